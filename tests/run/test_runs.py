"""`runs` tells failed, stuck and lost runs from live ones, without a server."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .conftest import PATIENCE, Launch, clean_environment, command, srun

NOW = 1_800_000_000.0
KNOWS_NONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
IS_DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"

LOST_RANK = {"status": "failed", "error": "rank 0 lost another", "lost_rank": True}
CHAIN = {"chain": ["77", "78", "79"]}
NEXT_WAITS = """case "$*" in *=77,78,79) echo '79 PENDING (Dependency)';; esac"""


@pytest.fixture
def runs(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, where no Slurm is."""
    from demo.tools import runs

    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return runs


def set_squeue(tmp_path: Path, does: str) -> None:
    """Put a squeue on the path; the real one is asked in tests/slurm/test_runs.py."""
    script = tmp_path / "bin" / "squeue"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)


def write_run(folder: Path, **state: object) -> Path:
    """Write the files of a running run, with some values changed."""
    folder.mkdir(parents=True)
    lives = {"status": "running", "error": None, "step": 350, "progress": 0.354, "started": NOW}
    times = {"updated": NOW, "expect_next_in": 600, "job": "77", "host": "n1"}
    best = {"best_metric": "validation/accuracy", "best_score": 0.9375, "best_step": 300}
    (folder / "status.json").write_text(json.dumps({**lives, **times, **best, **state}))
    lines = [
        {"step": 300, "validation/loss": 0.2, "validation/accuracy": 0.9375},
        {"step": 350, "train/loss": 0.31},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_that_finished_and_one_that_was_killed(
    runs: ModuleType, launch: Launch, project: Path, tmp_path: Path
) -> None:
    from demo.tools.survey import LATELY, find_runs, survey

    job = launch(1, name="whole", CHAIN_JOBS="77 78")
    killed = srun(project, tmp_path / "killed", 1, "--max-steps=100000", "--log-every=1")
    killed.wait_for_step(5)
    killed.kill()
    set_squeue(tmp_path, KNOWS_NONE)
    later = time.time() + 2 * LATELY
    found = {Path(run.folder).name: run for run in survey(find_runs([tmp_path]), later)}
    assert set(found) == {"whole", "killed"}
    state = found["whole"].state
    whole = found["whole"]
    assert (state["chain"], state["lost_rank"]) == (["77", "78"], False)
    assert (whole.status, state["step"]) == ("finished", 30)
    # Pictures need no tracker.
    pictures = {path.name for path in (tmp_path / "whole" / "figures").iterdir()}
    assert pictures == {
        "test-confusion_matrix-00000030.png",
        "test-predictions-00000030.png",
    }
    best = ("validation/accuracy", job.summary["validation_accuracy"])
    assert (state["best_metric"], state["best_score"]) == best
    assert found["killed"].status == "lost", found["killed"]
    assert found["killed"].state["job"] == "77"


@pytest.mark.parametrize(
    ("squeue", "state", "seconds", "status", "note"),
    [
        (None, {}, 599, "running", ""),
        (None, {}, 840, "stuck", "silent for 0:14:00 on n1"),
        (None, {"status": "failed", "error": "OSError: no\nroom"}, 900, "failed", "OSError: no r"),
        (None, {"status": "finished"}, 1e6, "finished", ""),
        ("echo '77 RUNNING (None)'", {}, 60, "running", ""),
        ("echo '77 SUSPENDED (None)'", {}, 900, "stuck", "; Slurm: SUSPENDED"),
        ("echo '77 PENDING (BeginTime)'", {}, 900, "queued", "Slurm: PENDING (BeginTime)"),
        ("echo '77 EXPEDITING (None)'", {}, 900, "queued", "Slurm: EXPEDITING (None)"),
        (
            "echo '77 REQUEUE_HOLD (None)'",
            {"status": "failed", "error": "gone"},
            60,
            "queued",
            "before: gone",
        ),
        ("echo '78 RUNNING (None)'", {}, 60, "lost", "Slurm no longer"),
        (KNOWS_NONE, {}, 60, "lost", "silent for 0:01:00 on n1"),
        # Another cluster's squeue, perhaps: somebody still writes.
        (KNOWS_NONE, {}, 20, "running", ""),
        (KNOWS_NONE, {"job": None}, 60, "running", ""),
        (KNOWS_NONE, {"status": "preempted"}, 60, "preempted", "submit again with --run-dir"),
        ("echo '77 RUNNING (None)'", {"status": "preempted"}, 60, "restarting", ""),
        ("echo '77 RUNNING (None)'", LOST_RANK, 60, "restarting", "rank 0 lost another"),
        ("echo '77 RUNNING (None)'", {**LOST_RANK, "lost_rank": False}, 60, "failed", "rank 0"),
        (KNOWS_NONE, LOST_RANK, 60, "failed", "another; not in"),
        (NEXT_WAITS, {"status": "preempted", **CHAIN}, 60, "queued", "job 79 of the chain"),
        (NEXT_WAITS, CHAIN, 60, "queued", "job 79 of the chain"),
        (NEXT_WAITS, {"status": "finished", **CHAIN}, 60, "finished", ""),
        (IS_DOWN, {}, 60, "running", ""),
        (IS_DOWN, {}, 900, "stuck", "silent for 0:15:00"),
    ],
)
def test_a_run_is_judged_by_what_it_and_slurm_say(
    runs: ModuleType,
    tmp_path: Path,
    squeue: str | None,
    state: dict[str, Any],
    seconds: float,
    status: str,
    note: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from demo.tools.survey import survey

    if squeue:
        set_squeue(tmp_path, squeue)
    folder = write_run(tmp_path / "run", **state)
    (run,) = survey([folder], NOW + seconds)
    assert run.status == status, run
    assert note in run.note and bool(note) == bool(run.note) and "\n" not in run.note
    assert ("squeue does not" in capsys.readouterr().err) == (squeue == IS_DOWN)


def test_a_run_that_ends_while_slurm_is_asked_is_not_lost(runs: ModuleType, tmp_path: Path) -> None:
    from demo.tools.survey import survey

    folder = write_run(tmp_path / "run")
    ended = tmp_path / "ended.json"
    ended.write_text((folder / "status.json").read_text().replace("running", "finished"))
    set_squeue(tmp_path, f"/bin/mv {ended} {folder}/status.json; {KNOWS_NONE}")
    (run,) = survey([folder], NOW + 900)
    assert run.status == "finished"


def test_a_run_without_a_status_is_unknown(runs: ModuleType, tmp_path: Path) -> None:
    from demo.tools.survey import find_runs, survey

    (write_run(tmp_path / "run") / "status.json").unlink()
    (run,) = survey(find_runs([tmp_path]), time.time())
    assert run.status == "unknown" and "status.json: No such" in run.note
    assert abs(run.state["updated"] - time.time()) < PATIENCE


def test_the_table_and_the_exit_code(
    runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    now = time.time()
    write_run(root / "mnist" / "2", updated=now - 130, status="failed", error="no room", job="1")
    write_run(root / "mnist" / "1", updated=now - 200)
    write_run(root / "other" / "3", updated=now - 3 * 86400, expect_next_in=60, job=None)

    report = tmp_path / "report.json"

    assert runs.main([str(root), f"--json={report}"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["run", "status", "start", "step"]
    first, note, second, third, silence = (line.split() for line in lines)
    day, minute = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW)).split()
    assert first[:6] == [f"{root}/mnist/2", "failed", day, minute, "350", "35%"]
    assert lines[1] == "    no room" and note
    assert second[:2] == [f"{root}/mnist/1", "running"] and "  0:03:2" in lines[2]
    assert third[:2] == [f"{root}/other/3", "stuck"]
    assert lines[4].startswith("    silent for 3 days, 0:00:0") and silence
    assert len({lines[number].index("accuracy 0.9375") for number in (0, 2, 3)}) == 1
    listed = json.loads(report.read_text())
    assert [run["status"] for run in listed] == ["failed", "running", "stuck"]
    assert listed[0]["note"] == "no room" and listed[0]["step"] == 350

    assert runs.main([str(root), "--fail"]) == 1
    assert runs.main([str(root / "mnist" / "1"), "--fail"]) == 0
    assert runs.main([str(root / "other"), "--fail"]) == 1
    assert runs.main([str(root / "other"), "--fail", "--hours=24"]) == 0
    again = write_run(tmp_path / "again", **LOST_RANK)
    assert runs.main([str(again), "--fail"]) == 1
    set_squeue(tmp_path, "echo '77 RUNNING (None)'")
    assert runs.main([str(again), "--fail"]) == 0
    set_squeue(tmp_path, KNOWS_NONE)
    assert runs.main([str(root / "mnist" / "1"), "--fail"]) == 1, "Slurm no longer knows its job"


def test_what_is_no_run_is_passed_over(
    runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo.engine.errors import UsageError
    from demo.tools.survey import find_runs

    run = write_run(tmp_path / "runs" / "mnist" / "1")
    (run / "checkpoints").mkdir()
    write_run(tmp_path / "runs" / "mnist" / "mlartifacts" / "1" / "deep")
    assert find_runs([tmp_path / "runs", run]) == [run]
    (tmp_path / "empty").mkdir()
    assert runs.main([str(tmp_path / "empty"), "--fail"]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'empty'}\n"
    with pytest.raises(UsageError, match=f"{tmp_path}/nowhere is not"):
        runs.main([str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, match="can't write /proc/nowhere"):
        runs.main([str(run), "--json=/proc/nowhere"])


DAMAGED = {
    "a list": "[1, 2]",
    "a number": "7",
    "deep": "[" * 100_000,
    "no JSON": "{",
    "status": '{"status": ["running"]}',
    "updated": '{"status": "running", "updated": "yesterday"}',
    "error": '{"status": "failed", "error": 5}',
    "step": '{"status": "running", "step": [1]}',
    "progress": '{"status": "running", "progress": "half"}',
    "expected": '{"status": "running", "expect_next_in": {}}',
    "no number": '{"status": "running", "updated": NaN}',
    "huge": '{"status": "running", "updated": 1%s}' % ("0" * 400),
    "job": '{"status": "running", "job": 77}',
    "best": '{"status": "running", "best_metric": 7}',
    "score": '{"status": "running", "best_score": "0.9"}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_status_is_said_of_its_run_alone(
    runs: ModuleType, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_squeue(tmp_path, "echo '77 RUNNING (None)'")
    write_run(tmp_path / "runs" / "good", updated=time.time())
    (write_run(tmp_path / "runs" / "bad") / "status.json").write_text(content)
    assert runs.main([str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (bad,) = (number for number, line in enumerate(lines) if "/bad" in line)
    (good,) = (line for line in lines if "/good" in line)
    assert "unknown" in lines[bad] and "    can't read status.json: " in lines[bad + 1]
    assert "running" in good


def test_files_of_other_kinds_end_no_list(
    runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as pipes."""
    set_squeue(tmp_path, 'case "$*" in *=77) echo "77 RUNNING (None)";; *) exit 1;; esac')
    write_run(tmp_path / "runs" / "good", updated=time.time())
    write_run(tmp_path / "runs" / "job", job="no\0number", updated=time.time())
    piped = write_run(tmp_path / "runs" / "piped")
    (piped / "status.json").unlink()
    os.mkfifo(piped / "status.json")
    assert runs.main([str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    for name, said in (
        ("piped", "status.json: .* regular file"),
        ("job", "running"),
        ("good", "running"),
    ):
        assert re.search(rf"/{name} .*(\n   .*)?{said}", out)


def test_nothing_that_a_run_wrote_reaches_the_terminal_as_a_command(
    runs: ModuleType, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo.tools import prune, report

    # Set the window's title, clear the screen, turn the line around.
    evil = "\x1b]0;x\x07\x1b[2J\u202e\x9b1m"
    state = {"status": evil, "error": evil, "job": evil, "host": evil}
    run = write_run(tmp_path / f"runs{evil}" / "1", **state)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, f"{evil}/loss": 1.0}))
    git = {"commit": evil, "changes": evil, "diff": evil}
    facts = {"command": ["x", "train", evil], "git": git, "packages": {evil: evil}}
    facts |= {"hostnames": [evil], "launcher": evil, "world_size": evil}
    (run / "provenance.json").write_text(json.dumps(facts))
    (run / "trackers.json").write_text(json.dumps({evil: evil}))
    (run / "config.yaml").write_text(json.dumps({evil: evil, "lr": evil}))
    (run / "attempts").mkdir()
    (run / "attempts/1.json").write_text(json.dumps({"host": evil}))
    assert runs.main([str(run.parent)]) == 0
    assert runs.main([str(run)]) == 0
    assert prune.main([str(run)]) == 0
    other = write_run(run.parent / "3")
    (other / "provenance.json").write_text('{"git": {}}')
    assert runs.main([str(run), str(other)]) == 0
    empty = write_run(run.parent / "2")
    (empty / "metrics.jsonl").unlink()
    assert report.main([str(run.parent), f"--output={tmp_path}/plot.png"]) == 0
    # An error quotes the name of a metric.
    done = command(project, "report", run, "--output=x.png", "--metrics=other")
    assert "no run has 'other'" in done.stderr
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, done.stderr):
        assert "\\x1b]0;x\\x07\\x1b[2J\\u202e\\x9b1m" in text
        assert all(c.isprintable() or c == "\n" for c in text)


def test_torch_and_pyplot_are_not_needed(project: Path, tmp_path: Path) -> None:
    """A login node answers at once, and has no display."""
    write_run(tmp_path / "runs" / "1")
    code = (
        "import sys; from demo.tools import report, runs\n"
        f"report.main(['{tmp_path}/runs', '--output={tmp_path}/plot.png'])\n"
        f"report.main(['{tmp_path}/runs', '--output={tmp_path}/page.html'])\n"
        f"runs.main(['{tmp_path}/runs']); runs.main(['{tmp_path}/runs/1'])\n"
        "sys.exit(' '.join({'torch', 'matplotlib.pyplot'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(project),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
