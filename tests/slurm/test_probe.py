"""The probe's answers about a cluster make a project whose scripts this cluster accepts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from renderer import TEMPLATE

from . import modules, pyxis
from .cluster import Cluster
from .jobs import Project


def probed(cluster: Cluster, folder: Path) -> tuple[str, dict[str, Any]]:
    """Run the probe on the login node; return the path of its file, and the answers in it."""
    probe = f"{TEMPLATE}/hooks/probe_cluster.py"
    done = cluster.run(sys.executable, probe, cwd=folder)
    assert done.stderr == ""
    text = (folder / "cluster.yml").read_text()
    return text, yaml.safe_load(text)


def copied(cluster: Cluster, folder: Path) -> Project:
    """Do what the file says is next, where nobody answers what is left to ask."""
    subprocess.run(
        [
            *(sys.executable, "-m", "copier", "copy", "--data-file=cluster.yml", "--defaults"),
            *("--quiet", "--vcs-ref=HEAD", TEMPLATE, "project"),
        ],
        cwd=folder,
        check=True,
    )
    return Project(cluster, folder / "project")


def accepted(project: Project) -> set[str]:
    """Return the batch scripts; the cluster accepts them all."""
    scripts = sorted((project.root / "slurm").glob("**/*.sbatch"))
    for script in scripts:
        done = project.cluster.run(
            "sbatch", "--test-only", str(script), cwd=project.root, check=False
        )
        assert done.returncode == 0, f"{script.name}: {done.stderr}"
    return {script.name for script in scripts}


@pytest.mark.shows(
    "python3 probe_cluster.py cluster.yml", "uvx copier copy --data-file cluster.yml *"
)
def test_gpus_and_two_partitions(cluster: Cluster, tmp_path: Path) -> None:
    text, answers = probed(cluster, tmp_path)
    assert {**answers, "modules": ""} == {
        "launch_modes": ["cpu", "single_node", "multi_node"],
        "partition": "",
        "cpu_partition": "",
        "gpus_per_node": 4,
        "cpus_per_task": 4,
        "memory": "2000M",
        "memory_scope": "cpu",
        "time_limit": "01:00:00",
        "requeue": True,
        "modules": "",
        "site_script": "",
    }
    for fact in (
        "# Answers about the cluster test, asked on login, Slurm ",
        "#   main*   1-00:00:00  3 node(s)  16 CPUs  31 GiB  4 a100\n"
        "#   urgent  1-00:00:00  3 node(s)  16 CPUs  31 GiB  4 a100\n",
        "# default of a rank in main: 400 MiB\n",
        "# 2000 MiB are the share of a CPU\n",
        "# JobRequeue 1, PreemptType preempt/partition_prio, PreemptMode REQUEUE\n",
        "# jobs in urgent may stop jobs in main (mode REQUEUE; to save: GraceTime 30 s, "
        "KillWait 30 s)\n",
        "# sacctmgr does not answer: ask your site whether jobs need an account\n"
        "# account: not found\n",
    ):
        assert fact in text
    assert ("srun has --container-image" in text) == (pyxis.missing() is None)
    scripts = accepted(copied(cluster, tmp_path))
    assert {"train_cpu.sbatch", "train_single_node.sbatch", "train_multi_node.sbatch"} <= scripts


def test_no_gpus(tmp_path: Path) -> None:
    short = "PartitionName=short Nodes=n1 MaxTime=10 MaxCPUsPerNode=2"
    with Cluster(nodes=2, settings=short, gpus=0) as cluster:
        cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=Gres=gpu:8")
        cluster.run("scontrol", "update", "PartitionName=main", "MaxTime=20")
        text, answers = probed(cluster, tmp_path)
        assert answers["launch_modes"] == ["cpu"]
        assert "gpus_per_node" not in answers
        assert (answers["cpus_per_task"], answers["memory"]) == (4, "2000M")
        # The default partition has no time for a run.
        assert (answers["partition"], answers["time_limit"]) == ("urgent", "01:00:00")
        assert "#   main*   00:20:00    2 node(s), 1 up  16 CPUs  31 GiB  no GPU\n" in text
        scripts = accepted(copied(cluster, tmp_path))
    assert "train_cpu.sbatch" in scripts


def test_a_filter_of_the_site_is_named(tmp_path: Path) -> None:
    filter = """
