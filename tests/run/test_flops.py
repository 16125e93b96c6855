"""TFLOP/s and MFU of trainings whose operations are counted here by hand."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from renderer import render_project
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from .conftest import Job, own_project, srun

# Eight rows; in a stream, ranks have two and six of them.
DATA = """
import os
from types import SimpleNamespace

import torch
from torch.utils.data import TensorDataset

from .engine import ShardStream

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
ROWS = list(zip(X, X.sum(1, keepdim=True)))


def read(rows):
    return iter(ROWS[rows])


def load(settings):
    rows = TensorDataset(X, X.sum(1, keepdim=True))
    parts = [slice(0, 2), slice(2, 8)]
    train = ShardStream(parts, read, sizes=[2, 6]) if "STREAM" in os.environ else rows
    return SimpleNamespace(train=train, validation=rows, test=rows)
"""
MODEL = '''
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .learner import Learner


def layers(inputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 1))


class Regression(Learner):
    def build(self):
        return layers(4)

    def optimizers(self, network):
        return torch.optim.SGD(network.parameters(), lr=0.1)

    def loss(self, network, batch):
        x, y = batch
        return F.mse_loss(network(x), y)


class Twice(nn.Module):
    """Computes its layers again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = layers(4)

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


class Recomputing(Regression):
    def build(self):
        return Twice()


class Adversaries(Learner):
    def build(self):
        return {"maker": layers(4), "critic": layers(5)}

    def optimizers(self, networks):
        return {name: torch.optim.Adam(each.parameters()) for name, each in networks.items()}

    def train_step(self, updater):
        updater.update(self.critic_loss, "critic")
        updater.update(self.maker_loss, "maker")

    def critic_loss(self, networks, batch):
        x, y = batch
        real = networks["critic"](torch.cat([x, y], dim=1))
        made = networks["critic"](torch.cat([x, networks["maker"](x).detach()], dim=1))
        return F.softplus(-real).mean() + F.softplus(made).mean()

    def maker_loss(self, networks, batch):
        x, _ = batch
        return F.softplus(-networks["critic"](torch.cat([x, networks["maker"](x)], dim=1))).mean()

    def measure(self, networks, batch):
        return {"loss": self.maker_loss(networks, batch) * len(batch[0])}

    def predict(self, networks, batch):
        return networks["maker"](batch[0])


