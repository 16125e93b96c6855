"""Jobs in an image that is built here train, stop and resume as they do without an image."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from renderer import tomllib

from . import apptainer
from .cluster import wait_for
from .conftest import MakeProject
from .jobs import Job, Project
from .test_stops import submit

SECRET = "a-key-that-is-nobodys-business"
# Quick, not small.
SQUASH = "--mksquashfs-args '-comp zstd -Xcompression-level 1'"
SHORTER = ("--epochs=2",)
STEPS = 2 * 117
QUICK = ("--dataset=synthetic", "--max-steps=3")
# What the code of a project is edited to say: who it is, and which paths it sees.
EDIT = """
import os, platform
paths = [path for path in os.environ.get("PROBE", "").split(":") if os.path.exists(path)]
print("edited", os.environ["SLURM_PROCID"], os.environ["SLURM_LOCALID"], platform.node(), *paths)
"""


@pytest.fixture(scope="session")
def site(commands: Path) -> str:
    """slurm/site.sh of a site that has apptainer, and shows an image no folder by itself."""
    return f"PATH={commands}:$PATH\nexport APPTAINER_CONTAIN=1\n"


@pytest.fixture(scope="session")
def project(
    make_project: MakeProject, site: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """A project with an image, which a job built; its runs are in a folder elsewhere."""
    project = make_project(container="apptainer", trackers=[])
    root = project.root
    (root / "slurm/site.sh").write_text(site)
    (root / "runs").symlink_to(tmp_path_factory.mktemp("scratch"))
    git = ("git", "-c", "user.name=demo", "-c", "user.email=demo@example.org", "-C", root)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=demo"]):
        subprocess.run([*git, *command], check=True)
    wheels = tmp_path_factory.mktemp("wheels")
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    apptainer.download(settings["project"]["dependencies"], wheels)
    arguments = (
        f"{SQUASH} --bind {wheels}:/mnt"
        f" --build-arg BOOTSTRAP=localimage --build-arg BASE={apptainer.BASE}"
        f" --build-arg TORCH={os.environ.get('TORCH', 'torch==2.13.0')}"
    )
    job = project.sbatch(
        "slurm/build_image.sbatch",
        f"BUILD_ARGS={arguments}",
        WANDB_API_KEY=SECRET,
    )
    assert job.wait().state == "COMPLETED", job.log
    yield project
    shutil.rmtree(wheels)
    for image in root.glob("container/*.sif"):
        image.unlink()


@pytest.fixture(scope="session")
def uninterrupted(project: Project) -> Job:
    """A training on two nodes."""
    job = submit(project, flags=SHORTER)
    assert job.summary["global_step"] == STEPS
    return job


@pytest.fixture
def elsewhere(tmp_path: Path) -> list[Path]:
    """Folders outside the project."""
    folders = [tmp_path / name for name in ("named", "linked", "configured", "bound", "hidden")]
    for folder in folders:
        folder.mkdir()
    return folders


def on_login(project: Project, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the login node, where apptainer is installed."""
    script = '. slurm/site.sh && exec "$@"'
    return project.cluster.run(
        "bash", "-c", script, "bash", *command, cwd=project.root, check=False
    )


def edited(project: Project, text: str) -> None:
    """Append to the project's code."""
    with (project.root / "src/demo/__init__.py").open("a") as code:
        code.write(text)


def stop(job: Job) -> None:
    """Signal only the tasks, as Slurm does with ProctrackType proctrack/cgroup."""
    tasks = [
        child
        for process in job.ranks().values()
        for child, parent in itertools.pairwise([process, *process.parents()])
        if parent.name() == "slurmstepd"
    ]
    assert len(tasks) == len(job.ranks())
    # At once: a rank that hears of another's signal before its own comes names that one.
    for task in tasks:
        task.send_signal(signal.SIGUSR2)


def check_back(job: Job, uninterrupted: Job) -> None:
    """Check that a job is requeued, and ends as if it had never been stopped."""
    job.wait_for_restart()
    assert job.summary["global_step"] == STEPS and job.summary["resumed_from_step"] > 0
    assert job.summary["parameters_sha256"] == uninterrupted.summary["parameters_sha256"]
    assert job.restarts == 1
    assert "by SIGUSR2" in job.log, job.log


