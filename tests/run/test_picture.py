"""Curves are drawn from the files of runs, and can be distinguished."""

import json
import os
import re
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from .conftest import Launch

CURVE = [{"step": step, "train/loss": 1 / step, "train/lr": 0.1} for step in range(10, 410, 10)]


@pytest.fixture
def plot(project: Path) -> SimpleNamespace:
    """The command `report`, and what draws its pictures."""
    from demo.tools import report
    from demo.tools.report import curves, picture
    from demo.tools.survey import find_runs

    def load(folders: list[Path]) -> list[curves.Curves]:
        return curves.drawable(curves.read_runs(find_runs(folders)))

    return SimpleNamespace(**vars(picture), load=load, main=report.main)


def write_run(folder: Path, lines: list[dict[str, Any]] = CURVE, **settings: object) -> Path:
    """Write the files of a run that the plots read."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(json.dumps({"run_dir": str(folder), **settings}))
    return folder


def panels(figure: Figure) -> dict[str, Axes]:
    """Return the panels by title."""
    return {axes.get_title(): axes for axes in figure.axes}


def legend(figure: Figure) -> list[str]:
    """Return the texts in the legend of the runs."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def width_of(colour: str, axes: Axes, picture: np.ndarray) -> float:
    """Return the share of a panel, from left to right, in which a picture shows a colour.

    Args:
        axes: the panel, in a figure that was drawn to the picture.
        picture: from 0 to 1, of shape (height, width, 3 or 4), the top row first.
    """
    left, bottom, right, top = (round(side) for side in axes.get_window_extent().extents)
    inside = picture[len(picture) - top : len(picture) - bottom, left:right, :3]
    columns = (np.abs(inside - to_rgb(colour)).max(axis=2) < 0.02).any(axis=0).nonzero()[0]
    return np.ptp(columns) / (right - left) if len(columns) else 0.0


