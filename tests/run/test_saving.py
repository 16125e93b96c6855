"""Checkpoints are written during the training, one at a time, and each is complete."""

import errno
import io
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from .conftest import PATIENCE

if TYPE_CHECKING:
    from demo.engine.checkpoint import Checkpointing


@pytest.fixture
def saver(project: Path, tmp_path: Path) -> "Checkpointing":
    """What saves the checkpoints of the run folder tmp_path, on a world of one rank."""
    from demo.engine.checkpoint import Checkpointing
    from demo.engine.config import Settings
    from demo.engine.ranks.world import World

    world = World(0, 1, 0, "none", torch.device("cpu"), None, ("here",), None)
    settings = Settings(run_dir=str(tmp_path), timeout=PATIENCE)
    loader: Any = SimpleNamespace(samples_per_step=1, state_dict=lambda: None)
    return Checkpointing(SimpleNamespace(layouts=dict), None, settings, world, loader)


def held_up(event: threading.Event) -> Callable[[], None]:
    """Return a replacement for a slow disk, which writes when the event is set."""

    def wait() -> None:
        assert event.wait(PATIENCE)

    return wait


def written(folder: Path, step: int) -> Any:  # noqa: ANN401 - whatever was written
    return torch.load(folder / f"checkpoints/step-{step:08}.pt", weights_only=True)


def test_training_goes_on_while_a_checkpoint_is_written(
    saver: "Checkpointing", tmp_path: Path
) -> None:
    weight, disk = torch.zeros(1000), threading.Event()
    saver.start_writing({"network": {"weight": weight}, "step": 1}, 1, False, before=held_up(disk))
    weight += 1  # the next step
    assert not list(tmp_path.rglob("*.pt"))

    # The next one waits for the first; and what is written is not touched by what comes then.
    arguments = ({"network": {"weight": weight}, "step": 2}, 2, True, lambda: None)
    second = threading.Thread(target=saver.start_writing, args=arguments)
    second.start()
    second.join(0.2)
    assert second.is_alive() and not list(tmp_path.rglob("*.pt"))
    disk.set()
    second.join(PATIENCE)
    assert saver.wait()
    assert written(tmp_path, 1)["network"]["weight"].eq(0).all()
    assert written(tmp_path, 2)["network"]["weight"].eq(1).all()
    folder = tmp_path / "checkpoints"
    assert (folder / "latest").read_text() == (folder / "best").read_text() == "step-00000002.pt"


def test_the_end_waits_for_the_checkpoint_after_an_error_too(
    saver: "Checkpointing", tmp_path: Path
) -> None:
    disk = threading.Event()
    threading.Timer(0.2, disk.set).start()
    with pytest.raises(ValueError, match="of the training"), closing(saver):
        saver.start_writing({"step": 1}, 1, False, before=held_up(disk))
        raise ValueError("of the training")
    assert written(tmp_path, 1) == {"step": 1}