@pytest.mark.shows("make image")
def test_it_trains_on_two_nodes(project: Project, digits: list[str]) -> None:
    job = project.sbatch("--nodes=2", "slurm/train_cpu.sbatch", *digits, "--max-steps=150")
    assert job.summary["test_accuracy"] > 0.9
    assert job.summary["hostnames"] == ["n1", "n1", "n2", "n2"]
    assert "4 rank(s) by srun" in job.log
    image = f"{project.root}/container/image.sif"
    provenance = json.loads((job.run_dir / "provenance.json").read_text())
    code = f"{project.root}/.snapshots/{provenance['snapshot']}/src/demo"
    assert f"interpreter  {image} (Python 3." in job.log and f"code         {code}\n" in job.log
    assert provenance["slurm"]["SLURM_JOB_ID"] == job.id
    assert provenance["container"] == image
    assert re.fullmatch(r"[0-9a-f]{40}", provenance["git"]["commit"])


def test_the_image_says_what_it_is_and_holds_no_secret(project: Project) -> None:
    labels = on_login(project, "apptainer", "inspect", "--labels", "container/image.sif").stdout
    head = subprocess.check_output(
        ["git", "-C", project.root, "rev-parse", "--short=12", "HEAD"], text=True
    )
    assert {"project: demo", "version: 0.1.0", f"commit: {head.strip()}"} <= {*labels.splitlines()}
    said = on_login(
        project,
        *("env", "APPTAINER_CONTAIN=", "APPTAINER_NO_MOUNT=tmp,home,cwd"),
        *("apptainer", "exec", "container/image.sif", "bash", "-c"),
        f"""
        grep -rlF {SECRET} / --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev
        find /root /tmp /opt -name '*.whl' -o -name .cache -o -path /opt/project/src
        cat /opt/project/pyproject.toml
        """,
    )
    assert said.stdout == (project.root / "pyproject.toml").read_text()


def test_a_build_that_fails_leaves_the_image(project: Project) -> None:
    image = project.root / "container/image.sif"
    before = image.stat()
    done = on_login(project, "make", "image", "BUILD_ARGS=--build-arg BOOTSTRAP=localimage")
    assert done.returncode == 2 and "container/image.sif was not built" in done.stderr
    assert image.stat() == before
    assert not list(image.parent.glob("new*"))


def test_an_edit_needs_no_new_image_and_each_rank_is_itself(
    project: Project, elsewhere: list[Path]
) -> None:
    named, linked, configured, bound, hidden = elsewhere
    root = project.root
    (root / "data").symlink_to(linked)
    settings = root / "configs/train.yaml"
    code = root / "src/demo/__init__.py"
    kept = {path: path.read_text() for path in (settings, code)}
    settings.write_text(
        kept[settings].replace("data_dir: data", 'data_dir: "${PLACE}/configured" # ours')
    )
    edited(project, EDIT)
    try:
        job = project.sbatch(
            *("--nodes=2", "slurm/train_cpu.sbatch", *QUICK, "--run-dir=$PLACE/named/new"),
            PLACE=str(named.parent),
            PROBE=":".join(map(str, elsewhere)),
            APPTAINER_BIND=str(bound),
        )
        assert job.wait().state == "COMPLETED", job.log
    finally:
        for path, text in kept.items():
            path.write_text(text)
        (root / "data").unlink()
    seen = f"{named} {linked} {configured} {bound}"
    assert {line for line in job.log.splitlines() if ": edited" in line} == {
        f"{rank}: edited {rank} {rank % 2} {node} {seen}"
        for rank, node in enumerate(["n1", "n1", "n2", "n2"])
    }
    assert (named / "new/summary.json").exists() and not hidden.joinpath("new").exists()


@pytest.mark.slow
def test_the_code_of_a_release_is_its_own(project: Project, tmp_path: Path) -> None:
    done = on_login(project, "make", "release", f"BUILD_ARGS={SQUASH}")
    assert done.returncode == 0, done.stderr
    edited(project, "print('edited')\n")
    try:
        job = project.sbatch("slurm/train_cpu.sbatch", *QUICK, IMAGE="container/release.sif")
        assert job.wait().state == "COMPLETED", job.log
    finally:
        code = project.root / "src/demo/__init__.py"
        code.write_text(code.read_text().replace("print('edited')\n", ""))
    assert "edited" not in job.log
    assert "code         /opt/project/src/demo\n" in job.log
    commit = re.search(r"^commit +(\w+)$", job.log, re.MULTILINE)[1]
    head = subprocess.check_output(["git", "-C", project.root, "rev-parse", "HEAD"], text=True)
    assert head.startswith(commit)
    release = project.root / "container/release.sif"
    command = f"cd {tmp_path}; apptainer run --bind {tmp_path} --pwd {tmp_path} {release} train"
    done = on_login(project, "bash", "-c", f"{command} {' '.join(QUICK)} --run-dir here")
    assert done.returncode == 0, done.stderr
    # configs/train.yaml came with it.
    assert "experiment: demo" in (tmp_path / "here/config.yaml").read_text()


