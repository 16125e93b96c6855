"""A process without a core near its GPU gets a warning, from the files of a two-socket node."""

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from .conftest import Job, edited, srun

RECORDED = Path(__file__).parents[1] / "recorded/two-sockets.txt"
# The sixth GPU, on the second socket.
GPU = {"pci_domain_id": 0, "pci_bus_id": 0xC3, "pci_device_id": 0}


def node(root: Path, cores: str) -> None:
    """Write /sys of the recorded node, and /proc of a process with some cores."""
    for line in RECORDED.read_text().splitlines():
        if not line.startswith("#"):
            address, numa, near = line.split()
            folder = root / "sys/bus/pci/devices" / address
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(f"{numa}\n")
            (folder / "local_cpulist").write_text(f"{near}\n")
    (root / "proc/self").mkdir(parents=True)
    status = f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cores}\nMems_allowed:\t3\n"
    (root / "proc/self/status").write_text(status)


@pytest.mark.parametrize(
    ("cores", "far"),
    [("0-7", True), ("0-51,104", True), ("0-52", False), ("60", False), ("3,103", False)],
)
def test_one_near_core_is_enough(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: str, far: bool
) -> None:
    topology = import_module("demo.engine.ranks.topology")
    node(tmp_path, cores)
    monkeypatch.setattr(topology, "SYS", tmp_path / "sys")
    monkeypatch.setattr(topology, "PROC", tmp_path / "proc")
    said = f".* 0000:c3:00.0 .* 52-103, .* {cores}" if far else ""
    assert re.fullmatch(said, topology.far_from(SimpleNamespace(**GPU)))
    # Torch does not tell, as of a CPU; Linux does not tell, as in a container.
    assert topology.far_from(None) == ""
    assert topology.far_from(SimpleNamespace(**GPU | {"pci_bus_id": 1})) == ""


def test_a_training_says_which_ranks_are_far(project: Path, tmp_path: Path) -> None:
    node(tmp_path, "0-7")
    lie = f"""
import os
from pathlib import Path
from types import SimpleNamespace

from .engine.ranks import topology
from .engine.run import messages

if os.environ["SLURM_PROCID"] == "1":
    topology.SYS, topology.PROC = Path("{tmp_path}/sys"), Path("{tmp_path}/proc")
    messages.gpu_properties = lambda device: SimpleNamespace(**{GPU})

Batch ="""
    copy = edited(project, tmp_path, "model.py", "\nBatch =", lie)
    job: Job = srun(copy, tmp_path / "run", 2, "--max-steps=1").wait()
    assert job.log.count("near cores 52-103") == 1
    assert "rank 1 on " in job.log
