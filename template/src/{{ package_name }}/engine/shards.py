"""Writes and reads sharded tensors, in the format of torch.distributed.checkpoint.

Every rank writes its own parts to the same folder. Any number of ranks can read the folder, and
each rank reads only the parts that it needs. The folder's file `.metadata` is a pickle, which
foreign.py reads.
"""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from .filesystem import HashedFile, remove
from .foreign import ShardsUnpickler, check_archive, open_regular, read_bytes

FAILURES = [0]
"""How many saves have failed. Then some ranks may have kept their plans, and others not, so no rank
uses them again (github.com/pytorch/pytorch/issues/176289)."""


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
        dcp.save(dict(parts), storage_writer=writer, planner=planner(), process_group=group)
    except CheckpointException as error:
        FAILURES[0] += 1
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {first}") from None
    lines = [f"{digest}  {folder.stem}/{name}" for name, digest in files.digests.items()]
    of_ranks: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(of_ranks, lines, group)
    return [line for each in of_ranks for line in each]


def planner() -> dcp.DefaultSavePlanner:
    """Return a planner that keeps all ranks' plans, so that rank 0 joins them only if they change.

    torch keeps them by the name of the planner's class.
    """
    return type(f"Planner{FAILURES[0]}", (dcp.DefaultSavePlanner,), {})(enable_plan_caching=True)


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
        if near is not None and near.shape == size:
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
    """Reads only tensors: foreign.CLASSES lacks the class of what torch would unpickle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Files(folder)

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Any:  # noqa: ANN401 - Metadata
        content = read_bytes(Path(self.path) / ".metadata", most=2**28)
        return ShardsUnpickler(io.BytesIO(content)).load()

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
