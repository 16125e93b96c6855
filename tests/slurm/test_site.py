"""The facts of a site: slurm/site.sh, and a cluster without modules."""

from .conftest import MakeProject
from .modules import found_by_ranks, probe


def test_a_cluster_without_modules_says_so(make_project: MakeProject) -> None:
    job = probe(make_project, "demo-tool/1.0").sbatch("slurm/train_cpu.sbatch").wait()
    assert job.state == "FAILED"
    assert "error: there is no module command on n1" in job.log


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
    assert "error: slurm/site.sh ends with exit code 1" in job.log
