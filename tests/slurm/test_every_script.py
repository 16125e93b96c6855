"""Each distinct batch script is submitted, for all answers, and starts the right commands.

Stand-ins for Python and Apptainer print their arguments.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from classes import SCRIPTS, Classes

from . import modules
from .cluster import Cluster, missing, wait_for
from .jobs import ENDED
from .stand_ins import Submitted, set_up, states

NODES = 8  # in two racks: a sample answer asks for 4 in one
# Modules of sample answers, in addition to those that all tests have.
MODULES = {"cuda/12.4": "setenv CUDA_HOME /no/cuda", "nccl/2.21": "prereq cuda"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A site with everything that the sample answers name."""
    if reason := missing() or modules.missing("environment-modules"):
        pytest.skip(reason)
    partitions = "\n".join(
        f"PartitionName={name} Nodes=ALL MaxTime=INFINITE" for name in ("gpu_short", "cpu")
    )
    settings = f"Licenses=course:1\n{partitions}"
    folder = tmp_path_factory.mktemp("site")
    modules.write(folder / "etc/environment-modules/modules", MODULES)
    with (
        Cluster(nodes=NODES, memory=20_000_000, settings=settings) as running,
        modules.installed(running, "environment-modules", folder),
    ):
        control = ("scontrol", "update")
        running.run(*control, "PartitionName=main", "MaxTime=INFINITE")
        features = [f"{which}Features=h100,rack2" for which in ("Available", "Active")]
        running.run(*control, f"NodeName=n[5-{NODES}]", *features)
        running.run(
            *("scontrol", "create", "reservation", "ReservationName=course-2", "Users=root"),
            # Without nodes of its own: those would be closed to the other jobs.
            *("StartTime=now", "Duration=UNLIMITED", "Flags=ANY_NODES", "Licenses=course:1"),
        )
        yield running


def test_every_distinct_script_starts_what_it_is_to_start(
    site: Cluster, classes: Classes, tmp_path: Path
) -> None:
    jobs, knows_expedite = [], site.version >= "25.11"
    for script in classes.of(SCRIPTS):
        root = tmp_path / str(script.variant.number)
        if not root.exists():
            set_up(root, script.variant.files)
        if not knows_expedite:
            path = root / script.path
            path.write_text(path.read_text().replace("--requeue=expedite", "--requeue"))
        jobs.append(Submitted(script.variant.answers, root, script.path))
    for job in jobs:
        sweep = ["ada/digits/1"] if "sweep" in job.path else []
        done = site.run("sbatch", "--parsable", job.path, *sweep, cwd=job.root, check=False)
        assert done.returncode == 0, f"{job.path} of {job.answers}: {done.stderr}"
        job.id = done.stdout.strip()
    wait_for(lambda: set(states(site).values()) <= ENDED, lambda: f"{states(site)}\n{site.logs}", 1)
    ended = states(site)
    faults = [
        f"{fault}\n{site.said_of(job.id)}" for job in jobs if (fault := job.fault(ended[job.id]))
    ]
    assert not faults, f"{len(faults)} of {len(jobs)}:\n" + "\n\n".join(faults[:3])
    assert len(jobs) > 180


def test_a_script_that_asks_for_too_much_is_refused(site: Cluster, tmp_path: Path) -> None:
    """So that the test above means something."""
    for line in ("--partition=nowhere", "--gres=gpu:h100:1", "--nodes=50", "--constraint=none"):
        script = tmp_path / "script"
        script.write_text(f"#!/bin/bash\n#SBATCH {line}\n")
        with pytest.raises(subprocess.CalledProcessError):
            site.run("sbatch", "--test-only", str(script))
