"""No file of another person runs code, hangs a command or copies a secret, whatever it contains.

The tests replace each file that `train --resume`, `runs`, `prune`, `report`, `sync` and
`sweep` open by pickles with each kind of call. If a call is made, it creates a file. The second
half replaces files by pipes, links, and archives that unpack to far too many bytes.
"""

import io
import logging
import math
import os
import pickle
import shutil
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import sign, spawn, srun

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
    """Return the opcodes that call the function with a name."""
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
    """Otherwise the tests below would prove nothing."""
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
    from demo.engine import checkpoint_files as checkpoint
    from demo.engine.errors import UsageError

    path = folder / "step-00000001.pt"
    for file in (archive(content), content):
        path.write_bytes(file)
        sign(path, path)
        assert checkpoint.Checkpoints(folder).newest() == path
        with suppress(UsageError):
            checkpoint.load(path)


def as_shards(folder: Path, content: bytes) -> None:
    """As the metadata, and as a part."""
    from demo.engine import checkpoint_files as checkpoint
    from demo.engine.errors import UsageError

    path = folder / "step-00000001.pt"
    torch.save({"network": {"weight": checkpoint.IN_SHARDS}}, path)
    shards = path.with_suffix(".shards")
    dcp.save({"network/weight": torch.zeros(1)}, checkpoint_id=shards, no_dist=True)
    metadata = (shards / ".metadata").read_bytes()
    for files in ((content, b""), (metadata, archive(content))):
        (shards / ".metadata").write_bytes(files[0])
        (shards / "__0_0.distcp").write_bytes(files[1])
        sign(path, path, shards / ".metadata", shards / "__0_0.distcp")
        assert checkpoint.Checkpoints(folder).newest() == path
        with suppress(UsageError):
            checkpoint.load(path)


def as_run(folder: Path, content: bytes) -> None:
    from demo.engine.checkpoint_files import Checkpoints
    from demo.engine.errors import UsageError
    from demo.settings import Settings
    from demo.tools import runs
    from demo.tools.report import curves
    from demo.trackers.dispatch import known_ids

    for name in ("status.json", "provenance.json", "config.yaml", "trackers.json"):
        (folder / name).write_bytes(content)
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "time": 2.0}\n' + content)
    (folder / "best").write_bytes(content)
    runs.recent([folder], math.inf, time.time())
    tell_about(folder)
    other = folder.with_name("other")
    shutil.copytree(folder, other, dirs_exist_ok=True)
    assert runs.main([str(folder), str(other)]) == 0
    curves.read_runs([folder])
    assert known_ids(folder) == {}
    with pytest.raises(UsageError):
        Checkpoints(folder).best()
    with suppress(UsageError):
        Settings.from_yaml(folder / "config.yaml")


def tell_about(run: Path) -> None:
    """Call the commands that look at any run folder, and remove from it."""
    from demo.tools import costs, prune, runs

    assert runs.main([str(run)]) == 0
    assert costs.main([str(run)]) == 0
    assert prune.main([str(run), "--dry-run"]) in (0, 1)


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


STEP = "checkpoints/step-00000001.pt"
NOBODY = 65534