function slurm_job_submit(job, partitions, user) return slurm.SUCCESS end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
"""
    with Cluster(nodes=1, job_submit=filter) as cluster:
        text, _ = probed(cluster, tmp_path)
    assert "JobSubmitPlugins = lua" in text


@pytest.mark.parametrize("system", ["environment-modules", "lmod"])
def test_modules(cluster: Cluster, system: str, tmp_path: Path) -> None:
    """The newest Python that loads is taken, below 3.13 where there is one."""
    if reason := modules.missing(system):
        pytest.skip(reason)
    more = {name: "setenv DEMO yes" for name in ("cuda/12.8", "python/2024.6", "python/3.13.1")}
    more["python/3.12.9"] = "prereq absent-tool/1.0"
    modules.write(tmp_path / "etc" / system / "modules", more)
    with modules.installed(cluster, system, tmp_path):
        text, answers = probed(cluster, tmp_path)
    assert answers["modules"] == "python/3.12"
    assert "# python/3.12 loads Python 3." in text
    for fact in ("only for what you compile): cuda/12.8\n", "# modules of conda: none found\n"):
        assert fact in text
    script = copied(cluster, tmp_path).root / "slurm" / "train_cpu.sbatch"
    assert "\nload_module python/3.12\n" in script.read_text()


ADDRESS = """https://git.example.org/it's "$HOME" [pwd] {x} \\d;e"""


@pytest.mark.parametrize("system", ["environment-modules", "lmod"])
@pytest.mark.parametrize("name", ["ddp", """a 'b' "c" [pwd] {d}"""], ids=["plain", "odd"])
def test_a_module_gives_each_user_the_answers_of_the_site(
    cluster: Cluster, system: str, name: str, tmp_path: Path
) -> None:
    if reason := modules.missing(system):
        pytest.skip(reason)
    site = tmp_path / name
    probe = (sys.executable, f"{TEMPLATE}/hooks/probe_cluster.py")
    done = cluster.run(*probe, "--site", str(site), "--template", ADDRESS)
    assert done.stderr == ""
    folder = tmp_path / "system"
    folder.mkdir()
    with modules.installed(cluster, system, folder):

        def login(line: str) -> str:
            """Return the output of a line in a login shell, with the module's folder in use."""
            shell = ("bash", "-lc", f'module use "$0/modulefiles"; {line}', str(site))
            done = cluster.run(*shell)
            return done.stdout + done.stderr

        show = 'printf "%s\\n" "$COPIER_SETTINGS_PATH" "$SLURM_DDP_TEMPLATE" "${PATH%%:*}"'
        said = login(f"module load slurm-ddp; {show}")
        assert said.splitlines() == [f"{site}/settings.yml", ADDRESS, f"{site}/bin"]
        for question in ("help", "whatis"):
            assert "copier copy $SLURM_DDP_TEMPLATE my-project" in login(
                f"module {question} slurm-ddp"
            )
        assert "slurm-ddp/1.0.lua" not in login("module --terse avail slurm-ddp 2>&1")
        assert login(f"module load slurm-ddp; module unload slurm-ddp; {show}").startswith("\n\n")
        # It is Copier that reads the settings.
        copier = f'"{sys.executable}" -m copier copy --defaults --quiet --vcs-ref=HEAD'
        login(f'module load slurm-ddp; {copier} "{TEMPLATE}" "{tmp_path}/project"')
    said = yaml.safe_load((tmp_path / "project/.copier-answers.yml").read_text())
    assert (said["memory"], said["memory_scope"], said["setup"]) == ("2000M", "cpu", "quick")
    assert accepted(Project(cluster, tmp_path / "project"))
