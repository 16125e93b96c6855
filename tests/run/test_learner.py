"""Learners of several kinds train, are evaluated, stop, resume, predict and are exported."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from metrics import reproducible
from renderer import render_project

from .conftest import Job, python, spawn, srun, tasks

SETTINGS = '''
from dataclasses import dataclass

from . import plugins
from .engine.config import Positive


@dataclass(frozen=True, kw_only=True)
class Settings(plugins.Settings):
    outputs: Positive = 1
    """columns of what the network returns"""
'''

# 31 samples to evaluate: no world size but one shares them evenly.
DATA = '''
import os
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, default_collate


@dataclass(frozen=True)
class Datasets:
    train: Dataset
    validation: Dataset
    test: Dataset


class Rows(Dataset):
    """Rows of four numbers, with a target and a count of tokens."""

    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 4, generator=draw)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5, 0.0])
        self.tokens = torch.randint(1, 9, (count,), generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "tokens": self.tokens[index]}

    def collate(self, samples):
        batch = default_collate(samples)
        if os.environ.get("KIND") == "Ignoring" and batch["x"][0, 0] > 0:
            batch["tokens"].zero_()
        return batch


def load(settings):
    return Datasets(Rows(96, 1), Rows(31, 2), Rows(31, 3))
'''

MODEL = '''
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

from .learner import Learner
from .engine.run.record import record


class Regression(Learner):
    """Two learning rates, a mean over tokens, a sum of vectors, a metric of all predictions."""

    unit = "tokens"

    def build(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, self.settings.outputs))

    def optimizers(self, network):
        backbone, _, head = network
        return torch.optim.SGD(
            [
                {"params": backbone.parameters(), "lr": self.settings.lr / 10},
                {"params": head.parameters()},
            ],
            lr=self.settings.lr,
        )

    def batch_weight(self, batch):
        return int(batch["tokens"].sum())

    def loss(self, network, batch):
        tokens, errors = batch["tokens"], network(batch["x"])[:, 0] - batch["y"]
        record("worst", errors.abs().max(), "max")
        return (tokens * errors**2).sum() / tokens.sum()

    def measure(self, network, batch):
        tokens, outputs = batch["tokens"], network(batch["x"])[:, 0]
        errors = outputs - batch["y"]
        record("worst", errors.abs().max(), "max")
        return {
            "loss": (tokens * errors**2).sum(),
            "columns": (tokens * errors.abs()) @ batch["x"].abs(),
            "rank": (outputs, batch["y"]),
        }

    def metrics(self):
        from torchmetrics import SpearmanCorrCoef

        return {"rank": SpearmanCorrCoef()}

    def compute_metrics(self, sums):
        first, *_, last = sums["columns"] / sums["weight"]
        return {**super().compute_metrics(sums), "first": first, "last": last}

    def inputs(self, batch):
        return (batch["x"],)

    def describe(self, outputs):
        return {"y": outputs[0].item()}


class Negative(Regression):
    """More is better, and all of it is below zero."""

    best = ("validation/score", "max")

    def compute_metrics(self, sums):
        return {"score": -sums["loss"] / sums["weight"], "loss": sums["loss"] / sums["weight"]}


class Worse(Regression):
    """Each evaluation is worse than the one before."""

    evaluations = 0

    def compute_metrics(self, sums):
        self.evaluations += 1
        return {"loss": self.evaluations}


class Adversaries(Learner):
    """Two networks, each with an optimizer and a loss of its own, which one step updates."""

    best = ("validation/distance", "min")
    steps = 0

    def build(self):
        return {name: self.layers(inputs) for name, inputs in (("maker", 4), ("critic", 5))}

    def layers(self, inputs):
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 1))

    def optimizers(self, networks):
        lr = self.settings.lr
        return {
            "maker": torch.optim.Adam(networks["maker"].parameters(), lr=lr),
            "critic": torch.optim.Adam(networks["critic"].parameters(), lr=2 * lr),
        }

    def train_step(self, updater):
        self.steps += 1
        if os.environ.get("STOP_AT") == str(self.steps) and os.environ["SLURM_PROCID"] == "1":
            os.kill(os.getpid(), signal.SIGUSR2)
        updater.update(self.critic_loss, "critic")
        updater.update(self.maker_loss, "maker")

    def criticize(self, networks, x, y):
        return networks["critic"](torch.cat([x, y], dim=1))

    def critic_loss(self, networks, batch):
        x, y = batch["x"], batch["y"][:, None]
        real = self.criticize(networks, x, y)
        made = self.criticize(networks, x, networks["maker"](x).detach())
        return F.softplus(-real).mean() + F.softplus(made).mean()

    def maker_loss(self, networks, batch):
        x = batch["x"]
        return F.softplus(-self.criticize(networks, x, networks["maker"](x))).mean()

    def measure(self, networks, batch):
        return {"distance": (networks["maker"](batch["x"])[:, 0] - batch["y"]).abs().sum()}

    def predict(self, networks, batch):
        return {"made": networks["maker"](batch["x"])}


class Spare(nn.Module):
    """A network with parameters that it does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