def test_a_failure_is_told_to_who_waits(
    saver: "Checkpointing", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver.start_writing({"step": 1}, 1, False, before=lambda: None)
    assert saver.wait()
    (tmp_path / "checkpoints/step-00000002.pt").mkdir()  # where a file must be made
    saver.start_writing({"step": 2}, 2, False, before=lambda: None)
    assert not saver.wait()
    assert "step-00000002.pt" in caplog.text and "training goes on" in caplog.text
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000001.pt"


def test_a_state_is_written_as_it_is(saver: "Checkpointing", tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "none": None}
    saver.start_writing(state, 1, False, before=lambda: None)
    assert saver.wait()
    found = written(tmp_path, 1)
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    # The versions of the layers' states, by which torch reads old ones.
    assert found["network"]._metadata == state["network"]._metadata
    assert found["network"]["0.weight"].stride() == network[0].weight.stride()
    # A learning rate of a schedule that is made with NumPy.
    saver.start_writing({"rate": np.cos(0.0)}, 2, False, before=lambda: None)
    assert saver.wait() and written(tmp_path, 2) == {"rate": 1.0}


def test_a_state_that_could_not_be_read_again_is_refused_at_the_first_save(
    saver: "Checkpointing", tmp_path: Path
) -> None:
    """Such as get_extra_state of a module: the loss of all work would show at the next start."""
    from demo.engine.errors import UsageError

    state = {"step": 1, "networks": {"_extra_state": deque([1.0])}}
    with pytest.raises(UsageError, match=r"'networks' has collections\.deque"):
        saver.start_writing(state, 1, False, before=lambda: None)
    assert not list(tmp_path.rglob("*.pt"))


def test_the_digest_of_networks_has_more_than_tensors(project: Path) -> None:
    from demo.engine.networks import digest

    class Layer(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

    layer = Layer(1, 1)
    layer.seen = 1
    first = digest({"network": layer})
    layer.seen = 2
    assert digest({"network": layer}) != first


class Failing(io.FileIO):
    """A file of a disk, or of a network, that fails at some of all reads."""

    reads = 0
    failures = range(0)

    def readinto(self, *arguments: Any) -> int | None:  # noqa: ANN401
        Failing.reads += 1
        if Failing.reads in Failing.failures:
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(*arguments)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reads from a disk fail as `Failing` says."""

    def opened(path: Path) -> IO[bytes]:
        return io.BufferedReader(Failing(path))

    monkeypatch.setattr("demo.engine.checkpoint_files.open_regular", opened)
    monkeypatch.setattr("demo.engine.foreign.open_regular", opened)


PARTS = ("networks", "averages", "optimizers", "position", "settings")
STATE = {**{part: {} for part in PARTS}, "weights": torch.zeros(10_000)}


@pytest.mark.usefixtures("failing")
def test_a_failing_disk_is_not_damage(saver: "Checkpointing", tmp_path: Path) -> None:
    """Wherever it fails: while damage is looked for, or while the checkpoint is loaded."""
    from demo.engine.checkpoint_files import find_start, load
    from demo.engine.errors import UsageError

    saver.checkpoints.write(STATE, 1)
    saver.checkpoints.write(STATE, 2)

    def first(failures: range) -> Path:
        Failing.reads, Failing.failures = 0, failures
        path = find_start("auto", tmp_path)
        assert path
        load(path)
        return path

    assert first(range(0)) == saver.checkpoints.path(2)
    reads = Failing.reads
    assert reads >= 4, "of the search and of the load"
    for read in range(1, reads + 1):
        # torch replaces the error of a file by others of its own.
        with pytest.raises(UsageError, match=r"step-00000002.pt"):
            first(range(read, read + 1))


def test_a_folder_that_cannot_be_listed_is_not_empty(project: Path, tmp_path: Path) -> None:
    from demo.engine.checkpoint_files import Checkpoints
    from demo.engine.errors import UsageError

    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(UsageError, match=r"checkpoints: .* \(errno \d+\)"):
        Checkpoints(tmp_path / "checkpoints").newest()


def test_the_digests_are_those_of_sha256sum(saver: "Checkpointing", tmp_path: Path) -> None:
    """A changed byte is found, also where torch would load the file; the one before is taken."""
    for step in (1, 2, 2):  # the second one is written again, as at the end of an epoch
        saver.checkpoints.write({**STATE, "step": step}, step)
    path = saver.checkpoints.path(2)
    command = ["sha256sum", "--check", path.with_suffix(".sha256").name]
    subprocess.run(command, cwd=path.parent, check=True, capture_output=True)
    content = bytearray(path.read_bytes())
    for position in (0, len(content) // 2, len(content) - 1):
        changed = content.copy()
        changed[position] ^= 1
        path.write_bytes(changed)
        assert saver.checkpoints.newest() == saver.checkpoints.path(1), position


def test_a_step_that_is_written_again_counts_at_each_moment(
    saver: "Checkpointing", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be killed between any two of the names that a save replaces."""
    replace = os.replace
    saver.checkpoints.write({**STATE, "again": False}, 1)
    for killed_at in range(1, 6):
        calls = iter(range(1, 9))

        def one(*names: object, at: int = killed_at, calls: Iterator[int] = calls) -> None:
            if next(calls) == at:
                raise KeyboardInterrupt
            replace(*names)

        monkeypatch.setattr(os, "replace", one)
        with suppress(KeyboardInterrupt):
            saver.checkpoints.write({**STATE, "again": killed_at}, 1, best=True)
        monkeypatch.undo()
        assert saver.checkpoints.newest() == saver.checkpoints.path(1), killed_at


def test_a_checkpoint_without_digests_is_named(saver: "Checkpointing") -> None:
    """The run must not start again at step 0."""
    from demo.engine.checkpoint_files import IN_SHARDS, load
    from demo.engine.errors import UsageError

    saver.checkpoints.write(STATE, 1)
    path = saver.checkpoints.path(1)
    path.with_suffix(".sha256").unlink()
    with pytest.raises(UsageError, match=r"no step-00000001.sha256: .* set --resume"):
        saver.checkpoints.newest()
    assert load(path)["networks"] == {}
    torch.save({**STATE, "weights": IN_SHARDS}, path)
    with pytest.raises(UsageError, match=r"can't read .*step-00000001\.shards"):
        load(path)


def test_a_checkpoint_that_one_rank_cannot_load_ends_all(
    saver: "Checkpointing", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo.engine.errors import UsageError

    saver.checkpoints.write(STATE, 1)
    error = UsageError("of another rank")
    monkeypatch.setattr(type(saver.world), "gather", lambda _, own: [own, error])
    with pytest.raises(UsageError, match="of another rank"):
        saver.resume(saver.checkpoints.path(1))
