"""The record of `make test-gpu`, which scripts/gpu_record.py keeps and shows in docs/gpu.md."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from renderer import TEMPLATE

from scripts import gpu_record

MACHINE = {
    "date": "2026-12-01",
    "python": "3.12.4",
    "torch": "2.14.0+cu130",
    "gpus": 2,
    "gpu": "NVIDIA H100 80GB HBM3",
    "driver": "580.65.06",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "cudnn": 91002,
}
PASSED = {"outcome": "passed"}
RECORD = {
    "machine": MACHINE,
    "tests": {
        "test_a_stopped_run_goes_on_bit_for_bit[--compile --workers=2-1]": PASSED,
        "test_a_stopped_run_goes_on_bit_for_bit[--strategy=fsdp-2]": {"outcome": "failed"},
        "test_a_slow_rank_is_named": {"outcome": "skipped", "reason": "needs several GPUs"},
        "test_all_precisions_learn": PASSED,
    },
    "figures": {
        "GPT, MFU": {"value": 34.21456, "unit": "%"},
        "energy of a run, relative to NVML's counter": {"value": 1.02, "unit": ""},
    },
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The script and its page, in a folder of their own."""
    for file in ("scripts/gpu_record.py", "docs/gpu.md"):
        (tmp_path / file).parent.mkdir()
        shutil.copy(TEMPLATE / file, tmp_path / file)
    return tmp_path


def keep(copy: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Let the script keep a record."""
    (copy / "sent.json").write_text(text)
    command = [sys.executable, "scripts/gpu_record.py", "sent.json"]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True)


def rows(page: Path) -> dict[str, list[str]]:
    """Return the cells of the rows between the marks, by their first cell."""
    made = page.read_text().split(gpu_record.BEGIN)[1].split(gpu_record.END)[0]
    cells = [line.strip("| ").split(" | ") for line in made.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in cells}


def test_records_stand_side_by_side(copy: Path) -> None:
    page = copy / "docs/gpu.md"
    before, after = (
        page.read_text().split(gpu_record.BEGIN)[0],
        page.read_text().split(gpu_record.END)[1],
    )
    assert keep(copy, json.dumps(RECORD)).returncode == 0
    assert page.read_text().startswith(before) and page.read_text().endswith(after)
    found = rows(page)
    assert found["2026-12-01"] == [
        "NVIDIA H100 80GB HBM3", "2", "2.14.0+cu130", "13.0", "2.28.9", "580.65.06"
    ]  # fmt: skip
    assert found["a stopped run goes on bit for bit"] == ["1 passed, 1 failed"]
    assert found["a slow rank is named"] == ["needs several GPUs"]
    assert found["GPT, MFU [%]"] == ["34.21"]

    before = page.read_text()
    assert keep(copy, json.dumps(RECORD)).returncode == 1 and page.read_text() == before

    later = {**RECORD, "machine": {**MACHINE, "date": "2027-01-01"}, "figures": {}}
    assert keep(copy, json.dumps(later)).returncode == 0
    found = rows(page)
    assert found["what"] == [f"{day}, {MACHINE['gpu']}" for day in ("2027-01-01", "2026-12-01")]
    assert found["all precisions learn"] == ["passed", "passed"]
    assert found["GPT, MFU [%]"] == ["", "34.21"]


def changed(**parts: Any) -> str:  # noqa: ANN401
    """Return a record with other parts."""
    return json.dumps({**RECORD, **parts})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        changed(machine={**MACHINE, "gpu": "<script>"}),
        changed(machine={**MACHINE, "driver": "1 | 2"}),
        changed(machine={name: MACHINE[name] for name in MACHINE if name != "gpu"}),
        changed(tests={"test_a": "passed"}),
        changed(figures={"speed": {"value": "fast", "unit": "m/s"}}),
        changed(figures={"`speed`": {"value": 1, "unit": "m/s"}}),
        changed(figures={"speed": {"value": 10**400, "unit": "m/s"}}),
        changed(figures={"[speed] (x)": {"value": 1, "unit": "m/s"}}),
        changed(tests={"test_a": {"outcome": "skipped", "reason": "see https://a.b"}}),
        changed(machine={**MACHINE, "gpu": "A" * 300}),
        changed(machine={**MACHINE, "date": "../../evil"}),
        "[" * 100_000,
    ],
)
def test_other_files_are_refused(copy: Path, text: str) -> None:
    before = (copy / "docs/gpu.md").read_text()
    done = keep(copy, text)
    assert done.returncode == 1 and not (copy / "docs/gpu").exists()
    assert len(done.stderr.splitlines()) == 1 and "sent.json" in done.stderr
    assert (copy / "docs/gpu.md").read_text() == before


def test_the_page_shows_all_records() -> None:
    page = (TEMPLATE / "docs/gpu.md").read_text()
    assert gpu_record.renewed(page) == page


@pytest.mark.parametrize("script", ["gpu_record.py", "site_record.py", "draw_run.py", "record.py"])
def test_a_script_without_arguments_says_what_it_expects(script: str) -> None:
    command = [sys.executable, TEMPLATE / "scripts" / script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and script in done.stderr and len(done.stderr.splitlines()) == 1