def test_real_runs_are_drawn_and_told_apart(
    plot: SimpleNamespace, launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    flags = ("--log-every=5", "--validation-size=1000")
    alone = launch(1, *flags, "--lr=0.1", name="runs/1")
    launch(2, *flags, "--lr=0.001", name="runs/2")
    output = tmp_path / "plot.png"
    assert plot.main([str(root), f"--output={output}"]) == 0
    assert capsys.readouterr().out == f"{output}\n"

    figure = plot.figure(plot.load([root]))
    assert list(panels(figure)) == ["loss", "lr", "samples per second", "accuracy"]
    assert legend(figure) == ["runs/1 lr=0.1 ranks=1", "runs/2 lr=0.001 ranks=2"]
    figure.set_dpi(120)
    figure.draw_without_rendering()  # now it knows where its panels are
    picture = imread(output)
    for colour in ("C0", "C1"):
        assert width_of(colour, panels(figure)["loss"], picture) > 0.8
        assert width_of(colour, panels(figure)["lr"], picture) > 0.8
    assert width_of("C2", panels(figure)["loss"], picture) == 0

    train, *_ = panels(figure)["loss"].lines
    logged = [line for line in alone.metrics() if "train/loss" in line]
    assert list(train.get_xdata()) == [line["step"] for line in logged] == list(range(5, 35, 5))
    assert list(train.get_ydata()) == [line["train/loss"] for line in logged]


def test_twelve_runs_have_twelve_colours_and_names(plot: SimpleNamespace, tmp_path: Path) -> None:
    for number in range(12):
        curve = [{**line, "train/loss": number} for line in CURVE]
        write_run(tmp_path / "a" / f"trial-{number:02}", curve, lr=number, momentum=0.9)
    figure = plot.figure(plot.load([tmp_path / "a"]), smooth=0.5)
    assert legend(figure) == [f"a/trial-{number:02} lr={number}" for number in range(12)]
    figure.savefig(tmp_path / "plot.png", dpi=60)
    drawn = [line for line in panels(figure)["loss"].lines if line.get_alpha() is None]
    assert len({to_rgb(line.get_color()) for line in drawn}) == 12
    # The same name in two experiments; and more settings differ than a legend has room for.
    write_run(tmp_path / "b" / "trial-00", momentum=0, lr=7, seed=3, epochs=9)
    both = plot.load([tmp_path / "a" / "trial-00", tmp_path / "b"])
    assert legend(plot.figure(both)) == ["a/trial-00", "b/trial-00"]


def test_smoothing_draws_what_was_measured_behind(plot: SimpleNamespace, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    figure = plot.figure(plot.load([tmp_path]), smooth=0.6)
    behind, before = panels(figure)["loss"].lines
    assert list(behind.get_ydata()) == [line["train/loss"] for line in CURVE]
    assert behind.get_alpha() < 1
    first, second, third, *_ = before.get_ydata()
    assert (first, second) == pytest.approx((0.1, 0.6 * 0.1 + 0.4 * 0.05))
    assert third == pytest.approx(0.6 * second + 0.4 / 30)
    (rate,) = panels(figure)["lr"].lines
    assert set(rate.get_ydata()) == {0.1}


def test_a_panels_legend_shows_what_is_drawn(plot: SimpleNamespace, tmp_path: Path) -> None:
    """One epoch gives one validation value, which is a dot."""
    validated = [{"step": 400, "validation/loss": 0.5}]
    write_run(tmp_path / "run", CURVE + validated)
    train, validation = panels(plot.figure(plot.load([tmp_path])))["loss"].get_legend().get_lines()
    assert (train.get_linestyle(), train.get_marker()) == ("-", "None")
    assert (validation.get_linestyle(), validation.get_marker()) == ("--", "o")
    # With a second value, and another run that has many.
    write_run(tmp_path / "two", [*CURVE, {"step": 200, "validation/loss": 0.6}, *validated])
    (*_, validation) = panels(plot.figure(plot.load([tmp_path])))["loss"].get_legend().get_lines()
    assert (validation.get_linestyle(), validation.get_marker()) == ("--", "o")
    # What is in no line of the file is not in the legend either.
    write_run(tmp_path / "nan" / "run", [*CURVE, {"step": 400, "validation/loss": float("nan")}])
    assert not panels(plot.figure(plot.load([tmp_path / "nan"])))["loss"].get_legend()


def test_over_time(plot: SimpleNamespace, tmp_path: Path) -> None:
    lines = [
        {"step": 50, "time": 1000.0, "train/loss": 1.0},
        {"step": 100, "time": 1600.0, "epoch": 1, "train/loss": 0.9},
        {"step": 160, "time": 4600.0, "epoch": 1, "train/loss": float("nan")},
        {"step": 190, "time": 8200.0, "train/loss": 0.7},
    ]
    write_run(tmp_path / "run", lines)
    (axes,) = plot.figure(plot.load([tmp_path]), x="time").axes
    assert axes.get_xlabel() == "hours"
    assert list(axes.lines[0].get_xdata()) == pytest.approx([0, 1 / 6, 2])


def test_a_line_that_is_being_written_and_a_run_that_just_began(
    plot: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "train/lo')
    began = write_run(tmp_path / "began", [])
    (found,) = plot.load([tmp_path])
    assert found.lines == CURVE
    assert f"{began} is left out" in capsys.readouterr().err


def test_what_others_wrote_ends_no_picture(
    plot: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "folder/metrics.jsonl").mkdir(parents=True)
    (tmp_path / "folder/config.yaml").touch()
    huge = [{"step": 10**400, "train/loss": 1}, {"step": 1, "train/loss": 10**400}]
    write_run(tmp_path / "huge", [*huge, {"step": 2, "train/loss": 1.0, r"$\frac{$": 2}])
    write_run(tmp_path / "half", [{"step": 1, "a/\ud800": 1.0}])  # half of a character
    write_run(tmp_path / os.fsdecode(b"caf\xe9"))  # a name that is not UTF-8
    write_run(tmp_path / "odd", [{"step": 1, "train/loss": "x", "time": "soon", "epoch": "one"}])
    pipe = write_run(tmp_path / "pipe") / "config.yaml"
    pipe.unlink()
    os.mkfifo(pipe)
    for x in ("step", "time"):
        assert plot.main([str(tmp_path), f"--output={tmp_path}/drawn.png", f"--x={x}"]) == 0
        assert "/folder is left out" in capsys.readouterr().err
    assert plot.main([str(tmp_path / "odd"), f"--output={tmp_path}/odd.png"]) == 0


@pytest.mark.parametrize("suffix", ["svg", "pdf", "PNG"])
def test_the_suffix_says_the_format(plot: SimpleNamespace, tmp_path: Path, suffix: str) -> None:
    write_run(tmp_path / "run")
    output = tmp_path / f"plot.{suffix}"
    plot.main([str(tmp_path), "--metrics", "train/lr", "train/loss", f"--output={output}"])
    signatures = {"svg": b"<?xml", "pdf": b"%PDF-", "PNG": b"\x89PNG"}
    assert output.read_bytes().startswith(signatures[suffix])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "^nowhere is not"),
        ([], "nothing to report"),
        (["{}/empty"], "nothing to report"),
        (["{}/run", "--output=x.html", "--x=time"], "--x, .* add --output"),
        (["{}/run", "--metrics", "loss"], "'loss' .* train/loss, train/lr"),
        (["{}/run", "--smooth=1"], "0 .* below 1"),
        (["{}/run", "--output=plot.txt"], "can't write plot.txt: .* png, .*svg"),
        (["{}/run", "--output=plot"], "--output is plot: .* .html, .png"),
        (["{}/run", "--output=/proc/plot.png"], "can't write /proc/plot.png"),
        (["{}/run", "--output=/proc/x.html"], "can't write /proc/x.html: .* change --output"),
    ],
)
def test_mistakes(plot: SimpleNamespace, tmp_path: Path, flags: list[str], message: str) -> None:
    from demo.engine.errors import UsageError

    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message) as raised:
        plot.main(["--output=plot.png", *(flag.format(tmp_path) for flag in flags)])
    assert "\n" not in str(raised.value)


