"""Reads files that another user may have made, in a run folder or of another program.

Such a file can't run code, can't let the caller wait or fill its memory, and can't be a link to one
of the caller's secrets. Commands that take a path, and all that read a run folder, read through
this module.
"""

import errno
import json
import os
import pickle
import stat
import zipfile
from collections.abc import Mapping
from enum import EnumMeta
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import IO, Any

MOST_BYTES = 2**24  # allowed in a file that is read from a run folder
MOST_VALUES = 1_000_000  # allowed in a checkpoint; a tensor counts as one value
UNLINKED = ("attempts", "figures", "profile")  # folders of a run that must not be links
CLASSES = {
    "torch": ("Size",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""The classes that `.metadata` of shards may name, by module."""


def open_regular(path: Path, mode: str = "rb", buffering: int = -1) -> IO[Any]:
    """Open a file in a run folder, which another user may have made.

    Raises:
        OSError: the file can't be opened; or it is a link, which may point to a secret of the
            caller; or a pipe, on which the caller would wait; or a hard link to another user's
            file; or its folder is one of UNLINKED and is a link.
    """

    def opener(name: str, flags: int) -> int:
        try:
            flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not on Windows
            number = os.open(name, flags, 0o666)
        except OSError as error:
            known = {errno.ELOOP: "it is a link", errno.ENXIO: "it is not a regular file"}  # a pipe
            raise OSError(error.errno, known.get(error.errno or 0, error.strerror), name) from None
        facts = os.fstat(number)
        reason = "" if stat.S_ISREG(facts.st_mode) else "it is not a regular file"
        if facts.st_nlink > 1 and facts.st_uid != path.parent.stat().st_uid:
            reason = "it is a hard link to another user's file"
        if path.parent.name in UNLINKED and path.parent.is_symlink():
            reason = "its folder is a link"
        if reason:
            os.close(number)
            raise OSError(errno.EPERM, reason, name)
        if hasattr(os, "O_NONBLOCK"):  # on Lustre, non-blocking reads may fail
            os.set_blocking(number, True)
        return number

    return open(path, mode, buffering, None if "b" in mode else "utf-8", opener=opener)


def files_in(folder: Path) -> list[Path]:
    """Return the paths in a folder of a run, sorted by name.

    Raises:
        OSError: the folder can't be read, or is a link, which may point to private files.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(folder))
    return sorted(folder.iterdir())


def read_bytes(path: Path, most: int = MOST_BYTES, last: bool = False) -> bytes:
    """Return the content of a file in a run folder.

    Args:
        path: the file.
        most: the largest number of bytes to read.
        last: whether to return only the end of a longer file.

    Raises:
        OSError: the file can't be read, is not a regular file, or is longer than `most` without
            `last`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most and not last:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        file.seek(max(size - most, 0))
        return file.read(most)


def read_object(path: Path, kinds: Mapping[str, type | UnionType]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: the file.
        kinds: the expected types by name. Names may be missing in the file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not a JSON object, or a value has another type or is out of range.
    """
    try:
        values = json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is a {type(values).__name__}, not an object")
    for name in values.keys() & kinds.keys():
        if not isinstance(values[name], kinds[name]) or not in_range(values[name]):
            raise ValueError(f"{name} has a wrong type, or is out of range")
    return values


def in_range(value: object) -> bool:
    """Return whether a number is finite and fits a float; True for other values."""
    return not isinstance(value, int | float) or abs(value) < 1e300


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl as dictionaries; an empty list if there is no file.

    Incomplete lines are left out. A line is incomplete while it is being written, or after the disk
    was full.
    """
    try:
        content = read_bytes(path, 2**30)
    except FileNotFoundError:
        return []
    lines = []
    for line in content.decode(errors="replace").splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = values.get("step") if isinstance(values, dict) else None
        if isinstance(step, int) and in_range(step):
            lines.append(values)
    return lines


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError for a TorchScript program, or an archive that unpacks to more than its size.

    torch.save does not compress, so such an archive is meant to fill the memory.
    """
    if file.read(4) == b"PK\x03\x04":  # torch reads a file with these first bytes as an archive
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(each.file_size for each in archive.infolist())
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise ValueError("it is a TorchScript program: save its state_dict with torch.save")
        if unpacked > size:
            raise ValueError(f"its {size} bytes unpack to {unpacked}")
    file.seek(0)


def read_tensors(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return what torch.save or safetensors wrote to a file.

    A file in a cache of downloads may have any name. A safetensors file begins with 8 bytes for the
    length of a JSON object, and then the object's bracket. The archives and pickles of torch begin
    with other bytes.

    Raises:
        Exception: of any class, if the file can't be read.
    """
    import torch

    with open_regular(path) as file:  # torch would replace an OSError by its own error
        start = file.read(24)
        file.seek(0)
        if start == b"version https://git-lfs.":
            raise ValueError("it is a pointer of Git LFS: get the file itself with 'git lfs pull'")
        if path.suffix == ".safetensors" or start[8:9] == b"{":
            from safetensors import safe_open

            with safe_open(path, "pt") as tensors:
                names = tensors.keys()
                if len(names) > MOST_VALUES:  # making so many tensors would take minutes
                    raise ValueError(f"it has more than {MOST_VALUES} values")
                return {name: tensors.get_tensor(name) for name in names}
        check_archive(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    if count(state) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    return state


def count(value: Any, known: dict[int, int] | None = None) -> int:  # noqa: ANN401
    """Return the number of values in nested dictionaries, lists and tuples.

    A value that is referenced several times counts each time.

    Args:
        value: the nested value.
        known: the counts so far by `id`, for the recursion.
    """
    known = {} if known is None else known
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value
        inside = parts if isinstance(value, dict | list | tuple) else ()
        known[id(value)] = 1 + sum(count(each, known) for each in inside)
    return known[id(value)]


def _member(enum: Any, name: str) -> Any:  # noqa: ANN401 - what the pickle names
    """Return a member of an enum: Python 3.11.0 to 3.11.3 pickles it as a call of getattr."""
    if not isinstance(enum, EnumMeta):
        raise pickle.UnpicklingError(f".metadata calls getattr of {enum}")
    return enum[name]


class ShardsUnpickler(pickle.Unpickler):
    """Reads `.metadata` of shards. An ordinary unpickler would run any code in it."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a class or function
        """Return what the pickle names, which must be in the tables; it is not imported before."""
        import torch  # here, since its import takes a second

        if name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        known = {
            ("builtins", "getattr"): _member,
            ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
            # The path of the folder. In Python 3.13, its class is in another module.
            ("pathlib", "PosixPath"): PurePosixPath,
            ("pathlib._local", "PosixPath"): PurePosixPath,
            **{("torch", key): x for key, x in vars(torch).items() if isinstance(x, torch.dtype)},
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f".metadata names {module}.{name}")
        return known[module, name]
