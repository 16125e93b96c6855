"""A run imports PyTorch's compiler when something is compiled, and not before."""

from pathlib import Path

import pytest

from .conftest import Launch, python

COMPILER = "torch._dynamo.eval_frame"
# A new interpreter, which lists what it imports in its log.
LISTED = {"PYTHONPROFILEIMPORTTIME": "1"}

BEFORE = """
import sys, torch
from demo.engine.compiler import answer_optimizers, spared
answer_optimizers()
weight = torch.ones(2, requires_grad=True)
optimizers = [torch.optim.SGD([weight], 0.1, momentum=0.9), torch.optim.AdamW([weight], 0.1)]
def step():
    for optimizer in optimizers:
        weight.sum().backward()
        with spared(type(optimizer)):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
step()
assert "torch._dynamo" not in sys.modules
"""
AFTER = f"""
assert "{COMPILER}" in sys.modules
step()
assert torch._dynamo.eval_frame and torch._dynamo is sys.modules["torch._dynamo"]
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
"""
OWN = """
class Own(torch.optim.SGD):
    def step(self):
        import torch._dynamo.config as config
        from torch._dynamo import eval_frame
        assert eval_frame.config is config
optimizers = [Own([weight], 0.1)]
step()
"""


def test_a_run_without_compile_does_without_it(launch: Launch) -> None:
    """DDP, the optimizer, its state in a checkpoint, and the resumed run ask for nothing in it."""
    for steps in (3, 6):
        job = launch(2, f"--max-steps={steps}", **LISTED)
        assert job.summary["global_step"] == steps
        assert " torch.optim\n" in job.log and COMPILER not in job.log


@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(torch.sin, backend='eager')(torch.ones(1))",
        "with spared(torch.optim.SGD): torch.compile(torch.sin, backend='eager')(torch.ones(1))",
        "with spared(torch.optim.SGD): torch._dynamo.utils.compile_times()",
        OWN,
    ],
)
def test_who_uses_it_gets_it(project: Path, use: str) -> None:
    python(project, f"{BEFORE}\n{use}\n{AFTER}", **LISTED)
