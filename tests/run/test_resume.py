"""A stopped run continues where it was, and ends where the uninterrupted run ends."""

import json
import math
import os
import re
import signal
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import logged, reproducible

from .conftest import PACED, PATIENCE, Job, Launch, edited, srun

# Two epochs of 58 steps on two ranks, so that stops fall inside an epoch and behind its end.
LONG = ("--max-steps=1000", "--epochs=2", "--batch-size=128", "--log-every=1")


@pytest.fixture(scope="module")
def uninterrupted(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run that the others are compared with."""
    return srun(project, tmp_path_factory.mktemp("whole") / "run", 2, *LONG).wait()


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("SIGUSR1", 1),
        ("SIGTERM", 0),
        pytest.param("SIGUSR2", 0, marks=pytest.mark.slow),
        pytest.param("SIGINT", 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_on_one_rank_stops_all_and_the_next_run_goes_on(
    project: Path, launch: Launch, tmp_path: Path, uninterrupted: Job, name: str, rank: int
) -> None:
    job = srun(project, tmp_path / "run", 2, *LONG)
    job.stop(20, rank=rank, number=getattr(signal, name))
    assert f"by {'a signal' if rank else name}" in job.log
    assert "Traceback" not in job.log
    stop = job.metrics()[-1]["step"]

    resumed = launch(2, *LONG, "--keep-checkpoints=9")
    assert resumed.summary["resumed_from_step"] == stop >= 20
    assert resumed.summary["parameters_sha256"] == uninterrupted.summary["parameters_sha256"]
    assert resumed.summary["test_accuracy"] == uninterrupted.summary["test_accuracy"]
    # Time and samples are those of all steps.
    seconds = resumed.summary["trained_seconds"]
    assert resumed.summary["samples_per_second"] * seconds == pytest.approx(2 * 58 * 256)
    saved = torch.load(tmp_path / f"run/checkpoints/step-{stop:08}.pt", weights_only=True)
    samples, _, so_far = saved["meter"]["trained"]
    assert samples == stop * 256 and 0 < so_far < seconds
    # Every step once, with the numbers of the uninterrupted run.
    assert reproducible(resumed.metrics()) == reproducible(uninterrupted.metrics())


def test_a_second_interrupt_ends_the_rank_at_once(project: Path, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 1, *LONG, **PACED)
    job.wait_for_step(3)
    (rank,) = job.processes
    rank.send_signal(signal.SIGINT)
    while _handles(rank.pid, signal.SIGINT):
        time.sleep(0.005)
    rank.send_signal(signal.SIGINT)
    assert job.wait().codes == [-signal.SIGINT], job.log


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(caught[1], 16) >> (number - 1) & 1)


def test_ranks_killed_during_validation_go_on_behind_the_epoch(
    project: Path, launch: Launch, tmp_path: Path, uninterrupted: Job
) -> None:
    job = srun(project, tmp_path / "run", 2, *LONG, "--test-batch-size=1")
    while not (tmp_path / "run/checkpoints/step-00000058.pt").exists():
        assert job.processes[0].poll() is None, job.log
        time.sleep(0.01)
    job.kill()
    assert not any("validation/loss" in line for line in job.metrics())
    resumed = launch(2, *LONG)
    assert resumed.summary["resumed_from_step"] == 58
    assert resumed.summary["parameters_sha256"] == uninterrupted.summary["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(uninterrupted.metrics())


def test_a_rank_that_dies_takes_the_others_along(project: Path, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 2, *LONG)
    job.wait_for_step(5)
    job.processes[1].kill()
    assert job.wait().codes == [76, -signal.SIGKILL], job.log
    assert "error: rank 0 on " in job.log and "lost another rank" in job.log
    assert "Traceback" not in job.log
    assert not (tmp_path / "run" / "summary.json").exists()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["error"].startswith("rank 0 on ") and "lost another rank" in status["error"]
    assert status["lost_rank"] is True


def test_a_rank_that_dies_at_its_very_end_is_said(project: Path, tmp_path: Path) -> None:
    """The run has finished, and its rank 0 waits for the others to leave with it."""
    barrier = "            dist.barrier(self.control)\n"
    dies = "            if self.rank:\n                __import__('signal').raise_signal(9)\n"
    dying = edited(project, tmp_path, "engine/ranks/world.py", barrier, dies + barrier)
    job = srun(dying, tmp_path / "run", 2, "--max-steps=3").wait()
    assert job.codes == [76, -signal.SIGKILL], job.log
    assert "lost another rank" in job.log and "Traceback" not in job.log
    assert (job.run_dir / "summary.json").exists()


def test_ranks_wait_for_the_end_of_rank_0_beyond_the_timeout(project: Path, tmp_path: Path) -> None:
    """It may have much to write; a restart would find a finished run."""
    head = '    images, labels = batch\n    return {\n        "confusion'
    slow = "    if sums['weight'] > 100:\n        __import__('time').sleep(9)\n"
    late = edited(project, tmp_path, "figures.py", head, slow + head)
    job = srun(late, tmp_path / "run", 2, "--max-steps=3", "--timeout=4").wait()
    assert job.summary["global_step"] == 3


def test_a_run_folder_that_is_removed_meanwhile_is_said(project: Path, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 2, *LONG, "--checkpoint-every=10")
    job.wait_for_step(15)
    (tmp_path / "run").rename(tmp_path / "gone")
    assert job.wait().codes[0] == 1, job.log
    assert "metrics.jsonl was removed" in job.log and "Traceback" not in job.log
    assert json.loads((tmp_path / "run/summary.json").read_text())["global_step"] == 116


def test_a_rank_that_hangs_is_not_waited_for_without_end(project: Path, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 2, *LONG, "--timeout=5")
    job.wait_for_step(5)
    job.processes[1].send_signal(signal.SIGSTOP)
    try:
        assert job.processes[0].wait(PATIENCE) == 76, job.log
    finally:
        job.kill()
    assert "lost another rank (" in job.log and "waiting 5000ms" in job.log
    assert "Traceback" not in job.log


@pytest.fixture(scope="module")
def small(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with a third of the samples, for use with `--validation-size=1000`."""
    folder = tmp_path_factory.mktemp("small")
    copy = edited(project, folder, "data.py", "synthesize(20_000", "synthesize(6_000")
    return edited(copy, folder / "both", "data.py", "synthesize(1_001", "synthesize(501")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, ("--streaming", "--workers=2"), marks=pytest.mark.slow),
        pytest.param(3, ("--workers=2",), marks=pytest.mark.slow),
        (3, ("--accumulate=3", "--clip-norm=0.5", "--precision=bf16", "--schedule=cosine")),
        (3, ("--strategy=fsdp", "--accumulate=2", "--precision=bf16", "--deterministic")),
        pytest.param(4, ("--streaming",), marks=pytest.mark.slow),  # one rank has a shard less
        pytest.param(4, ("--strategy=fsdp", "--clip-norm=0.5"), marks=pytest.mark.slow),
        pytest.param(8, (), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resume_is_exact_on_any_number_of_ranks(
    small: Path, tmp_path: Path, ranks: int, flags: tuple[str, ...]
) -> None:
    # The stop falls in the second epoch, whose order differs from the first one's, and most often
    # between two log lines.
    quick = ("--max-steps=1000", "--epochs=3", f"--batch-size={200 // ranks}", "--log-every=4")
    quick += ("--validation-size=1000",)
    whole = srun(small, tmp_path / "whole", ranks, *quick, *flags).wait()
    epoch = whole.summary["global_step"] // 3
    job = srun(small, tmp_path / "run", ranks, *quick, *flags)
    job.stop(epoch + 2, number=signal.SIGUSR2)
    resumed = srun(small, tmp_path / "run", ranks, *quick, *flags).wait()
    assert epoch < resumed.summary["resumed_from_step"] < whole.summary["global_step"]
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(whole.metrics())


@pytest.mark.parametrize(
    ("flags", "steps", "stop"),
    [
        ((), 20, 12),
        (("--strategy=fsdp",), 20, 12),
        (("--accumulate=3",), 7, 2),
        pytest.param(("--strategy=fsdp", "--accumulate=3"), 7, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resume_is_exact_where_a_rank_has_no_more_batches(
    small: Path, tmp_path: Path, flags: tuple[str, ...], steps: int, stop: int
) -> None:
    """Rank 0, whose running statistics are kept, has 10 batches, and rank 1 has 20."""
    counted = (
        "        from .engine.run.record import record\n\n"
        '        record("samples", len(images), "sum")\n'
        "        images = F.dropout(images, 0.1)\n        return F.cross_entropy(\n"
    )
    project = edited(small, tmp_path, "model.py", "        return F.cross_entropy(\n", counted)
    flags += ("--streaming", "--validation-size=4500", "--batch-size=50", "--epochs=1", "--seed=1")
    flags += ("--max-steps=1000", "--log-every=1")
    whole = srun(project, tmp_path / "whole", 2, *flags).wait()
    assert whole.summary["global_step"] == steps
    job = srun(project, tmp_path / "run", 2, *flags, **PACED)
    job.stop(stop)
    resumed = srun(project, tmp_path / "run", 2, *flags).wait()
    assert stop <= resumed.summary["resumed_from_step"] < steps
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(whole.metrics())
    samples = [line["train/samples"] for line in whole.metrics() if "train/samples" in line]
    assert sum(samples) == 1500, "a spare batch was counted, too"


def test_a_validation_changes_nothing(small: Path, tmp_path: Path) -> None:
    """Afterwards, batch norm and dropout act as in a training again."""
    training = (
        "        from .engine.run.record import record\n\n"
        '        record("trains", float(all(each.training for each in network.modules())))\n'
        "        return F.cross_entropy(\n"
    )
    project = edited(small, tmp_path, "model.py", "        return F.cross_entropy(\n", training)
    flags = ("--validation-size=1000", "--max-steps=9", "--log-every=1")
    once, often = (
        srun(project, tmp_path / f"{steps}", 2, *flags, f"--validate-every={steps}").wait()
        for steps in (9, 2)
    )
    assert often.summary["parameters_sha256"] == once.summary["parameters_sha256"]
    lines = [line for line in often.metrics() if "train/trains" in line]
    assert [line["train/trains"] for line in lines] == [1] * 9


def test_resume_draws_the_same_with_any_number_of_workers(small: Path, tmp_path: Path) -> None:
    """Images are augmented one by one, with random numbers of three kinds, and in each step."""
    step = "images, labels = batch\n        images = images * torch.rand(())\n"
    noisy = edited(small, tmp_path / "noisy", "model.py", "images, labels = batch\n", step)
    plain = edited(noisy, tmp_path / "plain", "data.py", "__getitems__", "_chosen")
    plain = edited(plain, tmp_path / "one by one", "data.py", "def collate", "def _stacked")
    drawn = "return images[0] + torch.rand(()) + np.random.rand() + random.random(), int"
    drawing = edited(plain, tmp_path / "drawing", "data.py", "return images[0], int", drawn)
    imports = "import random\nfrom collections.abc"
    drawing = edited(drawing, tmp_path / "random", "data.py", "from collections.abc", imports)
    drawing = edited(
        drawing,
        tmp_path / "numpy",
        "data.py",
        "import torch\n",
        "import numpy as np\nimport torch\n",
    )
    flags = ("--epochs=2", "--batch-size=100", "--validation-size=1000")
    whole = srun(drawing, tmp_path / "whole", 2, *flags, "--workers=3").wait()
    job = srun(drawing, tmp_path / "run", 2, *flags, "--workers=2", STEP_SECONDS="0.1")
    job.stop(10)
    resumed = srun(drawing, tmp_path / "run", 2, *flags).wait()
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"], resumed.log
    other = srun(plain, tmp_path / "plain run", 2, *flags).wait()
    assert other.summary["parameters_sha256"] != whole.summary["parameters_sha256"]


def processes_of(job: Job) -> set[int]:
    """Return the ids of the ranks' processes and of all that they started and that still run."""
    sessions, found = {process.pid for process in job.processes}, set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    "flags",
    [("--workers=2",), pytest.param(("--streaming", "--workers=2"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_signals_to_every_process_of_the_job_end_no_loading_worker(
    project: Path, launch: Launch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Slurm signals ranks, workers and helpers alike, at any moment of their lives."""
    whole = launch(2, *LONG, *flags, name="whole")
    job = srun(project, tmp_path / "run", 2, *LONG, *flags)
    ranks = {process.pid for process in job.processes}
    struck: set[int] = set()
    while not logged(job.run_dir, 70):
        assert job.processes[0].poll() is None, job.log
        # Workers and helpers, from their first instant on.
        for pid in processes_of(job) - ranks:
            struck.add(pid)
            _send(pid, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    assert len(struck) >= 2 * (2 + 2), "each rank has two helpers and two workers"
    for pid in processes_of(job):
        _send(pid, signal.SIGUSR2, signal.SIGTERM)
    assert job.wait().codes == [75, 75], job.log
    assert "Traceback" not in job.log and "Error" not in job.log

    resumed = launch(2, *LONG, *flags)
    assert 70 <= resumed.summary["resumed_from_step"] < whole.summary["global_step"]
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(whole.metrics())


def _send(pid: int, *numbers: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        for number in numbers:
            os.kill(pid, number)


def test_loading_workers_leave_with_a_killed_rank(project: Path, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 1, *LONG, "--workers=2")
    job.wait_for_step(5)
    try:
        assert len(processes_of(job)) >= 1 + 2 + 2, "a rank, two helpers, two workers"
        job.processes[0].kill()
        job.processes[0].wait()
        deadline = time.monotonic() + PATIENCE
        while processes_of(job):
            assert time.monotonic() < deadline, "some were left behind"
            time.sleep(0.05)
    finally:
        for pid in processes_of(job):
            _send(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(1, ("--streaming",)), (3, ()), pytest.param(1, (), marks=pytest.mark.slow)],
)
def test_another_world_size_goes_on_and_says_that_it_is_not_exact(
    project: Path, launch: Launch, tmp_path: Path, ranks: int, more: tuple[str, ...]
) -> None:
    flags = (*LONG, *more)
    job = srun(project, tmp_path / "run", 2, *flags)
    job.wait_for_step(20)
    job.processes[0].send_signal(signal.SIGTERM)
    stopped = job.wait().metrics()[-1]["step"]
    resumed = launch(ranks, *flags)
    summary = resumed.summary
    assert "not bit for" in resumed.log
    assert (summary["world_size"], summary["resumed_from_step"]) == (ranks, stopped)
    assert summary["test_accuracy"] > 0.9
    # What was left of the samples, in steps of this world's size, and a whole second epoch.
    left, whole = (samples / (ranks * 128) for samples in (15_000 - stopped * 256, 15_000))
    rounded = math.ceil if more else math.floor  # a stream has a last, smaller batch
    assert summary["global_step"] == stopped + rounded(left) + rounded(whole)
    # The learning rate falls to the end of the run, not before.
    rates = [line["train/lr"] for line in resumed.metrics() if "train/lr" in line]
    assert rates[-3] > 0


def test_a_corrupt_checkpoint_is_skipped_with_a_warning(launch: Launch, tmp_path: Path) -> None:
    flags = ("--checkpoint-every=8", "--keep-checkpoints=9")
    whole = launch(2, *flags)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in sorted(folder.glob("*.pt"))] == [
        f"step-{step:08}.pt" for step in (8, 16, 24, 30)
    ]
    newest, second, third = (folder / f"step-{step:08}.pt" for step in (30, 24, 16))
    os.truncate(newest, newest.stat().st_size // 2)
    # A single changed byte, deep in a tensor, which torch.load does not notice.
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 0xFF
    second.write_bytes(content)
    # A list of digests that names another file.
    third.with_suffix(".sha256").write_text("0" * 64 + "  ../config.yaml\n")
    (tmp_path / "run" / "summary.json").unlink()  # the run was killed before its end

    resumed = launch(2, *flags)
    assert resumed.log.count("corrupt checkpoint") == 3, "rank 0 alone says so"
    assert resumed.summary["resumed_from_step"] == 8
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert "starting from step 0" not in resumed.log
    # A later resume must not find them, nor wrongly go on from them.
    aside = [path.name for path in sorted((tmp_path / "run/earlier-1/checkpoints").iterdir())]
    assert aside[0] == "best", "it named one of them"
    assert aside[1:] == [
        name
        for path in (third, second, newest)
        for name in (path.name, path.with_suffix(".sha256").name)
    ]


def test_a_fresh_start_moves_aside_what_it_replaces(launch: Launch, tmp_path: Path) -> None:
    flags = ("--checkpoint-every=8", "--log-every=1")
    run = tmp_path / "run"
    launch(1, *flags)
    for path in run.glob("checkpoints/*.pt"):
        os.truncate(path, 100)
    (run / "summary.json").write_text("{}")  # of no end
    kept = ("metrics.jsonl", "summary.json", "config.yaml", "provenance.json")
    kept += tuple(f"checkpoints/{path.name}" for path in checkpoints(run))
    before = {name: (run / name).read_bytes() for name in kept}

    anew = launch(1, *flags, "--max-steps=4")
    assert "starting from step 0" in anew.log
    assert "moved files" in anew.log
    assert anew.summary["resumed_from_step"] is None
    assert {name: (run / "earlier-1" / name).read_bytes() for name in kept} == before
    assert [path.name for path in checkpoints(run)] == ["step-00000004.pt"]
    assert {line["step"] for line in anew.metrics()} == {1, 2, 3, 4}


def test_a_prolonged_run_that_is_killed_at_its_end_is_finished(
    launch: Launch, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launch(1, "--max-steps=3", "--log-every=1")
    kept = (run / "summary.json").read_bytes()
    job = launch(1, "--max-steps=6", "--log-every=1")
    whole, before, status = job.metrics(), job.summary, state_of(run)
    rates = [line["train/lr"] for line in whole if "train/lr" in line]
    (said,) = re.findall("max_steps was 3 .* now 6: (.*)", job.log)
    assert "may go up" in said and rates[2] < rates[3]
    # As a kill leaves it between the line of the test and the summary.
    (run / "summary.json").write_bytes(kept)
    job = launch(1, "--max-steps=6", "--log-every=1")
    assert (job.summary["global_step"], job.summary["resumed_from_step"]) == (6, 6)
    assert reproducible(job.metrics()) == reproducible(whole)
    # Figures are those of all attempts, of which this one took no step.
    assert before["trained_seconds"] > json.loads(kept)["trained_seconds"] > 0
    for name in ("trained_seconds", "samples_per_second", "best_step"):
        assert job.summary[name] == before[name], name
    assert {name: state_of(run)[name] for name in BEST} == {name: status[name] for name in BEST}
    assert "nothing is left" in launch(1, "--max-steps=6").log
    # What the attempts were is kept.
    settings = [run / f"attempts/{number}-config.yaml" for number in (1, 2)]
    steps = [re.findall("max_steps: .*", path.read_text()) for path in settings]
    assert steps == [["max_steps: 3"], ["max_steps: 6"]]
    facts = [json.loads((run / f"attempts/{n}-provenance.json").read_text()) for n in (1, 2)]
    assert ["--max-steps=3" in each["command"] for each in facts] == [True, False]


BEST = ("best_metric", "best_direction", "best_score", "best_step")


def state_of(run: Path) -> dict[str, Any]:
    """Return the status.json of a run."""
    return json.loads((run / "status.json").read_text())


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run."""
    return sorted(run.glob("checkpoints/*.pt"))


def test_old_checkpoints_are_removed_but_not_the_best(project: Path, tmp_path: Path) -> None:
    from demo.engine.checkpoint_files import Checkpoints

    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.write({"step": step}, step, best=step == 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "latest",
        *[f"step-{step:08}.{kind}" for step in (2, 5, 6) for kind in ("pt", "sha256")],
    ]
    assert (tmp_path / "latest").read_text() == "step-00000006.pt"
    assert (tmp_path / "best").read_text() == "step-00000002.pt"


def test_damage_of_any_kind_is_found_and_costs_no_good_checkpoint(
    project: Path, tmp_path: Path
) -> None:
    from demo.engine.checkpoint_files import Checkpoints, find, find_fault
    from demo.engine.errors import UsageError

    checkpoints = Checkpoints(tmp_path, keep=1)
    parts = ("networks", "averages", "optimizers", "position", "settings")
    state: dict[str, Any] = {part: {} for part in parts}
    checkpoints.write(state | {"step": 1000, "weights": torch.zeros(8)}, 1000)
    newer = tmp_path / "step-00001000.pt"
    whole = newer.read_bytes()
    for position in range(len(whole)):
        newer.write_bytes(
            whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :]
        )
        assert str(find_fault(newer)).startswith("step-00001000.pt does not match"), position
    with pytest.raises(UsageError, match="is damaged"):
        find(newer)
    newer.write_bytes(whole[: len(whole) // 2])
    # A run that went on from elsewhere saves an earlier step: that is the one to keep.
    checkpoints.write({"step": 600}, 600)
    assert checkpoints.newest() == tmp_path / "step-00000600.pt"


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_good_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    from demo.engine.checkpoint_files import Checkpoints

    checkpoints = Checkpoints(tmp_path)
    checkpoints.write({"weights": torch.zeros(10)}, 1)
    before = sorted(path.name for path in tmp_path.iterdir())
    # The kernel refuses to let a file grow, as it does when the disk is full.
    monkeypatch.setattr(signal, "SIGXFSZ", signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            checkpoints.write({"weights": torch.zeros(100_000)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert checkpoints.newest() == tmp_path / "step-00000001.pt"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_stop_without_a_checkpoint_is_a_failure(
    project: Path, tmp_path: Path, strategy: str
) -> None:
    """Otherwise each requeue of the job would start the run from the beginning."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()  # a file where a folder must be made
    job = srun(project, tmp_path / "run", 2, *LONG, f"--strategy={strategy}")
    job.wait_for_step(5)
    job.processes[0].send_signal(signal.SIGUSR2)
    assert job.wait().codes == [1, 1], job.log
    assert job.log.count("could not write") == 1, "rank 0 alone says so"
    assert "written: make room" in job.log
    assert "Traceback" not in job.log


def test_an_end_without_a_checkpoint_is_a_failure(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    job = launch(2, "--max-steps=5")
    assert job.codes == [1, 1], job.log
    assert "ended at step 5" in job.log
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_option_of_the_optimizer_that_changed_is_used(launch: Launch, tmp_path: Path) -> None:
    launch(2, "--max-steps=5")
    launch(2, "--max-steps=6", "--weight-decay=0.25")
    newest = max((tmp_path / "run/checkpoints").glob("step-*.pt"))
    groups = torch.load(newest, weights_only=False)["optimizers"]["optimizer"]["param_groups"]
    assert {group["momentum"] for group in groups} == {0.9}
    assert 0.25 in {group["weight_decay"] for group in groups}


def test_a_file_that_is_no_checkpoint_is_refused(project: Path, tmp_path: Path) -> None:
    from demo.engine.checkpoint_files import load
    from demo.engine.errors import UsageError

    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt", "w") as archive:
        archive.writestr("a", "b")
    (tmp_path / "text.pt").write_text("# A title\n")
    for name in ("foreign.pt", "archive.pt", "text.pt"):
        with pytest.raises(UsageError, match=f"{name} is not .*checkpoint") as raised:
            load(tmp_path / name)
        assert "In PyTorch 2.6" not in str(raised.value), "torch advises to let the file run code"


def test_resume_takes_a_path_or_refuses(launch: Launch, tmp_path: Path) -> None:
    first = launch(1, "--checkpoint-every=10")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010.pt"
    assert first.summary["global_step"] == 30

    # From a file, and from a run folder, into a folder of its own.
    onward = launch(1, f"--resume={checkpoint}", name="onward")
    assert onward.summary["resumed_from_step"] == 10
    assert onward.summary["parameters_sha256"] == first.summary["parameters_sha256"]
    assert launch(1, f"--resume={tmp_path / 'run'}", name="n").summary["resumed_from_step"] == 30
    # Its own checkpoints go first once it has some: so a requeued job does not start over.
    again = launch(1, f"--resume={checkpoint}", name="onward")
    assert "nothing is left" in again.log
    assert again.summary == onward.summary

    refused = launch(1, "--resume=never")
    assert refused.codes == [1]
    assert "--run-dir, or --resume auto" in refused.log
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    for path, said in (
        ("nowhere", "nowhere has no"),
        (tmp_path / "other.pt", "other.pt is not a checkpoint"),
    ):
        missing = launch(1, f"--resume={path}", name="missing")
        assert missing.codes == [1] and "Traceback" not in missing.log
        assert said in missing.log
