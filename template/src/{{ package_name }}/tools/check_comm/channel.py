"""The ranks, as check-comm sees them: who there is, and how they talk, within a time limit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimeIsUp
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ...core.ranks.device import synchronize
from ...core.ranks.world import World

T = TypeVar("T")


@dataclass
class Channel:
    """What an operation needs to know: the ranks, seen from one, and how they talk.

    Messages travel through `group`, over the backend that is checked. What ranks tell each other
    besides goes through `world.control`.
    """

    world: World
    group: dist.ProcessGroup
    device: torch.device
    timeout: int

    def in_time(self, function: Callable[[], T]) -> T:
        """Return what the function returns, once the GPU has done what the function asked for.

        Raises:
            RuntimeError: it takes longer than it may, or raised it.
        """

        def work() -> T:
            value = function()
            synchronize(self.device)
            return value

        return within(self.timeout, work)


def open_channel(world: World, backend: str, device: torch.device, timeout: int) -> Channel:
    """Connect the ranks over the backend that is to be checked."""
    # We keep the time ourselves. At its own limit NCCL would abort the process without a word.
    own_limit = timedelta(seconds=timeout) if backend == "gloo" else timedelta(days=1)
    group = dist.new_group(backend=backend, timeout=own_limit)
    # Gloo moves host memory, and knows some operations only there.
    at = torch.device("cpu") if backend == "gloo" else device
    channel = Channel(world, group, at, timeout)
    # NCCL connects at its first collective only.
    channel.in_time(lambda: dist.all_reduce(torch.ones(1, device=at), group=group))
    return channel


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return what the function returns.

    It runs in a thread of its own, which is left behind if it hangs: some calls of NCCL's, and of
    the store's, wait for another rank without any limit.

    Raises:
        RuntimeError: it takes longer than it may, or raised it.
    """
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(function())
        except RuntimeError as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeIsUp:
        raise RuntimeError(f"no end after {seconds} seconds") from None
