"""Weights as safetensors: `export` writes them; `--init-from` and other programs read them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import put_example
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from .conftest import Job, clean_environment, command, python, srun

TOKEN = "sk-correct-horse-7"


def error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of a command that failed."""
    said = done.stdout + done.stderr
    assert done.returncode == 1 and said.count("\n") == 1, said
    return said


@pytest.fixture(scope="module")
def averaged(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run with averages, whose best step is not its last."""
    folder = tmp_path_factory.mktemp("averaged")
    flags = ("--ema=0.5", "--max-steps=12", "--validate-every=4", "--tags", TOKEN)
    return srun(project, folder / "run", 2, *flags).wait()


def test_the_best_averages_are_written_and_read(
    project: Path, averaged: Job, tmp_path: Path
) -> None:
    path = tmp_path / "network.safetensors"
    path.write_text("is replaced")
    export = ("export", averaged.run_dir, f"--output={path}")
    done = command(project, *export, MY_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.glob("*.tmp")] == []
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask

    folder = averaged.run_dir / "checkpoints"
    best = torch.load(folder / (folder / "best").read_text(), weights_only=True)
    written = load_file(path)
    assert written.keys() == best["averages"]["network"].keys()
    for name, tensor in best["averages"]["network"].items():
        assert torch.equal(written[name], tensor)

    started = ("--max-steps=1", f"--init-from={path}", "--freeze", "layers.1.*")
    job = srun(project, tmp_path / "started", 1, *started).wait()
    assert f"network starts from {path}: 20 of 20 tensors" in job.log
    kept = torch.load(tmp_path / "started/checkpoints/step-00000001.pt", weights_only=True)
    weight = kept["networks"]["network"]["layers.1.0.weight"]
    assert torch.equal(weight, written["layers.1.0.weight"])


def test_the_file_tells_where_it_comes_from_and_no_more(
    project: Path, averaged: Job, tmp_path: Path
) -> None:
    path = tmp_path / "network.safetensors"
    words = ("export", averaged.run_dir, f"--output={path}")
    done = command(project, *words, "--checkpoint=latest", MY_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    with safe_open(path, "pt") as file:
        told = file.metadata()
    settings = json.loads(told.pop("settings"))
    summary = averaged.summary
    facts = json.loads((averaged.run_dir / "provenance.json").read_text())
    commit = facts["git"]["commit"]
    assert told == {
        "format": "pt",
        "package": "demo",
        "torch": torch.__version__,
        "run": "demo/run",
        "step": "12",
        "best_metric": "validation/accuracy",
        "best_value": str(summary["validation_accuracy"]),
        "best_step": str(summary["best_step"]),
        **({"commit": commit} if commit else {}),
    }
    assert settings["lr"] == 0.15 and settings["tags"] == ["<MY_TOKEN>"]
    assert not {"data_dir", "run_dir", "run_root", "init_from", "resume"} & settings.keys()
    content = path.read_bytes()
    assert TOKEN.encode() not in content and str(averaged.run_dir).encode() not in content


def test_what_can_not_be_written_is_one_line(project: Path, averaged: Job, tmp_path: Path) -> None:
    run = averaged.run_dir
    for output, said in (
        ("x.pt", ".safetensors, .pt2 or .onnx"),
        (f"{tmp_path}/none/x.safetensors", "choose another --output"),
        (str(tmp_path), f"{tmp_path} exists"),
        (f"{tmp_path}/folder", "model.py returned Network"),
    ):
        assert said in error(command(project, "export", run, f"--output={output}"))
    words = ("export", run, f"--output={tmp_path}/x.safetensors", "--network=critic")
    assert "one of network" in error(command(project, *words))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["safetensors", "pt2"])
def test_a_file_stays_if_another_can_not_replace_it(
    project: Path, averaged: Job, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"x.{kind}"
    path.write_text("stays")
    export = [sys.executable, "-m", "demo", "export", averaged.run_dir, f"--output={path}"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *export],  # as if the disk were full
        cwd=project,
        env=clean_environment(project),
        capture_output=True,
        text=True,
    )
    assert error(done).startswith(f"error: can't write {path}")
    assert path.read_text() == "stays" and [*tmp_path.iterdir()] == [path]


def test_an_error_of_save_pretrained_is_one_line(
    project: Path, averaged: Job, tmp_path: Path
) -> None:
    copy = shutil.copytree(project, tmp_path / "demo")
    model = copy / "src/demo/model.py"
    method = """
    def pretrained(self, network):
        def save_pretrained(folder):
            (folder / "half").touch()
            raise RuntimeError("\\n  Some tensors\\n  share memory")
        network.save_pretrained = save_pretrained
        return network
"""
    model.write_text(model.read_text() + method)
    output = tmp_path / "folder"
    done = command(copy, "export", averaged.run_dir, f"--output={output}")
    assert f"{output}: Some tensors share" in error(done)
    assert not [*tmp_path.glob("folder*")]


def test_a_missing_package_is_named(project: Path, averaged: Job, tmp_path: Path) -> None:
    """As in the environment of a project that was set up before it was needed."""
    (tmp_path / "safetensors.py").write_text("raise ModuleNotFoundError(name=__name__)\n")
    hidden = f"{tmp_path}:{project}/src"
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    for words in (
        ["export", averaged.run_dir, f"--output={path}"],
        ["train", "--dataset=synthetic", "--device=cpu", "--trackers=none", f"--init-from={path}"],
    ):
        done = command(project, *words, PYTHONPATH=hidden)
        assert done.returncode == 1 and "safetensors is missing" in done.stderr, done.stderr
        assert "run 'make clean-env setup'" in done.stderr


class Tied(nn.Module):
    """A network whose embedding is its last layer, too."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if tie:
            self.last.weight = self.first.weight
        self.register_buffer("rest", torch.randn(4, 3).t())  # not contiguous
        self.register_buffer("part", torch.randn(10)[2:5])
        self.register_buffer("none", torch.zeros(0, 2))


def initialize(modules: dict[str, nn.Module], path: Path, partial: bool = False) -> None:
    from demo.engine import weights

    weights.initialize(modules, str(path), partial)


def check_same(ours: nn.Module, theirs: nn.Module) -> None:
    """Check that two networks have the same state."""
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_tied_weights_are_in_the_file_once_and_come_back(project: Path, tmp_path: Path) -> None:
    from demo.engine.errors import UsageError
    from demo.tools import export

    ours, path = Tied(), tmp_path / "x.safetensors"
    export.write_safetensors(path, {"network": ours.state_dict()}, {"step": "7"})
    assert load_file(path).keys() == {"first.weight", "rest", "part", "none"}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"last.weight": "first.weight", "step": "7"}
    fresh = Tied()
    initialize({"network": fresh}, path)
    check_same(fresh, ours)
    assert fresh.last.weight is fresh.first.weight
    with pytest.raises(UsageError, match=r"network at last\.weight: set --init-partial"):
        initialize({"network": Tied(tie=False)}, path)
    # Others may leave out the other name.
    state = {name: x.contiguous() for name, x in ours.state_dict().items()}
    del state["first.weight"]
    save_file(state, path)
    initialize({"network": (again := Tied())}, path)
    check_same(again, ours)


