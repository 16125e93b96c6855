"""Writes and reads sharded tensors, in the format of torch.distributed.checkpoint.

Every rank writes its own parts to the same folder. Any number of ranks can read the folder, and
each rank reads only the parts that it needs. The folder's file `.metadata` is a pickle. An ordinary
unpickler would run any code that a pickle contains. So the unpickler here accepts only the names in
`CLASSES` and `KNOWN`.
"""

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import EnumMeta
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from .filesystem import HashedFile, check_archive, open_regular, read_bytes, remove
from .ranks.dtensor import is_dtensor

CLASSES = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""The classes that `.metadata` may name, as module and name."""


def _member(enum: Any, name: str) -> Any:  # noqa: ANN401 - what the pickle names
    """Return a member of an enum: Python 3.11.0 to 3.11.3 pickles it as a call of getattr."""
    if not isinstance(enum, EnumMeta):
        raise pickle.UnpicklingError(f".metadata calls getattr of {enum}")
    return enum[name]


KNOWN: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    # The path of the folder. In Python 3.13, its class is in another module.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    **{("torch", name): x for name, x in vars(torch).items() if isinstance(x, torch.dtype)},
}
"""The other names that `.metadata` may have, and the objects that are used for them."""


def write(folder: Path, parts: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    """Write sharded tensors; every rank calls this, with the same names.

    Args:
        folder: the new folder, whose name ends in .tmp until all of its files are written.
        parts: DTensors by name.
        group: the process group of the ranks.

    Returns:
        The lines of a digest file for all ranks' files.

    Raises:
        OSError: on every rank, if one of them could not write.
    """
    if group.rank() == 0:
        # A killed process may have left this folder. Other ranks can't be writing to it yet: they
        # wait for a plan from rank 0.
        remove(folder)
    writer, files = dcp.FileSystemWriter(folder), _Files(folder)
    writer.fs = files
    try:
        dcp.save(dict(parts), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {first}") from None
    lines = [f"{digest}  {folder.stem}/{name}" for name, digest in files.digests.items()]
    of_ranks: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(of_ranks, lines, group)
    return [line for each in of_ranks for line in each]


def read(folder: Path, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors by name; each rank reads on its own.

    Args:
        folder: a folder that any number of ranks wrote.
        like: for each name, a DTensor or None. If the DTensor has the shape of the stored tensor,
            the tensor is distributed in the same way. Otherwise it is read in full, on the CPU.

    Raises:
        Exception: of any class, if a file is damaged.
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
        warnings.simplefilter("ignore")  # torch warns that this rank reads on its own
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
    return tensors


class _Files(filesystem.FileSystem):
    """Opens only regular files of a folder, and keeps the digests of the files that it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.digests = folder, dict[str, str]()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # noqa: ANN401 - torch's own
        name = Path(path).name
        with open_regular(self.folder / name, mode) as file:
            hashed = HashedFile(file)
            yield hashed
        self.digests[name.removesuffix(".tmp")] = hashed.digest.hexdigest()


class _Reader(dcp.FileSystemReader):
    """Reads only tensors. `CLASSES` lacks the class of other values, which torch would unpickle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Files(folder)

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Any:  # noqa: ANN401 - Metadata
        content = read_bytes(Path(self.path) / ".metadata", most=2**28)
        return _Unpickler(io.BytesIO(content)).load()

    def read_data(self, plan: Any, planner: Any) -> Any:  # noqa: ANN401 - torch's own types
        def file_of(item: Any) -> Any:  # noqa: ANN401
            return self.storage_data[item.storage_index].relative_path

        for name, items in groupby(sorted(plan.items, key=file_of), file_of):
            with self.fs.create_stream(Path(self.path) / name, "rb") as file:
                for item in items:
                    self._read(item, file, planner)
        done = torch.futures.Future[None]()
        done.set_result(None)
        return done

    def _read(self, item: Any, file: Any, planner: Any) -> None:  # noqa: ANN401 - torch's own types
        place = self.storage_data[item.storage_index]
        file.seek(place.offset)
        part = io.BytesIO(file.read(place.length))
        check_archive(part)
        tensor = torch.load(part, map_location="cpu", weights_only=True)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a class or function
        if (module, name) in CLASSES:
            return super().find_class(module, name)
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f".metadata names {module}.{name}")
        return KNOWN[module, name]
