"""`acceptance`: where it refuses to run, how small its jobs are, and what it shows of a log."""

from pathlib import Path
from types import ModuleType

import pytest

from .conftest import command


@pytest.fixture(scope="module")
def jobs(project: Path) -> ModuleType:
    """The module of the project."""
    from demo.tools.acceptance import jobs

    return jobs


def test_what_it_does_not_know_is_refused(project: Path, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho ran > ran\n")
    (tmp_path / "sbatch").chmod(0o755)
    other = {"SBATCH_CLUSTERS": "other"}
    for path, flags, said, *env in (
        ("", [], "error: sbatch is missing: run this on a login node of a Slurm cluster"),
        (str(tmp_path), ["--only", "train"], "error: --only train: no such check: expected "),
        (str(tmp_path), ["--lr=fast"], "lr"),
        (str(tmp_path), ["--wait=nan"], "argument --wait: invalid positive value: 'nan'"),
        (str(tmp_path), [], "error: can't follow jobs on other: unset SBATCH_CLUSTERS", other),
    ):
        done = command(project, "acceptance", *flags, PATH=path, **(env[0] if env else {}))
        assert done.returncode and said in done.stderr and "Traceback" not in done.stderr
    assert not (project / "ran").exists() and not list(project.glob("logs/acceptance*"))


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        (["--nodes=1", "--no-requeue"], ["--time=15"]),
        (["--nodes=2", "--gpus=8"], ["--time=15"]),
        (["--nodes=16", "--signal=USR2@121"], ["--time=18", "--nodes=2"]),
        (["--nodes=8", "--gpus=a100:32"], ["--time=15", "--nodes=2", "--gpus=a100:8"]),
        (["--nodes=8", "--gpus-per-node=4"], ["--time=15", "--nodes=2"]),
    ],
)
def test_jobs_are_small(jobs: ModuleType, lines: list[str], options: list[str]) -> None:
    script = "".join(f"#SBATCH {line}\n" for line in ["--time=2-00", *lines])
    assert jobs.smallest(f"#!/bin/bash -l\n{script}srun true\n") == options


@pytest.mark.parametrize("limit", ["5", "15:00", "00:10:00", "0-00:14", "0-00:15:00"])
def test_no_job_gets_more_time_than_its_script_asks_for(jobs: ModuleType, limit: str) -> None:
    """Which may be what the partition allows."""
    assert jobs.smallest(f"#SBATCH --time={limit}\n") == []
    assert jobs.smallest("#SBATCH --time=00:15:01\n") == []
    for longer in ("16", "16:00", "01:00:00", "1-0", "0-00:16", "UNLIMITED"):
        assert jobs.smallest(f"#SBATCH --time={longer}\n") == ["--time=15"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "its log"),
        ("one\ntwo\n", "two"),
        ("error: module x can't be loaded\nsrun: error: n1: task 0: Exited\n", "error: module x"),
        ("1: Traceback\n1:   line\n1: ValueError: bad\n0: error: rank 1 left\n", "ValueError: bad"),
        ("0: 11:22:33 [rank 0] error: no room\nslurmstepd: error: step\n", "error: no room"),
        ("tensorboard  ok\nwandb        FAILED  no key\nlast\n", "wandb FAILED no key"),
        ("error    GPUs         none\n\n1 error(s), 0 warning(s)\n", "error GPUs none"),
        ("stopped after a checkpoint, and not requeued: x\nslurmstepd: y\n", "stopped after a"),
    ],
)
def test_the_first_error_of_a_job_is_shown(
    jobs: ModuleType, tmp_path: Path, said: str, why: str
) -> None:
    (tmp_path / "log").write_text(said)
    job = jobs.Job("7", tmp_path / "log")
    failure = jobs.failure(job, {"JobState": "FAILED", "ExitCode": "1:0"})
    assert str(failure).startswith(why)
    assert str(failure).endswith(f"(FAILED, exit code 1:0; {tmp_path}/log)")
    assert failure.log == said.rstrip("\n")
