"""The rendered scripts run on a cluster, submitted as users submit them."""

import itertools
import json
import re
from pathlib import Path

import pytest
from renderer import render_project

from .cluster import Cluster
from .conftest import ANSWERS, MakeProject
from .jobs import Job, Project
from .trainings import both_launchers

SHORT = ("--max-steps=150",)
QUICK = ("--dataset=synthetic", "--max-steps=40")


@pytest.mark.shows("sbatch slurm/train_*")
@both_launchers
@pytest.mark.parametrize(
    ("script", "hosts"),
    [
        pytest.param(
            ("--nodes=2", "slurm/train_cpu.sbatch"),
            ["n1", "n1", "n2", "n2"],
            marks=pytest.mark.slow,  # the tests of stops start it, too
        ),
        pytest.param(
            ("slurm/train_single_node.sbatch", "--device=cpu"), ["n1", "n1"], marks=pytest.mark.slow
        ),
        (("slurm/train_multi_node.sbatch", "--device=cpu"), ["n1", "n1", "n2", "n2"]),
    ],
)
def test_every_launch_mode_trains(
    projects: dict[str, Project],
    digits: list[str],
    launcher: str,
    script: tuple[str, ...],
    hosts: list[str],
) -> None:
    job = projects[launcher].sbatch(*script, *digits, *SHORT)
    assert job.summary["test_accuracy"] > 0.9
    assert job.summary["hostnames"] == hosts
    assert job.summary["world_size"] == len(hosts)
    assert (job.summary["backend"], job.summary["device"]) == ("gloo", "cpu")
    assert f"{len(hosts)} rank(s) by {launcher} on" in job.log
    provenance = json.loads((job.run_dir / "provenance.json").read_text())
    assert provenance["slurm"]["SLURM_JOB_ID"] == job.id


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_job_evaluates(projects: dict[str, Project], launcher: str) -> None:
    project, script = projects[launcher], "slurm/train_cpu.sbatch"
    trained = project.sbatch(script, *QUICK)
    summary = trained.summary
    words = (str(trained.run_dir.relative_to(project.root)), "--checkpoint=latest")
    job = project.sbatch("--array=4", script, "evaluate", *words)
    task = Job(project, f"{job.id}_4").wait()
    assert task.state == "COMPLETED", task.log
    (path,) = trained.run_dir.glob("evaluation-test-*.json")
    found = json.loads(path.read_text())
    assert found["world_size"] == summary["world_size"] == 2
    for name in ("loss", "accuracy"):
        assert found["metrics"][f"test/{name}"] == summary[f"test_{name}"]
    assert not list(project.root.glob(f"runs/*/{job.id}*"))

    failed = project.sbatch(script, "evalute", *words).wait()
    assert (failed.state, failed.restarts) == ("FAILED", 0)
    errors = [line for line in failed.log.splitlines() if "error: unknown command" in line]
    assert len(errors) == 1 and "did you mean 'evaluate'?" in errors[0], failed.log


@pytest.mark.parametrize(
    ("launcher", "cpus_per_task"),
    [("srun", 2), pytest.param("torchrun", 4, marks=pytest.mark.slow)],
)
def test_loading_workers_for_the_cpus_of_a_rank(
    projects: dict[str, Project], launcher: str, cpus_per_task: int
) -> None:
    options = (f"--cpus-per-task={cpus_per_task}", "slurm/train_cpu.sbatch")
    job = projects[launcher].sbatch(*options, *QUICK, "--workers=auto")
    assert job.summary["world_size"] == 2
    assert "1 loading worker(s) a rank" in job.log


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_gpus_that_torch_does_not_see_end_the_job_at_once(
    projects: dict[str, Project], launcher: str
) -> None:
    job = projects[launcher].sbatch("slurm/train_multi_node.sbatch", *QUICK).wait()
    assert (job.state, job.facts["ExitCode"], job.restarts) == ("FAILED", "1:0", 0)
    errors = {
        re.sub(r"rank \d on n\d", "rank", line[3:])
        for line in job.log.splitlines()
        if "error: device" in line
    }
    (error,) = errors
    assert re.match(
        r"error: device is cuda, but rank sees no GPU \(CUDA_VISIBLE_DEVICES=0,1", error
    )
    assert "Traceback" not in job.log


