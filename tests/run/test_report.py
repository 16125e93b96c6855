"""The page about runs is right, small enough for an e-mail, and runs no code in a browser."""

import json
import math
import re
import shutil
import signal
from base64 import b64decode
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.slurm.browser import ARGS, NAMES

from .conftest import PACED, Job, srun

FLAGS = ("--log-every=5", "--checkpoint-every=10", "--validate-every=10", "--validation-size=500")
EVIL = "\x1b]0;x\x07\u202e<script>document.title='taken'</script><img src=x onerror=alert(1)>\udcff"
MEGABYTE = 1_000_000
CPU = "system/cpu_percent"


class Read(HTMLParser):
    """What is in a page: its words, its curves, and its other pictures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.kind: str | None = None
        self.curves: list[bytes] = []
        self.pictures: list[bytes] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "figure":
            self.kind = dict(attrs)["class"]
        if tag == "img":
            start, _, data = str(dict(attrs)["src"]).partition(",")
            assert start == "data:image/png;base64"
            (self.curves if self.kind == "curve" else self.pictures).append(b64decode(data))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


Report = Callable[..., Read]


@pytest.fixture(scope="module")
def report(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return a function that writes a page about some folders and reads it."""

    def write(*folders: Path, output: Path | None = None) -> Read:
        from demo.tools import report

        output = output or tmp_path_factory.mktemp("page") / "report.html"
        assert report.main([*map(str, folders), f"--output={output}"]) == 0
        assert output.stat().st_size < MEGABYTE
        return Read(output.read_text("utf-8"))

    return write