@pytest.mark.parametrize("names", [("maker", "critic"), ("network", "critic")])
def test_several_networks_are_in_a_file(
    project: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    from demo.engine.errors import UsageError
    from demo.tools import export

    ours: dict[str, nn.Module] = {names[0]: nn.Linear(2, 3), names[1]: Tied()}
    path = tmp_path / "x.safetensors"
    export.write_safetensors(path, {name: each.state_dict() for name, each in ours.items()}, {})
    assert f"{names[0]}.bias" in load_file(path) and "critic.first.weight" in load_file(path)
    fresh: dict[str, nn.Module] = {names[0]: nn.Linear(2, 3), names[1]: Tied()}
    initialize(fresh, path)
    for name, each in fresh.items():
        check_same(each, ours[name])
    save_file({**load_file(path), "other.weight": torch.zeros(1)}, path)
    with pytest.raises(UsageError, match="does not fit"):
        initialize(fresh, path)


def test_networks_that_share_a_tensor_come_back(project: Path, tmp_path: Path) -> None:
    from demo.tools import export

    def pair() -> dict[str, nn.Module]:
        first, second = nn.Linear(2, 3), Tied()
        second.first.weight = second.last.weight = nn.Parameter(torch.randn(3, 2))
        first.weight = second.first.weight
        second.register_buffer("flat", first.weight.detach().view(-1))
        return {"maker": first, "critic": second}

    ours, fresh, path = pair(), pair(), tmp_path / "x.safetensors"
    export.write_safetensors(path, {name: each.state_dict() for name, each in ours.items()}, {})
    initialize(fresh, path)
    for name, each in fresh.items():
        check_same(each, ours[name])


class Extra(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2, dtype=torch.complex128), "x is .*torch.complex128"),
        (torch.eye(2).to_sparse(), "x is .*torch.sparse_coo"),
        ({"calls": 3}, "x is .*dict"),
    ],
)
def test_what_the_format_lacks_is_named(
    project: Path, tmp_path: Path, value: object, said: str
) -> None:
    from demo.tools import export

    path = tmp_path / "x.safetensors"
    path.write_text("stays")
    state: dict[str, Any] = {"w": torch.ones(1), "x": value}
    with pytest.raises(ValueError, match=said):
        export.write_safetensors(path, {"network": state}, {})
    with pytest.raises(ValueError, match="the name __metadata__"):
        export.write_safetensors(path, {"network": {"__metadata__": torch.ones(1)}}, {})
    assert path.read_text() == "stays" and len([*tmp_path.iterdir()]) == 1


