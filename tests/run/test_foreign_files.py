"""No file from elsewhere runs code, whatever is in it.

Pickles of every kind of call are put in the place of each file that `train --resume`, `runs`,
`plot`, `sync` and `sweep` open. A call that is made leaves a file behind.
"""

import io
import json
import pickle
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

MARK = "a-call-was-made"
# What code would be run by: of Python, of a file that lies beside, by way of an allowed module.
CALLS = {
    ("os", "system"): f"touch {MARK}",
    ("posix", "system"): f"touch {MARK}",
    ("pathlib", "os.system"): f"touch {MARK}",
    ("torch.distributed.checkpoint.metadata", "os.system"): f"touch {MARK}",
    ("torch.serialization", "os.system"): f"touch {MARK}",
    ("builtins", "exec"): f"open({MARK!r}, 'w')",
    ("builtins", "eval"): f"open({MARK!r}, 'w')",
    ("beside", "call"): "",
}
HARMLESS = [("torch", "Size"), ("torch", "float32"), ("collections", "OrderedDict")]
HARMLESS += [("torch.distributed.checkpoint.metadata", "Metadata"), ("torch._utils", "_rebuild")]


def text(value: str) -> bytes:
    """Return the opcode that pushes a text."""
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def lookup(module: str, name: str, how: str) -> bytes:
    """Return opcodes that look a name up."""
    if how == "GLOBAL":
        return f"c{module}\n{name}\n".encode()
    return text(module) + text(name) + b"\x93"


def call(module: str, name: str, argument: str, how: str, found: str) -> bytes:
    """Return opcodes that call what a name stands for."""
    function, arguments = lookup(module, name, found), text(argument) + b"\x85"
    match how:
        case "REDUCE":
            return function + arguments + b"R"
        case "NEWOBJ":
            return function + arguments + b"\x81"
        case "NEWOBJ_EX":
            return function + arguments + b"}\x92"
        case "OBJ":
            return b"(" + function + text(argument) + b"o"
        case "INST":
            return b"(" + text(argument) + f"i{module}\n{name}\n".encode()
    # BUILD: an object that is known calls what its state names.
    known = lookup("torch.distributed.checkpoint.metadata", "Metadata", found)
    state = b"}" + text("__setstate__") + function + b"s"
    return known + b")\x81" + state + b"b" + text(argument) + b"b"


FOUND = ("GLOBAL", "STACK_GLOBAL")
KINDS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "BUILD")
looked_up, kinds = st.sampled_from(FOUND), st.sampled_from(KINDS)
bad = st.builds(
    lambda n, k, f: call(*n, CALLS[n], k, f), st.sampled_from([*CALLS]), kinds, looked_up
)
good = st.builds(lambda n, f: lookup(*n, f), st.sampled_from(HARMLESS), looked_up)
noise = st.sampled_from([b"", b"}", b")", b"N", b"\x94", b"0", b"2", b"(", b"t", b"b", b"R", b"a"])
pickles = st.builds(
    lambda protocol, parts: b"\x80" + bytes([protocol]) + b"".join(parts) + b".",
    st.integers(2, 5),
    st.lists(st.one_of(bad, good, noise), min_size=1, max_size=6).filter(len),
)


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of foreign files, in which commands are given, and from which can be imported."""
    (tmp_path / "beside.py").write_text(f"open({MARK!r}, 'w')\n\ndef call(*_): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("beside", None)
    return tmp_path


def archive(content: bytes, name: str = "archive/data.pkl") -> bytes:
    """Return a file of torch's, or another archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(name, content)
        made.writestr("archive/version", "3\n")
        made.writestr("archive/byteorder", sys.byteorder)
    return file.getvalue()


def test_the_calls_are_made_by_an_ordinary_unpickler(beside: Path) -> None:
    """Otherwise the tests below would show nothing."""
    made = set()
    for (module, name), argument in CALLS.items():
        for kind in KINDS:
            for found in FOUND:
                with suppress(Exception):
                    pickle.loads(b"\x80\x04" + call(module, name, argument, kind, found) + b".")
                if (beside / MARK).exists():
                    made.add(((module, name), kind, found))
                    (beside / MARK).unlink()
                sys.modules.pop("beside", None)
    for number, each in enumerate(([*CALLS], {*KINDS} - {"NEWOBJ", "NEWOBJ_EX"}, FOUND)):
        assert {combination[number] for combination in made} >= {*each}


def as_checkpoint(folder: Path, content: bytes) -> None:
    from demo.core.checkpoint import restore, store
    from demo.core.errors import UsageError

    path = folder / "step-00000001.pt"
    for file in (archive(content), content):
        path.write_bytes(file)
        store.Checkpoints(folder).newest()
        with suppress(UsageError):
            restore.load(path)


def as_shards(folder: Path, content: bytes) -> None:
    """As the list, and as a part."""
    from demo.core.checkpoint import dcp, restore, store
    from demo.core.errors import UsageError

    path = folder / "step-00000001.pt"
    torch.save({"network": {"weight": store.IN_SHARDS}}, path)
    shards = store.shards_of(path)
    shards.mkdir(exist_ok=True)
    part = archive(content)
    listed = {"network/weight": ("float32", [1], [("part", 0, len(part), [0], [1])])}
    for files in (
        {dcp.LIST: archive(content, dcp.LIST_IN)},
        {dcp.LIST: archive(json.dumps(listed).encode(), dcp.LIST_IN), "part": part},
    ):
        for old in shards.iterdir():
            old.unlink()
        for name, file in files.items():
            (shards / name).write_bytes(file)
        store.Checkpoints(folder).newest()
        with suppress(UsageError):
            restore.load(path)


def as_run(folder: Path, content: bytes) -> None:
    from demo.core.checkpoint.store import Checkpoints
    from demo.core.errors import UsageError
    from demo.settings import Settings
    from demo.tools import runs, sync
    from demo.tools.plot import curves
    from demo.tracking.dispatch import known_ids

    for name in ("status.json", "provenance.json", "config.yaml", "trackers.json"):
        (folder / name).write_bytes(content)
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "time": 2.0}\n' + content)
    (folder / "best").write_bytes(content)
    runs.survey(runs.find_runs([folder]), time.time())
    curves.labels(curves.load([folder]))
    assert sync.read_json(folder / "status.json") == known_ids(folder, 0) == {}
    assert Checkpoints(folder).best() is None
    with suppress(UsageError):
        Settings.from_yaml(folder / "config.yaml")


def as_study(folder: Path, content: bytes) -> None:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    journal = folder / "journal.log"
    journal.write_bytes(content + b"\n{}\n")
    with suppress(ValueError, KeyError):
        backend = JournalFileBackend(str(journal), JournalFileOpenLock(str(journal)))
        JournalStorage(backend).get_all_studies()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("opened", [as_checkpoint, as_shards, as_run, as_study])
def test_no_pickle_runs_code(
    project: Path, beside: Path, opened: Callable[[Path, bytes], None]
) -> None:
    @settings(deadline=None, max_examples=60)
    @given(content=pickles)
    def check(content: bytes) -> None:
        opened(beside, content)
        assert not (beside / MARK).exists() and "beside" not in sys.modules

    check()


@pytest.mark.parametrize("tag", ["object/apply:os.system", "object/new:os.system", "name:beside.x"])
def test_no_tag_of_yaml_runs_code(project: Path, beside: Path, tag: str) -> None:
    as_run(beside, f"lr: !!python/{tag} [touch {MARK}]\n".encode())
    assert not (beside / MARK).exists() and "beside" not in sys.modules
