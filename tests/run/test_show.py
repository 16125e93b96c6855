"""What `runs` prints about one run, two and many is true."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import Job, command, srun

LR = ("--lr=0.05", "--checkpoint-every=10", "--tags", "one two", "three")


@pytest.fixture(scope="module")
def repository(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in git."""
    copy = shutil.copytree(project, tmp_path_factory.mktemp("repository") / "demo")
    for words in (["init", "-q"], ["add", "--all"], ["commit", "-qm", "first"]):
        git(copy, *words)
    return copy


def git(folder: Path, *arguments: str) -> str:
    """Return the output of git."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def first(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of 20 steps that was prolonged to 30, from a clean commit."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    flags = ("--device=cpu", "--world-size", "1", *LR)
    srun(repository, folder, 1, *flags, "--max-steps=20", SLURM_JOB_ID="76").wait()
    return srun(repository, folder, 1, *flags, "--max-steps=30").wait()


@pytest.fixture(scope="module")
def second(repository: Path, first: Job) -> Job:
    """A run on two ranks, with a change that was not committed."""
    with (repository / "src/demo/model.py").open("a") as file:
        file.write("# an afterthought\n")
    return srun(repository, first.run_dir.with_name("second"), 2, "--lr=0.1").wait()


def ask(project: Path, *arguments: object) -> str:
    """Return the output of a command."""
    done = command(project, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sections(shown: str) -> dict[str, str]:
    """Return the sections that `runs` printed, by name."""
    found = re.findall(r"^(\w+) +(.*(?:\n .*)*)", shown, re.M)
    return {name: " ".join(text.split()) for name, text in found}


@pytest.mark.shows("python -m demo runs RUN_DIR")
def test_a_screen_says_everything_of_a_run(repository: Path, first: Job, second: Job) -> None:
    shown = ask(repository, "runs", first.run_dir)
    assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 120
    said, summary = sections(shown), first.summary
    assert said["run"] == str(first.run_dir)
    assert said["status"].startswith("finished; last heard 0:0")
    assert said["step"] == "30, 100%"
    best = f"{summary['validation_accuracy']:.6g} at step {summary['best_step']}"
    assert said["best"] == f"validation/accuracy {best}"
    assert f"test_loss={summary['test_loss']:.6g} test_accuracy=" in said["results"]
    day = time.strftime("%Y-%m-%d", time.localtime())
    starts = re.findall(
        rf"([12]): {day} \d\d:\d\d for 0:0\d:\d\d, process \d+ on \S+, job (\d+)", said["attempts"]
    )
    assert starts == [("2", "77"), ("1", "76")]
    assert "lr=0.05" in said["settings"] and "tags=['one two', 'three']" in said["settings"]
    assert not {"seed=", "epochs=", "ranks="} & set(re.findall(r"\w+=", said["settings"]))
    commit = git(repository, "rev-parse", "HEAD")
    assert said["commit"] == commit[:8]
    assert said["command"].startswith("train ") and "--lr=0.05" in said["command"]
    assert said["nodes"].endswith("; world size 1, srun")
    torch = json.loads((first.run_dir / "provenance.json").read_text())["packages"]["torch"]
    assert said["versions"].endswith(f", torch {torch}")
    assert re.fullmatch(r"10, 20, 30 \(best\); \d\.\d MiB", said["checkpoints"])
    assert "metrics.jsonl provenance.json status.json summary.json" in said["files"]
    du = subprocess.run(["du", "-sB1", first.run_dir], capture_output=True, text=True).stdout
    assert said["files"].startswith(f"{int(du.split()[0]) / 2**20:.1f} MiB: ")

    changed = sections(ask(repository, "runs", second.run_dir))
    assert changed["commit"] == f"{commit[:8]} with uncommitted changes"
    assert changed["nodes"].endswith("; world size 2, srun")


@pytest.mark.shows("python -m demo runs")
def test_a_list_has_start_commit_and_flags(repository: Path, first: Job, second: Job) -> None:
    report = first.run_dir.with_name("report.json")
    lines = ask(repository, "runs", first.run_dir.parent, f"--json={report}").splitlines()
    assert [line.split()[0].rpartition("/")[2] for line in lines[1::2]] == ["second", "first"]
    commit = git(repository, "rev-parse", "HEAD")[:8]
    assert lines[1].endswith(f"77   {commit}+") and lines[3].endswith(f"77   {commit}")
    day = time.strftime("%Y-%m-%d ", time.localtime())
    assert day in lines[1] and day in lines[3]
    assert lines[2].split()[-1] == "--lr=0.1"
    flags = lines[4].strip()
    assert flags.endswith("--max-steps=30") and "--tags 'one two' three" in flags
    for given in ("--device", "--world-size", "--run-dir", " 1 "):
        assert given not in flags
    newest = json.loads(report.read_text())[0]
    assert (newest["commit"], newest["status"]) == (f"{commit}+", "finished")
    assert newest["flags"] == lines[2].strip() and "state" not in newest


@pytest.mark.shows("python -m demo runs RUN_DIR RUN_DIR")
def test_the_difference_of_two_runs(repository: Path, first: Job, second: Job) -> None:
    facts = json.loads((second.run_dir / "provenance.json").read_text())
    facts["packages"]["torch"] = "2.6.0"
    facts["packages"]["new-one"] = "1.0"
    facts["hostnames"] = ["n1", "n2"]
    facts["snapshot"] = "0123abcd"
    other = shutil.copytree(second.run_dir, second.run_dir.with_name("third"))
    (other / "provenance.json").write_text(json.dumps(facts))
    said = ask(repository, "runs", first.run_dir, other)
    rows = {
        cells[0]: cells[1:]
        for line in said.splitlines()[1:]
        if len(cells := re.split(r" {2,}", line)) == 3
    }
    assert rows["setting lr"] == ["0.05", "0.1"]
    assert rows["setting ranks"] == ["1", "2"]
    assert rows["setting tags"] == ["['one two', 'three']", "[]"]
    assert rows["summary test_loss"] == [
        f"{job.summary['test_loss']:.6g}" for job in (first, second)
    ]
    commit = git(repository, "rev-parse", "HEAD")[:8]
    assert rows["commit"] == [commit, f"{commit}+"]
    assert rows["package torch"][1] == "2.6.0" and rows["package new-one"] == ["-", "1.0"]
    assert rows["nodes"][1] == "n1 n2"
    assert {"python", "launcher", "setting seed", "setting run_dir"}.isdisjoint(rows)
    assert "uncommitted changes differ" in said and "++# an afterthought" in said
    same = shutil.copytree(other, other.with_name("same"))
    assert ask(repository, "runs", other, same).endswith("\nno difference\n")
    assert sections(ask(repository, "runs", other))["code"] == "code/0123abcd.tar.gz"
    assert "code" not in sections(ask(repository, "runs", first.run_dir))


def test_a_run_that_has_only_begun(project: Path, tmp_path: Path) -> None:
    """Its files appear one after another."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("lr: 0.5\n")
    assert sections(ask(project, "runs", run))["settings"] == "lr=0.5"


def test_many_attempts_and_checkpoints_stay_on_one_screen(
    repository: Path, first: Job, tmp_path: Path
) -> None:
    run = shutil.copytree(first.run_dir, tmp_path / "run")
    for number in range(3, 40):
        shutil.copy(run / "attempts/1.json", run / f"attempts/{number}.json")
    for step in range(1000, 1500):
        (run / f"checkpoints/step-{step:08}.pt").touch()
    (run / "attempts/39.json").write_text('{"began": "early", "host": "\\u001b[2J"}')
    os.remove(run / "attempts/38.json")
    facts = json.loads((run / "provenance.json").read_text())
    facts["hostnames"] = [f"node{number:04}" for number in range(2000)]
    (run / "provenance.json").write_text(json.dumps(facts))
    shown = ask(repository, "runs", run)
    assert len(shown.splitlines()) <= 40 and "and 34 earlier" in shown
    assert "37: " in shown and "34: " not in shown