@pytest.fixture(scope="module")
def trained(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert srun(project, folder, 1, "--max-steps=1").wait().codes == [0]
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run. A command that waits for a pipe is interrupted."""

    def interrupt(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield shutil.copytree(trained, tmp_path / "run")
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_pipe(path: Path, _secret: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_link(path: Path, secret: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(secret)


def a_hard_link(path: Path, secret: Path) -> None:
    if os.geteuid():
        pytest.skip("the folder must be of another user")
    path.unlink(missing_ok=True)
    os.link(secret, path)
    os.chown(path.parent, NOBODY, NOBODY)


def empty_but_long(path: Path) -> None:
    """Write a sparse file that is larger than the memory."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(2**34)


def as_source(run: Path) -> None:
    from demo.model import Model

    Model.load(run)


def as_weights(run: Path) -> None:
    initialize(run)


def initialize(source: Path) -> torch.nn.Module:
    """Return a network with the weights of a file, of which it takes those that fit."""
    from demo.engine import weights

    network = torch.nn.Linear(1, 2, bias=False)
    weights.initialize({"network": network}, str(source), True)
    return network


def as_resumed(run: Path) -> None:
    from demo.engine.checkpoint_files import find_start, load

    path = find_start(str(run), run.with_name("other"))
    assert path
    load(path)


def as_synced(run: Path) -> None:
    from demo.tools import sync

    sync.sync(run, ["tensorboard"])


def as_own(run: Path) -> None:
    from demo.engine.run.meters import JsonLines
    from demo.engine.run.run_lock import RunLock

    lock = RunLock(run)
    try:
        lock.acquire()
        JsonLines(run / "metrics.jsonl", 1)
        open_log(run)
    finally:
        lock.release()


def open_log(run: Path) -> None:
    from demo.engine.foreign import open_regular

    open_regular(run / "log.txt", "a").close()


def as_repeated(run: Path) -> None:
    from demo.engine.run.folder import keep_earlier

    keep_earlier(run, 1)


READ = {
    "config.yaml": (as_synced, as_repeated),
    "checkpoints/best": (as_source, as_weights),
    STEP: (as_source, as_weights, as_resumed),
    STEP.replace(".pt", ".sha256"): (as_source, as_weights, as_resumed),
    "provenance.json": (as_synced, as_repeated),
    "status.json": (as_synced,),
    "trackers.json": (as_synced,),
    "log.txt": (as_synced, open_log),
    "metrics.jsonl": (as_synced, as_own),
    "attempts/1.json": (as_own,),
}


@pytest.mark.parametrize("spoil", [a_pipe, a_link, a_hard_link])
@pytest.mark.parametrize("name", READ)
def test_a_file_of_a_run_is_a_regular_file_of_its_owner(
    run: Path,
    beside: Path,
    name: str,
    spoil: Callable[[Path, Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from demo.engine.errors import UsageError
    from demo.tools.report import curves

    (beside / "secret").write_text("hunter2\n")
    spoil(run / name, beside / "secret")
    for read in READ[name]:
        with pytest.raises((UsageError, OSError), match=r"a link|not a regular file|a hard link"):
            read(run)
    written = [*run.glob("tensorboard/*"), *run.glob("attempts/*-*")]
    assert b"hunter2" not in b"".join(path.read_bytes() for path in written)
    tell_about(run)
    assert "hunter2" not in str((capsys.readouterr(), curves.read_settings(run)))


@pytest.mark.parametrize("name", [name for name in READ if name != STEP])
def test_a_file_of_any_size_is_not_read_into_memory(run: Path, name: str) -> None:
    from demo.engine.errors import UsageError

    empty_but_long(run / name)
    tell_about(run)
    for read in READ[name]:
        if name != "log.txt":  # of which the end is taken
            with pytest.raises((UsageError, OSError), match=r"more than \d+ bytes"):
                read(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tags: &words [a, b]\nfreeze: *words\n", "has an alias"),
        ("tags: &a [*a]", "has an alias"),
        ("tags:\n" + "- a\n" * 20_000, "more than 65536"),
    ],
)
def test_aliases_and_long_lists_are_refused(run: Path, text: str, message: str) -> None:
    """Aliases of aliases would expand to any number of values."""
    from demo.engine.errors import UsageError
    from demo.settings import Settings
    from demo.tools.survey import read_settings

    (run / "config.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        Settings.from_yaml(run / "config.yaml")
    assert read_settings(run) == {}


@pytest.mark.parametrize("name", [STEP, "weights.pt"])
def test_an_archive_that_unpacks_to_many_times_its_size(run: Path, name: str) -> None:
    from demo.engine import checkpoint_files as checkpoint
    from demo.engine.errors import UsageError

    with zipfile.ZipFile(run / name, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", bytes(2**24))
    sign(run / name, run / name)
    message = r"its \d+ bytes unpack to 16777216"
    if name == STEP:
        with pytest.raises(UsageError, match=message):
            as_source(run)
    with pytest.raises(UsageError, match=message):
        initialize(run / name)
    with pytest.raises(UsageError, match=message):
        checkpoint.load(run / name)


def header(text: str, data: bytes = b"") -> bytes:
    """Return a file of safetensors with this header."""
    return struct.pack("<Q", len(text)) + text.encode() + data


def entry(shape: str = "[2,1]", offsets: str = "[0,8]", name: str = "weight") -> str:
    return f'"{name}":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}'


EIGHT = bytes(8)
HOSTILE = {
    "empty": b"",
    "no length": b"\0\0",
    "no header": struct.pack("<Q", 100),
    "too long a header": struct.pack("<Q", 2**63) + b"{}",
    "longer than the file": struct.pack("<Q", 1000) + b"{}",
    "no object": header("[]"),
    "no JSON": header("{" * 16),
    "nested": header("{" + '"a":[' * 10_000),
    "no tensor": header('{"weight":7}'),
    "no type": header("{" + entry().replace("F32", "P7") + "}", EIGHT),
    "short": header("{" + entry() + "}", EIGHT[1:]),
    "long": header("{" + entry() + "}", EIGHT + b"x"),
    "another size": header("{" + entry("[3,1]") + "}", EIGHT),
    "overflow": header("{" + entry(f"[{2**62},{2**62}]") + "}", EIGHT),
    "beyond": header("{" + entry(offsets="[0,17179869184]") + "}", EIGHT),
    "backwards": header("{" + entry(offsets="[8,0]") + "}", EIGHT),
    "overlapping": header("{" + entry() + "," + entry(name="other") + "}", EIGHT),
    "a pickle": archive(b"\x80\x02" + call("os", "system", f"touch {MARK}", "REDUCE", "GLOBAL")),
    "a pointer": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("name", ["weights.safetensors", "blob"])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_safetensors_that_are_none_are_one_line(
    project: Path, beside: Path, content: bytes, name: str
) -> None:
    from demo.engine.errors import UsageError

    (beside / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name} is not") as caught:
        initialize(beside / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert not (beside / MARK).exists()


def test_any_change_of_safetensors_is_read_or_refused(project: Path, beside: Path) -> None:
    from demo.engine.errors import UsageError

    sound = header("{" + entry() + ',"__metadata__":{"a":"b"}}', EIGHT)

    @settings(deadline=None, max_examples=300)
    @given(st.integers(0, len(sound) - 1), st.binary(max_size=4), st.integers(0, 4))
    def check(place: int, put: bytes, left_out: int) -> None:
        changed = sound[:place] + put + sound[place + left_out :]
        (beside / "x.safetensors").write_bytes(changed)
        with suppress(UsageError):
            assert initialize(beside / "x.safetensors").weight.shape == (2, 1)

    check()
    (beside / "x.safetensors").write_bytes(sound)
    assert initialize(beside / "x.safetensors").weight.sum() == 0


def test_safetensors_of_many_tensors_or_of_any_size(project: Path, beside: Path) -> None:
    from demo.engine.errors import UsageError

    path = beside / "x.safetensors"
    empty_but_long(path)
    with pytest.raises(UsageError, match="not a checkpoint"):
        initialize(path)
    many = ",".join(entry("[0]", "[0,0]", f"{number:x}") for number in range(1_000_001))
    path.write_bytes(header("{" + many + "}"))
    with pytest.raises(UsageError, match="more than 1000000 values"):
        initialize(path)
    a_pipe(path, path)
    with pytest.raises(UsageError, match="has no checkpoint"):
        initialize(path)


def test_a_checkpoint_that_names_its_lists_many_times(run: Path) -> None:
    from demo.engine.errors import UsageError

    state = torch.load(run / STEP, weights_only=True)
    state["more"] = []
    for _ in range(40):
        state["more"] = [state["more"], state["more"]]
    torch.save(state, run / STEP)
    sign(run / STEP, run / STEP)
    for read in (as_source, as_weights, as_resumed):
        with pytest.raises(UsageError, match="more than 1000000 values"):
            read(run)


def test_workers_of_another_machine(run: Path) -> None:
    from demo.engine.ranks.environment import bound_cpus
    from demo.model import Model

    state = torch.load(run / STEP, weights_only=True)
    state["settings"]["workers"] = 60
    torch.save(state, run / STEP)
    sign(run / STEP, run / STEP)
    assert Model.load(run).settings.workers == min(60, bound_cpus())


@pytest.mark.skipif(os.geteuid(), reason="the link must be of another user")
def test_a_run_does_not_write_through_a_link_of_another_user(run: Path, beside: Path) -> None:
    from demo.engine.errors import UsageError

    (beside / "mine").mkdir()
    (beside / "mine/left.tmp").touch()
    (run / "results").symlink_to(beside / "mine")
    as_own(run)  # our own
    (run / "results").rename(run / "checkpoints.old")
    shutil.rmtree(run / "figures")
    (run / "figures").symlink_to(beside / "mine")
    os.lchown(run / "figures", NOBODY, NOBODY)
    with pytest.raises(UsageError, match="another user's link"):
        as_own(run)
    assert (beside / "mine/left.tmp").exists()


def test_the_weights_of_another_program_may_be_a_link(run: Path, beside: Path) -> None:
    """As they are in a cache of downloads."""
    torch.save({"weight": torch.ones(2, 1)}, beside / "blob")
    (beside / "weights.pt").symlink_to(beside / "blob")
    assert initialize(beside / "weights.pt").weight.sum() == 2


@pytest.mark.parametrize(
    "words", [["sync", "--trackers=tensorboard"], ["evaluate"], ["predict"], ["export"]], ids=str
)
def test_a_command_refuses_it_in_one_line(
    project: Path, run: Path, beside: Path, words: list[str]
) -> None:
    name = "log.txt" if words[0] == "sync" else STEP
    (beside / "secret").write_text("hunter2\n")
    a_link(run / name, beside / "secret")
    job = spawn(project, beside / "out", [["demo", words[0], str(run), *words[1:]]], [{}]).wait()
    assert job.codes == [1] and "is a link" in job.log and job.log.count("\n") == 1, job.log
    assert not list(run.glob("tensorboard/*"))


def test_a_logged_text_can_not_forge_a_line(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    from demo.engine.errors import PrintableFormatter

    logging.getLogger("foreign").warning("%s is odd", "x\n12:00:00 [rank 0] all is well\x1b[2J")
    line = PrintableFormatter("%(message)s").format(caplog.records[0])
    assert line == r"x\n12:00:00 [rank 0] all is well\x1b[2J is odd"