@pytest.fixture(scope="module")
def stopped(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of two ranks that was stopped, and went on to its end."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    job = srun(project, folder, 2, *FLAGS, "--lr=0.123", "--clip-norm=None", **PACED)
    job.stop(10, number=signal.SIGUSR2)
    job = srun(project, folder, 2, *FLAGS, "--lr=0.123", "--clip-norm=None").wait()
    assert job.summary["resumed_from_step"]
    return job


@pytest.fixture(scope="module")
def seeds(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of a setting, of which one is stopped and one failed, and one of another."""
    root = tmp_path_factory.mktemp("seeds") / "seeds"
    flags = (*FLAGS, "--max-steps=20")
    jobs = [srun(project, root / str(seed), 1, *flags, f"--seed={seed}") for seed in (0, 1)]
    jobs += [srun(project, root / "2", 1, *flags, "--seed=2", **PACED)]
    jobs += [srun(project, root / "other", 1, *flags, "--seed=0", "--lr=0.01")]
    jobs[2].wait_for_step(10)
    jobs[2].processes[0].send_signal(signal.SIGUSR2)
    assert [job.wait().codes for job in jobs] == [[0], [0], [75], [0]]
    return root


@pytest.mark.shows("python -m demo report RUN_DIR")
def test_a_page_says_everything_of_a_run(report: Report, stopped: Job) -> None:
    page, summary = report(stopped.run_dir), stopped.summary
    for name in ("accuracy", "loss"):
        assert f"{summary[f'test_{name}']:.6g} test {name}" in page.text
    for text in (
        f"{stopped.run_dir.parent.name}/stopped finished Made at 2",
        "; all times are ",
        f"{stopped.run_dir}, last heard",
        "cost 0:0",
        " in 2 attempts",
        "lr=0.123",
        "world size 2, srun",
        f"--run-dir={stopped.run_dir}",
        "2: 2",
        "Grey: an attempt",
        f"more in {stopped.run_dir}/summary.json",
    ):
        assert text in page.text, text
    for text in ("checkpoint_every=10", "clip_norm=None"):
        assert text in page.text
    assert "accumulate" not in page.text
    figures = {re.sub(r"-\d+$", "", path.stem) for path in stopped.run_dir.glob("figures/*.png")}
    assert len(page.pictures) == len(figures) > 0
    assert len(page.curves) == 5  # loss, lr and accuracy; speed and CPUs over time
    assert "Left out" not in page.text
    newest = max(stopped.run_dir.glob("figures/*.png"))
    assert newest.read_bytes() in page.pictures


def test_stops_are_marked_where_they_were(project: Path, stopped: Job, tmp_path: Path) -> None:
    from demo.tools.report import content as report
    from demo.tools.report.curves import Group, read_runs
    from demo.tools.report.picture import UNITS

    copied = shutil.copytree(stopped.run_dir, tmp_path / "copied", copy_function=shutil.copyfile)
    (curves,) = read_runs([copied])
    seen: dict[str, Any] = {}

    class Kept(report.Page):
        def add_panel(
            self, name: str, groups: list[Group], _: object, x: str = "step", **marks: list
        ) -> None:
            seen[name.rpartition(": ")[2]] = groups[0].runs[0].lines, x, marks

    report._add_curves(Kept(""), curves, 0)
    resumed = stopped.summary["resumed_from_step"]
    (step,) = seen["loss"][2]["stops"]
    assert step == max(line["step"] for line in curves.lines if line["step"] <= resumed)
    lines, unit, marks = seen[CPU]
    first, second = marks["spans"]
    began = lines[0]["time"]
    times = [(line["time"] - began) / UNITS[unit] for line in curves.lines]
    assert 0 == first[0] < times[0] < first[1] <= second[0] < times[-1] <= second[1] + 1
    # The curve has a gap where no process was there.
    gaps = [each["time"] - began for each in lines if math.isnan(each.get(CPU, 0))]
    assert gaps == [0, pytest.approx(second[0] * UNITS[unit])]
    assert all(line[CPU] > 0 for line in curves.lines if CPU in line)


def test_seeds_are_one_curve_that_names_those_that_did_not_end(
    project: Path, report: Report, seeds: Path
) -> None:
    from demo.tools.report.curves import read_runs
    from demo.tools.report.picture import figure as draw
    from demo.tools.survey import find_runs

    runs = read_runs(find_runs([seeds]))
    figure = draw(runs)
    label = "seeds lr=0.15 (mean of 3 seeds; seed 2 preempted)"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == [label, "seeds/other lr=0.01"]
    assert len(draw(runs, together=False).legends[0].get_texts()) == 4
    over_time = draw(runs, x="time").legends[0].get_texts()
    assert len(over_time) == 4

    page = report(seeds)
    assert label in page.text and "min to max" in page.text
    assert f"{label}: mean ± deviation" in page.text
    tested = [json.loads((seeds / f"{n}/summary.json").read_text())["test_loss"] for n in (0, 1)]
    assert f"{fmean(tested):.6g} ± {stdev(tested):.2g} (2 seeds)" in page.text
    assert "CPU-hours" in page.text and "GPU-hours" not in page.text
    assert "seeds/2 preempted" in page.text and "seed=2" in page.text
    assert page.text.count("The end of") == 4


def test_a_run_that_goes_on_and_then_fails(project: Path, report: Report, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 2, *FLAGS, "--max-steps=1000", **PACED)
    try:
        job.wait_for_step(5)
        assert "run running" in report(job.run_dir).text
        job.processes[1].send_signal(signal.SIGKILL)
    finally:
        job.processes[0].wait(60)
        job.kill()
    page = report(job.run_dir)
    assert "run failed" in page.text and "lost another rank" in page.text
    losses = [line["train/loss"] for line in job.metrics() if "train/loss" in line]
    assert f"{losses[-1]:.6g} train/loss" in page.text and len(page.curves) >= 4


def write_run(folder: Path, **settings: object) -> Path:
    """Write the folder of a run of 300 steps, with EVIL as text wherever possible."""
    (folder / "attempts").mkdir(parents=True)
    (folder / "figures").mkdir()
    state = {"status": "failed", "error": EVIL, "job": None, "host": EVIL, "warnings": [EVIL]}
    state |= {"best_metric": EVIL, "best_score": 0.5, "progress": 0.5, "step": 300}
    lines = [{"step": n, "time": 1e9 + n, "train/loss": 1 / n, EVIL: n} for n in range(1, 301)]
    git = {"commit": EVIL, "changes": EVIL, "diff": f"{EVIL}\n+\tdone\n"}
    facts = {"command": ["x", "train", EVIL], "git": git, "hostnames": [EVIL], "launcher": EVIL}
    facts |= {"packages": {"torch": EVIL}, "template": {"_commit": EVIL}, "world_size": 2}
    attempt = {"host": EVIL, "system": EVIL, "pid": 1, "started": 1, "cluster": None, "job": EVIL}
    for name, text in {
        "status.json": json.dumps(state),
        "provenance.json": json.dumps(facts),
        "config.yaml": json.dumps({EVIL: EVIL, "lr": EVIL, "seed": 1, **settings}),
        "summary.json": json.dumps({f"test_{EVIL}": 0.25, "test_text": EVIL}),
        "metrics.jsonl": "".join(f"{json.dumps(line)}\n" for line in lines),
        "log.txt": f"{EVIL}\n\x9b31mred\r\n",
        "attempts/1.json": json.dumps({**attempt, "restart": 0, "began": 1e9}),
        "attempts/2.json": json.dumps({**attempt, "restart": 1, "began": 1.1e9}),
        "attempts/3.json": json.dumps({**attempt, "restart": 2, "began": "soon"}),
        "attempts/4.json": json.dumps({**attempt, "restart": 2, "began": 0}),
    }.items():
        (folder / name).write_text(text, "utf-8", errors="surrogateescape")
    Image.new("RGB", (8, 8)).save(folder / "figures" / "a-00000001.png")
    return folder


def test_foreign_text_is_shown_and_does_nothing(report: Report, tmp_path: Path) -> None:
    run = write_run(tmp_path / EVIL.replace("/", "|"))
    other = write_run(tmp_path / "other", seed=2)
    for page in (report(run), report(run, other)):
        assert {"script", "link", "iframe", "object", "svg"} & {*page.tags} == set()
        assert page.curves and page.pictures
        text = "".join(page.words)
        assert all(c.isprintable() or c == "\n" for c in text)
        shown = "\\x1b]0;x\\x07\\u202e<script>document.title='taken'</script><img src=x onerror="
        assert text.count(shown) > 10
        assert "\\x9b31mred" in text and "+       done" in text


def test_what_is_damaged_or_missing_hides_nothing_else(report: Report, tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole")
    (tmp_path / "secret.png").write_bytes(b"\x89PNG hunter2" + bytes(16))
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    hows = ("gone", "noise", "deep", "other", "folder")
    for number, name in enumerate(names):
        for how in (hows[number % 5], "link"):
            run = shutil.copytree(whole, tmp_path / how / str(number))
            path = run / name
            path.unlink()
            if how == "noise":
                path.write_bytes(b"\x89PNG\xff\x00{" * 3)
            elif how == "deep":
                path.write_text("[" * 50_000)
            elif how == "other":  # what it should not be
                path.write_text('{"status": 7, "git": {"commit": {}}, "began": "x", "lr": [1e999]}')
            elif how == "link":
                path.symlink_to(tmp_path / "secret.png")
            elif how == "folder":
                path.mkdir()
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/config.yaml").write_text("lr: 0x" + "f" * 60_000)
    extremes = [{"step": 10**400, "time": 1}, {"step": -(10**299), "time": 1e299, "a/b": 1e299}]
    extremes += [{"step": 1, "time": -1e299, "a/b": -1e299}, {"step": True, "a/b": 1, "time": True}]
    text = "".join(f"{json.dumps(each)}\n" for each in extremes)
    (tmp_path / "lines/metrics.jsonl").write_text(text)
    from demo.tools import report as module
    from demo.tools.report.curves import read_runs
    from demo.tools.survey import find_runs

    assert "lines" in module.page_of(read_runs([whole, tmp_path / "lines"]))
    for each in read_runs(find_runs([tmp_path])):
        text = module.page_of([each])
        assert each.run.folder.name in text and len(text.encode()) < MEGABYTE
        assert b"hunter2" not in b"".join(Read(text).pictures)
        if each.run.folder.name.isdecimal():
            assert "script" not in Read(text).tags and text.count("&lt;script") > 5


@pytest.mark.slow
def test_a_page_has_at_most_a_megabyte(report: Report, tmp_path: Path) -> None:
    name = "n" * 120
    run = write_run(tmp_path / name / name, **{f"{'s' * 1000}{n}": "&" * 1000 for n in range(20)})
    noise = Image.effect_noise((640, 480), 99)
    for number in range(40):
        noise.save(run / f"figures/picture{number:02}-{number:08}.png")
    assert (run / "figures/picture39-00000039.png").stat().st_size > 250_000
    Image.new("RGB", (8, 8)).save(run / f"figures/{'f' * 200}-00000007.png")
    with (run / "log.txt").open("w") as file:
        file.writelines(f"{number} {'<' * 1000}\n" for number in range(100_000))
    facts = json.loads((run / "provenance.json").read_text())
    facts["git"]["diff"] = "<" * 100_000
    (run / "provenance.json").write_text(json.dumps(facts))
    metrics = [f"{'m' * 1000}{n}/loss" for n in range(30)]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1500):
            values = dict.fromkeys(metrics, (step * 7919) % 104729)
            file.write(f"{json.dumps({'step': step, **values})}\n")
    page = report(run)
    assert "99999 <<<" in page.text and "99940 <<<" not in page.text
    assert "megabyte" in page.text and "picture39" in page.text
    assert len(page.curves) > 3
    # Many runs: the table comes first, and says how many more there are.
    for number in range(120):
        copy = tmp_path / "many" / f"{name}{number}"
        copy.mkdir(parents=True)
        for file in ("config.yaml", "status.json"):
            shutil.copy(run / file, copy)
    page = report(tmp_path / "many")
    assert page.tags.count("tr") > 100 and "20 rows of the" in page.text


def test_the_numbers_of_all_runs_come_before_the_curves_of_any(
    report: Report, stopped: Job, tmp_path: Path
) -> None:
    for number in range(14):
        copied = shutil.copytree(stopped.run_dir, tmp_path / "many" / f"run-{number}")
        settings = (copied / "config.yaml").read_text().replace("lr: 0.123", f"lr: 0.{number}")
        (copied / "config.yaml").write_text(settings)
    page = report(tmp_path / "many")
    assert page.text.count("Where it came") == 14 and len(page.curves) > 20
    assert page.text.index("many/run-2 ") < page.text.index("many/run-10 ")
    assert " parts: many/run-" in page.text.partition(" run status ")[0]


def test_folders_of_a_run_that_are_links_are_refused(
    project: Path, report: Report, tmp_path: Path
) -> None:
    from demo.engine.errors import UsageError
    from demo.plugins.usage import costs as usage
    from demo.tools import profile

    run, secret = write_run(tmp_path / "run"), write_run(tmp_path / "secret")
    (secret / "profile").mkdir()
    (secret / "profile/x_rank_0.1.txt").write_text("hunter2")
    Image.effect_noise((1200, 1200), 99).save(secret / "figures" / "hunter2-00000001.png")
    (secret / "attempts/1-usage.json").write_text(json.dumps(asdict(usage.Usage(1e9, 2e9))))
    assert usage.total(secret) and "hunter2" in report(secret).text
    for name in ("figures", "attempts", "profile"):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).symlink_to(secret / name)
    page = report(run)
    assert "hunter2" not in page.text and not page.pictures
    assert usage.total(run) is None
    with pytest.raises(UsageError, match="is a link"):
        profile.main([str(run)])
    (tmp_path / "mine").symlink_to(secret)  # a run folder may be one
    assert "hunter2" in report(tmp_path / "mine").text


def test_a_browser_shows_it_without_network_and_script(
    report: Report, stopped: Job, seeds: Path, tmp_path: Path
) -> None:
    evil = write_run(tmp_path / "evil")
    pages = {"one": (stopped.run_dir,), "many": (seeds,), "evil": (evil, stopped.run_dir)}
    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGS)
        page, asked, said = browser.new_context(offline=True).new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        for name, folders in pages.items():
            file = tmp_path / f"{name}.html"
            report(*folders, output=file)
            page.goto(file.as_uri())
            assert page.title() != "taken"
            for each in page.locator("table.runs a").all():
                fold = page.locator(str(each.get_attribute("href")))
                assert not fold.locator("section").is_visible()
                fold.locator("summary").first.click()
                assert fold.locator("section").is_visible()
            for text in ("Curves", "Where it came from", "The end of the log"):
                assert page.get_by_text(text, exact=True).last.is_visible()
            for width in (1400, 400):
                page.set_viewport_size({"width": width, "height": 900})
                wide, pictures = page.evaluate(LOOK)
                assert wide <= width
                assert pictures and all(found >= 8 for found in pictures)
                page.screenshot(path=tmp_path / f"{name}-{width}.png", full_page=True)
        browser.close()
    assert asked == [(tmp_path / f"{name}.html").as_uri() for name in pages]
    assert said == []  # such as that something was blocked


# The width that a page takes, and the widths of its pictures as they were decoded.
LOOK = """() => [
    document.documentElement.scrollWidth,
    [...document.images].map(each => each.naturalWidth),
]"""
