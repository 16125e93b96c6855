"""The training loop."""

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint, data, model
from .checkpoint import Checkpoints, parameters_sha256
from .config import Settings
from .distributed import (
    Vote,
    World,
    autocast,
    distribute,
    gradients_stay_here,
    joined,
    set_up_logging,
    to_device,
)
from .errors import UsageError
from .evaluation import Pictures, evaluate
from .metrics import Meter
from .preemption import EXIT_CODE, StopRequest
from .recording import record
from .report import Report, with_run_dir
from .schedule import lr_factor, peak_lr
from .seeding import seed_torch
from .sharding import TrainBatches, evaluation_batches
from .tracking import Status, select

log = logging.getLogger(__name__)

Batch = tuple[Any, Tensor]  # inputs may be tuples or dictionaries of tensors


def run(settings: Settings, stop: StopRequest) -> int:
    """Train as the settings say; every rank calls this.

    Returns:
        The process's exit code: 0, or 75 when a signal stopped the run after a checkpoint.

    Raises:
        UsageError: the settings do not fit the world, the machine or the data.
    """
    trackers = select(settings.trackers)
    with joined(settings) as world:
        set_up_logging(world, settings.log_all_ranks)
        refuse_different_settings(settings, world)
        settings = with_run_dir(settings.for_world(world.size), world)
        return Trainer(settings, world, stop).train(trackers)


