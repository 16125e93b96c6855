"""Checkpoints: written whole or not at all, the newest good one found, the old ones removed."""

import hashlib
import logging
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import UsageError
from .files import write_atomically

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run: `step-00000500.pt` and the like, in one folder.

    Two small files name one of them each: `latest`, and `best` by validation accuracy. All but
    reading is for rank 0 alone.

    Args:
        folder: where they lie; made at the first save.
        keep: how many of the newest to keep, besides the best.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def save(self, state: dict[str, Any], step: int, best: bool = False) -> bool:
        """Write a checkpoint and point `latest` at it, and `best` if it is.

        Returns:
            False if the disk did not take it; the ones before are then as they were.
        """
        path = self.folder / f"step-{step:08}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: torch.save(state, file))
            for name in ("latest", "best") if best else ("latest",):
                write_atomically(self.folder / name, path.name)
        # torch turns an OSError of the file it writes to into a RuntimeError.
        except (OSError, RuntimeError) as error:
            log.error(
                "could not write %s (%s); training goes on, and a resume would start from %s",
                path,
                str(error).splitlines()[0],
                self._named("latest") or "the beginning",
            )
            return False
        self._prune(path)
        return True

    def newest(self) -> Path | None:
        """Return the newest checkpoint that can be read; say which can't."""
        # By name, not by `latest`: it may name a file that has been damaged since.
        found = sorted(self.folder.glob("step-*.pt"), reverse=True)
        for path in found:
            fault = find_fault(path)
            if not fault:
                return path
            log.warning("skipping the corrupt checkpoint %s: %s", path, fault)
        if found:
            log.warning("no checkpoint in %s can be read: starting from step 0", self.folder)
        return None

    def best(self) -> Path | None:
        """Return the best checkpoint by validation accuracy, None before the first validation."""
        name = self._named("best")
        return self.folder / name if name else None

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last, None before the first."""
        name = self._named("latest")
        return self.folder / name if name else None

    def _named(self, pointer: str) -> str | None:
        """Return the file name that `latest` or `best` holds."""
        path = self.folder / pointer
        return path.read_text(encoding="utf-8") if path.exists() else None

    def _prune(self, written: Path) -> None:
        kept = (self._named("best"), written.name)
        for path in sorted(self.folder.glob("step-*.pt"))[: -self.keep]:
            if path.name not in kept:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.tmp"):
            path.unlink(missing_ok=True)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's file, None if nothing.

    torch.load notices a short file, but not a changed byte; the archive's checksums do.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a changed byte can make zipfile raise anything
        return str(error) or type(error).__name__
    return f"checksum of {damaged}" if damaged else None


def find(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint to start from, None to start anew.

    Args:
        resume: `auto`, `never`, or the path of a checkpoint or of a run folder. The run folder's
            own checkpoints go before a path: a requeued job goes on where it was.
        run_dir: this run's folder.

    Raises:
        UsageError: a path that holds no checkpoint, or `never` where the run folder has some.
    """
    own = Checkpoints(run_dir / "checkpoints").newest()
    if resume == "never":
        if own:
            raise UsageError(
                f"resume is never, but {run_dir} holds {own.name} of an earlier run: choose "
                "another --run-dir, or --resume auto"
            )
        return None
    if resume == "auto" or own:
        return own
    path = Path(resume)
    if path.is_dir():
        inner = path / "checkpoints"
        found = Checkpoints(inner if inner.is_dir() else path).newest()
    else:
        found = path if path.is_file() and not find_fault(path) else None
    if not found:
        raise UsageError(
            f"resume is '{resume}', which is no readable checkpoint: give a step-*.pt file, a run "
            "folder that has some, auto or never"
        )
    return found


def load(path: Path) -> dict[str, Any]:
    """Return a checkpoint's state, on the CPU.

    Only tensors and plain values are read, so a file from elsewhere can't run code.

    Raises:
        UsageError: it is not one of this project's checkpoints.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # nor is it said what torch.load raises for what is none
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"{path} is no checkpoint: {reason}") from None
    if not isinstance(state, dict) or not {"network", "optimizer", "samples_per_step"} <= set(
        state
    ):
        raise UsageError(f"{path} is no checkpoint of this project: it was saved by something else")
    return state


def parameters_sha256(network: nn.Module) -> str:
    """Return a digest of all parameters and buffers, the same wherever they are the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        # As bytes: NumPy does not know bf16.
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
