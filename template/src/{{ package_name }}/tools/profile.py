"""Shows where the time of some steps went: `train --profile 10:20`, then `profile RUN_DIR`.

The names of the files in RUN_DIR/profile/ begin with HOST_rank_RANK.TIME, so that no file replaces
another one, and TensorBoard's plugin can read them (pytorch/kineto,
tb_plugin/torch_tb_profiler/consts.py).
"""

import dataclasses
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError, say
from ..engine.filesystem import files_in, read_bytes
from ..engine.run.clock import CLOCK
from . import program

if TYPE_CHECKING:
    from ..engine import Training

MARKS = ("data", "forward", "backward", "validation", "checkpoints")

log = logging.getLogger(__name__)


class Profiler:
    """Records steps, and writes its files after the last step, or at the end of the `with` block.

    Steps have the same numbers as in the log. A step lasts until the next one begins, so it
    includes a validation or a checkpoint after it.

    Raises:
        UsageError: `profile_ranks` is empty or has a rank that this run does not have.
    """

    def __init__(self, training: "Training") -> None:
        self.training, self.world, self.settings = training, training.world, training.settings
        ranks, size = self.settings.profile_ranks, self.world.size
        if not ranks or max(ranks) >= size:
            raise UsageError(f"profile_ranks is {list(ranks)}: choose from 0 to {size - 1}")

    def __enter__(self) -> None:
        """Prepare to record the chosen steps that this attempt still has to take."""
        from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

        from ..engine import torch_private

        done, chosen = self.training.position.step, self.world.rank in self.settings.profile_ranks
        first, stop = map(int, self.settings.profile.split(":"))
        self.steps = steps = range(max(first, done + 1), stop if chosen else 0)

        def action(step: int) -> ProfilerAction:
            if step not in steps:  # warm up, so that the first recorded step is not slowed down
                return ProfilerAction.WARMUP if step + 1 in steps else ProfilerAction.NONE
            return ProfilerAction.RECORD if step + 1 in steps else ProfilerAction.RECORD_AND_SAVE

        cpu, kind = ProfilerActivity.CPU, self.world.device.type.upper()
        self.memory = torch_private if kind == "CUDA" else None
        self.profile = profile(
            activities={cpu, getattr(ProfilerActivity, kind, cpu)},
            schedule=lambda step: action(step or done),  # PyTorch asks for step 0 first
            on_trace_ready=CLOCK.during("profile")(self._write),
        )
        self.profile.step_num = done
        self.profile.start()
        CLOCK.mark = record_function

    def step(self) -> None:
        """Tell the profiler that the next step begins."""
        if self.memory and self.profile.step_num + 1 in self.steps[:1]:
            self.memory.record_memory()
        self.profile.step()

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        """End the recording, but not after an error: the GPU may wait for a lost rank forever.

        If the device has no memory left, the files are written, because they show the reason.
        """
        from torch import OutOfMemoryError

        CLOCK.mark = nullcontext
        if not isinstance(error, Exception) or isinstance(error, OutOfMemoryError):
            if self.steps and self.profile.step_num < self.steps[0]:
                log.warning("no step of --profile %s was taken", self.settings.profile)
            self.profile.stop()

    def _write(self, profile: Any) -> None:  # noqa: ANN401 - PyTorch's profiler
        """Write all files, and log a table of the slowest operators by GPU time, or by CPU time."""
        found = [each for each in profile.key_averages() if each.device_type.name == "CPU"]
        whole = sum(each.cpu_time_total for each in found if each.key == "ProfilerStep*")
        kernels = sum(each.self_device_time_total for each in found)
        own = attrgetter("self_device_time_total" if kernels else "self_cpu_time_total")
        last, run = min(profile.step_num, self.steps[-1]), self.settings.run_dir
        table = f"steps {self.steps[0]} to {last}, rank {self.world.rank}, {self.world.device}: "
        table += f"{whole / 1e3:.1f} ms, kernels {kernels / 1e3:.1f} ms\n"
        parts = (x for x in found if x.key in MARKS or x.key.startswith("Optimizer.step"))
        of_parts = (f"{each.key} {each.cpu_time_total / 1e3:.1f} ms" for each in parts)
        table += f"on the CPU: {', '.join(of_parts)}\n"
        table += "        ms    calls  operator, without those that it calls\n"
        for each in sorted(found, key=own, reverse=True)[:10]:
            table += f"{own(each) / 1e3:10.1f}  {each.count:7}  {each.key:.80}\n"
        for line in (*table.splitlines(), f"the trace: {program('profile')} {run}"):
            log.info("%s", line)
        path = f"{run}/profile/{socket.gethostname()}_rank_{self.world.rank}.{time.time_ns()}"
        try:
            Path(run, "profile").mkdir(exist_ok=True)
            Path(f"{path}.txt").write_text(table, encoding="utf-8")
            profile.export_chrome_trace(f"{path}.pt.trace.json.gz")
            if self.memory:
                self.memory.save_memory(f"{path}.memory.pickle")
        except (OSError, RuntimeError) as error:
            log.error("can't write the profile to %s (%s); training goes on", run, error)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show where the time of the steps went in a run that was trained with `--profile`."""

    run: tyro.conf.Positional[Path]
    """run folder"""


def main(argv: Sequence[str]) -> int:
    """Print the tables of a profile, and how to open its other files; return 0.

    Raises:
        UsageError: the run has no profile, or it can't be read.
    """
    run = read_flags(Flags, argv, program("profile")).run
    folder = run / "profile"
    try:
        paths = [path for path in files_in(folder) if "_rank_" in path.name]
        for path in paths:
            say(read_bytes(path).decode(errors="replace") if path.suffix == ".txt" else path)
    except FileNotFoundError:
        what = "has no profile: train with --profile 10:20 to make one"
        raise UsageError(f"{run} {what if run.is_dir() else 'does not exist'}") from None
    except OSError as error:
        raise UsageError(f"can't read {error.filename}: {error.strerror}") from None
    say("*.gz: drop it on https://ui.perfetto.dev; nothing is uploaded")
    say("*.pickle (CUDA): drop it on https://pytorch.org/memory_viz; nothing is uploaded")
    say(f"or all: tensorboard --logdir {folder}, with the package torch-tb-profiler")
    return 0
