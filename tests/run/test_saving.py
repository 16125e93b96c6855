"""Checkpoints are written behind the training, one at a time, and none is half written."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from .conftest import PATIENCE

if TYPE_CHECKING:
    from demo.saving import Saver


@pytest.fixture
def saver(project: Path, tmp_path: Path) -> "Saver":
    """What saves to tmp_path, on a world of one rank."""
    from demo.checkpoint import Checkpoints
    from demo.distributed import World
    from demo.saving import Saver

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
