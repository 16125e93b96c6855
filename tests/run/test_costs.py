"""The costs of runs, added up from their folders and from Slurm's accounts."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest

from .conftest import Launch, clean_environment

# Each alone in the usage of an attempt, as another user may have written it.
FOREIGN = {
    "huge time": {"wall_seconds": 1e299},
    "huge hours": {"gpu_hours": 1e299},
    "huge integer": {"rates": {"samples_per_second": 10**400}},
    "infinite": {"seconds": dict.fromkeys(("steps", "data"), float("inf"))},
    "no number": {"rates": {"samples_per_second": float("nan")}},
}
# Noon of Wednesdays, in the weeks 1 and 2 of 2026.
FIRST, SECOND = 1_767_787_200 - 7 * 86400, 1_767_787_200
# The output of sacct in Slurm 22.05, with other times, for jobs on nodes that drew 1000 W each: one
# that ended well after some steps; one that was requeued, whose second start has a step `extern`;
# one that lost a rank. Then a job that runs, and one that waits.
SACCT = f"""\
1|{FIRST}|{FIRST + 12}|16362
1.batch|{FIRST}|{FIRST + 12}|12091
1.0|{FIRST + 2}|{FIRST + 7}|10258
1.1|{FIRST + 7}|{FIRST + 10}|6104
1.2|{FIRST + 10}|{FIRST + 10}|0
3|{FIRST}|{FIRST + 8}|
3.batch|{FIRST}|{FIRST + 8}|7503
3.0|{FIRST + 1}|{FIRST + 8}|12946
4|{FIRST}|{FIRST + 39}|829
4.batch|{FIRST}|{FIRST + 43}|43078
4.0|{FIRST + 1}|{FIRST + 18}|829
3|{FIRST + 12}|{FIRST + 20}|16342
3.batch|{FIRST + 12}|{FIRST + 20}|8171
3.extern|{FIRST + 12}|{FIRST + 20}|16342
3.0|{FIRST + 13}|{FIRST + 19}|11816
5|{SECOND}|Unknown|18446744073709551614
6|None|Unknown|
"""


def usage_of(began: float, seconds: float, **values: object) -> dict[str, Any]:
    """Return the usage of an attempt on 4 GPUs and 16 cores, with some values changed."""
    from demo.plugins.usage.costs import PARTS

    usage = {"began": began, "until": began + seconds, "attempts": 1, "wall_seconds": seconds}
    usage |= {"gpu_hours": 4 * seconds / 3600, "cpu_hours": 16 * seconds / 3600, "gpu_kwh": 0}
    return {**usage, "seconds": dict.fromkeys(PARTS, 1.0), "job": None, **values}


def write_run(folder: Path, *attempts: dict[str, Any] | None, **state: object) -> Path:
    """Write the folder of a run; an attempt without usage, None, ended in the first week."""
    (folder / "attempts").mkdir(parents=True)
    status = {"status": "finished", "updated": SECOND, "job": "1", "step": 30, **state}
    (folder / "status.json").write_text(json.dumps(status))
    for number, usage in enumerate(attempts, 1):
        path = folder / "attempts" / f"{number}.json"
        path.touch()
        os.utime(path, (FIRST, FIRST))
        if usage:
            path.with_name(f"{number}-usage.json").write_text(json.dumps(usage))
    return folder


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> list[list[str]]:
    """Return the words of the lines that `costs` prints."""
    from demo.tools import costs

    assert costs.main([*map(str, words)]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def sacct(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What sacct prints; the real one is asked in tests/slurm/test_usage.py."""
    said, script = tmp_path / "said", tmp_path / "bin/sacct"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\nexec /bin/cat {said}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    said.write_text(SACCT)
    return said


