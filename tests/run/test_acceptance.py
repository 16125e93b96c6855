"""`acceptance`: where it refuses to run, how small its jobs are, what its files say and do not."""

import json
import os
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


PRIVATE = (
    "/scratch/user42/run",
    "user42",
    "login01.example.org",
    "10.1.2.3",
    "proj-0042",
    "a@b.org",
)
FACTS = {
    "date": "2026-11-27",
    "template": "v1.2.0-3-g0123abc",
    "slurm": "24.11.5",
    "python": "3.13.0rc1",
    "torch": "2.11.0+cu128",
    "cuda": "12.8",
    "hip": "6.4.43482-0f2d60242",
    "nccl": "2.27.3",
    "driver": "550.54.15",
    "backend": "nccl",
    "gpu": "NVIDIA A100-SXM4-40GB",
    "gpus_per_node": "4",
    "launch_modes": "cpu multi_node",
    "launcher": "torchrun",
    "gpu_request": "gpus_per_task",
    "environment": "conda",
    "container": "apptainer",
}
CHECKS = [{"name": "stop and resume", "result": "FAIL", "seconds": "71"}]


@pytest.mark.parametrize("private", PRIVATE)
@pytest.mark.parametrize("how", ["{1}", "{0} {1}", "{1} {0}", "{0}{1}", "{1}/{0}", "{0}\n{1}"])
def test_a_record_has_only_what_is_known(project: Path, private: str, how: str) -> None:
    """Whatever Slurm, a driver, an answer or a run says. The rest of a text is kept."""
    from demo.tools.acceptance import record

    assert record.build(FACTS, CHECKS) == {**FACTS, "checks": CHECKS}
    facts: dict[str, object] = {name: how.format(text, private) for name, text in FACTS.items()}
    facts |= {"launch_modes": [private, "cpu", f"cpu {private}"], "site": private, private: private}
    check = {name: how.format(text, private) for name, text in CHECKS[0].items()}
    made = record.build(facts, [{**check, "why": private}])
    text = json.dumps(made)
    assert not [
        each for each in (private, "user", "login", "example", "proj", "b.org") if each in text
    ]
    assert made["launch_modes"] == "cpu" and made.keys() <= {*FACTS, "checks"}
    if how in ("{0} {1}", "{1} {0}", "{0}\n{1}"):
        assert made == {**FACTS, "launch_modes": "cpu", "checks": CHECKS}


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA GH200 120GB",
        "NVIDIA L40S",
        "Tesla V100-SXM2-32GB",
        "Quadro RTX 8000",
        "NVIDIA RTX 6000 Ada Generation",
        "AMD Instinct MI250X",
        "Intel(R) Data Center GPU Max 1550",
    ],
)
def test_a_record_names_the_gpus_of_clusters(project: Path, name: str) -> None:
    """As their drivers do."""
    from demo.tools.acceptance import record

    assert record.build({"gpu": name}, [])["gpu"] == name


def test_a_record_has_what_the_runs_say_about_their_nodes(project: Path, tmp_path: Path) -> None:
    """The last run of the checks is the largest. A damaged file changes nothing."""
    from demo.tools import acceptance

    gpu = {"name": "NVIDIA L40S", "cuda": "12.8", "hip": None, "nccl": "2.27.3", "driver": "550.54"}
    software = {"python": {"version": "3.12.1"}, "packages": {"torch": "2.11.0"}}
    host = {"hostnames": ["n1"], "world_size": 2, "backend": "gloo", "gpu": {}}
    runs = {
        "cpu": {**host, **software},
        "gpu": {
            "hostnames": ["n1", "n2"],
            "world_size": 8,
            "backend": "nccl",
            "gpu": gpu,
            **software,
        },
        "none": {"hostnames": [], "world_size": 8, "backend": "nccl", "gpu": {"name": 3}},
    }
    for second, (name, made) in enumerate(runs.items()):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "provenance.json"
        file.write_text(json.dumps(made))
        os.utime(file, (second, second))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/provenance.json").write_text("{")
    found = acceptance.on_nodes(tmp_path)
    assert acceptance.build(found, []) == {
        "python": "3.12.1",
        "torch": "2.11.0",
        "cuda": "12.8",
        "nccl": "2.27.3",
        "driver": "550.54",
        "backend": "nccl",
        "gpu": "NVIDIA L40S",
        "gpus_per_node": "4",
        "checks": [],
    }


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            "AccountingStorageHost = db1\nClusterName             = LUMI_G\nClusterNames = x",
            "lumi-g",
        ),
        ("ClusterName = ../../home/user42", "home-user42"),
        ("ClusterName = ///", "cluster"),
        ("", "cluster"),
    ],
)
def test_the_file_of_a_record_stays_in_logs(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, name: str
) -> None:
    """Its name is that of the cluster, whatever this is."""
    from demo.tools import acceptance

    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\n{config}\nEND\n")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    path = acceptance.write_record(FACTS, [])
    assert str(path) == f"logs/acceptance-{name}-2026-11-27.json"
    assert json.loads(path.read_text()) == {**FACTS, "checks": []}
