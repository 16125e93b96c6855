"""Checkpoints are written behind the training, one at a time, and none is half written."""

import errno
import io
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from .conftest import PATIENCE

if TYPE_CHECKING:
    from demo.core.checkpoint.writer import Saver


@pytest.fixture
def saver(project: Path, tmp_path: Path) -> "Saver":
    """What saves to tmp_path, on a world of one rank."""
    from demo.core.checkpoint.store import Checkpoints
    from demo.core.checkpoint.writer import Saver
    from demo.core.ranks.world import World

    world = World(0, 1, 0, "none", torch.device("cpu"), None, ("here",), None)
    return Saver(Checkpoints(tmp_path), world, PATIENCE)


def held_up(event: threading.Event) -> Callable[[], None]:
    """Return what stands for a slow disk: it ends when the event is set."""

    def wait() -> None:
        assert event.wait(PATIENCE)

    return wait


def written(folder: Path, step: int) -> Any:  # noqa: ANN401 - whatever was written
    return torch.load(folder / f"step-{step:08}.pt", weights_only=True)


def test_training_goes_on_while_a_checkpoint_is_written(saver: "Saver", tmp_path: Path) -> None:
    weight, disk = torch.zeros(1000), threading.Event()
    saver.save({"network": {"weight": weight}, "step": 1}, 1, False, before=held_up(disk))
    weight += 1  # the next step
    assert not list(tmp_path.glob("*.pt"))

    # The next one waits for the first; and what is written is not touched by what comes then.
    arguments = ({"network": {"weight": weight}, "step": 2}, 2, True, lambda: None)
    second = threading.Thread(target=saver.save, args=arguments)
    second.start()
    second.join(0.2)
    assert second.is_alive() and not list(tmp_path.glob("*.pt"))
    disk.set()
    second.join(PATIENCE)
    assert saver.wait()
    assert written(tmp_path, 1)["network"]["weight"].eq(0).all()
    assert written(tmp_path, 2)["network"]["weight"].eq(1).all()
    assert (tmp_path / "latest").read_text() == (tmp_path / "best").read_text()


def test_the_end_waits_for_the_checkpoint_after_an_error_too(
    saver: "Saver", tmp_path: Path
) -> None:
    disk = threading.Event()
    threading.Timer(0.2, disk.set).start()
    with pytest.raises(ValueError, match="of the training"), saver:
        saver.save({"step": 1}, 1, False, before=held_up(disk))
        raise ValueError("of the training")
    assert written(tmp_path, 1) == {"step": 1}


def test_a_failure_is_told_to_who_waits(
    saver: "Saver", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save({"step": 1}, 1, False, before=lambda: None)
    assert saver.wait()
    (tmp_path / "step-00000002.pt").mkdir()  # where a file must be made
    saver.save({"step": 2}, 2, False, before=lambda: None)
    assert not saver.wait()
    assert "a resume would start from step-00000001.pt" in caplog.text


def test_a_state_is_written_as_it_is(saver: "Saver", tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "none": None}
    saver.save(state, 1, False, before=lambda: None)
    assert saver.wait()
    found = written(tmp_path, 1)
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    # The versions of the layers' states, by which torch reads old ones.
    assert found["network"]._metadata == state["network"]._metadata
    assert found["network"]["0.weight"].stride() == network[0].weight.stride()


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
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let files be read from a failing disk; return how long has been waited each time."""
    waits: list[float] = []
    monkeypatch.setattr("demo.core.checkpoint.store.time.sleep", waits.append)

    def opened(path: Path) -> IO[bytes]:
        return io.BufferedReader(Failing(path))

    for module in ("restore", "store"):
        monkeypatch.setattr(f"demo.core.checkpoint.{module}.open_regular", opened)
    return waits


STATE = {"networks": {}, "optimizers": {}, "position": {}, "weights": torch.zeros(10_000)}


def test_a_failing_disk_is_no_damage(saver: "Saver", tmp_path: Path, waits: list[float]) -> None:
    """Wherever it fails: while damage is looked for, or while the checkpoint is loaded."""
    from demo.core.checkpoint.restore import candidates, load_first
    from demo.core.checkpoint.store import Checkpoints
    from demo.core.errors import UsageError

    folder = Checkpoints(tmp_path / "checkpoints")
    assert folder.save(STATE, 1) and folder.save(STATE, 2)

    def first(failures: range) -> Path:
        Failing.reads, Failing.failures = 0, failures
        waits.clear()
        found = load_first(candidates("auto", tmp_path), lambda *_: None, saver.world)
        assert found
        return found[0]

    assert first(range(0)) == folder.path(2) and not waits
    reads = Failing.reads
    assert reads >= 4, "of the search and of the load"
    for read in range(1, reads + 1):
        assert first(range(read, read + 2)) == folder.path(2), read
        assert len(waits) <= 2
        with pytest.raises(UsageError, match=r"can't read .*step-00000002.pt: .*\(errno 5\)"):
            first(range(read, 10_000))
        assert len(waits) == 3


def test_a_folder_that_cannot_be_listed_is_not_empty(
    project: Path, tmp_path: Path, waits: list[float]
) -> None:
    from demo.core.checkpoint.store import Checkpoints
    from demo.core.errors import UsageError

    (tmp_path / "checkpoints").symlink_to("checkpoints")
    with pytest.raises(UsageError, match=r"can't read .*checkpoints: .* \(errno \d+\)"):
        Checkpoints(tmp_path / "checkpoints").newest()
    assert waits, "it was tried again"


def test_a_checkpoint_that_another_process_removes_meanwhile(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then there is a newer one."""
    from demo.core.checkpoint import store

    folder = store.Checkpoints(tmp_path, keep=1)
    assert folder.save(STATE, 1)

    def pruned(path: Path) -> str | None:
        monkeypatch.undo()
        assert folder.save(STATE, 2) and not path.exists()
        return store.find_fault(path)

    monkeypatch.setattr(store, "find_fault", pruned)
    assert folder.newest() == folder.path(2)


def test_all_ranks_take_the_same_checkpoint(
    saver: "Saver", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one of them can't load it, none does; where none can be loaded, none is replaced."""
    from demo.core.checkpoint import restore, store

    folder = store.Checkpoints(tmp_path / "checkpoints")
    assert folder.save(STATE, 1) and folder.save(STATE, 2)
    answers: list[Exception] = []
    monkeypatch.setattr(
        saver.world, "gather", lambda own: [own, answers.pop() if answers else None]
    )

    def first(resume: str = "auto", run: str = "") -> tuple[Path, dict[str, Any]] | None:
        found = restore.candidates(resume, tmp_path / run)
        return restore.load_first(found, lambda *_: None, saver.world)

    for where in ((), (str(tmp_path), "another")):
        answers[:] = [restore.UnreadableError("of another rank")]
        loaded = first(*where)
        assert loaded and loaded[0] == folder.path(1)
    answers[:] = [restore.UnreadableError(f"{number}") for number in (1, 2)]
    with pytest.raises(restore.UnreadableError, match="2"):
        first()
    shutil.rmtree(folder.folder)
    assert first() is None
