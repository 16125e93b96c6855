"""Trainings on GPUs: exact over a stop with each setting, each rank on its own GPU, over NCCL."""

import json
import signal
from pathlib import Path

import pytest
from run.conftest import command, spawn, tasks

from .conftest import DEVICE, GPUS, RANKS, Figure, machine, start, train

PACE = {"STEP_SECONDS": "0.02"}
EXACT = ("--deterministic", "--max-steps=60", "--checkpoint-every=10", "--log-every=1")
FSDP = "--strategy=fsdp"


@pytest.mark.parametrize("ranks", sorted({1, RANKS}))
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--precision=bf16", "--accumulate=2", "--ema=0.9"),
        ("--compile", "--workers=2"),
        ("--compile", "--compile-mode=reduce-overhead", "--accumulate=2", "--ema=0.9"),
        (FSDP,),
        (FSDP, "--precision=bf16", "--recompute"),
        ("--precision=fp16", "--clip-norm=1"),
        (FSDP, "--precision=fp16"),
        (FSDP, "--shard-within=node", "--offload"),
    ],
    ids=" ".join,
)
def test_a_stopped_run_goes_on_bit_for_bit(
    paced: Path, tmp_path: Path, ranks: int, flags: tuple[str, ...]
) -> None:
    """With a signal in the middle: exit code 75, a checkpoint, and the rest in new processes."""
    whole = train(paced, tmp_path / "whole", *EXACT, *flags, ranks=ranks)
    job = start(paced, tmp_path / "stopped", *EXACT, *flags, ranks=ranks, **PACE)
    job.wait_for_step(15)
    job.processes[-1].send_signal(signal.SIGTERM)
    assert set(job.wait().codes) == {75}, job.log
    resumed = train(paced, tmp_path / "stopped", *EXACT, *flags, ranks=ranks)
    assert 0 < resumed["resumed_from_step"] < 60
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    assert resumed["backend"] == (None if ranks == 1 else "nccl" if GPUS else "gloo")


def test_all_precisions_learn(digits: Path, tmp_path: Path) -> None:
    """Synthetic digits are easy: 300 steps of the example suffice, on a CPU as on a GPU.

    The run folder names the GPU and its software.
    """
    for name, flags in {
        "fp32": (),
        "bf16": ("--precision=bf16",),
        "fp16": ("--precision=fp16",),
        "--compile": ("--compile",),
    }.items():
        assert train(digits, tmp_path / name, "--max-steps=300", *flags)["test_accuracy"] > 0.9
    found, here = json.loads((tmp_path / "fp32/provenance.json").read_text())["gpu"], machine()
    names = {"gpu": "name", "driver": "driver", "cuda": "cuda", "nccl": "nccl"}
    assert found.keys() >= {*names.values()} if GPUS else found == {}
    assert all(found[name] == here[key] for key, name in names.items() if found)


def test_the_other_commands_work_on_the_device(digits: Path, tmp_path: Path) -> None:
    """What was trained here is evaluated here and on the CPU with the same accuracy."""
    run = tmp_path / "run"
    summary = train(digits, run, "--max-steps=300")
    for device in {DEVICE, "cpu"}:
        file = tmp_path / f"{device}.json"
        done = command(digits, "evaluate", str(run), f"--device={device}", f"--output={file}")
        assert done.returncode == 0, done.stderr
        found = json.loads(file.read_text())["metrics"]["test/accuracy"]
        assert found == pytest.approx(summary["test_accuracy"], abs=0.003)


def test_ranks_without_a_gpu_of_their_own_are_named(
    gpu: object, digits: Path, tmp_path: Path
) -> None:
    """Before NCCL starts, which would hang or end with an error of its own."""
    job = start(digits, tmp_path / "run", ranks=GPUS + 1).wait()
    assert 0 not in job.codes and "the same GPU" in job.log and "Traceback" not in job.log


def test_two_ranks_share_a_gpu_over_gloo(gpu: object, digits: Path, tmp_path: Path) -> None:
    flags = ("--backend=gloo", "--max-steps=20")
    assert train(digits, tmp_path / "run", *flags, ranks=2)["backend"] == "gloo"


def test_messages_between_ranks_are_right(digits: Path, tmp_path: Path, figure: Figure) -> None:
    if GPUS == 1:
        pytest.skip("needs several GPUs")
    report = tmp_path / "report.json"
    words = ["demo", "check-comm", f"--device={DEVICE}", f"--json={report}"]
    words += [] if GPUS else ["--max-bytes=20000"]
    job = spawn(digits, tmp_path / "check", [words] * RANKS, tasks(RANKS)).wait()
    assert set(job.codes) == {0}, job.log
    found = json.loads(report.read_text())
    assert found["backend"] == ("nccl" if GPUS else "gloo")
    for row in found["speed"][-2:]:
        figure(f"{row['operation']} of {row['bytes']:,} bytes", row["bus_gb_s"], "GB/s")


@pytest.mark.parametrize("placement", ["block", "cyclic"])
def test_ranks_see_only_their_own_gpus(
    gpus: int, digits: Path, tmp_path: Path, placement: str
) -> None:
    """As with --gpus-per-task: rank and number of the GPU have nothing to do with each other."""
    order = range(gpus) if placement == "block" else reversed(range(gpus))
    envs = [
        {**env, "CUDA_VISIBLE_DEVICES": str(number)}
        for env, number in zip(tasks(gpus), order, strict=True)
    ]
    assert train(digits, tmp_path / "run", "--max-steps=20", ranks=gpus, envs=envs)


def test_a_slow_rank_is_named(gpus: int, paced: Path, tmp_path: Path) -> None:
    """The time of a forward pass on a GPU is known only where the loop waits for it."""
    module = next(paced.glob("src/*/plugins/slow_ranks.py"))
    limits = "LINES, SECONDS = "
    module.write_text(module.read_text().replace(f"{limits}10, 60.0", f"{limits}3, 1.0"))
    envs = [{**env, "STEP_SECONDS": str(0.1 * (not rank))} for rank, env in enumerate(tasks(gpus))]
    job = start(paced, tmp_path / "run", "--max-steps=60", "--log-every=2", ranks=gpus, envs=envs)
    assert set(job.wait().codes) == {0} and "rank 0" in job.log and "slow" in job.log