def test_sums_are_by_experiment_and_by_week_of_the_attempts(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    write_run(root / "a/1", usage_of(FIRST, 3600), usage_of(SECOND, 1800))
    write_run(root / "a/2", usage_of(SECOND, 1800))
    write_run(root / "b/3", usage_of(SECOND, 3600, gpu_hours=0.0))
    user = root.owner()
    header, *lines = ask(capsys, root)
    assert " ".join(header) == (
        "experiment week user runs attempts measured wall hours GPU hours CPU hours"
    )
    assert lines == [
        ["a", "2026-W01", user, "1", "1", "1", "1.00", "4.00", "16.00"],
        ["a", "2026-W02", user, "2", "2", "2", "1.00", "4.00", "16.00"],
        ["b", "2026-W02", user, "1", "1", "1", "1.00", "0.00", "16.00"],
        ["total", "3", "4", "4", "3.00", "8.00", "48.00"],
        ["of", "attempts", "4", "4", "4", "4", "4"],
    ]
    assert ask(capsys, root / "a", "--hours=1") == [["no", "runs", "in", f"{root}/a"]]


def test_runs_without_usage_are_counted_as_such(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an earlier version: with files of attempts, and without."""
    root = tmp_path / "runs"
    write_run(root / "a/1", None, usage_of(SECOND, 3600, gpu_kwh=1.5))
    write_run(root / "b/2")
    if os.geteuid() == 0:
        os.chown(root / "b/2", 4_000_000, -1)  # a user who is gone
    _, *lines = ask(capsys, root)
    user, gone = root.owner(), str((root / "b/2").stat().st_uid)
    gone = user if gone == str(os.geteuid()) else gone
    assert lines == [
        ["a", "2026-W02", user, "1", "2", "1", "1.00", "4.00", "16.00", "1.50"],
        ["b", "2026-W02", gone, "1", "1", "0"],
        ["total", "2", "3", "1", "1.00", "4.00", "16.00", "1.50"],
        ["of", "attempts", "3", "3", "1", "1", "1", "1"],
    ]


def test_energy_is_slurms_and_never_counted_twice(
    sacct: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    runs = {
        "1": write_run(root / "a/1", usage_of(FIRST, 7, job="1")),
        # Two attempts in the first start of the job, one in the second.
        "3": write_run(
            root / "a/3",
            usage_of(FIRST, 6, job="3"),
            usage_of(FIRST + 6, 2, job="3"),
            usage_of(FIRST + 12, 8, job="3"),
        ),
        "4": write_run(root / "a/4", usage_of(FIRST, 7, job="4")),
        "5": write_run(root / "a/5", usage_of(SECOND, 7, job="5"), usage_of(SECOND, 7, job="6")),
        # Another cluster's job of this number, and what is no number.
        "other": write_run(root / "a/6", usage_of(SECOND, 7, job="1"), usage_of(1, 1, job="1,2")),
    }
    from demo.tools import costs

    found = costs.attempts(dict.fromkeys(runs.values(), float(SECOND)))
    joules = {
        name: [3.6e6 * each.costs.get("node_kWh", 0) for each in found if each.run == run]
        for name, run in runs.items()
    }
    assert joules["1"] == pytest.approx([16362])
    assert joules["3"] == pytest.approx([0.75 * 12946, 0.25 * 12946, 16342])
    assert joules["4"] == pytest.approx([43078])
    assert joules["5"] == joules["other"] == [0, 0]
    *_, total, known = ask(capsys, root)
    assert float(total[-1]) == pytest.approx(88728 / 3.6e6, abs=0.005)
    assert known == ["of", "attempts", *["9"] * 5, "5"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and "--duplicates" in asked[0] and "--jobs=1,3,4,5,6 " in asked[0]

    sacct.unlink()
    assert "node_kWh" not in costs.attempts({runs["1"]: float(SECOND)})[0].costs
    assert "failed: /bin/cat" in capsys.readouterr().err


EVIL = {
    "formula": "=cmd|' /C calc'!A0",
    "plus": "+1",
    "minus": "-1+1|x",
    "at": "@SUM(1)",
    "space": " \t=1",
    "line": "a\n=1",
    "cell": "a;=1;  @b",
    "wide": "\uff1d1",
}


def test_a_table_for_pandas_and_for_spreadsheets(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo.tools import costs

    root, path = tmp_path / "runs", tmp_path / "runs.csv"
    scores = {"best_metric": "validation/loss", "best_score": -0.5, "started": FIRST + 120}
    whole = write_run(root / "a/1", usage_of(FIRST, 3600, gpu_kwh=2.5), None, **scores)
    (whole / "config.yaml").write_text("lr: 0.1\nseed: -3\ntags: [x, y]\n")
    (whole / "provenance.json").write_text(json.dumps({"command": ["x", "train", "--lr", "-1"]}))
    evil = write_run(root / "b/=2", error="=1", status="@failed", **{"=x": 1, "new": 10**4000})
    (evil / "config.yaml").write_text(json.dumps(EVIL))
    assert costs.main([str(root), f"--csv={path}"]) == 0
    assert "of attempts" in capsys.readouterr().out

    table = pandas.read_csv(path).set_index("folder")
    assert len(table) == 2
    row = table.loc[str(whole)]
    assert row["status"] == "finished" and row["user"] == root.owner()
    assert (row["attempts"], row["measured"], row["wall_hours"]) == (2, 1, 1)
    assert (row["GPU_hours"], row["CPU_hours"], row["GPU_kWh"]) == (4, 16, 2.5)
    assert (row["best_score"], row["settings.lr"], row["settings.seed"]) == (-0.5, 0.1, -3)
    assert row["command"] == "train --lr -1"
    assert time.mktime(pandas.to_datetime(row["started"]).timetuple()) == FIRST + 120
    assert table["wall_hours"].isna().sum() == 1  # what is not known is not 0

    with path.open(newline="") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    for cell in cells:
        for part in cell.split(";"):
            number = part.lstrip("-").replace(".", "").isdecimal()
            assert number or part.lstrip()[:1] not in (*"=+-@", "\uff1d"), cell
        assert cell.isprintable()
    with pytest.raises(Exception, match="write /proc/nowhere"):
        costs.main([str(root), "--csv=/proc/nowhere"])


def test_folders_that_can_not_be_read_are_counted(project: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root / "a/1", usage_of(FIRST, 3600))
    write_run(root / "a/2", usage_of(FIRST, 3600)).chmod(0)
    write_run(root / "b/3", usage_of(FIRST, 3600)).parent.chmod(0)
    # Without these capabilities, root cannot read everything.
    dropped = "-dac_override,-dac_read_search"
    as_user = ["setpriv", f"--bounding-set={dropped}"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*as_user, sys.executable, "-m", "demo", "costs", str(root)],
        env=clean_environment(project),
        cwd=project,
        capture_output=True,
        text=True,
    )
    (root / "b").chmod(0o700)
    (root / "a/2").chmod(0o700)
    assert done.stdout.splitlines()[-2].split()[:3] == ["total", "1", "1"]
    assert done.stderr == f"left out, as it can't be read: {root}/a/2 and 1 more\n"


def test_usage_of_others_neither_hangs_nor_ends_a_command(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo.plugins.usage import costs as usage
    from demo.tools import runs

    run = launch(1, "--max-steps=5").run_dir
    (run / "attempts" / f"{10**15}.json").touch()
    whole, path = usage.total(run), run / "attempts/1-usage.json"
    assert whole and whole.attempts == 1
    content = json.loads(path.read_text())
    for values in FOREIGN.values():
        (run / "attempts/2-usage.json").write_text(json.dumps(content | values))
        assert usage.total(run) == whole, values
    path.write_text(json.dumps(content | {"seconds": dict.fromkeys(whole.seconds, 0)}))
    assert runs.main([str(run)]) == 0
    assert "usage" in capsys.readouterr().out
    assert ask(capsys, run)[-2][:3] == ["total", "1", "2"]
