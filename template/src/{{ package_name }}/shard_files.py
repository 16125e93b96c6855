"""The shards of a checkpoint: a folder that all ranks write, each its parts of tensors.

It is one of torch.distributed.checkpoint, whose tools can read it too. Any number of ranks reads
it: each takes what it needs out of all files.
"""

import io
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from .parts import is_part


def write(folder: Path, parts: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write parts by name; every rank calls this, with the same names.

    Raises:
        OSError: on every rank, where one could not write.
    """
    try:
        dcp.save(
            dict(parts),
            storage_writer=dcp.FileSystemWriter(folder),
            planner=planner(),
            process_group=group,
        )
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {first}") from None


def planner() -> dcp.DefaultSavePlanner:
    """Return what plans a save: like the last one where nothing but the values has changed.

    Rank 0 puts the plans of all ranks together, which takes long where there are thousands.
    """
    known = "enable_plan_caching" in signature(dcp.DefaultSavePlanner).parameters  # in new torch
    return dcp.DefaultSavePlanner(**({"enable_plan_caching": True} if known else {}))


def read(folder: Path, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the tensors of these names; each rank reads for itself.

    Args:
        folder: where any number of ranks wrote them.
        like: for each name the part that the tensor is cut like. With None, or what is no part or
            of another shape, the tensor comes whole, on the CPU.

    Raises:
        Exception: whatever damaged files make torch raise.
    """
    reader = _Reader(folder)
    stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {}
    for name, near in like.items():
        size, dtype = stored[name].size, stored[name].properties.dtype
        if near is not None and is_part(near) and near.shape == size:
            tensors[name] = torch.empty_like(near, dtype=dtype)
        else:
            tensors[name] = torch.empty(size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads alone
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def find_fault(folder: Path) -> str | None:
    """Return what is wrong with the files, None if nothing: each part has a checksum."""
    try:
        stored = _Reader(folder).read_metadata().storage_data.values()
        # Several at once: who computes a checksum or reads leaves Python to other threads.
        with ThreadPoolExecutor() as pool:
            faults = pool.map(lambda each: _find_fault(folder, each), stored)
            return next((fault for fault in faults if fault), None)
    except Exception as error:  # a changed byte can make pickle and zipfile raise anything
        return str(error) or type(error).__name__


def _find_fault(folder: Path, stored: Any) -> str | None:  # noqa: ANN401 - a class of torch's
    with (folder / stored.relative_path).open("rb") as file:
        file.seek(stored.offset)
        content = io.BytesIO(file.read(stored.length))
    with zipfile.ZipFile(content) as archive:
        damaged = archive.testzip()
    return f"checksum of {stored.relative_path}: {damaged}" if damaged else None


class _Reader(dcp.FileSystemReader):
    """Reads the list of tensors without running code that a file from elsewhere may hold."""

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:  # noqa: ANN401
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        found = super().find_class(module, name)
        known = (
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        )
        if (
            module in ("torch.distributed.checkpoint.metadata", "pathlib")
            or isinstance(found, torch.dtype)
            or found is torch.Size
            or (module, name) in known
        ):
            return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no plain value")