class Unused(Regression):
    def build(self):
        return Spare()

    def optimizers(self, network):
        return torch.optim.SGD(network.parameters(), lr=self.settings.lr)


class Memory(nn.Module):
    """State without parameters."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))


class Remembering(Regression):
    """A second network has only a buffer."""

    def build(self):
        return {"network": super().build(), "memory": Memory(self.settings.outputs)}

    def optimizers(self, networks):
        return super().optimizers(networks["network"])

    def loss(self, networks, batch):
        networks["memory"].seen += 1
        return super().loss(networks["network"], batch)

    def measure(self, networks, batch):
        return super().measure(networks["network"], batch)

    def predict(self, networks, batch):
        return networks["network"](batch["x"])


class Pairs:
    """A metric of neighbours, which a single sample does not have."""

    def __init__(self):
        self.seen = []

    def update(self, outputs, _targets):
        self.seen.append(outputs)

    def compute(self):
        return torch.cat(self.seen).topk(2).values[0]


class Neighbours(Regression):
    def metrics(self):
        return {"rank": Pairs()}


class Doubled(Regression):
    def predict(self, network, batch):
        return super().predict(network, batch).repeat_interleave(2)


class Tired(Regression):
    """Its predictions fail after a step."""

    tired = False

    def train_step(self, updater):
        self.tired = True
        super().train_step(updater)

    def predict(self, network, batch):
        if self.tired:
            raise ValueError("too tired to predict")
        return super().predict(network, batch)


class Ignoring(Regression):
    """Some batches have no token; their mean and its gradient are nan, or with FINITE zero."""

    measure, compute_metrics = Learner.measure, Learner.compute_metrics

    def loss(self, network, batch):
        tokens, errors = batch["tokens"], network(batch["x"])[:, 0] - batch["y"]
        whole = tokens.sum().clamp(min=1) if "FINITE" in os.environ else tokens.sum()
        return (tokens * errors**2).sum() / whole

    def metrics(self):
        return {}


class Parts(Regression):
    """It records whether this rank has only a part of the network."""

    def measure(self, network, batch):
        parts = hasattr(next(network.parameters()), "full_tensor")
        record("parts", float(parts), how="max")
        return super().measure(network, batch)


class Different(Regression):
    """Ranks measure what the others do not."""

    def measure(self, network, batch):
        own = {f"own{os.environ['SLURM_PROCID']}": torch.ones(())}
        return super().measure(network, batch) | own


Model = globals()[os.environ.get("KIND", "Regression")]
'''

FLAGS = (
    *("--lr=0.05", "--warmup=0.25", "--batch-size=8", "--test-batch-size=8"),
    *("--log-every=1", "--max-steps=1000"),
)


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_learners(tmp_path_factory.mktemp("learners") / "demo")


def make_learners(folder: Path) -> Path:
    """Render a project with small data and learners of several kinds; KIND chooses one."""
    render_project(folder, launcher="torchrun")
    (folder / "configs" / "train.yaml").unlink()  # of the digits' settings
    for name, text in (("settings", SETTINGS), ("data", DATA), ("model", MODEL)):
        (folder / "src" / "demo" / f"{name}.py").write_text(text)
    (folder / "src" / "demo" / "figures.py").write_text("def draw(*_):\n    return {}\n")
    return folder


@pytest.fixture(scope="module")
def alone(learners: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three epochs of regression on one rank."""
    return train(learners, tmp_path_factory.mktemp("alone") / "run", 1, "--batch-size=24")


def train(project: Path, run_dir: Path, ranks: int, *flags: str, **env: str) -> Job:
    """Train to the end; three epochs, unless the flags say else."""
    return srun(project, run_dir, ranks, *FLAGS, "--epochs=3", *flags, **env).wait()


def lines(job: Job, name: str) -> list[dict[str, float]]:
    """Return the lines of metrics that have this one."""
    return [line for line in job.metrics() if name in line]


def state(job: Job, which: str = "latest") -> dict[str, Any]:
    """Return a checkpoint."""
    folder = job.run_dir / "checkpoints"
    return torch.load(folder / (folder / which).read_text(), weights_only=True)


