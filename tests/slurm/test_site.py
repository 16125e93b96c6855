"""The facts of a site: slurm/site.sh, and a cluster without modules."""

from pathlib import Path

import pytest

from .conftest import MakeProject
from .jobs import Job, Project
from .modules import PROBE, found_by_ranks, probe
from .trainings import both_launchers


def test_a_cluster_without_modules_says_so(make_project: MakeProject) -> None:
    job = probe(make_project, "demo-tool/1.0").sbatch("slurm/train_cpu.sbatch").wait()
    assert job.state == "FAILED"
    assert "is missing on n1" in job.log


@pytest.mark.shows("export *")
def test_facts_of_the_site_reach_every_rank(make_project: MakeProject) -> None:
    project = probe(make_project, "")
    site = project.root / "slurm/site.sh"
    site.write_text("export SCRATCH=/scratch/$SLURM_JOB_ID\n")
    job = project.sbatch("--nodes=2", "slurm/train_cpu.sbatch")
    assert [line.split()[-1] for line in found_by_ranks(job)] == [f"scratch=/scratch/{job.id}"] * 4
    site.write_text("export SCRATCH=/scratch\nmkdir /proc/mine\n")
    job = project.sbatch("slurm/train_cpu.sbatch").wait()
    assert (job.state, job.facts["ExitCode"]) == ("FAILED", "1:0")
    assert "cannot create directory" in job.log and "found" not in job.log
    assert "slurm/site.sh ends with" in job.log
    site.write_text("exit 0\n")
    job = project.sbatch("slurm/train_cpu.sbatch").wait()
    assert (job.state, job.facts["ExitCode"]) == ("FAILED", "1:0")
    assert "slurm/site.sh ended" in job.log


@pytest.mark.parametrize("modules", ["", "demo-tool/1.0"])
@pytest.mark.parametrize("profile", ["exec sh", '[ -n "$PS1" ] || exit 0'])
def test_what_the_users_shell_does_does_not_matter(
    make_project: MakeProject, tmp_path: Path, modules: str, profile: str
) -> None:
    """Unless modules need it."""
    (tmp_path / ".bash_profile").write_text(profile + "\n")
    functions = {
        f"BASH_FUNC_{name}%%": f'() {{ {kind} {name} "$@" && ls; }}'
        for name, kind in (("cd", "builtin"), ("sort", "command"), ("scontrol", "command"))
    }
    env = {"HOME": str(tmp_path), "CDPATH": "/:.:..", **functions}
    project = probe(make_project, modules)
    command = ("bash", "slurm/submit.sh", "1", "slurm/train_cpu.sbatch", "--")
    done = project.cluster.run(*command, cwd=project.root, **env)
    submitted = Job(project, done.stdout.split()[1].rstrip(","))
    for job in (submitted, project.sbatch("slurm/train_cpu.sbatch", **env)):
        if modules:
            assert (job.wait().state, job.facts["ExitCode"]) == ("FAILED", "1:0")
            (line,) = [line for line in job.log.splitlines() if "error: " in line]
            assert "command is missing" in line and "~/.bash_profile" in line
        else:
            assert len(found_by_ranks(job)) == 2


@pytest.mark.shows("MASTER_ADDR=*")
def test_the_first_node_may_have_two_names(make_project: MakeProject) -> None:
    for launcher in ("srun", "torchrun"):
        project = make_project(launch_modes=["cpu"], launcher=launcher, trackers=[])
        first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        (project.root / "slurm/site.sh").write_text(f"MASTER_ADDR={first}-ib\n")
        flags = ("--dataset=synthetic", "--max-steps=5")
        few = ("--nodes=2", "--ntasks-per-node=1")
        job = project.sbatch(*few, "slurm/train_cpu.sbatch", *flags, RANKS_PER_NODE="1")
        assert job.summary["global_step"] == 5
        assert "\nmaster       n1-ib\n" in job.log


@both_launchers
def test_rank_0_need_not_be_on_the_first_node(make_project: MakeProject, launcher: str) -> None:
    """As where Slurm lays out the tasks by its topology; here, by a list."""
    modes = ["cpu", "multi_node"]
    project = make_project(launch_modes=modes, launcher=launcher, trackers=[])
    (project.root / "hosts").write_text("n2\nn1\n")
    site = f"export SLURM_DISTRIBUTION=arbitrary SLURM_HOSTFILE={project.root}/hosts\n"
    (project.root / "slurm/site.sh").write_text(site)
    flags = ("--nodes=2", "--ntasks-per-node=1")
    train = ("slurm/train_cpu.sbatch", "--dataset=synthetic", "--max-steps=5", "--timeout=60")
    job = project.sbatch(*flags, *train, RANKS_PER_NODE="1")
    hosts = job.summary["hostnames"]
    assert hosts == ["n2", "n1"] if launcher == "srun" else set(hosts) == {"n1", "n2"}
    if launcher == "srun":
        doctor = ("slurm/doctor.sbatch", "--dataset=synthetic")
        for script in (doctor, ("slurm/check_comm.sbatch", "--max-bytes=9")):
            job = project.sbatch(*flags, "--gres=gpu:a100:1", *script, "--device=cpu")
            assert job.wait().state == "COMPLETED", job.log


def test_the_login_shells_rendezvous_is_another_jobs(make_project: MakeProject) -> None:
    job = probe(make_project, "").sbatch(
        "slurm/train_cpu.sbatch", MASTER_ADDR="n9", MASTER_PORT="1"
    )
    assert job.wait().state == "COMPLETED", job.log
    assert "\nmaster       n1\n" in job.log


@pytest.mark.shows("PROJECT_PYTHON=*")
def test_the_site_may_bring_python(make_project: MakeProject) -> None:
    """With modules' packages, which are otherwise not the project's."""
    project: Project = probe(make_project, "")
    python = project.root / "software/python"
    python.parent.mkdir()
    python.write_text(PROBE.replace("packages=", "site-packages="))
    python.chmod(0o755)
    (project.root / ".venv/bin/python").unlink()
    site = f"PROJECT_PYTHON={python}\nexport PYTHONPATH=/software/packages\n"
    (project.root / "slurm/site.sh").write_text(site)
    job = project.sbatch("slurm/train_cpu.sbatch")
    for line in found_by_ranks(job):
        assert "site-packages=src:/software/packages" in line
    assert f"interpreter  {python} (Python 3.12.1)" in job.log
