"""What a training says of its GPU, compared with NVML and with FLOPs counted by hand."""

import gzip
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import metrics
import pages
import pynvml
import pytest
from renderer import render_project

from .conftest import GIB, GPUS, Figure, train

# A GPT that fills a GPU, and a small one for the CPU.
LARGE, SMALL = (8, 1024, 512, 32), (2, 64, 64, 8)
LAYERS, WIDTH, CONTEXT, BATCH = LARGE if GPUS else SMALL
STEPS = 100 if GPUS else 30
FLAGS = (
    *(f"--layers={LAYERS}", f"--heads={WIDTH // 64}", f"--width={WIDTH}", f"--context={CONTEXT}"),
    *(f"--batch-size={BATCH}", f"--max-steps={STEPS}", "--epochs=999", "--precision=bf16"),
    *("--validate-every=0", "--validate-epochs=0", "--log-every=10"),
)
# FLOPs of a token, forward and backward: 6N + 12LHQT (PaLM, appendix B).
TOKEN = 6 * (LAYERS * 12 * WIDTH**2 + WIDTH * 256) + 12 * LAYERS * WIDTH * CONTEXT


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a transformer."""
    return render_project(tmp_path_factory.mktemp("gpt") / "demo", example="text")


@contextmanager
def most_memory(handle: Any) -> Iterator[list[float]]:  # noqa: ANN401
    """Yield the most memory in use on a GPU meanwhile, in GiB above that before."""
    before, most, ended = pynvml.nvmlDeviceGetMemoryInfo(handle).used, [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
            most[0] = max(most[0], (used - before) / GIB)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def test_memory_and_energy_are_those_of_nvml(
    gpu: Any,  # noqa: ANN401
    gpt: Path,
    tmp_path: Path,
    figure: Figure,
) -> None:
    before = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    with most_memory(gpu) as most:
        usage = train(gpt, tmp_path / "run", *FLAGS, "--max-steps=400", ranks=1)["usage"]
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before) / 1000
    (rank,) = usage["ranks"]
    # PyTorch's own memory, and a context of CUDA with its libraries.
    assert rank["gpu_gib"] < most[0] < rank["gpu_gib"] + 1.5
    figure("energy of a run, relative to NVML's counter", rank["gpu_joules"] / joules, "")
    figure("memory of a run by PyTorch", rank["gpu_gib"], "GiB")
    figure("memory of a run by NVML", most[0], "GiB")
    figure("share of a run in which the GPU computed", rank["gpu_seconds"] / rank["seconds"], "")
    assert rank["gpu_joules"] == pytest.approx(joules, rel=0.1)
    assert 0.3 < rank["gpu_seconds"] / rank["seconds"] <= 1


def test_flops_are_those_counted_by_hand(gpt: Path, tmp_path: Path, figure: Figure) -> None:
    for name, flags in {"GPT": (), "GPT, compiled": ("--compile",)}.items():
        summary = train(gpt, tmp_path / name, *FLAGS, *flags, "--count-flops", ranks=1)
        cost = summary["tflops_per_second"] * 1e12 / summary["tokens_per_second"]
        assert cost == pytest.approx(TOKEN)
        last = [line for line in metrics.read(tmp_path / name) if "train/loss" in line][-1]
        figure(f"{name}, {LAYERS} layers of {WIDTH}", last["train/tflops_per_second"], "TFLOP/s")
        if GPUS:
            assert 20 < last["train/mfu_percent"] < 100
            figure(f"{name}, MFU", last["train/mfu_percent"], "%")


def test_recomputation_takes_less_memory(gpt: Path, tmp_path: Path, figure: Figure) -> None:
    losses, memory = [], []
    for name, flags in {"kept": (), "recomputed": ("--recompute",)}.items():
        usage = train(gpt, tmp_path / name, *FLAGS, "--deterministic", *flags, ranks=1)
        losses.append(usage["parameters_sha256"])
        memory.append(usage["usage"]["ranks"][0]["gpu_gib"])
        figure(f"memory with activations {name}", memory[-1], "GiB")
    assert losses[0] == losses[1]
    assert not GPUS or memory[1] < 0.7 * memory[0]


def test_small_steps_do_not_wait_for_python(digits: Path, tmp_path: Path, figure: Figure) -> None:
    """With CUDA graphs, Python starts two graphs of a step instead of all its kernels.

    With the data on the GPU, it does not make and copy the batches.
    """
    resident = Path(shutil.copytree(digits, tmp_path / "demo"))
    recipe = pages.recipe(resident, "Keep the data on the GPU", "data")
    recipe.put_data("= Digits(", "= Resident(")
    graphs = ("--compile", "--compile-mode=reduce-overhead")
    variants = {
        "eager": (digits, ()),
        "compiled": (digits, graphs[:1]),
        "CUDA graphs": (digits, graphs),
        "data on the GPU": (resident, ()),
        "CUDA graphs and data on the GPU": (resident, graphs),
    }
    for name, (project, flags) in variants.items():
        for batch in (64, 256):
            run = tmp_path / f"{name}-{batch}"
            steps = ("--max-steps=1000", "--epochs=99") if GPUS else ("--max-steps=20",)
            summary = train(project, run, *steps, f"--batch-size={batch}", *flags, ranks=1)
            assert summary["test_accuracy"] > (0.9 if GPUS else 0)
            rate = summary["usage"]["rates"]["samples_per_second"]
            figure(f"digits, batches of {batch}, {name}", rate, "images/s")


def test_batches_are_copied_from_pinned_memory(
    digits_trace: list[dict[str, Any]], figure: Figure
) -> None:
    """On a GPU, the copy of a batch does not hold up the process that asks for it."""
    copies = [each for each in digits_trace if each.get("name", "").startswith("Memcpy HtoD")]
    kernels = [each for each in digits_trace if each.get("cat") == "kernel"]
    assert bool(copies) == bool(kernels) == bool(GPUS)
    large = [each for each in copies if each["args"]["bytes"] > 10_000]
    assert all(each["name"] == "Memcpy HtoD (Pinned -> Device)" for each in large)
    if GPUS:
        steps = [each for each in digits_trace if each.get("name", "").startswith("ProfilerStep#")]
        seconds = sum(each["dur"] for each in steps if each.get("cat") == "user_annotation")
        busy = sum(each["dur"] for each in kernels)
        figure("share of a step of the digits that kernels take", busy / seconds, "")


@pytest.fixture(scope="module")
def digits_trace(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The events of ten steps of the example."""
    run = tmp_path_factory.mktemp("trace") / "run"
    train(digits, run, "--profile=20:30", "--max-steps=40", "--batch-size=256", ranks=1)
    (path,) = (run / "profile").glob("*.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
