"""Writes a page about runs, or draws their curves: `python -m <package> report RUN_DIR...`.

It needs no server and no PyTorch. content.py fills the page, and picture.py draws the curves.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ...engine.config import read_flags
from ...engine.errors import UsageError
from .. import program
from ..survey import find_runs
from .content import page_of
from .curves import drawable, read_runs
from .picture import figure


@dataclasses.dataclass(frozen=True)
class Flags:
    """Write a page about runs: status, numbers, curves, settings, code, figures, log. The page is
    one file of at most a megabyte, without scripts, and it loads nothing from the internet. With
    --output curves.png, write a picture of the curves instead."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """folders of runs, or of experiments for all their runs; several runs are compared;
    runs that differ only in their seed are drawn as one curve, their mean"""
    output: Path = Path("report.html")
    """file to write: .html for the page; .png, .svg or .pdf for the picture"""
    metrics: tuple[str, ...] = ()
    """picture: metrics to draw, each in its own panel;
    default: all, with training and validation in one panel"""
    x: Literal["step", "time"] = "step"
    """picture: the x axis; time starts at a run's first line and includes waits in the queue"""
    seeds: Literal["mean", "each"] = "mean"
    """picture: mean draws runs that differ only in their seed as one curve, with a band from min
    to max; each draws a curve for each run, as always with --x time"""
    smooth: float = 0.0
    """picture: weight of the past in a moving average of each curve: from 0, no smoothing, to
    below 1"""


def main(argv: Sequence[str]) -> int:
    """Write the page or the picture and print its path; return 0.

    Raises:
        UsageError: a folder has no run, a flag has no effect on the page, no run has one of the
            named metrics, or the file can't be written.
    """
    flags = read_flags(Flags, argv, program("report"))
    if not 0 <= flags.smooth < 1:
        raise UsageError(
            f"--smooth is {flags.smooth:g}: it must be 0 (as measured) or more, and below 1"
        )
    # Matplotlib's warning about a character that no font has prints the character, which may be
    # part of a terminal's escape code.
    warnings.simplefilter("ignore")
    folders = find_runs(flags.folders)
    if not folders:
        raise UsageError("nothing to report: name folders of runs, or folders that hold some")
    if not flags.output.suffix:
        raise UsageError(f"--output is {flags.output}: it must end in .html, .png, .svg or .pdf")
    page = flags.output.suffix in (".html", ".htm")
    if page and (flags.metrics or (flags.x, flags.seeds, flags.smooth) != ("step", "mean", 0)):
        raise UsageError(
            "--metrics, --x, --seeds and --smooth are for an image: add --output curves.png"
        )
    runs = read_runs(folders)
    write: Callable[[], object]
    if page:
        write = partial(flags.output.write_text, page_of(runs), encoding="utf-8")
    else:
        together = flags.seeds == "mean"
        drawn = figure(drawable(runs), flags.metrics, flags.x, flags.smooth, together)
        write = partial(drawn.savefig, flags.output, dpi=120)
    try:
        write()
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown format
        reason = getattr(error, "strerror", error)
        raise UsageError(f"can't write {flags.output}: {reason}; change --output") from None
    print(flags.output)
    return 0
