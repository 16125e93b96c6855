"""Shows where the time of some steps went: `profile RUN_DIR`, after `train --profile 10:20`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError, say
from ..engine.foreign import files_in, read_bytes
from . import program


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
