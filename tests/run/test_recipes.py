"""The recipes of docs/recipes.md work without changes. Those for Slurm are in tests/slurm."""

import csv
import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import metrics
import pages
import psutil
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from PIL import Image
from renderer import TEMPLATE, tomllib

from .conftest import PATIENCE, clean_environment, srun
from .test_notify import Hook, hook  # noqa: F401 - a fixture
from .trackers.tensorboard import opened

# Where the run of a recipe would take minutes.
SMALL = {"dataset": "synthetic", "max_steps": 40, "log_every": 5, "validate_every": 20}


@pytest.fixture
def mine(project: Path, tmp_path: Path) -> Path:
    """A new project with an interpreter where the page expects it, and with small trainings."""
    root = tmp_path / "demo"
    shutil.copytree(project, root)
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    change_settings(root, **SMALL)
    return root


def change_settings(root: Path, **values: object) -> None:
    """Change lines of configs/train.yaml."""
    path = root / "configs/train.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def shell(root: Path, script: str, typed: str = "", **env: str) -> str:
    """Run a block of the page in a project; return its output."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    whole = {**clean_environment(root), **env}
    done = subprocess.run(
        command, cwd=root, env=whole, input=typed, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, script + done.stdout + done.stderr
    return done.stdout + done.stderr


def summary(run: Path) -> dict[str, Any]:
    """Return a run's summary."""
    return json.loads((run / "summary.json").read_text())


def test_every_recipe_has_a_test(project: Path) -> None:
    tests = "".join((TEMPLATE / f"tests/{x}/test_recipes.py").read_text() for x in ("run", "slurm"))
    assert [each for each in headings(project, "recipes") if f'"{each}"' not in tests] == []


def headings(root: Path, page: str) -> list[str]:
    """Return the headings of a page, each of which has a recipe."""
    found = re.findall(r"^## (.+)$", (root / f"docs/{page}.md").read_text("utf-8"), re.M)
    assert len(found) > 8
    return found


def test_all_code_of_the_pages_passes_the_linters_of_the_project(mine: Path) -> None:
    """That of docs/data.md, too."""
    model = mine / "src/demo/model.py"
    original, count = model.read_text(), 0
    for heading in headings(mine, "recipes"):
        recipe = pages.recipe(mine, heading)
        for number, block in enumerate(recipe.blocks("python")):
            if block.startswith("# src/"):
                put_module(mine, block)
            elif "(self, " in block:
                count += 1
                recipe.put_code(number)
                shutil.copy(model, model.with_name(f"model{count}.py"))
                model.write_text(original)
    assert count > 5
    shell(mine, ".venv/bin/python -m ruff check --ignore F401 .")
    for heading in headings(mine, "data"):
        pages.recipe(mine, heading, "data").put_data()
    shell(mine, ".venv/bin/python -m ruff check --ignore F401,I001,RUF017 .")
    shell(mine, ".venv/bin/python -m mypy")


def put_module(root: Path, block: str) -> None:
    """Write a block to the file that its first line names."""
    name, code = re.fullmatch(r"# (\S+)\n(.*)", block, re.DOTALL).groups()
    (root / name).write_text(code)


@pytest.mark.slow
def test_a_debugger_stops_one_process(mine: Path) -> None:
    recipe = pages.recipe(mine, "Stop in a debugger")
    recipe.put_code()
    here, *_ = recipe.blocks("bash")[0].splitlines()
    said = shell(mine, here, typed="print('at', training.position.step)\nc\n")
    assert "(Pdb) at 3\n" in said
    assert "step 40" in said