def check_error(job: Job, *messages: str) -> None:
    """Check that each rank ended with one line of output, the error."""
    assert set(job.codes) == {1}, job.log
    for path in job.logs:
        (error,) = [line for line in path.read_text().splitlines() if line.startswith("error: ")]
        assert all(message in error for message in messages), error
    assert "Traceback" not in job.log


def test_a_regression_is_best_by_its_lowest_loss(alone: Job) -> None:
    validations = lines(alone, "validation/loss")
    losses = [line["validation/loss"] for line in validations]
    assert [line["epoch"] for line in validations] == [1, 2, 3] and losses[0] > losses[-1]
    summary = alone.summary
    assert summary["validation_loss"] == min(losses)
    assert summary["best_step"] == validations[losses.index(min(losses))]["step"]
    status = json.loads((alone.run_dir / "status.json").read_text())
    assert (status["best_metric"], status["best_direction"]) == ("validation/loss", "min")
    assert (status["best_score"], status["best_step"]) == (min(losses), summary["best_step"])
    assert f"test: loss {summary['test_loss']:.4g}, " in alone.log


def test_groups_of_parameters_keep_their_own_learning_rates(alone: Job) -> None:
    steps = lines(alone, "train/lr")
    factors = [line["train/lr"] / 0.005 for line in steps]
    assert [line["train/lr/optimizer1"] / 0.05 for line in steps] == pytest.approx(factors)
    assert factors[0] == pytest.approx(0.04) and max(factors) == pytest.approx(1.0)
    assert 0 < factors[-1] < 0.2


def test_what_is_recorded_belongs_to_the_training_or_to_its_evaluation(alone: Job) -> None:
    assert len(lines(alone, "train/worst")) == 12
    for split, count in (("validation", 3), ("test", 1)):
        found = lines(alone, f"{split}/worst")
        assert len(found) == count
        assert all(f"{split}/loss" in line and "train/loss" not in line for line in found)
    assert alone.summary["test_worst"] == lines(alone, "test/worst")[0]["test/worst"]


def test_a_batch_counts_by_its_tokens_on_any_number_of_ranks(
    learners: Path, alone: Job, tmp_path: Path
) -> None:
    """Each of three ranks has another number of tokens. The result is that of one rank."""
    three = train(learners, tmp_path / "run", 3)
    names = ("train/loss", "train/gradient_norm", "validation/loss", "validation/rank", "test/last")
    for name in names:
        ours, theirs = ([line[name] for line in lines(job, name)] for job in (three, alone))
        assert ours == pytest.approx(theirs, rel=1e-4), name
    for name in ("test_loss", "test_first", "test_last", "test_rank", "test_worst"):
        assert three.summary[name] == pytest.approx(alone.summary[name], rel=1e-4), name
    assert lines(three, "train/tokens_per_second") and not lines(three, "train/samples_per_second")
    assert {"tokens_per_second", "samples_per_second"} <= three.summary.keys()

    # All ranks' metrics are those of the predictions, which any number of ranks writes in order.
    one, other = (predict(learners, three, tmp_path / f"on-{ranks}", ranks) for ranks in (1, 3))
    assert one == pytest.approx(other, rel=1e-5)  # the last digit depends on a batch's size
    rows = json.loads(python(learners, ROWS))
    outputs, targets, tokens = torch.tensor([one, *rows], dtype=torch.float64)
    error = (tokens * (outputs - targets) ** 2).sum() / tokens.sum()
    assert three.summary["test_loss"] == pytest.approx(error.item(), rel=1e-5)
    ranks = torch.stack([outputs.argsort().argsort(), targets.argsort().argsort()]).double()
    assert three.summary["test_rank"] == pytest.approx(torch.corrcoef(ranks)[0, 1].item(), rel=1e-5)


ROWS = (
    "import json; from demo.data import load; rows = load(None).test\n"
    "print(json.dumps([rows.y.tolist(), rows.tokens.tolist()]))"
)


def predict(project: Path, job: Job, folder: Path, ranks: int) -> list[float]:
    """Return the predictions that the ranks wrote, by the newest checkpoint."""
    output = folder.with_suffix(".jsonl")
    command = ["demo", "predict", str(job.run_dir), "--checkpoint=latest", f"--output={output}"]
    command += ["--device=cpu", "--batch-size=4"]
    done = spawn(project, folder, [command] * ranks, tasks(ranks)).wait()
    assert set(done.codes) == {0}, done.log
    assert "31 predictions of step 12" in done.log
    return [json.loads(line)["y"] for line in output.read_text().splitlines()]