def test_lazy_views_are_written_as_they_read(project: Path, tmp_path: Path) -> None:
    from demo.tools import export

    x = torch.tensor([1 + 2j, 3 - 4j])
    state = {"x": x, "conj": x.conj(), "neg": x.conj().imag}
    export.write_safetensors(tmp_path / "x.safetensors", {"network": state}, {})
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, state.pop(name)), name
    assert not state


def test_tensors_of_another_kind_do_not_fit(project: Path, tmp_path: Path) -> None:
    from demo.engine.errors import UsageError

    path, network = tmp_path / "x.safetensors", nn.Linear(2, 3)
    for dtype in (torch.int8, torch.complex64):
        save_file({"weight": torch.ones(3, 2, dtype=dtype), "bias": torch.ones(3)}, path)
        with pytest.raises(UsageError, match=r"network at weight.*--init-partial"):
            initialize({"network": network}, path)
    save_file({"weight": torch.ones(3, 2).half(), "bias": torch.ones(3)}, path)
    initialize({"network": network}, path)
    assert network.weight.sum() == 6
    for weight in (torch.ones(3, 2).to_sparse(), torch.ones(3, 2, device="meta")):
        torch.save({"weight": weight, "bias": torch.ones(3)}, tmp_path / "x.pt")
        with pytest.raises(UsageError, match="network at weight"):
            initialize({"network": network}, tmp_path / "x.pt")

    # A value that is no tensor, in a checkpoint.
    parts: dict[str, Any] = {
        part: {} for part in ("averages", "optimizers", "position", "settings")
    }
    theirs = Extra(2, 3).state_dict()
    torch.save({**parts, "networks": {"network": theirs}}, tmp_path / "step-00000001.pt")
    initialize({"network": (extra := Extra(2, 3))}, tmp_path / "step-00000001.pt")
    assert extra.calls == 3


def test_a_folder_with_weights_is_taken(project: Path, tmp_path: Path) -> None:
    from demo.engine.errors import UsageError

    network = nn.Linear(2, 3)
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    initialize({"network": network}, tmp_path)
    assert network.weight.sum() == 6
    with pytest.raises(UsageError, match="no such file"):
        initialize({"network": network}, tmp_path / "nope.safetensors")


FORMS = {
    "of DDP": {"module.weight": torch.ones(3, 2), "module.bias": torch.ones(3)},
    "of compile": {"_orig_mod.weight": torch.ones(3, 2), "_orig_mod.bias": torch.ones(3)},
    "of both": {f"module._orig_mod.{k}": torch.ones(3, 2)[:, n] for n, k in ((0, "bias"),)}
    | {"module._orig_mod.weight": torch.ones(3, 2)},
    "under state_dict": {"state_dict": {"weight": torch.ones(3, 2), "bias": torch.ones(3)}},
    "of Lightning": {"state_dict": {"model.weight": torch.ones(3, 2), "model.bias": torch.ones(3)}},
    "under model": {"epoch": 3, "model": {"weight": torch.ones(3, 2), "bias": torch.ones(3)}},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_other_programs_are_taken(
    project: Path, tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    network, path = nn.Linear(2, 3), tmp_path / "last.ckpt"
    torch.save(FORMS[form], path)
    with caplog.at_level("INFO"):
        initialize({"network": network}, path)
    assert network.weight.sum() == 6 and network.bias.sum() == 3
    (line,) = caplog.messages
    prefix = {
        "of DDP": "module.",
        "of compile": "_orig_mod.",
        "of both": "module._orig_mod.",
        "of Lightning": "model.",
    }
    assert ("names begin with" in line) == (form in prefix) and prefix.get(form, "") in line
    if form == "of DDP":  # a network of its own whose only part has this name
        own = nn.ModuleDict({"module": nn.Linear(2, 3)})
        initialize({"network": own}, path)
        assert own["module"].weight.sum() == 6


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_shards_with_an_index_are_taken(project: Path, tmp_path: Path, name: str) -> None:
    from demo.engine.errors import UsageError

    save: Any = save_file if name.endswith("s") else torch.save
    (tmp_path / "blobs").mkdir()  # as in Hugging Face's cache
    for number, key in enumerate(("weight", "bias")):
        save(
            {key: torch.ones(3, 2)[:, : 2 - number].squeeze(1).contiguous()},
            tmp_path / f"blobs/{key}",
        )
        (tmp_path / f"{key}-{name}").symlink_to(f"blobs/{key}")
    index = tmp_path / f"{name}.index.json"
    index.write_text(json.dumps({"weight_map": {k: f"{k}-{name}" for k in ("weight", "bias")}}))
    for source in (tmp_path, index):
        initialize({"network": (network := nn.Linear(2, 3))}, source)
        assert network.weight.sum() == 6 and network.bias.sum() == 3
    (tmp_path / "blobs/bias").unlink()
    with pytest.raises(UsageError, match=r"can't read .*bias"):
        initialize({"network": network}, tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "../weight.safetensors"}}))
    with pytest.raises(UsageError, match="of other folders"):
        initialize({"network": network}, tmp_path)