@pytest.mark.slow
def test_the_same_command_works_in_an_interactive_allocation(projects: dict[str, Project]) -> None:
    project = projects["srun"]
    flags = f"--device=cpu {' '.join(QUICK)} --experiment=here"
    train = f"srun --overlap .venv/bin/python -m demo train {flags}"
    project.cluster.run(
        *(
            "salloc",
            "--nodes=2",
            "--ntasks-per-node=2",
            "bash",
            "-ec",
            f"{train} & {train} --lr 0.2; wait $!",
        ),
        cwd=project.root,
    )
    # Each training in the allocation is its own run, even at the same time as another.
    runs = sorted((project.root / "runs/here").iterdir())
    assert runs[1].name == f"{runs[0].name}.1" and len(runs) == 2
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    for summary in summaries:
        assert summary["hostnames"] == ["n1", "n1", "n2", "n2"]
        assert summary["resumed_from_step"] is None
    assert len({summary["parameters_sha256"] for summary in summaries}) == 2


def test_a_script_runs_in_an_interactive_allocation(projects: dict[str, Project]) -> None:
    project = projects["srun"]
    script = ("bash", "slurm/train_cpu.sbatch", *QUICK, "--experiment=script")
    project.cluster.run("salloc", "--nodes=2", *script, cwd=project.root)
    (summary,) = (project.root / "runs/script").glob("*/summary.json")
    assert json.loads(summary.read_text())["hostnames"] == ["n1", "n2"]


def test_a_heterogeneous_job_is_refused(projects: dict[str, Project]) -> None:
    script = ("slurm/train_cpu.sbatch", *QUICK)
    job = projects["srun"].sbatch("--ntasks=1", ":", "--ntasks=1", *script).wait()
    (log,) = projects["srun"].root.glob(f"logs/*-{job.id}.out")
    (line,) = log.read_text().splitlines()
    assert line.startswith("error: this is a heterogeneous job")


def test_two_jobs_on_one_node_do_not_meet(projects: dict[str, Project]) -> None:
    project = projects["srun"]
    both = [project.sbatch("--nodelist=n1", "slurm/train_cpu.sbatch", *QUICK) for _ in range(2)]
    for job in both:
        assert job.summary["hostnames"] == ["n1", "n1"]
    starts, ends = ([job.facts[name] for job in both] for name in ("StartTime", "EndTime"))
    assert max(starts) < min(ends), "they did not run at once"


def test_the_tasks_of_an_array_are_runs_of_their_own(projects: dict[str, Project]) -> None:
    project = projects["srun"]
    script = project.root / "slurm/train_cpu.sbatch"
    follows = project.root / "slurm/then.sbatch"
    follows.write_text(script.read_text() + 'echo "after the training"\n')
    array = project.sbatch("--array=3,5", "slurm/then.sbatch", *QUICK)
    tasks = {seed: Job(project, f"{array.id}_{seed}").wait() for seed in (3, 5)}
    digests = set()
    for seed, task in tasks.items():
        assert task.state == "COMPLETED"
        folder = project.root / "runs/demo" / f"{array.id}_{seed}"
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["world_size"] == 2
        assert f"\nseed: {seed}\n" in (folder / "config.yaml").read_text()
        log = (project.root / f"logs/demo-cpu-{array.id}_{seed}.out").read_text()
        assert f"task {seed} of an array" in log and log.endswith("\nafter the training\n")
        digests.add(summary["parameters_sha256"])
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--world-size=4", "tasks of an array are never ranks"),
        ("--run-dir=runs/one", "each task of an array is a separate run"),
    ],
)
def test_the_tasks_of_an_array_are_not_ranks(
    projects: dict[str, Project], flag: str, words: str
) -> None:
    project = projects["srun"]
    array = project.sbatch(
        "--array=0-1", "--ntasks-per-node=1", "slurm/train_cpu.sbatch", *QUICK, flag
    )
    for number in (0, 1):
        assert Job(project, f"{array.id}_{number}").wait().state == "FAILED"
    logs = [path.read_text() for path in project.root.glob(f"logs/*-{array.id}.out")]
    assert logs and all(words in log for log in logs)


