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
# What a hook of an optimizer, or another thread, may do while an optimizer steps.
IN_A_STEP = """
from importlib import import_module
from threading import Thread
NAME = "torch._dynamo.config"
def hook(*_):
    {}
handle = optimizers[0].register_step_pre_hook(hook)
step()
handle.remove()
"""
ONE_COPY = """
from torch._dynamo import config, convert_frame, eval_frame, utils
from torch._dynamo.backends import registry
assert eval_frame.config is config is torch._dynamo.config
assert convert_frame.counters is utils.counters and utils is torch._dynamo.utils
assert registry is torch._dynamo.backends.registry
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
        "torch.compile(torch.sin)",
        "import torch._dynamo.config",
        "from torch._dynamo.utils import counters",
        "torch._dynamo.utils.compile_times()",
        "torch._dynamo.graph_break('why'); torch.compiler.disable(recursive=False)(print)",
        "assert torch.compiler.disable(hook) is not hook",
        "[each.start() or each.join() for each in [Thread(target=import_module, args=(NAME,))]]",
    ],
)
def test_who_uses_it_in_a_step_gets_the_only_one(project: Path, use: str) -> None:
    python(project, "\n".join([BEFORE, IN_A_STEP.format(use), AFTER, ONE_COPY]), **LISTED)
