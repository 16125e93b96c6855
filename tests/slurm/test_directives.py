"""Slurm itself accepts what the scripts ask for, under every answer."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from renderer import Renderer, copy_template
from variants import launch_variants, pairwise_variants, tracking_variants

from .cluster import Cluster, missing

# What the sample answers name. The nodes are of a cloud: Slurm believes that they could be started.
SITE = """
NodeName=cloud[1-20] CPUs=256 RealMemory=20000000 State=CLOUD \
    Gres=gpu:a100:16 Feature=a100,rack1
NodeName=cloud[21-40] CPUs=256 RealMemory=20000000 State=CLOUD \
    Gres=gpu:a100:16 Feature=h100,rack2
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=3600
SuspendExcNodes=n1
PartitionName=gpu_short Nodes=ALL MaxTime=INFINITE
PartitionName=cpu Nodes=ALL MaxTime=INFINITE
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    """A large site."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(nodes=1, settings=SITE) as running:
        running.run("scontrol", "update", "PartitionName=main", "Nodes=ALL", "MaxTime=INFINITE")
        running.run(
            *("scontrol", "create", "reservation", "ReservationName=course-2", "Users=root"),
            *("StartTime=now", "Duration=UNLIMITED", "Nodes=ALL", "Flags=IGNORE_JOBS"),
        )
        yield running


def test_every_distinct_script_is_accepted(site: Cluster, tmp_path: Path) -> None:
    render = Renderer(copy_template(tmp_path / "template"))
    scripts: dict[str, dict[str, object]] = {}
    for answers in (*launch_variants(), *tracking_variants(), *pairwise_variants()):
        for path, text in render(answers).items():
            if path.endswith(".sbatch"):
                scripts.setdefault(text, answers)
    refused = []
    for number, (text, answers) in enumerate(scripts.items()):
        script = tmp_path / f"{number}.sbatch"
        script.write_text(text)
        done = site.run("sbatch", "--test-only", str(script), check=False)
        if done.returncode:
            asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
            refused.append(f"{done.stderr}{chr(10).join(asked)}\n{answers}")
    assert not refused, f"{len(refused)} of {len(scripts)}:\n" + "\n\n".join(refused[:3])
    assert len(scripts) > 150


def test_a_script_that_asks_for_too_much_is_refused(site: Cluster, tmp_path: Path) -> None:
    """So that the test above means something."""
    for line in ("--partition=nowhere", "--gres=gpu:h100:1", "--nodes=50", "--constraint=none"):
        script = tmp_path / "script"
        script.write_text(f"#!/bin/bash\n#SBATCH {line}\n")
        with pytest.raises(subprocess.CalledProcessError):
            site.run("sbatch", "--test-only", str(script))
