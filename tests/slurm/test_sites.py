"""Each preset of sites/ is submitted where Slurm refuses what that site refuses."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from renderer import QUESTIONS, TEMPLATE, Renderer, copy_template, shrink

from . import modules
from .cluster import Cluster, missing, wait_for
from .conftest import set_up as set_up_packages
from .jobs import ENDED
from .stand_ins import SITE_SH, Submitted, set_up, states

PRESETS = sorted(path.stem for path in TEMPLATE.glob("sites/*.yml"))
# The GPUs of a node, as Slurm knows them: those of Vista it does not.
GPUS = {"alps": 4, "archer2": 4, "delta": 4, "frontier": 8, "lumi": 8}
GPUS |= {"perlmutter": 4, "snellius": 4, "tacc-vista": 0}
GPUS |= {"berzelius": 8, "coreweave": 8, "hyperpod": 0, "isambard-ai": 4, "setonix": 8}
GPUS |= {"smu-superpod": 8, "alliance": 4, "jean-zay": 4, "juwels-booster": 4, "leonardo": 4}
GPUS |= {"mila": 4}
# What each filter says of a project with the default answers, and an account; nothing where the
# site's documentation says of nothing in it that it is refused.
REFUSED = {
    "archer2": "a partition and a QOS must be given",
    "lumi": "an account and a partition must be given",
    "tacc-vista": "--gres is not supported",
}
TRAINING = ("--device=cpu", "--dataset=synthetic", "--max-steps=3")
# The file of a site says what is refused, where its documentation says it.
FILTER = """
function slurm_job_submit(job, partitions, user)
    local reason = refused(job)
    -- What has no script is a step that prepares the cluster.
    if reason == nil or job.script == nil then return slurm.SUCCESS end
    slurm.log_user(reason)
    return slurm.ERROR
end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
"""


@contextmanager
def site(name: str, preset: dict[str, Any], folder: Path) -> Iterator[Cluster]:
    """A cluster with a site's partitions, modules and filter; that with GPUs gives whole nodes."""
    lines = [
        f"PartitionName={preset[key]} Nodes=ALL MaxTime=INFINITE {shared}"
        for key, shared in (("partition", "OverSubscribe=EXCLUSIVE"), ("cpu_partition", ""))
        if key in preset
    ]
    loaded = preset.get("modules", "").split()
    rules = TEMPLATE / f"tests/slurm/sites/{name}.lua"
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(
                nodes=2,
                settings="\n".join(lines),
                gpus=GPUS[name],
                cores=300,
                memory=400_000,
                job_submit=rules.read_text() + FILTER if rules.exists() else "",
            )
        )
        if feature := preset.get("constraint"):
            features = [f"{which}Features={feature}" for which in ("Available", "Active")]
            cluster.run("scontrol", "update", "NodeName=n[1-2]", *features)
        if loaded:
            written = {
                each if "/" in each else f"{each}/1.0": "setenv LOADED yes" for each in loaded
            }
            modules.write(folder / "etc/environment-modules/modules", written)
            stack.enter_context(modules.installed(cluster, "environment-modules", folder))
        yield cluster


def scripts(render: Renderer, root: Path, site_sh: str, answers: dict[str, Any]) -> list[Submitted]:
    """Render a project, and return its batch scripts."""
    files = render(answers)
    set_up(root, files)
    (root / "slurm/site.sh").write_text(SITE_SH + site_sh)
    return [Submitted(answers, root, path) for path in files if path.endswith(".sbatch")]


def whole(answers: dict[str, Any]) -> bool:
    """Whether a job must have a whole node, as it asks for no cores."""
    return answers.get("task_options") == "srun"


def training(render: Renderer, root: Path, site_sh: str, answers: dict[str, Any]) -> str:
    """Write a project that can train, as two ranks where it can; return the script that does."""
    two = {"gpus_per_node": 2, "exclusive": False} if not whole(answers) else {}
    for path, text in render({**answers, **two, "trackers": []}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "slurm/site.sh").write_text(site_sh)
    (root / "slurm/task_epilog.sh").chmod(0o755)
    set_up_packages(shrink(root))
    if answers.get("container") == "pyxis":
        (root / "container/env").symlink_to(root / ".venv")
    modes = answers.get("launch_modes", ["cpu"])
    return f"slurm/train_{modes[0]}.sbatch"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_meets_the_rules_of_its_site(name: str, tmp_path: Path) -> None:
    if reason := missing() or modules.missing("environment-modules"):
        pytest.skip(reason)
    text = (TEMPLATE / f"sites/{name}.yml").read_text()
    preset = yaml.safe_load(text)
    assert set(preset) <= set(QUESTIONS)
    assert f"[{name}.yml](../sites/{name}.yml)" in (TEMPLATE / "docs/sites.md").read_text()
    given = {"package_name": "demo", "account": "proj-0042"}
    render = Renderer(copy_template(tmp_path / "template"))
    site_sh = "".join(re.findall(r"^#   (.*\n)", text, re.M))
    jobs = scripts(render, tmp_path / "preset", site_sh, {**preset, **given})
    scripts(render, tmp_path / "plain", "", given)
    project = tmp_path / "trained"
    train = training(render, project, site_sh, {**preset, **given})
    with site(name, preset, tmp_path / "site") as cluster:
        for job in jobs:
            done = cluster.run("sbatch", "--parsable", job.path, cwd=job.root, check=False)
            assert done.returncode == 0, f"{job.path}: {done.stderr}"
            job.id = done.stdout.strip()
        wait_for(lambda: set(states(cluster).values()) <= ENDED, lambda: cluster.logs, 1)
        # Two ranks do not take a whole node, and would get all of its GPUs.
        names = {preset[key] for key in ("partition", "cpu_partition") if key in preset}
        for queue in () if whole(preset) else names:
            cluster.run("scontrol", "update", f"PartitionName={queue}", "OverSubscribe=NO")
        done = cluster.run("sbatch", "--parsable", train, *TRAINING, cwd=project, check=False)
        assert done.returncode == 0, done.stderr
        trained = done.stdout.strip()
        wait_for(lambda: set(states(cluster).values()) <= ENDED, lambda: cluster.logs, 1)
        ended = states(cluster)
        (log,) = project.glob(f"logs/*-{trained}.out")
        assert ended.pop(trained) == "COMPLETED", log.read_text()
        (summary,) = project.glob("runs/*/*/summary.json")
        assert json.loads(summary.read_text())["world_size"] in (2, GPUS[name])
        faults = [fault for job in jobs if (fault := job.fault(ended[job.id]))]
        assert not faults, "\n\n".join(faults)
        # From 26.05 on, a step can't give a task more GPUs than the job gives each.
        newer = " 26." in cluster.run("scontrol", "--version").stdout
        if preset["gpu_request"] != "none" and not (newer and name == "alps"):
            doctor = next(job for job in jobs if "doctor" in job.path)
            assert f"sees GPUs {','.join(map(str, range(GPUS[name])))}\n" in doctor.log
        if name in REFUSED:
            script = "slurm/train_single_node.sbatch"
            done = cluster.run("sbatch", script, cwd=tmp_path / "plain", check=False)
            assert done.returncode and REFUSED[name] in done.stderr, done.stderr