def test_what_is_drawn_as_a_mean_of_seeds(plot: SimpleNamespace, tmp_path: Path) -> None:
    """Runs with the same code and the same settings except the seed, each at least once."""

    def labels(*runs: tuple[str, dict[str, object], str]) -> list[str]:
        root = tmp_path / str(len(os.listdir(tmp_path)))
        for name, settings, diff in runs:
            facts = {"git": {"commit": f"{diff:.9}", "diff": diff}, "world_size": 1}
            folder = write_run(root / name, **settings)
            (folder / "provenance.json").write_text(json.dumps(facts))
        return [
            label.removeprefix(f"{root.name} ") for label in legend(plot.figure(plot.load([root])))
        ]

    mean = "(mean of 2 seeds; seed 1 unknown; seed 2 unknown)"
    one, two = {"seed": 1, "lr": 0.1}, {"seed": 2, "lr": 0.1}
    assert labels(("a", one, ""), ("b", two, "")) == [mean]
    # What has no effect on a curve may differ.
    assert labels(("a", {**one, "tags": ["x"]}, ""), ("b", {**two, "experiment": "y"}, "")) == [
        mean
    ]
    other = {"seed": 3, "lr": 0.2}
    assert labels(("a", one, ""), ("b", two, ""), ("c", other, ""))[0] == f"lr=0.1 {mean}"
    both = labels(("a", one, "1st"), ("b", two, "1st"), ("c", one, "2nd"), ("d", two, "2nd"))
    changes = [f"changes={sha256(diff.encode()).hexdigest()[:6]}" for diff in ("1st", "2nd")]
    assert both == [f"commit={n} {c} {mean}" for n, c in zip(("1st", "2nd"), changes, strict=True)]
    # Of a commit with changes that differ; and in more settings than a name has room for.
    ninth, tenth = "123456789", "123456789x"
    changed = labels(("a", one, ninth), ("b", two, ninth), ("c", one, tenth), ("d", two, tenth))
    assert all(re.fullmatch(rf"changes=\w{{6}} {re.escape(mean)}", label) for label in changed)
    assert len({*changed}) == 2
    many = dict.fromkeys("wxyz", 1)
    third, fourth = ("c", {**many, "seed": 1}, ""), ("d", {**many, "seed": 2}, "")
    assert labels(("a", one, ""), ("b", two, ""), third, fourth) == [mean, f"{mean} (2)"]
    # Another code, a repetition, and settings that can't be read are no sample of seeds.
    for runs in (
        (("a", one, ""), ("b", two, "+ another line")),
        (("a", one, ""), ("b", one, "")),
        (("a", one, ""), ("b", two, ""), ("c", two, "")),
        (("a", {"lr": 1}, ""), ("b", {"lr": 1}, "")),
    ):
        assert not any("mean" in label for label in labels(*runs)), runs


def test_a_mean_is_pale_where_a_seed_has_no_value(plot: SimpleNamespace, tmp_path: Path) -> None:
    for seed, steps in enumerate((range(1, 5), range(1, 4), range(1, 6, 2))):
        lines = [{"step": step, "train/loss": float(step * 10**seed)} for step in steps]
        write_run(tmp_path / str(seed), lines, seed=seed)
    (axes,) = plot.figure(plot.load([tmp_path])).axes
    pale, whole = axes.lines
    assert list(pale.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(pale.get_ydata()) == [37, 11, 111, 4, 500]
    assert [x for x, y in zip(whole.get_xdata(), whole.get_ydata(), strict=True) if y == y] == [
        1,
        3,
    ]
    assert pale.get_alpha() < 1 and whole.get_alpha() is None
    (band,) = axes.collections[0].get_paths()
    assert {(x, y) for x, y in band.vertices} == {
        (1, 1), (1, 100), (2, 2), (2, 20), (3, 3), (3, 300)
    }  # fmt: skip
