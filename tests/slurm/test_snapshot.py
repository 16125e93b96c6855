"""A job runs the code as it was submitted, even if the folder changes; a chain is one run."""

import json
import subprocess
import tarfile
from pathlib import Path

import metrics
import pytest

from .cluster import Cluster, wait_for
from .conftest import MakeProject
from .jobs import ENDED, Job, Project
from .test_stops import submit

SHORTER = "--epochs=2"
STEPS = 2 * 117
BROKEN = "\nraise SystemExit('this code came later')\n"


@pytest.fixture(scope="module", params=["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def project(make_project: MakeProject, request: pytest.FixtureRequest) -> Project:
    """A project in a repository, with a change that is not committed and a new file."""
    project = make_project(launcher=request.param)
    git = ("git", "-c", "user.name=demo", "-c", "user.email=demo@example.org", "-C", project.root)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=demo"]):
        subprocess.run([*git, *command], check=True)
    with (project.root / "src/demo/figures.py").open("a") as code:
        code.write("# not committed: token = 'abcdefgh12345678'\n")
    (project.root / "src/demo/new.py").write_text("HERE = True\n")
    return project


def make(project: Project, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run make on the login node."""
    return project.cluster.run("make", *words, cwd=project.root, check=False, **env)


def submitted(project: Project, *words: str, **env: str) -> list[Job]:
    """Return the jobs that a target of make submitted."""
    done = make(project, *words, "SCRIPT=slurm/train_cpu.sbatch", **env)
    assert done.stdout.startswith("submitted "), done.stdout + done.stderr
    numbers = done.stdout.splitlines()[0].partition(",")[0].split()[1:]
    return [Job(project, number) for number in numbers]


class Edits:
    """Edits of a project's files, which are taken back at the end of a `with` block."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kept: dict[Path, str] = {}

    def __enter__(self) -> "Edits":
        return self

    def __exit__(self, *_: object) -> None:
        for path, text in self.kept.items():
            path.write_text(text)
            if not text:  # it is new
                path.unlink()

    def update(self) -> None:
        """Break what a job reads: its code, its settings, and the files of its script's folder."""
        for name, text in {
            "src/demo/model.py": BROKEN,
            "src/demo/tools/torchrun.py": BROKEN,
            "configs/train.yaml": "no_setting: 1\n",
            "slurm/common.sh": "",
            "slurm/resume.sh": "exit 99\n",
            "slurm/site.sh": "exit 98\n",
        }.items():
            path = self.root / name
            self.kept[path] = path.read_text() if path.exists() else ""
            path.write_text(self.kept[path] + text)
        common = self.root / "slurm/common.sh"
        text = common.read_text()
        assert text.count("[[ ${1:-} == ") == 1
        common.write_text(text.replace("[[ ${1:-} == ", "[[ ${1:-} == 99"))


def check_kept(job: Job) -> str:
    """Check what a run records about its code; return the hash."""
    provenance = json.loads((job.run_dir / "provenance.json").read_text())
    name = provenance["snapshot"]
    assert f"/.snapshots/{name}/src\n" in job.log
    assert f"settings from .snapshots/{name}/configs/train.yaml; " in job.log
    git = ("git", "-C", job.project.root, "rev-parse", "HEAD")
    assert provenance["git"]["commit"] == subprocess.check_output(git, text=True).strip()
    assert provenance["git"]["changes"] == " M src/demo/figures.py\n?? src/demo/new.py"
    diff = provenance["git"]["diff"]
    assert "+HERE = True" in diff and "<secret>" in diff and "came later" not in diff
    (packed,) = (job.run_dir / "code").iterdir()
    assert packed.name == f"{name}.tar.gz"
    with tarfile.open(packed) as archive:
        names = archive.getnames()
        assert b"came later" not in archive.extractfile("./src/demo/model.py").read()
    assert {"./configs/train.yaml", "./slurm/common.sh", "./src/demo/new.py"} <= {*names}
    assert not [each for each in names if "site.sh" in each or "pycache" in each]
    return name


def test_a_job_that_comes_back_goes_on_with_its_code(project: Project) -> None:
    job = submit(project, flags=(SHORTER, "--workers=1", "--config=configs/train.yaml"))
    job.wait_for_step(30)
    with Edits(project.root) as edits:
        edits.update()
        project.cluster.run("scancel", "--signal=USR2", job.id)
        job.wait_for_restart()
        assert job.summary["global_step"] == STEPS and job.summary["resumed_from_step"] > 0
        check_kept(job)
        # This job runs the folder's code, which is broken.
        other = project.sbatch("slurm/train_cpu.sbatch", CODE_SNAPSHOT="0")
        assert other.wait().state == "FAILED" and "has changed since" in other.log


def test_make_submit_takes_the_code_of_its_moment(project: Project) -> None:
    options = "SBATCH=--begin=now+1hour --array=0,7 --export=NONE"
    (array,) = submitted(project, "submit", options, "ARGS=--dataset=synthetic --max-steps=3")
    tasks = [Job(project, f"{array.id}_{task}") for task in (0, 7)]
    with Edits(project.root) as edits:
        edits.update()
        project.cluster.run("scontrol", "update", f"JobId={array.id}", "StartTime=now")
        assert {task.summary["global_step"] for task in tasks} == {3}
    assert len({check_kept(task) for task in tasks}) == 1


def test_a_chain_ends_with_its_run(project: Project) -> None:
    """Also if jobs are not requeued: the second job continues the run of the first."""
    options = ("N=3", "SBATCH=--nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --no-requeue")
    flags = "ARGS=--dataset=synthetic --checkpoint-every=20 --log-every=1 --experiment=long"
    flags = f"{flags} {SHORTER}"
    jobs = submitted(project, "chain", *options, flags, RANKS_PER_NODE="1", MAX_REQUEUES="0")
    first, second, third = jobs
    run_dir = project.root / "runs/long" / first.id
    wait_for(lambda: metrics.logged(run_dir, 30) or first.state in ENDED, lambda: first.log)
    project.cluster.run("scancel", "--signal=USR2", first.id)
    assert first.wait().state == "FAILED" and first.facts["ExitCode"] == "75:0", first.log
    assert second.wait().state == "COMPLETED", second.log
    assert third.wait().state == "CANCELLED"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["global_step"] == STEPS and summary["resumed_from_step"] > 0
    assert [path.name for path in run_dir.parent.iterdir()] == [first.id]


@pytest.mark.slow
def test_a_job_of_a_chain_may_come_back(project: Project) -> None:
    """The next job waits for it."""
    options = ("N=2", "SBATCH=--nodes=2 --ntasks-per-node=1 --cpus-per-task=1")
    flags = f"ARGS=--dataset=synthetic --log-every=1 --checkpoint-every=20 {SHORTER}"
    first, second = submitted(project, "chain", *options, flags, RANKS_PER_NODE="1")
    first.wait_for_step(30)
    project.cluster.run("scancel", "--signal=USR2", first.id)
    first.wait_for_restart()
    assert first.summary["resumed_from_step"] > 0
    assert second.wait().state == "CANCELLED" and not second.log


def test_each_job_of_a_chain_waits_for_all_before_it(project: Project) -> None:
    """So that one can be cancelled; and nothing is left of a chain that has ended."""
    flags = f"ARGS=--dataset=synthetic --log-every=1 {SHORTER}"
    first, second, third = submitted(project, "chain", "N=3", flags)
    first.wait_for_step(10)
    project.cluster.run("scancel", second.id)
    assert second.wait().state == "CANCELLED"
    assert f"afterany:{first.id}" in third.facts["Dependency"]
    assert first.summary["global_step"] == STEPS
    assert third.wait().state == "CANCELLED" and not third.log
    left = [path.name for path in (project.root / "logs").glob("c[oh]*-*")]
    assert not [name for name in left for job in (first, second, third) if f"-{job.id}-" in name]


@pytest.fixture
def short(make_project: MakeProject) -> Project:
    """A project whose jobs do nothing."""
    project = make_project(launch_modes=["cpu"])
    (project.root / "slurm/short.sbatch").write_text("#!/bin/bash\n#SBATCH --output=/dev/null\n")
    return project


def submit_short(project: Project, *options: str, count: int = 1, **env: str) -> list[Job]:
    """Submit jobs that do nothing; return those that Slurm has now and had not before."""

    def known() -> set[str]:
        shown = project.cluster.run("squeue", "--noheader", "--states=all", "--format=%A")
        return set(shown.stdout.split())

    before = known()
    command = ("bash", "slurm/submit.sh", str(count), "slurm/short.sbatch", *options, "--")
    project.cluster.run(*command, cwd=project.root, check=False, **env)
    return [Job(project, each) for each in sorted(known() - before, key=int)]


def test_options_of_sbatch_count_wherever_they_stand(short: Project) -> None:
    script = short.root / "slurm/short.sbatch"
    without = script.read_text()
    (job,) = submit_short(short, SBATCH_WAIT="1")
    assert job.state == "COMPLETED"
    (job,) = submit_short(short, "--hold", '--comment=x -a b "--wait"')
    assert (job.state, job.facts["Reason"]) == ("PENDING", "JobHeldUser")
    assert len(submit_short(short, "--comment=x -a b", count=2)) == 2
    for where in ("environment", "script", "options"):
        env = {"SBATCH_ARRAY_INX": "0-1"} if where == "environment" else {}
        script.write_text(without + "#SBATCH -a0-1\n" * (where == "script"))
        assert not submit_short(short, *["--arr=0-1"] * (where == "options"), count=2, **env), where
    script.write_text(without + "#SBATCH --wait\n")
    (job,) = submit_short(short)
    assert job.state == "COMPLETED"


def test_the_number_of_an_earlier_job_is_not_its_run(make_project: MakeProject) -> None:
    """Two clusters over one home, or one whose numbers begin again."""
    project = make_project(launch_modes=["cpu"])
    flags = ("--dataset=synthetic", "--log-every=1", "--checkpoint-every=20")
    script, runs = "slurm/train_cpu.sbatch", project.root / "runs/demo"
    with Cluster(nodes=1) as first:
        there = Project(first, project.root)
        assert there.sbatch(script, *flags, "--max-steps=20").summary["global_step"] == 20
        # It leaves its code, since it never starts.
        (waits,) = submitted(there, "submit", "SBATCH=--begin=now+1hour")
        first.run("scancel", waits.id)
    (project.root / "src/demo/new.py").write_text("HERE = True\n")
    with Cluster(nodes=1, hasty=True) as second:
        here = Project(second, project.root)
        job = here.sbatch(script, *flags, SHORTER)
        (run,) = wait_for_folders(runs, "1-*")
        wait_for(lambda: metrics.logged(run, 30) or job.state in ENDED, lambda: job.log)
        second.run("scancel", "--signal=USR2", job.id)
        job.wait_for_restart()
        assert job.wait().state == "COMPLETED", job.log
        for _ in range(int(job.id) + 1, int(waits.id)):
            here.sbatch("--output=/dev/null", "--wrap=true")
        other = here.sbatch(script, *flags, "--max-steps=2")
        assert other.id == waits.id and other.summary["global_step"] == 2
    assert sorted(path.name for path in runs.iterdir()) == ["1", run.name, other.id]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["global_step"] == STEPS and summary["resumed_from_step"] > 0
    codes = [next((runs / name / "code").iterdir()).name for name in ("1", run.name, other.id)]
    assert codes[0] != codes[1] == codes[2]


def wait_for_folders(parent: Path, pattern: str) -> list[Path]:
    """Wait until there are folders with such names; return them."""
    wait_for(lambda: list(parent.glob(pattern)), lambda: f"no {pattern} in {parent}")
    return list(parent.glob(pattern))


def test_a_chain_ends_with_a_fault_of_the_program(project: Project) -> None:
    failed, *others = submitted(project, "chain", "N=3", "ARGS=--lr=quick")
    assert failed.wait().state == "FAILED"
    assert [job.wait().state for job in others] == ["CANCELLED", "CANCELLED"]
