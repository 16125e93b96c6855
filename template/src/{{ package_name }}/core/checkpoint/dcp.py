"""The shards of a checkpoint: a folder that all ranks write, each its parts of tensors.

The files are those of torch.distributed.checkpoint, but for the list of what is in them: torch
pickles it, and reading a pickle can run code. Here it is JSON, in an archive that has a checksum.
Any number of ranks reads the folder: each takes what it needs out of all files.
"""

import io
import json
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..filesystem import archive_fault, open_regular, read_bytes, size_fault, write_atomically
from ..ranks.dtensor import is_dtensor

LIST, LIST_IN = "list.zip", "list.json"
DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}

# A part: its file, where in it, how long; where in the tensor, of which size.
Part = tuple[str, int, int, list[int], list[int]]
# Of each tensor the dtype, the size and the parts.
Listed = dict[str, tuple[str, list[int], list[Part]]]


def write(folder: Path, parts: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write parts by name; every rank calls this, with the same names.

    Raises:
        OSError: on every rank, where one could not write.
    """
    try:
        dcp.save(
            dict(parts),
            storage_writer=_Writer(folder),
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
        if near is not None and is_dtensor(near) and near.shape == size:
            tensors[name] = torch.empty_like(near, dtype=dtype)
        else:
            tensors[name] = torch.empty(size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads alone
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
    return tensors


def find_fault(folder: Path) -> str | None:
    """Return what is wrong with the files, None if nothing: each part has a checksum.

    Raises:
        Exception: whatever a damaged list or file makes Python raise.
    """
    stored = _Reader(folder).read_metadata().storage_data.values()
    if sum(each.length for each in stored) > sum(path.stat().st_size for path in folder.iterdir()):
        return "the list has more than the files"
    # Several at once: who computes a checksum or reads leaves Python to other threads.
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda each: _find_fault(folder, each), stored)
        return next((fault for fault in faults if fault), None)


def _find_fault(folder: Path, stored: _StorageInfo) -> str | None:
    with open_regular(folder / stored.relative_path) as file:
        file.seek(stored.offset)
        content = io.BytesIO(file.read(stored.length))
    with zipfile.ZipFile(content) as archive:
        fault = archive_fault(archive)
    return f"{stored.relative_path}: {fault}" if fault else None


class _Writer(dcp.FileSystemWriter):
    """Writes the list as JSON."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        stored = {written.index: written.storage_data for written in chain(*results)}
        content = json.dumps(_listed(metadata.state_dict_metadata, stored))

        def write(file: BinaryIO) -> None:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(LIST_IN, content)

        write_atomically(Path(self.path) / LIST, write)


class _Reader(dcp.FileSystemReader):
    """Reads the list from JSON."""

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:  # noqa: ANN401
        tensors: dict[str, Any] = {}
        stored = {}
        for name, (dtype, size, parts) in _read_list(Path(self.path)).items():
            chunks = []
            for file, start, length, offset, part_size in parts:
                if Path(file).name != file:
                    raise ValueError(f"it lists {file}, which is outside of its folder")
                stored[MetadataIndex(name, offset)] = _StorageInfo(file, start, length)
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(part_size)))
            properties = TensorProperties(DTYPES[dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(size), chunks)
        return Metadata(tensors, storage_data=stored)


def _listed(tensors: Mapping[str, Any], stored: Mapping[Any, Any]) -> Listed:
    """Return torch's description of tensors, and where each part is stored, as plain values."""
    stored_at = {(index.fqn, tuple(index.offset)): at for index, at in stored.items()}
    listed: Listed = {}
    for name, tensor in tensors.items():
        parts: list[Part] = []
        for chunk in tensor.chunks:
            at = stored_at[name, tuple(chunk.offsets)]
            where = (at.relative_path, at.offset, at.length)
            parts.append((*where, [*chunk.offsets], [*chunk.sizes]))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        listed[name] = (dtype, [*tensor.size], parts)
    return listed


def _read_list(folder: Path) -> Listed:
    # At once: zipfile takes a failure to read for damage.
    with zipfile.ZipFile(io.BytesIO(read_bytes(folder / LIST, 2**28))) as archive:
        if fault := size_fault(archive, times=100):
            raise ValueError(fault)
        return json.loads(archive.read(LIST_IN))
