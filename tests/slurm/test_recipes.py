"""The recipes of docs/recipes.md that need Slurm work without changes."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pages
import pytest
import yaml

from .conftest import MakeProject
from .jobs import Job, Project

SMALL = {"dataset": "synthetic", "max_steps": 20, "log_every": 5}


@pytest.fixture
def project(make_project: MakeProject) -> Project:
    """A project whose trainings are small."""
    made = make_project(trackers=[])
    path = made.root / "configs/train.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **SMALL}))
    return made


def shell(project: Project, script: str) -> str:
    """Run a block of the page on the login node; return its output."""
    command = ("bash", "-euo", "pipefail", "-c", script)
    done = project.cluster.run(*command, cwd=project.root, check=False, USER="root")
    assert done.returncode == 0, script + done.stdout + done.stderr
    return done.stdout + done.stderr


def summary(project: Project, run: str) -> dict[str, Any]:
    """Return the summary of a run."""
    return json.loads((project.root / "runs/demo" / run / "summary.json").read_text())


# Runs a command in a terminal, and types once the debugger asks.
TYPE = """
mkfifo keys
script --quiet --return --flush --command {command} said <keys >/dev/null &
exec 3>keys
until grep --quiet Pdb said; do kill -0 $! && sleep 0.2; done
printf "print('at', training.position.step, training.world.size)\\nc\\n" >&3
wait $!
cat said
rm keys said
"""


@pytest.mark.slow
def test_a_debugger_stops_a_rank(project: Project) -> None:
    recipe = pages.recipe(project.root, "Stop in a debugger")
    recipe.put_code()
    commands = recipe.blocks("bash")[0].splitlines()
    for command, ranks in zip(commands[1:], (2, 1), strict=True):
        said = shell(project, TYPE.format(command=shlex.quote(command.partition("  #")[0])))
        assert f"at 3 {ranks}" in said
        assert "test: loss" in said


@pytest.mark.slow
def test_many_trainings_in_one_allocation(project: Project) -> None:
    script, many = pages.recipe(project.root, "Many runs in one allocation").blocks("bash")
    said = shell(project, script)
    assert said.count("2 rank(s) by srun") == 2
    for run, rate in (("a", 0.1), ("b", 0.2)):
        assert summary(project, run)["world_size"] == 2
        config = yaml.safe_load((project.root / f"runs/demo/{run}/config.yaml").read_text())
        assert config["lr"] == rate
    assert "seq 20 |" in many
    shell(project, many.replace("seq 20", "seq 3").replace("-P4", "-P2"))
    assert len({summary(project, f"seed-{n}")["parameters_sha256"] for n in (1, 2, 3)}) == 3


def test_a_chain(project: Project) -> None:
    (script,) = pages.recipe(project.root, "A chain of runs").blocks("bash")
    said = shell(project, f"{script}\nsqueue --me --format '%i %r'\necho first $first")
    first, second = (Job(project, re.search(rf"{x} (\d+)", said)[1]) for x in ("first", "job"))
    assert f"{second.id} Dependency" in said
    assert second.wait().state == first.state == "COMPLETED", second.log
    assert re.search(r"network starts from runs/demo/first/checkpoints/step-\d+.pt", second.log)
    assert summary(project, "second")["resumed_from_step"] is None


@pytest.mark.slow
def test_singleton(project: Project) -> None:
    text = pages.recipe(project.root, "A chain of runs").text
    (options,) = re.findall(r"`(sbatch .*singleton) …`", text)
    script = f"{options} slurm/train_cpu.sbatch"
    said = shell(project, f"{script} --lr=-1\n{script}\nsqueue --me --format '%i %r'")
    first, second = (Job(project, each) for each in re.findall(r"job (\d+)", said))
    assert f"{second.id} Dependency" in said
    assert second.wait().state == "COMPLETED", second.log
    assert first.state == "FAILED", first.log


@pytest.mark.slow
def test_seeds(project: Project) -> None:
    (script,) = pages.recipe(project.root, "Five seeds compared").blocks("bash")
    shell(project, script.replace(" --experiment", " --device=cpu --experiment"))  # has no GPU
    runs = sorted((project.root / "runs/seeds").glob("*/config.yaml"))
    assert [yaml.safe_load(path.read_text())["seed"] for path in runs] == [0, 1, 2, 3, 4]
    assert (project.root / "curves.png").exists()


@pytest.mark.slow
def test_folds(project: Project) -> None:
    recipe = pages.recipe(project.root, "Cross-validation", "data")
    old = "    held_out = settings.validation_size\n"
    call = "        return fold_of(Digits(images, labels), len(labels), settings)\n"
    recipe.put_data(old, f"    if settings.folds:\n{call}{old}")
    (script,) = recipe.blocks("bash")
    shell(project, script.replace("0-4", "0-1").replace("--folds 5", "--folds 2"))
    runs = sorted((project.root / "runs/folds").glob("*/config.yaml"))
    assert [yaml.safe_load(path.read_text())["seed"] for path in runs] == [0, 1]


@pytest.mark.slow
def test_last_weeks_training_again(project: Project, tmp_path: Path) -> None:
    (script,) = pages.recipe(project.root, "Repeat last week's run").blocks("bash")
    model = project.root / "src/demo/model.py"
    text = model.read_text()
    who = "git -c user.name=x -c user.email=x@example.org"
    shell(project, f"git init -q\ngit add --all\n{who} commit -qm first")
    model.write_text(text.replace("4, 8,", "4, 9,").replace("8, 16,", "9, 16,"))  # not committed
    job = project.sbatch("slurm/train_cpu.sbatch", "--lr=0.07")
    job.wait()
    model.write_text("raise SystemExit('this is not the code of last week')\n")
    shell(project, f"git add --all\n{who} commit -qm later")
    run = f"runs/demo/{job.id}"
    said = shell(project, script.replace("RUN_DIR", run))
    Job(project, re.search(r"batch job (\d+)", said)[1]).wait()
    again = json.loads((project.root / "../again/runs/demo/again/summary.json").read_text())
    assert again["parameters_sha256"] == job.summary["parameters_sha256"]
