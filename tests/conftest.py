"""Options that all tests share."""

from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --no-skips, for CI: there, a test that did not run has not passed."""
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failure")


def _fail_if_skipped(
    report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
) -> None:
    """Turn a skip into a failure. An expected failure (xfail) reports as skipped too, and stays."""
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