STOP = """
import os, signal
def on_step(self, training):
    if training.position.step == 10 and not training.checkpointing.resumed_from:
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_another_batch_size_midway(mine: Path) -> None:
    first, second = pages.recipe(mine, "Another batch size midway").blocks("bash")[0].splitlines()
    change_settings(mine, epochs=2, max_steps=None, validate_every=0)
    model = mine / "src/demo/model.py"
    model.write_text(pages.with_code(model.read_text(), STOP))
    run = mine / "runs/demo/grown"
    for name in ("one", "two"):
        shell(mine, f"{first} || (($? == 75))")  # Ctrl-C
        said = shell(mine, second)
        assert "batch_size was 64" in said
        run.rename(mine / name)
    ended = summary(mine / "one")
    stopped = ended["resumed_from_step"]
    assert 10 <= stopped < 30
    # An epoch has 15,000 samples: none is read twice.
    assert ended["global_step"] == stopped + (15_000 - 64 * stopped) // 128 + 15_000 // 128
    rates = [line["train/lr"] for line in metrics.read(mine / "one") if "train/lr" in line]
    assert max(rates) == pytest.approx(0.15, rel=0.05)
    assert summary(mine / "two")["parameters_sha256"] == ended["parameters_sha256"]


def test_seeds_are_compared(mine: Path) -> None:
    (script,) = pages.recipe(mine, "Five seeds compared").blocks("python")
    for number in range(5):
        (mine / f"runs/seeds/{number}").mkdir(parents=True)
        found = {"test_accuracy": 0.9 + number / 100, "test_loss": 1, "epochs": 1}
        (mine / f"runs/seeds/{number}/summary.json").write_text(json.dumps(found))
    (mine / "compare.py").write_text(script)
    assert shell(mine, ".venv/bin/python compare.py").splitlines() == [
        "test_accuracy 0.9200 ± 0.0158, 5 runs",
        "test_loss 1.0000 ± 0.0000, 5 runs",
    ]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_memory_bank_is_the_same_on_all_ranks_and_after_a_resume(
    mine: Path, tmp_path: Path, ranks: int
) -> None:
    pages.recipe(mine, "A memory bank").put_code()
    model = mine / "src/demo/model.py"
    look = """
import os, signal
def on_end(self, training, status, error):
    every = training.world.gather(self.network.bank.tolist())
    assert all(each == every[0] for each in every)
    print("rows", len({tuple(row) for row in every[0]}))
