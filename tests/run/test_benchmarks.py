"""The benchmarks run, with only some steps. No test checks a speed."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import (
    checkpoints,
    defaults,
    growth,
    jpegs,
    loading,
    packing,
    report,
    resuming,
    startup,
    steps,
)
from benchmarks.compare import Comparison
from benchmarks.ranks import CONTESTANTS, Setting, peer, project, start

SETTING = Setting(device="cpu", ranks=2, threads=1, data_dir=None)


def test_the_readme_has_the_tables_of_the_results() -> None:
    readme = report.README.read_text("utf-8")
    assert report.renewed(readme) == readme, "run python -m benchmarks.report"


def test_ratios_are_those_of_the_same_turn() -> None:
    comparison = Comparison("speed", "images/s", "bare", {"ours": [1, 8, 3], "bare": [2, 4, 3]})
    assert comparison.ratios == {"ours": 1, "bare": 1}
    assert comparison.medians == {"ours": 3, "bare": 3}


@pytest.mark.slow
def test_the_trainer_and_those_beside_it_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WARM_UP", 50)
    assert steps.ours(SETTING, 4, 50)["cpu ms"] > 0
    for name in ("bare", "reference"):  # the others need packages that no test does
        assert peer(SETTING, name, batch=4, warm_up=1, steps=3) > 0
    assert startup.joined(SETTING, ddp="yes") > 0
    assert all(defaults.changed(*change).is_dir() for change in defaults.CHANGES.values())


@pytest.mark.slow
def test_the_loading_of_images_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "WARM_UP", 1)
    monkeypatch.setattr(loading, "BATCH", 4)
    images = jpegs.write(tmp_path / "images", shards=2, each=40, edge=256)
    assert all(loading.ours(SETTING, kind, images, steps=3) > 0 for kind in loading.OURS.values())
    for loader in ("decoding", "files"):  # the others need packages that no test does
        assert loading.theirs(SETTING, loader, images, steps=3) > 0


@pytest.mark.slow
def test_what_follows_a_stop_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resuming, "BATCH", 4)
    monkeypatch.setattr(resuming, "STOP", 12)
    images = jpegs.write(tmp_path / "images", shards=4, each=40, edge=256)
    files, parquet = (
        resuming.verdict(*resuming.turn(SETTING, loader, images)) for loader in ("files", "parquet")
    )
    assert files.count("the same images") == 2
    assert parquet.endswith("with 3 other images")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_saves_are_timed(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "EXAMPLE", (12, 4))
    figures = checkpoints.median_milliseconds(SETTING, 0, strategy, at_once=True)
    assert figures["step"] > 0 and figures["save"] > 0


@pytest.mark.slow
def test_one_rank_of_many_is_played() -> None:
    few, many = (growth.play(SETTING, size, 1, "growing", what="parts") for size in (2, 64))
    assert many["fsdp MiB"] == pytest.approx(few["fsdp MiB"] / 32, rel=0.01)
    assert many["ddp MiB"] == few["ddp MiB"]
    assert many["shard files"] == 64 + 3
    assert growth.play(SETTING, 64, 1, "growing", what="fsdp")["files"] > 0
    assert growth.play(SETTING, 4, 1, "mesh")["descriptors"] > 0


@pytest.mark.slow
def test_the_memory_of_a_larger_model_is_measured() -> None:
    ranks, program = replace(SETTING, ranks=1), str(CONTESTANTS / "larger.py")
    found = start(
        ranks,
        program,
        "--strategy=fsdp",
        folder=project(example="text"),
        env={"BENCHMARK_WORLD": "8"},
    )
    assert found["MiB"] > 0 and found["step ms"] > 0


@pytest.mark.slow
def test_a_slow_disk_counts_the_files_that_are_opened(tmp_path: Path) -> None:
    if not shutil.which("fusermount3"):
        pytest.skip("there is no FUSE: run scripts/install-fuse.sh")
    (tmp_path / "file").write_text("text")
    notes: list[str] = []
    with packing.mounted(tmp_path, notes) as shared:
        assert [(shared / "file").read_text() for _ in range(3)] == ["text"] * 3
    assert notes == ["Opened: 3 files."]