class Trainer:
    """A network, its data, and how far the one is trained on the other.

    The place in the training is `epoch`, `step`, and within the epoch `epoch_steps` and
    `consumed`: steps are optimizer steps, consumed are samples of all ranks.
    """

    def __init__(self, settings: Settings, world: World, stop: StopRequest) -> None:
        self.settings, self.world, self.stop = settings, world, stop
        self.epoch, self.step, self.epoch_steps, self.consumed = 0, 0, 0, 0
        self.best_accuracy, self.validated_step = -1.0, 0
        self.resumed_from: int | None = None
        self.trained_samples, self.trained_seconds = 0, 0.0

        self.datasets = data.load(settings)
        self.batches = TrainBatches(
            self.datasets.train,
            settings.batch_size,
            world.rank,
            world.size,
            settings.seed,
            settings.workers,
            pin=world.device.type == "cuda",
        )
        self.samples_per_step = settings.batch_size * settings.accumulate * world.size
        if not self.batches.samples and not settings.max_steps:
            raise UsageError("the training set does not say its length: set --max-steps")

        torch.manual_seed(settings.seed)
        self.network = model.build().to(world.device)
        self.optimizer = model.build_optimizer(self.network, settings)
        self.meter = Meter(world.device)
        self.run_dir = Path(str(settings.run_dir))
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", settings.keep_checkpoints)
        self._resume()
        # What is called in training; the plain network serves evaluation and checkpoints.
        self.forward = torch.compile(self.network) if settings.compile else self.network
        if world.size > 1:
            self.forward = distribute(self.forward)

    def train(self, trackers: list[str]) -> int:
        """Train to the end or to a signal; return the process's exit code."""
        self._describe()
        if self.settings.dry_run:
            return 0
        if self.resumed_from and self._is_done() and self.world.share(self._has_summary()):
            log.info("nothing is left to do: this run has finished; --run-dir chooses another")
            return 0
        self.report = Report(self.settings, self.world, trackers, self.resumed_from or 0)
        status: Status = "failed"
        error: str | None = None
        try:
            stopped = False
            while not self._is_done() and not stopped:
                stopped = not self._train_epoch()
            if not stopped:
                if self.validated_step != self.step:
                    self._end_epoch(whole=False)
                self._summarize(bool(trackers))
            status = "preempted" if stopped else "finished"
        except BaseException as failure:
            kind = "" if isinstance(failure, UsageError) else f"{type(failure).__name__}: "
            error = f"{kind}{failure}".splitlines()[0]
            raise
        finally:
            self.report.close(status, error, self.step, self.checkpoints.best())
        return EXIT_CODE if stopped else 0

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch, evaluate and save; return False if a signal came first."""
        steps = (self.batches.samples or 0) // self.samples_per_step
        bar = self.report.progress_bar(self.epoch, self.epoch_steps, steps or None)
        windows = self._windows()
        window = self._next(windows)
        vote = self._vote(window)
        began = time.perf_counter()
        stopping, samples = False, 1
        while not self._at_last_step():
            stopping, samples = vote.result()
            if stopping or samples == 0:
                break
            # The next step's vote travels while this step is computed.
            following = self._next(windows)
            vote = self._vote(following)
            self._train_step(window, samples)
            window = following
            bar.update()
            if self.step % self.settings.log_every == 0:
                self._log_step()
            if self.step % self.settings.checkpoint_every == 0 and not self._at_last_step():
                self._save()
        vote.result()
        bar.close()
        self.trained_seconds += time.perf_counter() - began
        if stopping:
            if not self.world.share(self._save()):
                raise UsageError(
                    f"stopped at step {self.step}, but the checkpoint could not be written: make "
                    f"room for {self.checkpoints.folder}; the same command then goes on from the "
                    "checkpoint before, if there is one"
                )
            log.info(
                "stopped at step %d by %s; the same command with --run-dir %s goes on from there",
                self.step,
                self.stop.received or "a signal to another rank",
                self.run_dir,
            )
            return False
        if samples == 0 and self.step == 0:
            raise UsageError("the training set has no samples: is data_dir the right folder?")
        self._end_epoch(whole=samples == 0)
        return True

    def _windows(self) -> Iterator[list[Batch]]:
        """Yield this rank's batches for each step that is left of the epoch, then empty lists."""
        accumulate = self.settings.accumulate
        batches = self.batches.epoch(self.epoch, self.consumed, self.epoch_steps * accumulate)
        step = self.step
        while True:
            seed_torch("samples", self.settings.seed, self.world.rank, step)
            yield list(islice(batches, accumulate))
            step += 1

    def _next(self, windows: Iterator[list[Batch]]) -> list[Batch]:
        """Return the next step's batches, and take note of how long they were waited for."""
        began = time.perf_counter()
        window = next(windows)
        record("train/data_seconds", time.perf_counter() - began)
        return window

    def _vote(self, window: list[Batch]) -> Vote:
        samples = sum(len(targets) for _, targets in window)
        return self.world.vote(self.stop.received is not None, samples)

    def _train_step(self, window: list[Batch], samples: int) -> None:
        """Take one optimizer step.

        Args:
            window: this rank's batches. A rank that has none left, since its shards were shorter,
                takes part with weight zero, so that the others need not stop.
            samples: of all ranks together.
        """
        settings, device = self.settings, self.world.device
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        seed_torch("step", settings.seed, self.world.rank, self.step)
        loss_sum = torch.zeros((), device=device)
        weighted = [(batch, len(batch[1])) for batch in window] or [(self.batches.last, 0)]
        for number, ((inputs, targets), weight) in enumerate(weighted, 1):
            inputs, targets = to_device((inputs, targets), device)
            with nullcontext() if number == len(weighted) else gradients_stay_here(self.forward):
                with autocast(device, settings.precision):
                    loss = model.loss(self.forward(inputs), targets, settings.label_smoothing)
                (loss * (weight / (settings.batch_size * settings.accumulate))).backward()
            loss_sum += loss.detach() * weight
        if samples != self.samples_per_step:
            # The last step of an epoch may have fewer: make the gradient their mean.
            for parameter in self.network.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self.samples_per_step / samples
        norm = None
        if settings.clip_norm:
            norm = nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip_norm)
        elif self._is_due(settings.log_every):
            gradients = [each.grad for each in self.network.parameters() if each.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
        self.optimizer.step()
        if self._is_due(settings.histograms_every):
            self.report.histograms(self.step + 1, self.network)
        self.optimizer.zero_grad()
        self.step += 1
        self.epoch_steps += 1
        self.consumed += samples
        self.trained_samples += samples
        self.meter.add(loss_sum, norm, sum(weight for _, weight in weighted), samples)

    def _end_epoch(self, whole: bool) -> None:
        """Evaluate on the validation set and save; `whole` unless max_steps cut the epoch short."""
        began = time.perf_counter()
        # First of all: a signal in a long validation then costs no more than the validation.
        self._save()
        loss, accuracy = evaluate(self.network, self.datasets.validation, self.settings, self.world)
        self._refuse_divergence("the validation loss is", loss)
        best = accuracy > self.best_accuracy
        self.best_accuracy = max(accuracy, self.best_accuracy)
        self.validated_step = self.step
        if whole:
            self.epoch, self.epoch_steps, self.consumed = self.epoch + 1, 0, 0
        self.report.metrics(
            self.step,
            self.progress(),
            {"epoch": self.epoch, "validation/loss": loss, "validation/accuracy": accuracy},
        )
        self._save(best)
        self.meter.skip(time.perf_counter() - began)

    def _log_step(self) -> None:
        readings, own = self.meter.read(self.world)
        self._refuse_divergence("the training loss is", readings["train/loss"])
        rate = {"train/lr": self.learning_rate()}
        self.report.metrics(self.step, self.progress(), rate | readings, rate | own)

    def _summarize(self, with_pictures: bool) -> None:
        pictures = Pictures() if with_pictures else None
        loss, accuracy = evaluate(
            self.network, self.datasets.test, self.settings, self.world, pictures
        )
        self.report.metrics(self.step, 1.0, {"test/loss": loss, "test/accuracy": accuracy})
        self.report.summary(
            {
                "test_accuracy": accuracy,
                "test_loss": loss,
                "validation_accuracy": self.best_accuracy,
                "epochs": self.epoch,
                "global_step": self.step,
                "world_size": self.world.size,
                "backend": self.world.backend,
                "device": str(self.world.device),
                "hostnames": list(self.world.hostnames),
                "images_per_second": self.trained_samples / max(self.trained_seconds, 1e-9),
                "resumed_from_step": self.resumed_from,
                "parameters_sha256": parameters_sha256(self.network),
            }
        )
        if pictures:
            drawn = pictures.draw(self.world)
            self.report.figures(self.step, {f"test/{name}": each for name, each in drawn.items()})
        if self.settings.register_model and self.world.is_main:
            self._register(self.settings.register_model)

    def _register(self, name: str) -> None:
        """Put the best network into the registry of models."""
        network, step = copy.deepcopy(self.network).cpu().eval(), self.step
        if best := self.checkpoints.best():
            state = checkpoint.load(best)
            network.load_state_dict(state["network"])
            step = state["step"]
        # As batches reach the network: through the dataset's own way to make them.
        inputs, _ = next(iter(evaluation_batches(self.datasets.test, 4, 0, 1, 0)))
        self.report.trackers.log("model", network, inputs, name, step)

    # -- where the training stands ----------------------------------------------------------------

    def progress(self) -> float:
        """Return how much of the training is done, from 0 to 1, the same on any world size."""
        shares = []
        if self.batches.samples:
            steps = max(self.batches.samples // self.samples_per_step, 1)
            in_epoch = min(self.consumed / (steps * self.samples_per_step), 1.0)
            shares.append((self.epoch + in_epoch) / self.settings.epochs)
        if self.settings.max_steps:
            shares.append(self.step / self.settings.max_steps)
        return max(shares)

    def learning_rate(self) -> float:
        """Return the learning rate of the step to come."""
        peak = peak_lr(self.settings, self.samples_per_step)
        return peak * lr_factor(self.settings, self.progress())

    def _describe(self) -> None:
        """Log what is about to happen."""
        s, world = self.settings, self.world
        log.info(
            "%s on %s, device %s",
            f"{world.size} rank(s) by {world.launcher}" if world.backend else "one process",
            ", ".join(dict.fromkeys(world.hostnames)),
            f"{world.device}, backend {world.backend}" if world.backend else world.device,
        )
        log.info(
            "%s: %s training samples, %d samples a step (%d a rank%s), %d epoch(s)%s, seed %d",
            s.dataset,
            self.batches.samples or "an unknown number of",
            self.samples_per_step,
            s.batch_size,
            f", {s.accumulate} times" if s.accumulate > 1 else "",
            s.epochs,
            f" or {s.max_steps} steps" if s.max_steps else "",
            s.seed,
        )
        log.info("settings from %s", s.config or "flags and defaults alone")
        log.info("run folder %s%s", self.run_dir, " (dry run: not touched)" if s.dry_run else "")

    def _is_done(self) -> bool:
        return self.epoch >= self.settings.epochs or self._at_last_step()

    def _has_summary(self) -> bool:
        return (self.run_dir / "summary.json").exists()

    def _is_due(self, every: int) -> bool:
        """Return whether the step that is being taken is one of those; 0 means none."""
        return every > 0 and (self.step + 1) % every == 0

    def _at_last_step(self) -> bool:
        return self.settings.max_steps is not None and self.step >= self.settings.max_steps

    def _refuse_divergence(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            newest = self.checkpoints.latest() or "none had been saved yet"
            raise UsageError(
                f"{what} {value} at step {self.step}: lower lr, lengthen warmup, or set "
                f"clip_norm; the last checkpoint from before: {newest}"
            )

    def _save(self, best: bool = False) -> bool:
        """Save everything that a resumed run needs; every rank calls this.

        Random generators are not in it: they are seeded with each step's number.

        Returns:
            Whether rank 0 could write it; other ranks do not know.

        Raises:
            UsageError: on every rank, if the network has diverged: the checkpoints from before are
                worth more than this one.
        """
        norm = nn.utils.get_total_norm(each.detach() for each in self.network.parameters())
        self._refuse_divergence("the norm of all parameters is", norm.item())
        self.report.flush()
        meter = self.meter.total(self.world)
        if not self.world.is_main:
            return False
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "epoch_steps": self.epoch_steps,
            "consumed": self.consumed,
            "best_accuracy": self.best_accuracy,
            "validated_step": self.validated_step,
            "meter": meter,
            "world_size": self.world.size,
            "samples_per_step": self.samples_per_step,
            "settings": self.settings.as_dict(),
        }
        return self.checkpoints.save(state, self.step, best)

    def _resume(self) -> None:
        """Go on from the checkpoint that the settings lead to, if there is one."""
        # Rank 0 looks, so that all ranks take the same one.
        found = self.world.on_main(lambda: checkpoint.find(self.settings.resume, self.run_dir))
        if found is None:
            return
        state = checkpoint.load(found)
        try:
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"{found} does not fit the network in model.py ({str(error).split(chr(9))[-1]}): "
                "choose another --run-dir, or bring back the network that it was saved from"
            ) from None
        self.epoch, self.step = state["epoch"], state["step"]
        self.epoch_steps, self.consumed = state["epoch_steps"], state["consumed"]
        if state["samples_per_step"] != self.samples_per_step:
            # The batches that each rank would have had by now.
            self.epoch_steps = self.consumed // self.samples_per_step
        self.best_accuracy = state["best_accuracy"]
        self.validated_step = state["validated_step"]
        self.meter.resume(state["meter"], self.world)
        self.resumed_from = self.step
        log.info("resuming from %s: step %d, epoch %d", found, self.step, self.epoch + 1)
        if not self.world.is_main:
            return
        if state["world_size"] != self.world.size:
            log.warning(
                "the checkpoint is of %d rank(s), this run has %d: it goes on behind as many "
                "samples of the epoch, but not bit for bit as without the stop",
                state["world_size"],
                self.world.size,
            )
        before = state["settings"]
        for name, value in self.settings.as_dict().items():
            if name not in ("config", "run_dir", "resume") and before.get(name) != value:
                log.warning("%s was %s at the checkpoint, now %s", name, before.get(name), value)


def refuse_different_settings(settings: Settings, world: World) -> None:
    """Make sure that all ranks were started with the same settings.

    Raises:
        UsageError: on a rank whose settings are not rank 0's.
    """
    mine = settings.as_dict()
    for name, value in world.share(mine).items():
        if mine[name] != value:
            raise UsageError(
                f"rank {world.rank} has {name} {mine[name]}, but rank 0 has {value}: start all "
                "ranks with the same flags and the same configs/train.yaml"
            )
