"""The batch scripts are equal to reviewed copies.

After an intended change, run `pytest tests/render/test_golden.py --update-golden`, and read the
difference as a user would read the script.
"""

from pathlib import Path

import pytest
from renderer import Renderer

GOLDEN = Path(__file__).parent / "golden"
ANSWERS = {
    "package_name": "demo",
    "partition": "gpu",
    "cpu_partition": "cpu",
    "account": "proj-0042",
    "gpu_type": "a100",
    "memory": "64G",
    "time_limit": "12:00:00",
    "modules": "python/3.12\ncuda/12.4",
}
SCRIPTS = [
    "train_cpu.sbatch",
    "train_single_node.sbatch",
    "train_multi_node.sbatch",
    "common.sh",
    "resume.sh",
]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_batch_scripts(
    render: Renderer, pytestconfig: pytest.Config, launcher: str, script: str
) -> None:
    text = render({**ANSWERS, "launcher": launcher})[f"slurm/{script}"]
    name, _, kind = script.partition(".")
    golden = GOLDEN / f"{name}.{launcher}.{kind}"
    if pytestconfig.getoption("update_golden"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden.name} differs: see the docstring of this test"