"""
    model.write_text(pages.with_code(model.read_text(), look))
    whole = srun(mine, tmp_path / "whole", ranks, "--ema=0.9").wait()
    assert "rows 1024" in whole.log, whole.log
    job = srun(mine, tmp_path / "run", ranks, "--ema=0.9")
    job.stop(5)
    resumed = srun(mine, tmp_path / "run", ranks, "--ema=0.9").wait()
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


@pytest.mark.slow
def test_weights_from_elsewhere(mine: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(mine, "Weights from elsewhere")
    started = srun(mine, tmp_path / "run", 1).wait()
    state = torch.load(started.run_dir / "checkpoints/step-00000030.pt", weights_only=True)
    ours = state["networks"]["network"]
    theirs = {name.replace("layers.", "encoder."): tensor + 1 for name, tensor in ours.items()}
    theirs["encoder.5.bias"] = torch.zeros(7)  # a head for other classes
    theirs["decoder.weight"] = torch.zeros(3)
    torch.save(theirs, mine / "theirs.pt")
    (mine / "rename.py").write_text(recipe.blocks("python")[0])
    shell(mine, ".venv/bin/python rename.py")
    recipe.put_code(1)  # groups of weight decay
    commands = recipe.blocks("bash")[0].replace("RUN_DIR", str(started.run_dir))
    *from_file, from_run = (
        f"{line.partition('  #')[0]} --max-steps 2" for line in commands.splitlines()
    )
    for number, command in enumerate(from_file):
        said = shell(mine, f"{command} --run-dir {number}")
        assert "19 of 20 tensors, without layers.5.bias, decoder.weight" in said, said
    assert "tensors, without" not in shell(mine, from_run)
    ends = [
        torch.load(mine / f"{number}/checkpoints/step-00000002.pt", weights_only=True)
        for number in range(2)
    ]
    trained = ends[0]["networks"]["network"]["layers.1.0.weight"]
    frozen = ends[1]["networks"]["network"]["layers.1.0.weight"]
    assert torch.equal(frozen, ours["layers.1.0.weight"] + 1) and not torch.equal(trained, frozen)
    groups = ends[0]["optimizers"]["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]


def test_a_one_cycle_schedule(mine: Path, tmp_path: Path) -> None:
    pages.recipe(mine, "A one-cycle schedule").put_code()
    job = srun(mine, tmp_path / "run", 1, "--max-steps=100", "--log-every=1").wait()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.15)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.15, total_steps=101, cycle_momentum=False
    )
    for line in job.metrics():
        if "train/lr" in line:
            # Its peak is a step earlier.
            assert line["train/lr"] == pytest.approx(optimizer.param_groups[0]["lr"], abs=0.01)
            optimizer.step()
            theirs.step()


def test_layers_are_frozen_for_some_epochs(mine: Path, tmp_path: Path) -> None:
    pages.recipe(mine, "Freeze for some epochs").put_code()
    flags = ("--batch-size=1500", "--epochs=4", "--log-every=1", "--checkpoint-every=1")
    flags += ("--keep-checkpoints=99", "--schedule=constant", "--warmup=0", "--max-steps=99")
    job = srun(mine, tmp_path / "run", 2, *flags).wait()
    assert job.summary["global_step"] == 20
    bodies = []
    for step in (1, 10, 11, 20):
        path = job.run_dir / f"checkpoints/step-{step:08}.pt"
        weights = torch.load(path, weights_only=True)["networks"]["network"]
        bodies.append((weights["layers.1.0.weight"], weights["layers.5.weight"]))
    assert torch.equal(bodies[0][0], bodies[1][0]) and not torch.equal(bodies[0][1], bodies[1][1])
    assert not torch.equal(bodies[1][0], bodies[2][0])
    rates = [(line["train/lr/head"], line["train/lr/body"]) for line in job.metrics()[:5]]
    assert all(head > 0 and body == 0 for head, body in rates)
    for suffix in (".pt", ".sha256"):  # as if it had been stopped after the second epoch
        (job.run_dir / "checkpoints/latest").unlink(missing_ok=True)
        for step in range(11, 21):
            (job.run_dir / f"checkpoints/step-{step:08}{suffix}").unlink()
    (job.run_dir / "summary.json").unlink()
    again = srun(mine, tmp_path / "run", 2, *flags).wait()
    assert again.summary["resumed_from_step"] == 10
    assert again.summary["parameters_sha256"] == job.summary["parameters_sha256"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_gradient_norm_of_each_layer(mine: Path, tmp_path: Path, strategy: str) -> None:
    pages.recipe(mine, "The gradient norm of each layer").put_code()
    flags = ("--log-every=1", "--max-steps=2", "--clip-norm=1000", f"--strategy={strategy}")
    line = srun(mine, tmp_path / "run", 2, *flags).wait().metrics()[0]
    norms = [value for name, value in line.items() if name.startswith("gradient_norm/")]
    assert len(norms) > 5
    assert sum(each**2 for each in norms) ** 0.5 == pytest.approx(line["train/gradient_norm"])


def test_an_optimizer_of_ones_own(mine: Path, tmp_path: Path) -> None:
    pages.recipe(mine, "An optimizer of your own").put_code()
    flags = ("--log-every=1", "--strategy=fsdp", "--max-steps=20")
    whole = srun(mine, tmp_path / "whole", 2, *flags).wait()
    line = whole.metrics()[0]
    assert line["train/lr/adamw"] == pytest.approx(10 * line["train/lr/sign"])
    assert srun(mine, tmp_path / "run", 2, *flags[:-1], "--max-steps=9").wait().codes == [0, 0]
    assert srun(mine, tmp_path / "run", 2, *flags).wait().summary["resumed_from_step"] == 9


@pytest.mark.slow
def test_a_learning_rate_is_found(mine: Path) -> None:
    recipe = pages.recipe(mine, "Find a learning rate")
    recipe.put_code()
    (command,), (_, code) = recipe.blocks("bash"), recipe.blocks("python")
    shell(mine, f"{command.strip()} --dataset synthetic || true")
    (mine / "find.py").write_text(code)
    found = float(shell(mine, ".venv/bin/python find.py").split()[1])
    assert 0.001 < found < 1


@pytest.mark.slow
def test_several_trainings_run_at_the_same_time(mine: Path) -> None:
    (script,) = pages.recipe(mine, "Several runs on one GPU").blocks("bash")
    (loop,) = (line for line in script.splitlines() if line.startswith("for "))
    shell(mine, loop.replace("1 2 3", "1 2").replace(" train ", " train --device cpu "))
    assert all(summary(mine / f"runs/demo/seed-{seed}")["global_step"] == 40 for seed in (1, 2))


def test_low_rank_adapters(mine: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(mine, "Low-rank adapters (LoRA)")
    recipe.put_code()
    job = srun(mine, tmp_path / "run", 2).wait()
    adapters = torch.load(job.run_dir / "adapters.pt", weights_only=True)
    path = job.run_dir / "checkpoints/step-00000030.pt"
    whole = torch.load(path, weights_only=True)["networks"]["network"]
    assert adapters and adapters.keys() < whole.keys()
    for name, value in adapters.items():
        assert torch.equal(value, whole[name]) and value.abs().sum() > 0
    assert sum(map(torch.numel, adapters.values())) < 0.5 * sum(map(torch.numel, whole.values()))
    first = srun(mine, tmp_path / "first", 1, "--max-steps=1").wait()
    path = first.run_dir / "checkpoints/step-00000001.pt"
    start = torch.load(path, weights_only=True)["networks"]["network"]
    base = "layers.5.parametrizations.weight.original"
    assert torch.equal(start[base], whole[base])


def test_what_a_validation_logs(mine: Path, tmp_path: Path) -> None:
    pages.recipe(mine, "An image, a text and a table at each validation").put_code()
    job = srun(mine, tmp_path / "run", 2, "--validate-every=15", "--trackers=tensorboard").wait()
    assert job.codes == [0, 0], job.log
    figures = job.run_dir / "figures"
    for split, step in (("validation", 15), ("validation", 30), ("test", 30)):
        with Image.open(figures / f"{split}-digits-{step:08}.png") as picture:
            assert picture.size == (16 * 28, 28)
            assert picture.convert("L").getextrema() == (0, 255)
        mistakes = (figures / f"{split}-mistakes-{step:08}.txt").read_text().splitlines()
        with (figures / f"{split}-found-{step:08}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 16
        wrong = [row for row in rows if row["label"] != row["found"]]
        assert len(wrong or [None]) == len(mistakes)
    images = opened(job.run_dir).Images("validation/digits")
    assert [each.step for each in images] == [15, 30]


def with_archive(mine: Path, tmp_path: Path) -> Path:
    """Add the recipe for uploads to a project; return the folder that it copies to."""
    recipe = pages.recipe(mine, "Upload checkpoints")
    archive = tmp_path / "archive"
    archive.mkdir()
    page = mine / "docs/recipes.md"
    page.write_text(page.read_text().replace("/archive", str(archive)))
    pages.recipe(mine, "Upload checkpoints").put_code()
    assert recipe.text.count("/archive") == 1
    return archive


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_checkpoints_are_uploaded(mine: Path, tmp_path: Path, ranks: int) -> None:
    archive = with_archive(mine, tmp_path)
    flags = ("--validate-every=10", "--max-steps=30")
    job = srun(mine, tmp_path / "run", ranks, *flags).wait()
    best = job.run_dir / "checkpoints" / f"step-{job.summary['best_step']:08}.pt"
    assert (archive / "run-best.pt").read_bytes() == best.read_bytes()
    assert (archive / "run-step-00000010.pt").exists()
    (archive / "run-best.pt").unlink()
    archive.rename(tmp_path / "gone")
    failed = srun(mine, tmp_path / "failed", ranks, *flags).wait()
    assert failed.codes[0] == 1 and "not all checkpoints" in failed.log


def test_a_stop_waits_for_no_upload(mine: Path, tmp_path: Path) -> None:
    archive = with_archive(mine, tmp_path)
    (tmp_path / "bin").mkdir()
    never = tmp_path / "bin/cp"
    never.write_text(f"#!/bin/sh\necho $$ >>{tmp_path}/pids\nexec sleep 1000\n")
    never.chmod(0o755)
    env = {"PATH": f"{never.parent}:{clean_environment(mine)['PATH']}"}
    flags = ("--max-steps=10000", "--checkpoint-every=5", "--log-every=5")
    job = srun(mine, tmp_path / "run", 1, *flags, **env)
    job.stop(20)
    (pid,) = (tmp_path / "pids").read_text().split()  # one at a time
    copying = psutil.Process(int(pid))
    assert copying.name() == "sleep"
    copying.kill()
    assert not list(archive.iterdir())


@pytest.mark.slow
def test_the_time_of_a_step(mine: Path) -> None:
    (script,) = pages.recipe(mine, "Where the time of a step goes").blocks("bash")
    said = shell(mine, script)
    assert said.count("19, rank 0, cpu: ") == 2  # in the log, and by `profile`
    (path,) = (mine / "runs/demo/profiled/profile").glob("*.gz")
    trace = gzip.decompress(path.read_bytes()).decode()
    text = pages.recipe(mine, "Where the time of a step goes").text
    for part in ("ProfilerStep*", "data", "forward", "backward", "Optimizer.step…"):
        assert f"`{part}`" in text and f'"name": "{part[:-1]}' in trace, part
    assert path.name in said


def test_the_memory_of_a_training(mine: Path, tmp_path: Path) -> None:
    text = pages.recipe(mine, "How much memory a run takes").text
    job = srun(mine, tmp_path / "run", 2, "--max-steps=10", "--log-every=5").wait()
    assert job.codes == [0, 0], job.log
    assert "`system/memory_gib`" in text
    assert all(line["system/memory_gib"] > 0.1 for line in job.metrics() if "train/lr" in line)


@pytest.mark.slow
def test_the_use_of_the_gpu(mine: Path) -> None:
    (command,) = pages.recipe(mine, "How much of the GPU a run uses").blocks("bash")
    said = shell(mine, command)
    assert "cpu in fp32: unknown" in said and "without a formula" not in said
    (run,) = (mine / "runs/demo").iterdir()
    lines = metrics.read(run)
    assert all(line["train/tflops_per_second"] > 0 for line in lines if "train/lr" in line)
    assert summary(run)["tflops_per_second"] > 0


@pytest.mark.slow
def test_a_run_is_renamed_and_goes_on(mine: Path, tmp_path: Path) -> None:
    (move, go_on) = pages.recipe(mine, "Rename or move a run").blocks("bash")[0].splitlines()
    train = ".venv/bin/python -m demo train --trackers tensorboard --max-steps 20"
    old = tmp_path / "elsewhere/old"
    (mine / "runs/demo").mkdir(parents=True)
    shell(mine, f"{train} --run-dir {old}")
    said = shell(mine, f"{move.replace('RUN_DIR', str(old))}\n{go_on} --trackers tensorboard")
    assert "step 20, epoch 1" in said and not old.exists()
    run = mine / "runs/demo/baseline"
    assert summary(run)["resumed_from_step"] == 20
    steps = [each.step for each in opened(run).Scalars("train/lr")]
    assert steps == [5, 10, 15, 20, 25, 30, 35, 40]
    assert (run / "attempts/2.json").exists()


@pytest.mark.slow
def test_checkpoints_are_kept_evaluated_and_removed(mine: Path) -> None:
    (script,) = pages.recipe(mine, "Keep, evaluate and remove checkpoints").blocks("bash")
    train, evaluate, dry, prune = script.splitlines()
    change_settings(mine, max_steps=50, validate_every=0)
    shell(mine, train)
    folder = mine / "runs/demo/kept/checkpoints"

    def steps() -> list[int]:
        return sorted(int(path.stem[5:]) for path in folder.glob("*.pt"))

    assert steps() == [20, 30, 40, 50]
    assert "validation/accuracy" in shell(mine, evaluate)
    (found,) = (mine / "runs/demo/kept").rglob("evaluation-validation-00000020.json")
    assert json.loads(found.read_text())["step"] == 20
    shell(mine, dry)
    assert steps() == [20, 30, 40, 50]
    assert "removed 1 checkpoint(s)" in shell(mine, prune)
    assert steps() == [20, 40, 50]


def test_a_dependency_is_added(mine: Path) -> None:
    recipe = pages.recipe(mine, "Add a dependency")
    first, added = recipe.blocks("toml")[0].splitlines()
    path = mine / "pyproject.toml"
    path.write_text(path.read_text().replace(f"{first}\n", f"{first}\n{added}\n"))
    dependencies = tomllib.loads(path.read_text())["project"]["dependencies"]
    assert [Requirement(each).name for each in dependencies][:2] == ["torchmetrics", "torch"]
    make, add = recipe.blocks("bash")[0].splitlines()
    assert make.startswith("make setup lock ")  # tests/run/test_setup.py runs it
    shell(mine, f"git init -q\n{add}")
    assert "torchmetrics" in shell(mine, "git diff --cached")


def test_what_belongs_in_git(mine: Path) -> None:
    (script,) = pages.recipe(mine, "What belongs in git").blocks("bash")
    (mine / "slurm/site.sh").touch()
    for name in (".env", "runs/demo/1/log.txt", "logs/1.out", "data/x"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).touch()
    who = "git -c user.name=x -c user.email=x@example.org"
    shell(mine, f"git init -q && git add --all && {who} commit -qm first")
    assert shell(mine, script).split() == ["data", ".venv", "logs/1.out", ".env"]
    kept = shell(mine, "git ls-files").split()
    assert {"slurm/site.sh", "constraints.txt", ".copier-answers.yml"} <= set(kept)
    assert not {".env", "data/x", "runs/demo/1/log.txt"} & set(kept)


@pytest.mark.slow
def test_a_message_when_a_run_ends(mine: Path, hook: Hook) -> None:  # noqa: F811
    (command,) = pages.recipe(mine, "A message when a run ends").blocks("bash")
    said = shell(mine, command.replace("ADDRESS", hook.url))
    assert hook.body()["status"] == "finished" and "NOTIFY_URL" not in said
    shell(mine, re.sub("=ADDRESS", "=", command))
    assert len(hook.posts) == 1


@pytest.mark.slow
def test_a_tracker_of_ones_own(mine: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(mine, "A tracker of your own")
    put_module(mine, recipe.blocks("python")[0])
    (command,) = recipe.blocks("bash")
    run = tmp_path / "run"
    shell(mine, f"{command.strip()} --run-dir {run} --max-steps 20")
    shell(mine, f"{command.strip()} --run-dir {run}")
    with (run / "numbers.csv").open() as file:
        rows = [row for row in csv.reader(file) if row[1] == "train/lr"]
    assert [int(step) for step, *_ in rows] == [5, 10, 15, 20, 25, 30, 35, 40]
