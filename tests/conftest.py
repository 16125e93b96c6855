"""Shared by all tests: the option --no-skips, what each target runs, and all variants."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from classes import Classes, Variant, render_all
from once import once
from renderer import Renderer, copy_template
from tiers import is_full

# This test needs an environment with another PyTorch, which `make test-torch` makes.
collect_ignore = [] if os.environ.get("OTHER_PYTHON") else ["run/test_torch_versions.py"]

NIGHTLY = ("nightly", True)  # a property of the slow tests that were taken
LEFT_OUT = pytest.StashKey[Counter[str]]()

# A process that a script starts in the background ignores SIGINT (Ctrl-C). Without this line, the
# processes that the tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --no-skips, for CI, where each test must run, and --nightly-share."""
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failure")
    text = "run every Nth slow test as if it were not slow, beginning with another one each day"
    parser.addoption("--nightly-share", type=int, metavar="N", help=text)


def _fail_if_skipped(
    report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
) -> None:
    """Turn a skip into a failure. An expected failure (xfail), also reported as skipped, stays."""
    if report.skipped and config.getoption("no_skips") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}\n(--no-skips: what is skipped has not passed)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Apply --no-skips to tests."""
    report = yield
    _fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Apply --no-skips to whole modules."""
    report = yield
    _fail_if_skipped(report, collector.config)
    return report


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out; of the slow ones, take those of today."""
    for item in items:
        if is_full(item.path):
            item.add_marker("full")
    if share := config.getoption("nightly_share"):
        slow = [
            each
            for each in items
            if each.get_closest_marker("slow") and not each.nodeid.startswith("tests/gpu/")
        ]
        for item in slow[date.today().toordinal() % share :: share]:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
            item.user_properties.append(NIGHTLY)


def pytest_configure(config: pytest.Config) -> None:
    """Make room for what is left out."""
    config.stash[LEFT_OUT] = Counter()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what the options leave out, by the target that runs it."""
    for item in items:
        target = "test-nightly" if item.get_closest_marker("slow") else "test-all"
        item.config.stash[LEFT_OUT][target] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401
    """Take the counts of the processes: each of them collects all tests."""
    node.config.stash[LEFT_OUT] |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of a process to the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    """Say what was left out, and how to run it, and which nightly tests ran."""
    reports = [each for several in terminalreporter.stats.values() for each in several]
    drawn = {each.nodeid for each in reports if NIGHTLY in getattr(each, "user_properties", ())}
    for name in sorted(drawn):
        terminalreporter.write_line(f"of the nightly tests: {name}")
    if config.option.markexpr:
        for target, tests in sorted(config.stash[LEFT_OUT].items()):
            terminalreporter.write_line(f"left out: {tests} tests that `make {target}` runs")


@pytest.fixture(scope="session", autouse=True)
def _types_are_read_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let mypy keep what it knows of torch and the like, for all projects of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPY_CACHE_DIR", str(tmp_path_factory.mktemp("mypy")))
        yield


@pytest.fixture(scope="session")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Classes:
    """All variants with their files, rendered once by the first process that needs them."""

    def make(folder: Path) -> list[Variant]:
        return render_all(Renderer(copy_template(folder / "template")))

    return Classes(once(tmp_path_factory, "variants", make))


@pytest.fixture
def pipx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put pipx on PATH, in an environment of its own; return the folder of what it installs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = Path(sys.executable).parent
    (folder / "pipx").write_text(f'#!/bin/sh\nexec {tools}/uvx --quiet pipx "$@"\n')
    (folder / "pipx").chmod(0o755)
    monkeypatch.setenv("PIPX_HOME", str(tmp_path / "pipx"))
    monkeypatch.setenv("PIPX_BIN_DIR", str(folder))
    monkeypatch.setenv("UV_SYSTEM_CERTS", "1")  # this machine's own, as pip takes them
    monkeypatch.setenv("PATH", f"{folder}:{tools}:{os.environ['PATH']}")
    return folder
