"""The parts of tensors that ranks hold, in the format of torch.distributed.checkpoint.

Every rank writes its own parts into one folder. Any number of ranks can read the folder; each takes
the parts that it needs. The folder's `.metadata` is a pickle. It is read by an unpickler that knows
only the names in `KNOWN`, because an ordinary one would run any code that a file asks for.
"""

import io
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException

from .filesystem import open_regular, read_bytes, size_fault
from .ranks.dtensor import is_dtensor

KNOWN: dict[tuple[str, str], Any] = {
    **{
        (each.__module__, each.__name__): each
        for each in (
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            torch.Size,
        )
    },
    **{
        ("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)
    },
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    # The folder that was written to. Its class has another module in Python 3.13.
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
}
"""What the pickle of a folder's metadata may name, by module and name."""


def write(folder: Path, parts: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write parts by name; every rank calls this, with the same names.

    Raises:
        OSError: on every rank, if one of them could not write.
    """
    writer = dcp.FileSystemWriter(folder)
    try:
        dcp.save(dict(parts), storage_writer=writer, planner=planner(), process_group=group)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {first}") from None


def planner() -> dcp.DefaultSavePlanner:
    """Return a planner that uses the last save's plan again if only the values have changed.

    Rank 0 merges the plans of all ranks, which is slow for thousands of tensors.
    """
    known = "enable_plan_caching" in signature(dcp.DefaultSavePlanner).parameters  # in newer torch
    return dcp.DefaultSavePlanner(**({"enable_plan_caching": True} if known else {}))


def read(folder: Path, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the tensors of these names; each rank reads for itself.

    Args:
        folder: where any number of ranks wrote them.
        like: for each name a DTensor with the layout of the result. If it is None, not a DTensor,
            or of another shape, the result is the whole tensor, on the CPU.

    Raises:
        Exception: of any class, for damaged files.
    """
    reader = _Reader(folder)
    stored = reader.read_metadata().state_dict_metadata
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


class _Files(filesystem.FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # noqa: ANN401 - as torch's
        with open_regular(Path(path), mode) as file:
            yield file


class _Reader(dcp.FileSystemReader):
    """Reads only tensors. torch would unpickle any other value, which can run code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Files()

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Any:  # noqa: ANN401 - Metadata
        content = read_bytes(Path(self.path) / ".metadata", most=2**28)
        found = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, metadata.Metadata):
            raise ValueError(".metadata has no Metadata object")
        for each in found.state_dict_metadata.values():
            if not isinstance(each, metadata.TensorStorageMetadata):
                raise ValueError(".metadata lists something that is not a tensor")
        for each in found.storage_data.values():
            if PurePath(each.relative_path).name != each.relative_path:
                raise ValueError(f"it lists {each.relative_path}, which is outside of its folder")
        return found

    def _slice_file(self, *arguments: Any) -> Any:  # noqa: ANN401 - torch's own types
        # zipfile can't read torch's view of a part: `seek` from the end leaves the part.
        part = io.BytesIO(super()._slice_file(*arguments).read())
        with zipfile.ZipFile(part) as archive:
            if fault := size_fault(archive):
                raise ValueError(fault)
        part.seek(0)
        return part


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in `KNOWN`
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f".metadata names {module}.{name}")
        return KNOWN[module, name]