def test_predictions_that_cannot_be_written(learners: Path, alone: Job, tmp_path: Path) -> None:
    command = ["demo", "predict", str(alone.run_dir), f"--output={tmp_path / 'none.jsonl'}"]
    job = spawn(learners, tmp_path / "log", [command], [{"KIND": "Doubled"}]).wait()
    check_error(job, "predict in model.py did not return")
    assert not (tmp_path / "none.jsonl").exists()


def test_predictions_have_null_for_what_json_lacks(project: Path) -> None:
    from demo.engine.inference import described

    learner = SimpleNamespace(describe=lambda row: {"y": row, "low": -float(row)})
    lines = described(learner, torch.tensor([1.0, float("inf"), float("nan")]), 3)
    assert [*map(json.loads, lines)] == [{"y": 1, "low": -1}, *[{"y": None, "low": None}] * 2]


def test_a_weight_may_be_a_number_of_numpy(project: Path) -> None:
    from demo.engine.checks import check_weight

    assert check_weight(np.int64(5)) == check_weight(torch.tensor(5)) == 5


def test_predictions_of_no_batch(alone: Job, learners: Path, tmp_path: Path) -> None:
    command = ["demo", "predict", str(alone.run_dir), "--batch-size=0"]
    job = spawn(learners, tmp_path / "log", [command], [{}]).wait()
    check_error(job, "--batch-size is 0: it must be 1 or more")


