"""Shows where the time of some steps goes: `train --profile 10:20`, then `profile RUN_DIR`.

Files in RUN_DIR/profile/ begin with HOST_rank_RANK.TIME: so none is replaced, and the plugin of
TensorBoard reads them (pytorch/kineto, tb_plugin/torch_tb_profiler/consts.py).
"""

import dataclasses
import gzip
import logging
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError, say
from ..engine.filesystem import read_bytes
from ..engine.run.clock import CLOCK, Part
from . import program

MOST_EVENTS = 100_000  # of the memory, the newest: each takes some KB

log = logging.getLogger(__name__)


class Profiler(ExitStack):
    """Records steps, and writes its files when the last one is over, or at the end of the `with`.

    A step has the number of its log line, and lasts until the next one begins: a validation and a
    checkpoint after it are part of it.

    Raises:
        UsageError: `profile_ranks` names no rank, or one that does not exist.
    """

    def __init__(self, trainer: Any) -> None:  # noqa: ANN401 - `Trainer` of train.py
        from torch.profiler import ProfilerActivity, profile

        super().__init__()
        self.trainer, self.recorded, self.mark = trainer, list[int](), ExitStack()
        world, ranks = trainer.world, trainer.settings.profile_ranks
        if not ranks or max(ranks) >= world.size:
            raise UsageError(f"profile_ranks is {list(ranks)}: choose from 0 to {world.size - 1}")
        steps = range(*map(int, trainer.settings.profile.split(":")))
        self.steps = steps if world.rank in ranks else range(0)
        kinds = ("CPU", world.device.type.upper())
        activities = [each for name, each in ProfilerActivity.__members__.items() if name in kinds]
        self.profile, self.memory = profile(activities=activities), "CUDA" in kinds
        # The first rank tells what was found. Other ranks than 0 log warnings only.
        self.level = logging.WARNING if world.rank == min(ranks) > 0 else logging.INFO

    def step(self, step: int) -> None:
        """Note that a step begins."""
        from torch.profiler import record_function

        if step == self.steps.start - 1:  # so that the first step does not wait for the profiler
            self._prepare()
        elif step == self.steps.stop:
            self.close()
        elif step in self.steps:
            if not self.recorded:
                self._begin()
            self.mark.close()
            self.mark.enter_context(record_function(f"ProfilerStep#{step}"))  # the plugin's name
            self.recorded.append(step)

    def __exit__(self, *failure: Any) -> bool | None:  # noqa: ANN401 - as ExitStack has it
        """End the recording, but not after an error: the GPU may wait for a lost rank forever.

        That the GPU's memory is full is an exception, since the files say why.
        """
        from torch import OutOfMemoryError

        if isinstance(failure[1], Exception) and not isinstance(failure[1], OutOfMemoryError):
            self.pop_all()
        elif self.steps and not self.recorded:
            steps = self.trainer.settings.profile
            log.log(self.level, "no step of --profile %s was taken: nothing is profiled", steps)
        return super().__exit__(*failure)

    def _prepare(self) -> None:
        self.profile.prepare_trace()
        self.callback(self._end)

    def _begin(self) -> None:
        """Record from now on, with the parts of steps that torch does not mark itself."""
        import torch
        from torch.profiler import record_function

        @contextmanager
        def during(part: Part, before: Any = CLOCK.during) -> Iterator[None]:  # noqa: ANN401
            with record_function(part), before(part):
                yield

        if not self.profile.profiler:  # this attempt had no step before
            self._prepare()
        if self.memory:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
        self.profile.start_trace()
        updater = self.trainer.updater
        for owner, name, marked in (
            (CLOCK, "during", during),
            (updater, "_forward", record_function("forward")(updater._forward)),
            (updater, "_backward", record_function("backward")(updater._backward)),
        ):
            setattr(owner, name, marked)
            self.callback(delattr, owner, name)  # the class still has it
        self.enter_context(self.mark)

    def _end(self) -> None:
        """Stop, log the table, and write all files or none."""
        if not self.recorded:  # as `torch.profiler.profile` does it
            self.profile.start_trace()
        self.profile.stop_trace()  # without it, Python crashes at its exit
        if not self.recorded:
            return
        table, run = self._table(), self.trainer.settings.run_dir
        for line in (*table.splitlines(), f"the trace: {program('profile')} {run}"):
            log.log(self.level, "%s", line)
        try:
            self._write(Path(run, "profile"), table)
        except (OSError, RuntimeError) as error:
            log.error("can't write the profile to %s (%s); training goes on", run, error)
        self.trainer.meter.begin()  # this was no training

    def _write(self, folder: Path, table: str) -> None:
        name = f"{socket.gethostname()}_rank_{self.trainer.world.rank}.{time.time_ns()}"
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            path = f"{scratch}/{name}"
            Path(f"{path}.txt").write_text(table, encoding="utf-8")
            self.profile.export_chrome_trace(f"{path}.pt.trace.json.gz")
            with gzip.open(f"{path}.pt.trace.json.gz") as trace:
                if not trace.read(1):  # torch itself does not say it
                    raise OSError(f"no space in {tempfile.gettempdir()}")
            if self.memory:
                from torch.cuda import memory

                memory._dump_snapshot(f"{path}.memory.pickle")
                memory._record_memory_history(enabled=None)
            for each in Path(scratch).iterdir():
                each.replace(folder / each.name)

    def _table(self) -> str:
        """Return the operators that took longest, by the time of their kernels or else on the CPU.

        Marks are among them, with the time that is no operator's.
        """
        found = [each for each in self.profile.key_averages() if each.device_type.name == "CPU"]
        whole = sum(each.cpu_time_total for each in found if each.key == "ProfilerStep*") / 1000
        kernels = sum(each.self_device_time_total for each in found) / 1000
        own = "self_device_time_total" if kernels else "self_cpu_time_total"
        rows = [(getattr(each, own) / 1000, each.count, each.key) for each in found]
        share = 100 / max(sum(row[0] for row in rows), 1e-9)
        text = f"steps {self.recorded[0]} to {self.recorded[-1]}, rank {self.trainer.world.rank}, "
        text += f"{self.trainer.world.device}: {whole:.1f} ms, kernels {kernels:.1f} ms\n"
        text += "        ms   share    calls  operator, without those that it calls\n"
        for ms, calls, name in sorted(rows, reverse=True)[:10]:
            text += f"{ms:10.1f}  {ms * share:5.1f}%  {calls:7}  {name:.80}\n"
        return text


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show where the time of steps went in a run that was trained with `--profile`."""

    run: tyro.conf.Positional[Path]
    """run folder"""


def main(argv: Sequence[str]) -> int:
    """Print the tables of a profile, and how to look at its other files; return 0.

    Raises:
        UsageError: there is none, or it can't be read.
    """
    folder = read_flags(Flags, argv, program("profile")).run / "profile"
    if not (paths := sorted(folder.glob("*_rank_*"))):
        raise UsageError(f"{folder.parent} has no profile: train with --profile 10:20 to make one")
    for path in paths:
        try:
            say(read_bytes(path).decode(errors="replace") if path.suffix == ".txt" else path)
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror}") from None
    say("*.gz: open https://ui.perfetto.dev and drop the file there; nothing is uploaded")
    say(f"  or all: tensorboard --logdir {folder}, with the package torch-tb-profiler")
    if any(path.suffix == ".pickle" for path in paths):
        say("*.pickle: open https://pytorch.org/memory_viz and drop the file; nothing is uploaded")
    return 0