# Stands in for Python: says what the step has, and what the job has.
STUB = """\
#!/bin/bash
[[ $1 != --version ]] || exec echo Python
[[ $SLURM_PROCID == 0 ]] || exit 0
echo "array ${SLURM_ARRAY_JOB_ID:-no}, restarts ${SLURM_RESTART_COUNT:-no}, home ${PYTHONHOME:-no}"
for what in "job $SLURM_JOB_ID" "step $SLURM_JOB_ID.$SLURM_STEP_ID"; do
    echo "memory $(scontrol show $what | grep -o 'TRES=[^ ]*' | grep -m 1 -o 'mem=[^,]*')"
done
"""
SCRIPTS = ("train_cpu", "train_single_node")
SESSION = f"""\
export SLURM_NTASKS_PER_GPU=1
for project in */; do
    cd $project
    for script in {" ".join(SCRIPTS)}; do
        sbatch --wait --output=$script.log slurm/$script.sbatch &
    done
    cd ..
done
wait
"""


def test_what_a_session_asked_for_does_not_reach_a_job(cluster: Cluster, tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    requests = ("gres", "gpus_per_node", "gpus", "gpus_per_task")
    for launcher, request in [
        *zip(itertools.repeat("srun"), requests, strict=False),
        ("torchrun", "gres"),
    ]:
        answers = {"launcher": launcher, "gpu_request": request}
        memory = {"memory": "300M", "memory_scope": "cpu"}
        render_project(tmp_path / f"{launcher}-{request}", **{**ANSWERS, **answers, **memory})
    cluster.run(
        *("salloc", "--ntasks=3", "--gpus-per-task=1", "--mem=200M", "--threads-per-core=1"),
        *("srun", "--ntasks=1", "bash", "-c", SESSION),
        cwd=tmp_path,
        PROJECT_PYTHON=str(stub),
        SLURM_ARRAY_JOB_ID="7",
        SLURM_ARRAY_TASK_ID="3",
        SLURM_RESTART_COUNT="11",
        PYTHONHOME="/usr",
    )
    for project in (path for path in tmp_path.iterdir() if path.is_dir()):
        for script in SCRIPTS:
            log = (project / f"{script}.log").read_text()
            assert "array no, restarts no, home no" in log, (project.name, log)
            memory = re.findall(r"memory mem=(\S+)", log)
            assert memory == ["600M", "600M"], (project.name, log)


def test_ranks_that_the_environment_names_are_refused(projects: dict[str, Project]) -> None:
    job = projects["srun"].sbatch("slurm/train_cpu.sbatch", *QUICK, RANK="0").wait()
    assert job.state == "FAILED"
    assert "RANK, LOCAL_RANK or WORLD_SIZE is set" in job.log


def test_an_image_is_not_built_without_apptainer(make_project: MakeProject) -> None:
    job = make_project(container="apptainer").sbatch("slurm/build_image.sbatch").wait()
    assert job.state == "FAILED"
    assert "apptainer is missing" in job.log


def test_a_script_outside_the_project_says_so(projects: dict[str, Project], tmp_path: Path) -> None:
    project = projects["srun"]
    elsewhere = Project(project.cluster, tmp_path)
    script = project.root / "slurm/train_cpu.sbatch"
    job = elsewhere.sbatch(f"--output={tmp_path}/log", str(script)).wait()
    assert job.state == "FAILED"
    assert "the project's root" in (tmp_path / "log").read_text()