def test_what_holds_no_weights_to_read_is_named(project: Path, tmp_path: Path) -> None:
    from demo.engine.errors import UsageError

    pointer, script = tmp_path / "model.safetensors", tmp_path / "scripted.pt"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n")
    torch.jit.script(nn.Linear(2, 3)).save(str(script))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").touch()
    torch.save({0: torch.zeros(2)}, tmp_path / "numbered.pt")
    torch.save([1], tmp_path / "list.pt")
    parts = ("averages", "optimizers", "position", "settings")
    torch.save({**{part: {} for part in parts}, "networks": {"a": None}}, tmp_path / "empty.pt")
    for source, said in (
        (pointer, "Git LFS"),
        (script, "TorchScript"),
        (tmp_path / "dcp", "torch.distributed.checkpoint"),
        (tmp_path / "numbered.pt", "nor the state_dict"),
        (tmp_path / "list.pt", "list.pt is not .* nor the state_dict"),
        (tmp_path / "empty.pt", "without names"),
    ):
        with pytest.raises(UsageError, match=said) as raised:
            initialize({"network": nn.Linear(2, 3)}, source)
        assert "\n" not in str(raised.value)


def test_the_settings_tell_no_secret_and_no_path(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo.tools.export import _public

    secret = 'a"quoted\\secret'
    monkeypatch.setenv("MY_TOKEN", secret)
    inside = [secret, "/home/me", Path("data"), {"plain": 1, "path": "~/x", secret: (secret, 2.5)}]
    expected = ["<MY_TOKEN>", {"plain": 1, "<MY_TOKEN>": ["<MY_TOKEN>", 2.5]}]
    assert _public({"options": inside}) == {"options": expected}


def test_a_file_without_an_ending_is_known_by_its_content(project: Path, tmp_path: Path) -> None:
    """Such as one in Hugging Face's cache, to which a link with the ending leads."""
    (tmp_path / "blobs").mkdir()
    save_file({"weight": torch.ones(3, 2), "old": torch.ones(1)}, tmp_path / "blobs/0a1b")
    (tmp_path / "model.safetensors").symlink_to("blobs/0a1b")
    network = nn.Linear(2, 3)
    initialize({"network": network}, tmp_path / "model.safetensors", partial=True)
    assert network.weight.sum() == 6


LOOK = """
import json, sys
from demo import data
from demo.model import Model

trained = Model.load(sys.argv[1])
batch = trained.example(data.load(trained.settings).test, 4)
print(json.dumps([batch["input_ids"].tolist(), batch["attention_mask"].tolist(),
                  trained.predict(batch)["logits"].tolist()]))
"""


@pytest.mark.slow
def test_transformers_load_a_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(project, tmp_path / "demo")
    root = put_example(copy, "Fine-tuning with transformers")
    flags = ("--width=8", "--max-steps=4")
    run = srun(root, tmp_path / "run", 1, *flags).wait().run_dir
    folder = tmp_path / "classifier"
    export = ("export", run, f"--output={folder}")
    done = command(root, *export)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    tokens, mask, expected = json.loads(python(root, LOOK, run))
    with torch.no_grad():
        found = network(torch.tensor(tokens), torch.tensor(mask)).logits
    torch.testing.assert_close(found, torch.tensor(expected))
    assert "exists: choose another" in error(command(root, *export))

    again = (f"--init-from={folder}/model.safetensors", "--init-partial")
    job = srun(root, tmp_path / "again", 1, *flags, *again).wait()
    assert job.codes == [0] and "40 of 40 tensors" in job.log, job.log

    # A part of the network, and the configuration next to it.
    path = root / "src/demo/model.py"
    method = "    def pretrained(self, network):\n        return network.distilbert, network.config"
    path.write_text(f"{path.read_text()}\n{method}\n")
    done = command(root, "export", run, f"--output={tmp_path}/encoder")
    assert done.returncode == 0, done.stderr
    names = {name.partition(".")[0] for name in load_file(tmp_path / "encoder/model.safetensors")}
    assert names == {"embeddings", "transformer"}
