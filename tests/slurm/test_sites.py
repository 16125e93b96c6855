"""Each preset in sites/ is submitted to a Slurm that refuses what that site refuses."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from renderer import QUESTIONS, TEMPLATE, Renderer, copy_template, shrink

from . import modules
from .cluster import Cluster, missing, wait_for
from .conftest import set_up as set_up_packages
from .jobs import ENDED
from .stand_ins import Submitted, set_up, states

PRESETS = sorted(path.stem for path in TEMPLATE.glob("sites/*.yml"))
# These train with every change; the others at night.
OFTEN = ("frontier", "mila", "smu-superpod")
# The GPUs of a node, as Slurm knows them: those of Vista it does not.
GPUS = {"alps": 4, "archer2": 4, "delta": 4, "frontier": 8, "lumi": 8}
GPUS |= {"perlmutter": 4, "snellius": 4, "tacc-vista": 0}
GPUS |= {"berzelius": 8, "coreweave": 8, "hyperpod": 0, "isambard-ai": 4, "setonix": 8}
GPUS |= {"smu-superpod": 8, "alliance": 4, "jean-zay": 4, "juwels-booster": 4, "leonardo": 4}
GPUS |= {"marenostrum5": 4, "mila": 4, "ncsu-hazel": 4}
# What a preset leaves to its user, and the site demands.
GIVEN = {"ncsu-hazel": {"gpu_type": "a100"}}
TRAINING = ("--device=cpu", "--dataset=synthetic", "--max-steps=3")
# What a site refuses, where its documentation says so: of jobs, or of options of sbatch and srun.
FILTERS = Path(__file__).with_name("sites")
JOB_SUBMIT = """
function slurm_job_submit(job, partitions, user)
    local reason = refused(job)
    -- What has no script is a step that prepares the cluster.
    if reason == nil or job.script == nil then return slurm.SUCCESS end
    slurm.log_user(reason)
    return slurm.ERROR
end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
"""
CLI_FILTER = """
function slurm_cli_pre_submit(options, offset)
    local reason = refused(options)
    if reason == nil then return slurm.SUCCESS end
    slurm.log_error(reason)
    return slurm.ERROR
end
function slurm_cli_setup_defaults(options, early) return slurm.SUCCESS end
function slurm_cli_post_submit(offset, job, step) return slurm.SUCCESS end
"""


@dataclass
class Preset:
    """A file of sites/.

    Attributes:
        values: what it answers.
        answers: with what it leaves to its user.
    """

    name: str
    values: dict[str, Any]
    answers: dict[str, Any]
    render: Renderer


@contextmanager
def site(preset: Preset, folder: Path, gpus: int) -> Iterator[Cluster]:
    """A cluster with a site's partitions, modules and filter; that with GPUs gives whole nodes."""
    values = preset.values
    lines = [
        f"PartitionName={values[key]} Nodes=ALL MaxTime=INFINITE {shared}"
        for key, shared in (("partition", "OverSubscribe=EXCLUSIVE"), ("cpu_partition", ""))
        if key in values
    ]
    loaded = values.get("modules", "").split()
    rules, asked = (FILTERS / f"{kind}/{preset.name}.lua" for kind in ("job_submit", "cli_filter"))
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(
                nodes=2,
                settings="\n".join(lines),
                gpus=gpus,
                cores=300,
                memory=400_000,
                job_submit=rules.read_text() + JOB_SUBMIT if rules.exists() else "",
                cli_filter=asked.read_text() + CLI_FILTER if asked.exists() else "",
            )
        )
        if feature := values.get("constraint"):
            features = [f"{which}Features={feature}" for which in ("Available", "Active")]
            cluster.run("scontrol", "update", "NodeName=n[1-2]", *features)
        if loaded:
            written = {
                each if "/" in each else f"{each}/1.0": "setenv LOADED yes" for each in loaded
            }
            modules.write(folder / "etc/environment-modules/modules", written)
            stack.enter_context(modules.installed(cluster, "environment-modules", folder))
        yield cluster


def scripts(render: Renderer, root: Path, answers: dict[str, Any]) -> list[Submitted]:
    """Render a project, and return its batch scripts."""
    files = render(answers)
    set_up(root, files)
    return [Submitted(answers, root, path) for path in files if path.endswith(".sbatch")]