Model = globals()[os.environ.get("KIND", "Regression")]
'''
# A layer of n inputs and m outputs takes 2nm FLOPs forward, as many for the gradient of its
# weights, and as many for that of its inputs, which the data do not need.
REGRESSION = 2 * (4 * 8) * 2 + 2 * 8 * 3
# Of the critic's update: two forward and two backward passes of the critic, and a forward pass of
# the maker. Of the maker's: a pass of both, forward and backward, without the critic's weights.
CRITIC, MAKER = 2 * (5 * 8 + 8), 2 * (4 * 8 + 8)
ADVERSARIES = (2 * CRITIC + MAKER + 2 * (CRITIC + 16)) + (MAKER + CRITIC + CRITIC + MAKER + 16)

FLAGS = ("--count-flops", "--batch-size=2", "--log-every=1", "--epochs=99", "--warmup=0")
FLAGS += ("--schedule=constant", "--max-steps=4", "--validate-epochs=0")


@pytest.fixture(scope="module")
def small(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of small networks, of which KIND chooses one; `demo` is that of `project` here."""
    return own_project(tmp_path_factory.mktemp("small"), DATA, MODEL, tools=["flops"])


def costs(job: Job, ranks: int, unit: str = "samples") -> list[float]:
    """Return the FLOPs of a sample, or another unit, by each line of metrics and the summary."""
    lines = [line for line in job.metrics() if "train/loss" in line or "train/maker_loss" in line]
    found = [(each["train/tflops_per_second"], each[f"train/{unit}_per_second"]) for each in lines]
    found.append((job.summary["tflops_per_second"], job.summary[f"{unit}_per_second"]))
    return [tflops * 1e12 * ranks / rate for tflops, rate in found]


def count(compute: Callable[[], object]) -> int:
    """Return the model FLOPs of a function."""
    from demo.plugins.flops.counter import FlopCounter

    with FlopCounter() as counter:
        compute()
    assert not counter.unknown
    return sum(counter.flops)


# -- what is counted ------------------------------------------------------------------------------


def test_products_and_convolutions_forward_and_backward(project: Path) -> None:
    layer, x = nn.Linear(6, 10), torch.randn(4, 6)
    assert count(lambda: layer(x)) == 2 * 4 * 6 * 10
    assert count(lambda: layer(x).sum().backward()) == 2 * (2 * 4 * 6 * 10)
    assert count(lambda: layer(x.requires_grad_()).sum().backward()) == 3 * (2 * 4 * 6 * 10)
    images = torch.randn(2, 3, 16, 16)
    convolution = nn.Conv2d(3, 8, 5, padding=2, stride=2)
    forward = 2 * 2 * 8 * 8 * (8 * 3 * 5 * 5)
    assert count(lambda: convolution(images).sum().backward()) == 2 * forward


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_counts_alike_whatever_computes_it(project: Path, backend: SDPBackend) -> None:
    query, key = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (16, 12))
    value = torch.randn(2, 3, 12, 4, requires_grad=True)
    products = 2 * (2 * 3) * 16 * 12 * (8 + 4)

    def attend(query: Tensor) -> None:
        F.scaled_dot_product_attention(query, key, value).sum().backward()

    with sdpa_kernel(backend):
        if backend == SDPBackend.FLASH_ATTENTION:  # which needs equal sizes
            value = torch.randn(2, 3, 12, 8, requires_grad=True)
            products = 2 * (2 * 3) * 16 * 12 * (8 + 8)
        assert count(lambda: attend(query)) == 3 * products


def test_flex_attention_counts_like_any_other(project: Path) -> None:
    x = torch.randn(2, 3, 16, 8)  # for which torch has an operator of a higher order
    with torch.compiler.set_stance("force_eager"):  # as in a training
        assert count(lambda: flex_attention(x, x, x)) == 2 * (2 * 3) * 16 * 16 * (8 + 8)


def pair() -> tuple[nn.Module, Tensor]:
    """Return a network and an input, which needs a gradient."""
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(
        4, 6
    ).requires_grad_()


PAIR = 3 * 2 * (2 * 4 * 6 * 6)
CACHING = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": CACHING},
    ],
)
def test_what_is_computed_again_does_not_count(project: Path, options: dict[str, Any]) -> None:
    network, x = pair()
    again = partial(checkpoint, **options)
    with FlopCounterMode(display=False) as all_of_them:
        again(network, x).sum().backward()
    cached = "context_fn" in options
    assert (all_of_them.get_total_flops() > PAIR) == (not cached)
    assert count(lambda: again(network, x).sum().backward()) == PAIR
    assert count(lambda: again(partial(again, network), x).sum().backward()) == PAIR
    # A backward pass inside the forward pass, as for forces from an energy.
    assert count(lambda: again(network, again(network, x)).sum().backward()) == 2 * PAIR


def test_a_backward_pass_through_another_one_counts(project: Path) -> None:
    network, x = pair()

    def penalty(network: Callable[[Tensor], Tensor]) -> None:
        y = network(x).pow(2).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (y + gradient.pow(2).sum()).backward()

    # The products of a forward pass, its gradient with respect to the input, and backward passes
    # through both: 2 + 2 + 4 + 4. (torch's own counter fails here.)
    assert count(lambda: penalty(network)) == 12 * (2 * 4 * 6 * 6)
    assert count(lambda: penalty(partial(checkpoint, network, use_reentrant=False))) == 2 * PAIR


def test_the_optimizer_and_spare_batches_do_not_count(project: Path) -> None:
    from demo.engine.run.record import RECORDER

    network, x = pair()
    matrices = [each for each in network.parameters() if each.dim() == 2]
    optimizer = torch.optim.Muon(matrices)
    network(x).sum().backward()
    with FlopCounterMode(display=False) as expected:
        optimizer.step()
    assert expected.get_total_flops() > 0 == count(optimizer.step)
    with RECORDER.apart():
        assert count(lambda: network(x).sum().backward()) == 0


def test_operations_without_a_formula_are_named(project: Path) -> None:
    from demo.plugins.flops.counter import FlopCounter

    with FlopCounter() as counter:
        nn.LSTM(4, 4)(torch.randn(3, 2, 4))
    assert counter.unknown == {"aten.mkldnn_rnn_layer"}


# -- trainings ------------------------------------------------------------------------------------

TEXT = ("--layers=2", "--heads=2", "--width=32", "--context=16", "--batch-size=16", "--dropout=0.1")
# Per token: the matrices of two blocks and the head, three times 2; scores of 16 tokens, and their
# products with values. As in appendix B of PaLM: 6N + 12LHQT.
GPT = 6 * (2 * 12 * 32 * 32 + 32 * 256) + 12 * 2 * 32 * 16


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ("--ema=0.9", "--accumulate=2")),
        (2, ()),
        (2, ("--strategy=fsdp", "--precision=bf16", "--accumulate=2")),
    ],
)
def test_a_gpt_of_the_example(
    gpt: Path, tmp_path: Path, ranks: int, flags: tuple[str, ...]
) -> None:
    own = ("--count-flops", "--log-every=1", "--max-steps=3", *TEXT, *flags)
    job = srun(gpt, tmp_path / "run", ranks, *own).wait()
    assert costs(job, ranks, "tokens") == pytest.approx([GPT] * 4)
    tokens = 16 * 16 * ranks * (2 if "--accumulate=2" in flags else 1)
    assert f"a step takes {GPT * tokens / 1e9:.4g} GFLOP: {GPT / 1e9:.4g} for each" in job.log
    precision = "bf16" if "--precision=bf16" in flags else "fp32"
    assert job.log.count(f"peak of cpu in {precision}: unknown") == 1
    assert "mfu_percent" not in job.log and "without a formula" not in job.log


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render_project(
        tmp_path_factory.mktemp("text") / "demo", example="text", package_name="demo"
    )


@pytest.mark.parametrize(
    ("kind", "cost"), [("Regression", REGRESSION), ("Adversaries", ADVERSARIES)]
)
def test_other_kinds_of_training(small: Path, tmp_path: Path, kind: str, cost: int) -> None:
    job = srun(small, tmp_path / "run", 2, *FLAGS, KIND=kind).wait()
    assert costs(job, 2) == pytest.approx([cost] * 5)


def test_spare_batches_of_a_stream_do_not_count(small: Path, tmp_path: Path) -> None:
    """In each step, one rank has three batches, and the other one a batch and two spare ones."""
    job = srun(small, tmp_path / "run", 2, *FLAGS, "--accumulate=3", STREAM="1").wait()
    assert costs(job, 2) == pytest.approx([REGRESSION] * 5)


def test_the_flag_changes_no_parameter_and_a_resumed_run_does_not_count_again(
    small: Path, tmp_path: Path
) -> None:
    def train(name: str, *flags: str) -> Job:
        return srun(small, tmp_path / name, 2, *FLAGS, *flags, KIND="Recomputing").wait()

    without = train("without", "--no-count-flops").summary
    job = train("whole")
    whole = job.summary
    assert costs(job, 2) == pytest.approx([REGRESSION] * 5)
    assert whole["parameters_sha256"] == without["parameters_sha256"]
    assert "tflops_per_second" in whole and "tflops_per_second" not in without

    assert "a step takes" in train("run", "--max-steps=2").log
    job = train("run")
    assert job.summary["resumed_from_step"] == 2 and "a step takes" not in job.log
    assert costs(job, 2) == pytest.approx([REGRESSION] * 5)
    assert job.summary["parameters_sha256"] == whole["parameters_sha256"]


def test_a_resumed_run_counts_if_it_did_not_before(small: Path, tmp_path: Path) -> None:
    srun(small, tmp_path / "run", 1, *FLAGS, "--no-count-flops", "--max-steps=2").wait()
    job = srun(small, tmp_path / "run", 1, *FLAGS).wait()
    assert "a step takes" in job.log and job.summary["resumed_from_step"] == 2
    found = [line.get("train/tflops_per_second") for line in job.metrics() if "train/loss" in line]
    assert [each is None for each in found] == [True, True, False, False]
    assert job.summary["tflops_per_second"] > 0
    # And the other way round: a run without the flag reads what was counted, and leaves it alone.
    job = srun(small, tmp_path / "run", 1, *FLAGS, "--no-count-flops", "--max-steps=6").wait()
    assert "tflops_per_second" not in job.summary


@pytest.mark.slow
def test_what_is_compiled_counts_alike(small: Path, tmp_path: Path) -> None:
    def train(name: str, *flags: str) -> Job:
        return srun(small, tmp_path / name, 2, *FLAGS, "--compile", *flags).wait()

    whole = train("whole")
    assert costs(whole, 2) == pytest.approx([REGRESSION] * 5)
    train("run", "--max-steps=2")
    job = train("run")
    assert costs(job, 2) == pytest.approx([REGRESSION] * 5)
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert costs(train("sharded", "--strategy=fsdp"), 2) == pytest.approx([REGRESSION] * 5)


def test_a_project_without_the_plug_in_says_so(tmp_path: Path) -> None:
    folder = render_project(tmp_path / "demo", setup="full", tools=["doctor"], package_name="demo")
    job = srun(folder, tmp_path / "run", 1, "--count-flops").wait()
    assert job.codes == [2] and "Traceback" not in job.log
    assert "--count-flops" in job.log and not (tmp_path / "run" / "metrics.jsonl").exists()


# -- the peak -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "units", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 132, "bf16", 989.4),
        ("NVIDIA H100 PCIe", 114, "bf16", 756),
        ("NVIDIA H100 NVL", 132, "tf32", 417.5),
        ("NVIDIA H200", 132, "fp32", 66.9),
        ("NVIDIA H200 NVL", 132, "bf16", 835.5),
        ("NVIDIA GH200 480GB", 132, "bf16", 989.4),
        ("NVIDIA A100-SXM4-40GB", 108, "tf32", 156),
        ("A100-PCIE-40GB", 108, "bf16", 312),
        ("NVIDIA A100 80GB PCIe", 108, "fp32", 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, "bf16", 312 * 42 / 108),
        ("NVIDIA A100-SXM-64GB", 124, "bf16", None),  # a card made for one site
        ("NVIDIA A1000", 18, "bf16", None),
        ("Tesla V100-SXM2-16GB", 80, "bf16", None),
        ("Tesla V100-SXM2-32GB", 80, "tf32", 15.7),
        ("NVIDIA L40", 142, "bf16", 181.05),
        ("NVIDIA L40S", 142, "bf16", 362.05),
        ("AMD Instinct MI250X", 110, "bf16", 191.5),
        ("AMD Instinct MI250X/MI250", 104, "bf16", 362.1 / 2),  # an MI250: half of its data sheet
        ("AMD Instinct MI300X", 304, "tf32", None),
        ("AMD Instinct MI300X", 38, "bf16", 1307.4 / 8),  # a partition
        ("NVIDIA GeForce RTX 4090", 128, "bf16", None),
    ],
)
def test_the_peak_of_a_gpu(
    project: Path, name: str, units: int, precision: str, expected: float | None
) -> None:
    from demo.plugins.flops.peaks import peak

    found = peak(SimpleNamespace(name=name, multi_processor_count=units), precision)
    assert found == (expected and pytest.approx(expected, rel=1e-4))


def test_the_peak_of_a_gpu_of_intel_is_that_of_its_vector_engines(project: Path) -> None:
    from demo.plugins.flops.peaks import peak

    name = "Intel(R) Data Center GPU Max 1550"
    stack, card = (SimpleNamespace(name=name, max_compute_units=n) for n in (512, 1024))
    assert peak(stack, "bf16") == pytest.approx(512 * 512 * 1.6e9 / 1e12, rel=1e-3)
    assert peak(card, "fp32") == pytest.approx(1024 * 32 * 1.6e9 / 1e12, rel=1e-3)


def test_fp32_is_tf32_where_torch_computes_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo.plugins.flops.peaks import fp32_precision

    def found(device: str = "cuda") -> tuple[str, str]:
        at = torch.device(device)
        return fp32_precision(at, convolutions=False), fp32_precision(at, convolutions=True)

    before = torch.get_float32_matmul_precision()
    try:
        assert found() == ("fp32", "tf32")  # as torch.backends says
        assert found("xpu") == found("cpu") == ("fp32", "fp32")
        torch.set_float32_matmul_precision("high")
        assert found() == ("tf32", "tf32")
        assert found("xpu") == ("tf32", "fp32")
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert found() == ("fp32", "fp32")
    finally:
        torch.set_float32_matmul_precision(before)


def test_mfu_is_the_share_of_the_peak(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU that this machine does not have."""
    from demo.engine.ranks import device
    from demo.engine.ranks.world import World
    from demo.engine.run.clock import CLOCK
    from demo.engine.run.meters import Meter
    from demo.engine.run.record import RECORDER
    from demo.plugins import flops
    from demo.settings import Settings

    monkeypatch.setattr(CLOCK, "part", "steps")
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
    monkeypatch.setattr(device, "gpu_properties", lambda _: gpu)
    caplog.set_level("INFO")
    training = SimpleNamespace(
        settings=Settings(precision="bf16", count_flops=True),
        world=World.alone(),
        meter=Meter("tokens"),
        learner=SimpleNamespace(train_step=None),
        checkpointing=SimpleNamespace(plugins={}),
    )

    def count(weight: int) -> float:
        training.meter.count(64, weight)
        plugin.on_step(training)
        return training.meter.seconds

    with RECORDER.apart():
        plugin = flops.Plugin(training)
        plugin.on_start(training)
        plugin.cost = [3e9, 1e9]
        seconds = [count(1000), count(3000)]
        found = RECORDER.read(training.world)
        assert found["train/tflops_per_second"] == pytest.approx(4000 * 4e9 / sum(seconds) / 1e12)
        share = 100 * found["train/tflops_per_second"] / 989.4
        assert found["train/mfu_percent"] == pytest.approx(share)
        assert "HBM3 in bf16: 989.4" in caplog.text

        # Of both attempts, on one rank and then on two.
        plugin.on_save(training)
        training.settings, training.meter = Settings(count_flops=True), Meter("tokens")
        training.world.size = 2
        plugin = flops.Plugin(training)
        plugin.on_start(training)
        more = count(5000)
        time, rates = sum(seconds) + 2 * more, training.meter.rates()
        assert rates["tflops_per_second"] == pytest.approx(9000 * 4e9 / time / 1e12)
        assert "in fp32: 66.9 TFLOP/s" in caplog.text
        shares = (4000 * 4e9 / 989.4e12, 5000 * 4e9 / 66.9e12)
        assert rates["mfu_percent"] == pytest.approx(100 * sum(shares) / time)
        assert math.isfinite(rates["mfu_percent"])