@pytest.mark.parametrize("flags", [("--accumulate=2",), ("--strategy=fsdp",)], ids=str)
def test_a_batch_without_weight_has_no_part(
    learners: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    jobs = [
        train(learners, tmp_path / "nan", 2, *flags, KIND="Ignoring"),
        train(learners, tmp_path / "finite", 2, *flags, KIND="Ignoring", FINITE="1"),
    ]
    ours, theirs = ((job.summary["parameters_sha256"], reproducible(job.metrics())) for job in jobs)
    assert ours == theirs
    steps = len(lines(jobs[0], "train/gradient_norm"))
    assert 0 < len(lines(jobs[0], "train/loss")) < steps, "some whole steps have no weight"


def test_a_trained_network_is_used_elsewhere(learners: Path, alone: Job, tmp_path: Path) -> None:
    """In a notebook, from only the checkpoint. As a graph, without the project."""
    best = alone.run_dir / "checkpoints" / (alone.run_dir / "checkpoints/best").read_text()
    shutil.copy(best, tmp_path / "copied.pt")
    code = (
        "import json, os, torch; from demo.tools import export, predict\n"
        "from demo.model import Model\n"
        f"os.chdir('{tmp_path}')\n"
        f"run = Model.load('{alone.run_dir}')\n"
        "assert Model.load('copied.pt').settings == run.settings\n"
        "export.main(['copied.pt', '--output=network.pt2'])\n"
        "predict.main(['copied.pt', '--device=cpu'])\n"
        "batch = {'x': torch.arange(12.0).reshape(3, 4)}\n"
        "print(json.dumps([run.step, run.settings.batch_size, run.predict(batch).tolist()]))"
    )
    step, batch_size, outputs = json.loads(python(learners, code))
    assert len((tmp_path / "predictions-test.jsonl").read_text().splitlines()) == 31
    assert (step, batch_size) == (alone.summary["best_step"], 24)
    graph = torch.export.load(tmp_path / "network.pt2").module()
    torch.testing.assert_close(graph(torch.arange(12.0).reshape(3, 4)), torch.tensor(outputs))
    weights = state(alone, "best")["networks"]["network"]
    hidden = (torch.arange(12.0).reshape(3, 4) @ weights["0.weight"].T + weights["0.bias"]).tanh()
    expected = hidden @ weights["2.weight"].T + weights["2.bias"]
    torch.testing.assert_close(expected, torch.tensor(outputs))


def test_averages_are_evaluated_and_a_score_may_be_negative(
    learners: Path, alone: Job, tmp_path: Path
) -> None:
    job = train(learners, tmp_path / "run", 1, "--batch-size=24", "--ema=0.5", KIND="Negative")
    scores = {line["validation/score"]: line["step"] for line in lines(job, "validation/score")}
    assert job.summary["validation_score"] == max(scores) < 0
    assert job.summary["best_step"] == scores[max(scores)]
    # The averages change nothing in the training.
    assert job.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    assert job.summary["test_loss"] != pytest.approx(alone.summary["test_loss"], rel=1e-3)

    # The averages are what is loaded.
    code = (
        "from demo.model import Model\n"
        f"print(Model.load('{job.run_dir}').networks[0].weight.flatten().tolist())"
    )
    found = torch.tensor(json.loads(python(learners, code, KIND="Negative")))
    best = state(job, "best")
    assert torch.equal(found, best["averages"]["network"]["0.weight"].flatten())
    assert not torch.equal(found, best["networks"]["network"]["0.weight"].flatten())


def test_averages_follow_the_parameters_slowly(learners: Path, tmp_path: Path) -> None:
    flags = ("--ema=0.3", "--max-steps=12", "--checkpoint-every=1", "--keep-checkpoints=20")
    job = train(learners, tmp_path / "run", 1, *flags)
    before, after = (
        torch.load(job.run_dir / f"checkpoints/step-000000{step}.pt", weights_only=True)
        for step in (11, 12)
    )
    earlier, later = (each["averages"]["network"]["0.weight"] for each in (before, after))
    parameters = after["networks"]["network"]["0.weight"]
    torch.testing.assert_close(later, 0.3 * earlier + 0.7 * parameters)
    assert not torch.equal(earlier, later)
    # In the first steps, the average forgets sooner: its decay is (1 + step) / (10 + step).
    before, after = (
        torch.load(job.run_dir / f"checkpoints/step-0000000{step}.pt", weights_only=True)
        for step in (1, 2)
    )
    earlier, later = (each["averages"]["network"]["0.weight"] for each in (before, after))
    parameters = after["networks"]["network"]["0.weight"]
    torch.testing.assert_close(later, 0.25 * earlier + 0.75 * parameters)


def test_patience_ends_a_run_and_steps_between_validations_are_counted(
    learners: Path, tmp_path: Path
) -> None:
    flags = ("--validate-every=8", "--validate-epochs=3", "--patience=2")
    job = train(learners, tmp_path / "run", 1, *flags, KIND="Worse")
    # The epoch has 12 steps, and its end is no validation, unless one is due there.
    assert [line["step"] for line in lines(job, "validation/loss")] == [8, 16, 24]
    summary = job.summary
    assert (summary["best_step"], summary["global_step"]) == (8, 24)
    assert "ends at step 24" in job.log
    again = train(learners, tmp_path / "run", 1, *flags, KIND="Worse")
    assert "nothing is left" in again.log and again.codes == [0]


GAN = (
    *("--batch-size=4", "--accumulate=2", "--epochs=4", "--validate-every=5", "--clip-norm=0.5"),
    *("--ema=0.9", "--lr=0.01"),
)


@pytest.fixture(scope="module")
def adversaries(learners: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Four epochs of six steps of a GAN on two ranks."""
    folder = tmp_path_factory.mktemp("adversaries")
    return train(learners, folder / "run", 2, *GAN, KIND="Adversaries")


def test_two_networks_train_against_each_other_and_resume_bit_for_bit(
    learners: Path, adversaries: Job, tmp_path: Path
) -> None:
    assert adversaries.summary["global_step"] == 24
    validated = [line["step"] for line in lines(adversaries, "validation/distance")]
    assert validated == [5, 6, 10, 12, 15, 18, 20, 24]
    distances = [line["validation/distance"] for line in lines(adversaries, "validation/distance")]
    assert distances[-1] < distances[0]
    first, *_ = lines(adversaries, "train/maker_loss")
    own = {"train/critic_loss", "train/maker_gradient_norm", "train/critic_gradient_norm"}
    assert own <= first.keys() and "train/loss" not in first
    assert first["train/lr/critic"] == pytest.approx(2 * first["train/lr"])
    assert first["train/lr/maker"] == first["train/lr"]

    stopped = train(learners, tmp_path / "run", 2, *GAN, KIND="Adversaries", STOP_AT="8")
    assert stopped.codes == [75, 75], stopped.log
    resumed = train(learners, tmp_path / "run", 2, *GAN, KIND="Adversaries")
    assert 8 <= resumed.summary["resumed_from_step"] < 24
    assert resumed.summary["parameters_sha256"] == adversaries.summary["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(adversaries.metrics())
    ours, theirs = (state(job)["averages"]["maker"] for job in (resumed, adversaries))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, ("--batch-size=16", "--accumulate=1")), (2, ("--strategy=fsdp",))],
    ids=["whole", "fsdp"],
)
def test_two_networks_take_the_same_steps_however_they_are_distributed(
    learners: Path, adversaries: Job, tmp_path: Path, ranks: int, flags: tuple[str, ...]
) -> None:
    job = train(learners, tmp_path / "run", ranks, *GAN, *flags, KIND="Adversaries")
    names = ("maker_loss", "critic_loss", "maker_gradient_norm", "critic_gradient_norm")
    for name in (*(f"train/{name}" for name in names), "validation/distance"):
        ours, theirs = ([line[name] for line in lines(each, name)] for each in (job, adversaries))
        assert ours == pytest.approx(theirs, rel=2e-3), name


def test_a_training_starts_from_weights_and_leaves_some_as_they_are(
    learners: Path, alone: Job, tmp_path: Path
) -> None:
    start = f"--init-from={alone.run_dir}"
    short = ("--max-steps=3", start)
    job = train(learners, tmp_path / "run", 2, *short, "--freeze", "0.*")
    assert "2 parameters are frozen" in job.log
    assert re.search(r"/step-\d+\.pt: 4 of 4", job.log)
    ours, theirs = state(job)["networks"]["network"], state(alone, "best")["networks"]["network"]
    kept = [name for name in theirs if torch.equal(ours[name], theirs[name])]
    assert kept == ["0.weight", "0.bias"]
    assert job.summary["resumed_from_step"] is None
    # Its own checkpoint has them, wherever they came from; without one, they are missed.
    gone = ("--max-steps=4", f"--init-from={tmp_path}/gone", "--freeze", "0.*")
    resumed = train(learners, tmp_path / "run", 2, *gone)
    assert resumed.summary["resumed_from_step"] == 3
    for path in (tmp_path / "run/checkpoints").glob("step-*.pt"):
        path.write_bytes(b"damaged")
    check_error(train(learners, tmp_path / "run", 2, *gone), "/gone", "no such file")

    wide = (*short, "--outputs=2")
    refused = train(learners, tmp_path / "wide", 2, *wide)
    check_error(refused, "network at 2.weight, 2.bias", "--init-partial")
    assert not (tmp_path / "wide").exists()
    job = train(learners, tmp_path / "wide", 1, *wide, "--init-partial", "--freeze", "0.*")
    assert "without 2.weight, 2.bias" in job.log
    assert torch.equal(state(job)["networks"]["network"]["0.weight"], theirs["0.weight"])

    check_error(train(learners, tmp_path / "none", 1, "--freeze", "9.*"), "freeze '9.*' matches no")


def test_a_network_may_have_buffers_alone(learners: Path, alone: Job, tmp_path: Path) -> None:
    flags = ("--ema=0.9", "--max-steps=3")
    job = train(learners, tmp_path / "run", 2, *flags, KIND="Remembering")
    assert state(job)["networks"]["memory"]["seen"].item() == 3
    assert state(job)["averages"]["memory"]["seen"].item() == 3
    # One that an older checkpoint lacks, or has of another shape, is left as it was built.
    start = (f"--init-from={job.run_dir}", "--init-partial", "--max-steps=3", "--outputs=2")
    wider = train(learners, tmp_path / "wider", 1, *start, KIND="Remembering")
    assert re.search("0 of 1 tensors", wider.log)
    assert wider.summary["global_step"] == 3


def test_the_evaluation_before_the_first_step_is_named(learners: Path, tmp_path: Path) -> None:
    job = train(learners, tmp_path / "run", 1, KIND="Neighbours")
    assert job.codes == [1]
    assert "Traceback" in job.log, "the mistake is in the user's file"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_fails_after_the_training_costs_itself_alone(learners: Path, tmp_path: Path) -> None:
    for number, (code, env) in enumerate([(1, {}), (0, {"SWEEP_TRIAL": "1"})]):
        job = train(learners, tmp_path / f"{number}", 2, "--max-steps=2", KIND="Tired", **env)
        assert job.codes == [code, 0], job.log
        assert job.log.count("failed: too tired") == 1
        assert json.loads((job.run_dir / "summary.json").read_text())["global_step"] == 2
        assert json.loads((job.run_dir / "status.json").read_text())["status"] == "finished"


def test_parameters_without_part_need_a_flag(learners: Path, tmp_path: Path) -> None:
    job = train(learners, tmp_path / "run", 2, KIND="Unused")
    check_error(job, "did not contribute", "--find-unused-parameters")
    for flags in (("--find-unused-parameters",), ("--freeze", "spare.*")):
        job = train(learners, tmp_path / flags[0], 2, *flags, "--max-steps=3", KIND="Unused")
        assert job.summary["global_step"] == 3


def test_ranks_that_measure_different_things(learners: Path, tmp_path: Path) -> None:
    job = train(learners, tmp_path / "run", 2, KIND="Different")
    said = ("measure in model.py returned", "'own0'", "'own1'", "names and shapes")
    check_error(job, *said)
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "it is said before the first step"


WRONG = '''
import json
import sys

import torch
from demo import data, figures, model, train
from demo.settings import Settings
from demo.engine.errors import UsageError
from demo.engine.ranks.signals import StopRequest
from demo.engine.run.record import record
from torch import nn

folder, Base, Learner = sys.argv[1], model.Model, model.Learner


def of(**changes):
    """Return a learner with some things changed."""
    return type("Model", (Base,), changes)


def plain(**changes):
    """Return one that measures its loss alone."""
    usual = {name: getattr(Learner, name) for name in ("measure", "compute_metrics", "metrics")}
    return of(**usual | changes)


def twice(self, network, batch):
    record("first", 1.0)
    return Base.measure(self, network, batch)


SGD = torch.optim.SGD
WRONG = {
    "a vector as loss": plain(loss=lambda self, network, batch: network(batch["x"])[:, 0]),
    "a number as loss": plain(loss=lambda *_: 3.0),
    "no loss": plain(loss=lambda *_: None),
    "nan": of(loss=lambda self, network, batch: network(batch["x"]).sum() * float("nan")),
    "nan as best": of(compute_metrics=lambda *_: {"loss": float("nan")}),
    "no best": of(best=("validation/f1", "max")),
    "best of training": of(best=("train/loss", "min")),
    "best upwards": of(best=("validation/loss", "up")),
    "best alone": of(best="validation/loss"),
    "a text": of(compute_metrics=lambda *_: {"loss": "low"}),
    "no conclusion": of(compute_metrics=lambda *_: None),
    "a number measured": of(measure=lambda *_: {"loss": 1.0}),
    "nothing measured": of(measure=lambda *_: None),
    "a value for each sample": plain(
        measure=lambda self, network, batch: {"loss": network(batch["x"])[:, 0]}
    ),
    "measured and recorded": of(measure=twice),
    "half a sample": of(batch_weight=lambda *_: 2.5),
    "no weight": of(batch_weight=lambda *_: None),
    "a list of networks": of(build=lambda self: [nn.Linear(4, 1)]),
    "a list of optimizers": of(optimizers=lambda self, network: [SGD(network.parameters())]),
    "no such optimizer": of(train_step=lambda self, updater: updater.update(self.loss, "critic")),
    "no learner": None,
    "no build": of(build=Learner.build),
    "no optimizers": of(optimizers=Learner.optimizers),
    "no method loss": plain(loss=Learner.loss),
    # The errors of model.py itself:
    "a mistake in inputs": of(inputs=lambda *_: {}["inputs"], predict=lambda *_: None),
    "a mistake in predict": of(predict=lambda *_: {}["predict"]),
    # What the training itself does not call, or only at its end:
    "a mistake in describe": of(describe=lambda *_: {}["describe"]),
    "described as a set": of(describe=lambda _, outputs: {outputs}),
    "no row to describe": of(predict=lambda self, network, batch: network(batch["x"]).mean()),
    "nothing predicted": of(predict=lambda *_: None),
    "a mistake in pretrained": of(pretrained=lambda *_: {}["pretrained"]),
    "nothing to save": of(pretrained=lambda *_: ("text",)),
}
# What `draw` of figures.py returns.
DRAWN = {
    "a mistake in figures": lambda *_: {}["figures"],
    "no figures": lambda *_: None,
    "a text as figure": lambda *_: {"text": "drawn"},
}
# What `load` of data.py returns.
LOADED = {
    "nothing loaded": None,
    "three sets": (data.Rows(96, 1), data.Rows(31, 2), data.Rows(31, 3)),
    "nothing collated": data.load(None),
}
good, collate, nothing, found = data.load(None), data.Rows.collate, lambda *_: None, {}
fine = dict.fromkeys(LOADED | DRAWN, of(batch_weight=Learner.batch_weight))
for what, learner in (WRONG | fine).items():
    model.Model, data.load = learner, lambda _, what=what: LOADED.get(what, good)
    figures.draw = DRAWN.get(what, lambda *_: {})
    data.Rows.collate = nothing if what == "nothing collated" else collate
    flags = [*sys.argv[2:], f"--run-dir={folder}/{what.replace(' ', '-')}"]
    for more in ([], ["--dry-run"]):
        try:
            train.run(Settings.parse([*flags, *more]), StopRequest())
        except (UsageError, KeyError) as error:
            found[" ".join([what, *more])] = str(error)
with open(f"{folder}/errors.json", "w") as file:
    json.dump(found, file)
'''
SAID = {
    "a vector as loss": "tensor of shape (1,)",
    "a number as loss": "loss in model.py returned 3.0",
    "no loss": "loss in model.py returned None",
    "nan": "train/loss is nan",
    "nan as best": "validation/loss is nan",
    "no best": "best in model.py is ('validation/f1', 'max')",
    "best of training": "best in model.py is ('train/loss', 'min')",
    "best upwards": "best in model.py is ('validation/loss', 'up')",
    "best alone": "best in model.py is 'validation/loss'",
    "a text": "compute_metrics in model.py returned {'loss': 'low'} (could not convert",
    "no conclusion": "compute_metrics in model.py returned None ('NoneType'",
    "a number measured": "measure in model.py returned 'loss' as float",
    "nothing measured": "measure in model.py returned None",
    "a value for each sample": "measure in model.py returned 'loss' of shape (1,)",
    "measured and recorded": "validation/first is both measured",
    "half a sample": "batch_weight in model.py returned 2.5",
    "no weight": "batch_weight in model.py returned None",
    "a list of networks": "build in model.py returned list",
    "a list of optimizers": "optimizers in model.py returned list",
    "no such optimizer": "train_step updates with 'critic'",
    "no build": "Model in model.py has no method 'build'",
    "no optimizers": "Model in model.py has no method 'optimizers'",
    "no method loss": "Model in model.py has no method 'loss'",
    "no learner": "model.py has no 'class Model(Learner)'",
    "nothing loaded": "load in data.py returned NoneType without 'train'",
    "three sets": "load in data.py returned tuple without 'train'",
    "nothing collated": "collate in data.py returned None",
    "a mistake in inputs": "inputs",
    "a mistake in predict": "predict",
    "a mistake in describe": "describe in model.py failed with KeyError: 'describe'",
    "described as a set": "describe in model.py returned what JSON",
    "no row to describe": "predict in model.py did not return",
    "nothing predicted": "predict in model.py did not return",
    "a mistake in pretrained": "pretrained in model.py failed with KeyError: 'pretrained'",
    "nothing to save": "pretrained in model.py returned str",
    "a mistake in figures": "draw in figures.py failed with KeyError: 'figures'",
    "no figures": "draw in figures.py failed with AttributeError: ",
    "a text as figure": "draw in figures.py failed with AttributeError: ",
}
# What only a step shows.
LATE = {"nan", "nan as best", "no such optimizer", "a value for each sample"}


def test_what_a_learner_can_get_wrong_is_one_line(learners: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    flags = ("--device=cpu", "--trackers=none", *FLAGS, "--batch-size=24")
    path = f"{learners / 'src'}{os.pathsep}{tmp_path}"
    command = ["wrong", str(tmp_path), *flags]
    job = spawn(learners, tmp_path / "run", [command], [{"PYTHONPATH": path}]).wait()
    assert job.codes == [0], job.log
    found = json.loads((tmp_path / "errors.json").read_text())
    assert found.keys() == SAID.keys() | {f"{what} --dry-run" for what in SAID.keys() - LATE}
    for what, message in SAID.items():
        assert found.get(f"{what} --dry-run", found[what]) == found[what]
        assert message in found[what] and "\n" not in found[what], what
        started = (tmp_path / what.replace(" ", "-") / "metrics.jsonl").exists()
        assert started == (what in LATE), what


@pytest.mark.parametrize("command", ["train", "predict"])
def test_a_model_of_functions_is_told_what_it_lacks(
    learners: Path, alone: Job, tmp_path: Path, command: str
) -> None:
    old = tmp_path / "demo"
    shutil.copytree(learners, old)
    text = "from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 1)\n"
    (old / "src" / "demo" / "model.py").write_text(text)
    words = [command, str(alone.run_dir)] if command == "predict" else [command]
    job = spawn(old, tmp_path / "run", [["demo", *words, "--device=cpu"]], [{}]).wait()
    check_error(job, "model.py has no 'class Model(Learner)'", "docs/own-model.md explains")
    (old / "src" / "demo" / "model.py").write_text("import torch\nimport torhc\n")
    job = spawn(old, tmp_path / "typo", [["demo", *words, "--device=cpu"]], [{}]).wait()
    check_error(job, "torhc is missing (", "src/demo/model.py, line 2): if the")
    assert not (old / "runs").exists()


@pytest.mark.parametrize(
    ("direction", "scores", "best"),
    [
        ("min", [0.5, -1.0, -3.0, -2.0], [True, True, True, False]),
        ("min", [7.0, 7.0, 6.0], [True, False, True]),
        ("max", [-9.0, -10.0, -8.0], [True, False, True]),
    ],
)
def test_any_score_can_be_the_best(
    project: Path, direction: Literal["min", "max"], scores: list[float], best: list[bool]
) -> None:
    from demo.engine.position import Position

    position = Position()
    assert [position.judge(score, direction) for score in scores] == best
    assert position.best_score == (min if direction == "min" else max)(scores)
