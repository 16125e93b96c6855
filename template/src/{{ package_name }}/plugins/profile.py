"""Records where the time of some steps goes: `train --profile 10:20`.

The names of the files in RUN_DIR/profile/ begin with HOST_rank_RANK.TIME, so that no file replaces
another one, and TensorBoard's plugin can read them (pytorch/kineto,
tb_plugin/torch_tb_profiler/consts.py).
"""

import logging
import re
import socket
import time
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine import Count, UsageError
from ..engine.run.clock import CLOCK

if TYPE_CHECKING:
    from ..engine import Training

MARKS = ("data", "forward", "backward", "validation", "checkpoints")
MOST = 100  # steps: the profile of more takes minutes to write

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of this plug-in."""

    profile: str | None = None
    """steps to profile, at most 100; 10:20 profiles the steps 10 to 19"""
    profile_ranks: tuple[Count, ...] = (0,)
    """ranks that are profiled"""


def window(text: str) -> tuple[int, int]:
    """Return the first step to profile, and the step after the last one.

    Raises:
        UsageError: the text is not such a window, or has too many steps.
    """
    found = re.fullmatch(r"([1-9]\d{0,17}):(\d{1,18})", text, re.ASCII)
    first, stop = map(int, found.groups()) if found else (0, 0)
    if not 0 < stop - first <= MOST:
        raise UsageError(
            f"profile is {text!r}: it must be FIRST:END, such as 10:20 for the steps 10 to 19, "
            f"with FIRST 1 or more and at most {MOST} steps"
        )
    return first, stop


class Plugin:
    """Records steps, and writes its files after the last step, or at the end of the training.

    Steps have the same numbers as in the log. A step begins when the step before it was taken, so
    it includes a validation or a checkpoint between them.

    Raises:
        UsageError: `profile` is not a window of steps, or `profile_ranks` is empty or has a rank
            that this run does not have.
    """

    def __init__(self, training: "Training") -> None:
        self.training, self.world, self.settings = training, training.world, training.settings
        self.profile: Any = None
        if not self.settings.profile:
            return
        first, stop = window(self.settings.profile)
        ranks, size = self.settings.profile_ranks, self.world.size
        if not ranks or max(ranks) >= size:
            raise UsageError(f"profile_ranks is {list(ranks)}: choose from 0 to {size - 1}")
        self.steps = range(first, stop if self.world.rank in ranks else 0)

    def on_start(self, training: "Training") -> None:
        """Prepare to record the chosen steps that this attempt still has to take."""
        if not self.settings.profile:
            return
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        done = training.position.step
        self.steps = steps = self.steps[max(done + 1 - self.steps.start, 0) :]

        def action(step: int) -> ProfilerAction:
            if step not in steps:  # warm up, so that the first recorded step is not slowed down
                return ProfilerAction.WARMUP if step + 1 in steps else ProfilerAction.NONE
            return ProfilerAction.RECORD if step + 1 in steps else ProfilerAction.RECORD_AND_SAVE

        cpu, kind = ProfilerActivity.CPU, self.world.device.type.upper()
        self.has_memory = kind == "CUDA"
        self.profile = profile(
            activities={cpu, getattr(ProfilerActivity, kind, cpu)},
            schedule=lambda step: action(step or done),  # PyTorch asks for step 0 first
            on_trace_ready=CLOCK.during("profile")(self._write),
        )
        self.profile.step_num = done
        self.profile.start()
        CLOCK.marks.append(self._mark)

    def _mark(self, name: str) -> Any:  # noqa: ANN401 - a context
        """Return a context that the trace shows by its name. Each step begins with loading."""
        from torch.profiler import record_function

        if name == "validation" and self.training.position.is_validated:
            self._stop()  # only the test set is left
            return nullcontext()
        if name == "data" and self.profile.step_num <= self.training.position.step:
            if self.has_memory and self.profile.step_num + 1 in self.steps[:1]:
                record_memory()
            self.profile.step()
        return record_function(name)

    def on_end(self, _training: "Training", status: str, _error: BaseException | None) -> None:
        """End the recording after a stop."""
        if status == "preempted":
            self._stop()

    def on_close(self, _training: "Training", error: BaseException | None) -> None:
        """End the recording, but not after an error: the GPU may wait for a lost rank forever.

        If the device has no memory left, the files are written, because they show the reason.
        """
        from torch import OutOfMemoryError

        if not isinstance(error, Exception) or isinstance(error, OutOfMemoryError):
            self._stop()

    def _stop(self) -> None:
        if self.profile:
            CLOCK.marks.remove(self._mark)
            if self.steps and self.profile.step_num < self.steps[0]:
                log.warning("no step of --profile %s was taken", self.settings.profile)
            self.profile.stop()
            self.profile = None

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
        package = __package__.partition(".")[0]
        for line in (*table.splitlines(), f"the trace: python -m {package} profile {run}"):
            log.info("%s", line)
        path = f"{run}/profile/{socket.gethostname()}_rank_{self.world.rank}.{time.time_ns()}"
        try:
            Path(run, "profile").mkdir(exist_ok=True)
            Path(f"{path}.txt").write_text(table, encoding="utf-8")
            profile.export_chrome_trace(f"{path}.pt.trace.json.gz")
            if self.has_memory:
                save_memory(f"{path}.memory.pickle")
        except (OSError, RuntimeError) as error:
            log.error("can't write the profile to %s (%s); training goes on", run, error)


def record_memory() -> None:
    """Record the newest memory allocations on the GPU, with the Python lines that made them."""
    from torch.cuda import memory

    memory._record_memory_history(max_entries=100_000, stacks="python")  # an entry has some KB


def save_memory(path: str) -> None:
    """Write the recorded allocations for pytorch.org/memory_viz, and end the recording."""
    from torch.cuda import memory

    memory._dump_snapshot(path)
    memory._record_memory_history(enabled=None)