def test_a_stopped_job_comes_back(project: Project, uninterrupted: Job) -> None:
    job = submit(project, flags=SHORTER).wait_for_step(30)
    code = project.root / "src/demo/model.py"
    kept = code.read_text()
    code.write_text("raise SystemExit('edited while the job runs')\n")
    try:
        stop(job)
        check_back(job, uninterrupted)
    finally:
        code.write_text(kept)
    assert "checkpoint, and back" in job.log


@pytest.mark.slow
def test_a_job_comes_back_whose_image_was_signalled_too(
    project: Project, uninterrupted: Job
) -> None:
    job = submit(project, flags=SHORTER).wait_for_step(30)
    # This Slurm signals all processes, those that serve the image too: few survive the loss of it.
    project.cluster.run("scancel", "--signal=USR2", job.id)
    check_back(job, uninterrupted)


def test_a_cancelled_job_stays_away(project: Project) -> None:
    job = submit(project, flags=SHORTER).wait_for_step(5)
    project.cluster.run("scancel", job.id)
    assert (job.wait().state, job.restarts) == ("CANCELLED", 0)
    wait_for(lambda: not job.ranks(), lambda: f"ranks are left: {job.ranks()}")


@pytest.mark.slow
def test_torchrun_comes_back_and_the_shared_folder_is_made(
    make_project: MakeProject, project: Project, uninterrupted: Job, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    other = make_project(
        container="apptainer", trackers=[], launcher="torchrun", shared_root=str(shared)
    )
    shutil.copy(project.root / "slurm/site.sh", other.root / "slurm")
    (other.root / "runs").symlink_to(shared / "runs")
    image = str(project.root / "container/image.sif")
    job = submit(other, flags=SHORTER, IMAGE=image).wait_for_step(30)
    stop(job)
    check_back(job, uninterrupted)
    assert job.summary["hostnames"] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("image", "error"),
    [
        ("none.sif", "container/none.sif does not exist: run 'make image' first"),
        ("broken.sif", "container/broken.sif does not start, or its code does not"),
        ("image.sif", "neither apptainer nor singularity is on n1: load its module"),
    ],
)
def test_what_cannot_start_says_so(project: Project, image: str, error: str) -> None:
    (project.root / "container/broken.sif").write_text("no image")
    site = project.root / "slurm/site.sh"
    text = site.read_text()
    if image == "image.sif":
        site.write_text("")
    try:
        job = project.sbatch("slurm/train_cpu.sbatch", *QUICK, IMAGE=f"container/{image}")
        assert job.wait().state == "FAILED"
    finally:
        site.write_text(text)
    assert f"error: {error}" in job.log or f"/{error}" in job.log


def test_doctor_looks_at_the_image(project: Project, commands: Path, tmp_path: Path) -> None:
    """On a site that has SingularityCE in its place, which takes the same arguments."""
    (tmp_path / "singularity").symlink_to(commands / "apptainer")
    site = project.root / "slurm/site.sh"
    text = site.read_text()
    site.write_text(text.replace(str(commands), str(tmp_path)))
    try:
        job = project.sbatch("slurm/doctor.sbatch", "--device=cpu", "--dataset=synthetic").wait()
    finally:
        site.write_text(text)
    assert job.state == "COMPLETED", job.log
    assert "ok       packages     all " in job.log and "/opt/env/bin/python" in job.log


def test_the_checks_of_a_cluster_run_in_the_image(project: Project) -> None:
    command = (".venv/bin/python", "-m", "demo", "acceptance", "--dataset=synthetic")
    done = on_login(project, *command, "--only", "image", "train cpu")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^image +pass .* container/image.sif exists$", done.stdout, re.M)
    assert re.search(r"^train cpu +pass .* 100 steps$", done.stdout, re.M)