def training(render: Renderer, root: Path, answers: dict[str, Any]) -> str:
    """Write a project that can train, for two GPUs a node at most; return the script that does."""
    all_gpus = answers.get("gpus_per_node", 2)
    gpus = min(2, all_gpus)
    options = answers.get("srun_options", "").replace(f"gpu:{all_gpus}", f"gpu:{gpus}")
    fewer = {**answers, "gpus_per_node": gpus, "srun_options": options, "trackers": []}
    for path, text in render(fewer).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    set_up_packages(shrink(root))
    if answers.get("container") == "pyxis":
        (root / "container/env").symlink_to(root / ".venv")
    modes = answers.get("launch_modes", ["cpu"])
    return f"slurm/train_{modes[0]}.sbatch"


def submit(cluster: Cluster, root: Path, script: str, *options: str) -> str:
    """Submit a script and return its job."""
    done = cluster.run("sbatch", "--parsable", script, *options, cwd=root, check=False)
    assert done.returncode == 0, f"{script}: {done.stderr}"
    return done.stdout.strip()


def ended(cluster: Cluster) -> dict[str, str]:
    """Wait for all jobs, and return the state of each."""
    wait_for(lambda: set(states(cluster).values()) <= ENDED, lambda: cluster.logs, 1)
    return states(cluster)


@pytest.fixture(params=PRESETS)
def preset(request: pytest.FixtureRequest, tmp_path: Path) -> Preset:
    """Each preset, and what renders projects."""
    if reason := missing() or modules.missing("environment-modules"):
        pytest.skip(reason)
    name = request.param
    text = (TEMPLATE / f"sites/{name}.yml").read_text()
    values = yaml.safe_load(text)
    assert set(values) <= set(QUESTIONS)
    answers = {**values, "package_name": "demo", "account": "proj-0042", **GIVEN.get(name, {})}
    return Preset(name, values, answers, Renderer(copy_template(tmp_path / "template")))


@pytest.mark.shows("*copier copy --data-file alliance.yml *")
def test_a_preset_meets_the_rules_of_its_site(preset: Preset, tmp_path: Path) -> None:
    name = preset.name
    jobs = scripts(preset.render, tmp_path / "preset", preset.answers)
    scripts(preset.render, tmp_path / "plain", {"package_name": "demo"})
    with site(preset, tmp_path / "site", GPUS[name]) as cluster:
        for job in jobs:
            job.id = submit(cluster, job.root, job.path)
        found = ended(cluster)
        faults = [fault for job in jobs if (fault := job.fault(found[job.id]))]
        assert not faults, "\n\n".join(faults)
        # From 26.05 on, a step can't give a task more GPUs than the job gives each.
        newer = " 26." in cluster.run("scontrol", "--version").stdout
        if preset.values["gpu_request"] != "none" and not (newer and name == "alps"):
            doctor = next(job for job in jobs if "doctor" in job.path)
            assert f"sees GPUs {','.join(map(str, range(GPUS[name])))}\n" in doctor.log
        if filters := list(FILTERS.glob(f"*/{name}.lua")):
            script = "slurm/train_single_node.sbatch"
            done = cluster.run("sbatch", script, cwd=tmp_path / "plain", check=False)
            reasons = re.findall(r'return "(.+?)"', filters[0].read_text())
            assert done.returncode and any(each in done.stderr for each in reasons), done.stderr


@pytest.mark.parametrize(
    "preset",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS],
    indirect=True,
)
def test_a_preset_trains(preset: Preset, tmp_path: Path) -> None:
    """Two ranks train, on a node with as many GPUs: for more, this machine has too few cores."""
    root = tmp_path / "demo"
    script = training(preset.render, root, preset.answers)
    with site(preset, tmp_path / "site", min(2, GPUS[preset.name])) as cluster:
        job = submit(cluster, root, script, *TRAINING)
        found = ended(cluster)
        (log,) = root.glob(f"logs/*-{job}.out")
        assert found[job] == "COMPLETED", log.read_text()
    (summary,) = root.glob("runs/*/*/summary.json")
    assert json.loads(summary.read_text())["world_size"] == 2
