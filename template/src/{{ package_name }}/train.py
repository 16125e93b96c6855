"""The training loop."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, data, model
from .announce import announce, announce_resume, announce_waiting
from .checkpoint import Checkpoints, parameters_sha256
from .config import Settings
from .distributed import (
    World,
    autocast,
    joined,
    lost_ranks_named,
    refuse_different_samples,
    refuse_different_settings,
    set_up_logging,
    to_device,
)
from .errors import UsageError
from .evaluation import Pictures, evaluate
from .metrics import Meter
from .optimizer import load_optimizer, options_of
from .parts import layout
from .preemption import EXIT_CODE, StopRequest
from .recording import record
from .report import Report, with_run_dir
from .saving import Saver
from .schedule import lr_factor, peak_lr
from .seeding import seed_torch
from .sharding import TrainBatches, evaluation_batches
from .strategy import distribute, gradient_norm, gradients_stay_here, parameter_norm
from .tracking import Status, select
from .votes import Votes

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
        self.waiting_announced = settings.workers > 0

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
        refuse_different_samples("training", self.batches.samples, world)
        refuse_different_samples("validation", len(self.datasets.validation), world)
        refuse_different_samples("test", len(self.datasets.test), world)
        if not self.batches.samples and not settings.max_steps:
            raise UsageError("the training set does not say its length: set --max-steps")

        torch.manual_seed(settings.seed)
        self.network = model.build()
        # What is called in training; the network itself serves evaluation and checkpoints.
        self.forward = distribute(self.network, settings, world)
        self.optimizer = model.build_optimizer(self.network, settings)
        self.options = options_of(self.optimizer)
        self.meter = Meter(world.device)
        self.run_dir = Path(str(settings.run_dir))
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", settings.keep_checkpoints)
        self.saver = Saver(self.checkpoints, world, settings.timeout)
        self._resume()

    def train(self, trackers: list[str]) -> int:
        """Train to the end or to a signal; return the process's exit code."""
        announce(self.settings, self.world, self.batches.samples, self.samples_per_step)
        if self.settings.dry_run:
            return 0
        if self.resumed_from and self._is_done() and self.world.share(self._has_summary()):
            log.info("nothing is left to do: this run has finished; --run-dir chooses another")
            return 0
        self.report = Report(self.settings, self.world, trackers, self.resumed_from or 0)
        status: Status = "failed"
        error: str | None = None
        try:
            with self.saver, lost_ranks_named(self.world.rank, self.settings.timeout):
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
        votes = Votes(self.world, self.stop, self.step, self.batches.uneven)
        votes.begin(self.step, self._samples(window))
        began = time.perf_counter()
        stopping, samples = False, 1
        while not self._at_last_step():
            stopping, samples = votes.result()
            if stopping or samples == 0:
                break
            # The next step's vote travels while this step is computed.
            following = self._next(windows)
            votes.begin(self.step, self._samples(following))
            self._train_step(window, samples)
            window = following
            bar.update()
            if self.step % self.settings.log_every == 0:
                self._log_step()
            if self.step % self.settings.checkpoint_every == 0 and not self._at_last_step():
                self._save()
        votes.result()  # of the step behind max_steps: ranks must hear it before they talk again
        bar.close()
        self.trained_seconds += time.perf_counter() - began
        if stopping:
            self._save()
            self._refuse_unsaved("stopped")
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

    def _samples(self, window: list[Batch]) -> int:
        """Return this rank's samples of a step."""
        return sum(self._weight(batch) for batch in window)

    def _weight(self, batch: Batch) -> int:
        """Return for how many samples a batch counts.

        Of a map-style dataset these are its indices, equally many on each rank. `collate` may have
        left some out, or have made several targets of each.
        """
        return len(batch[1]) if self.batches.uneven else self.settings.batch_size

    def _train_step(self, window: list[Batch], samples: int) -> None:
        """Take one optimizer step.

        Args:
            window: this rank's batches. A rank that has none left, since its shards were shorter,
                takes part with weight zero, so that the others need not stop: in each forward
                and backward pass, at which ranks may meet.
            samples: of all ranks together.
        """
        settings, device = self.settings, self.world.device
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        seed_torch("step", settings.seed, self.world.rank, self.step)
        loss_sum = torch.zeros((), device=device)
        weighted = [(batch, self._weight(batch)) for batch in window]
        if self.batches.uneven:
            weighted += [(self.batches.last, 0)] * (settings.accumulate - len(window))
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
        if settings.clip_norm or self._is_due(settings.log_every):
            norm = gradient_norm(self.network, settings.clip_norm)
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
        if not self.waiting_announced and self.step > self.settings.log_every:
            self.waiting_announced = announce_waiting(readings, self.samples_per_step)
        rate = {"train/lr": self.learning_rate()}
        self.report.metrics(self.step, self.progress(), rate | readings, rate | own)

    def _summarize(self, with_pictures: bool) -> None:
        pictures = Pictures() if with_pictures else None
        loss, accuracy = evaluate(
            self.network, self.datasets.test, self.settings, self.world, pictures
        )
        self._refuse_unsaved("ended")
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
                "trained_seconds": self.trained_seconds,
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
        self.saver.wait()
        best = self.checkpoints.best()
        if best is None:
            log.error("there is no checkpoint, so no network goes into the registry")
            return
        state = checkpoint.load(best)
        network = model.build().eval()
        network.load_state_dict(state["network"])
        # As batches reach the network: through the dataset's own way to make them.
        inputs, _ = next(iter(evaluation_batches(self.datasets.test, 4, 0, 1, 0)))
        self.report.trackers.log("model", network, inputs, name, state["step"])

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
            self.saver.wait()
            newest = self.checkpoints.latest() or "none had been saved yet"
            raise UsageError(
                f"{what} {value} at step {self.step}: lower lr, lengthen warmup, or set "
                f"clip_norm; the last checkpoint from before: {newest}"
            )

    def _refuse_unsaved(self, what: str) -> None:
        if not self.world.share(self.saver.wait()):
            raise UsageError(
                f"{what} at step {self.step}, but the checkpoint could not be written: make room "
                f"for {self.checkpoints.folder}; the same command then goes on from the checkpoint "
                "before, if there is one"
            )

    def _save(self, best: bool = False) -> None:
        """Save everything that a resumed run needs; every rank calls this.

        Random generators are not in it: they are seeded with each step's number.

        Raises:
            UsageError: on every rank, if the network has diverged: the checkpoints from before are
                worth more than this one.
        """
        norm = parameter_norm(self.network).item()
        self._refuse_divergence("the norm of all parameters is", norm)
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "options": self.options,
            "epoch": self.epoch,
            "step": self.step,
            "epoch_steps": self.epoch_steps,
            "consumed": self.consumed,
            "best_accuracy": self.best_accuracy,
            "validated_step": self.validated_step,
            "meter": self.meter.total(self.world),
            "world_size": self.world.size,
            "samples_per_step": self.samples_per_step,
            "settings": self.settings.as_dict(),
        }
        self.saver.save(state, self.step, best, before=self.report.flush)

    def _resume(self) -> None:
        """Go on from the checkpoint that the settings lead to, if there is one."""
        found = checkpoint.load_first(
            checkpoint.candidates(self.settings.resume, self.run_dir),
            layout(self.network, self.optimizer),
            self.world,
        )
        if found is None:
            return
        path, state = found
        try:
            self.network.load_state_dict(state["network"])
            load_optimizer(self.optimizer, state, path)
            self._go_on_from(state)
            announce_resume(path, state, self.settings, self.world)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"{path} does not fit the network in model.py ({str(error).split(chr(9))[-1]}): "
                "choose another --run-dir, or bring back the network that it was saved from"
            ) from None
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} was not saved by this version of the project ({type(error).__name__}: "
                f"{error}): choose another --run-dir, or bring back the version that saved it"
            ) from None
        self.saver.go_on_from(path, self.step)

    def _go_on_from(self, state: dict[str, Any]) -> None:
        """Take up the place in the training that a checkpoint is of."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.epoch_steps, self.consumed = state["epoch_steps"], state["consumed"]
        if state["samples_per_step"] != self.samples_per_step:
            # The batches that each rank would have had by now.
            self.epoch_steps = self.consumed // self.samples_per_step
        self.best_accuracy = state["best_accuracy"]
        self.validated_step = state["validated_step"]
        self.meter.resume(state["meter"], self.world)
        self.resumed_from = self.step
