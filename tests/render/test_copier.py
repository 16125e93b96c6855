"""The fast renderer gives the same result as Copier, and Copier needs no --trust."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from renderer import QUESTIONNAIRE, QUESTIONS, TEMPLATE, Renderer, read
from variants import SAMPLES, SERVERS, TRACKERS, settle

FULL = settle(
    {
        **{name: values[0] for name, values in SAMPLES.items()},
        **{name: values[-1] for name, values in SAMPLES.items() if name != "launch_modes"},
        "setup": "full",
        "trackers": list(TRACKERS),
        "monitoring_servers": list(SERVERS),
        "memory_scope": "node",
    }
)


def copy(tool: dict[str, str], source: Path, project: Path, **answers: object) -> None:
    """Run `copier copy` as a user would, with answers from the command line and no trust."""
    data = [f"--data={name}={_as_text(value)}" for name, value in answers.items()]
    subprocess.run(
        [tool["copier"], "copy", "--defaults", "--quiet", *data, str(source), str(project)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize(
    "answers",
    [
        {},
        FULL,
        {"launch_modes": ["cpu"], "trackers": [], "tools": ["predict"], "license": "none"},
        {"container": "apptainer", "launcher": "torchrun", "sweep": "wandb", "ci": "github"},
    ],
    ids=["default", "full", "least", "apptainer"],
)
def test_the_fast_renderer_equals_stock_copier(
    render: Renderer,
    template: Path,
    tool: dict[str, str],
    tmp_path: Path,
    answers: dict[str, Any],
) -> None:
    copy(tool, template, tmp_path / "project", **answers)
    assert read(tmp_path / "project") == render(answers)


@pytest.mark.parametrize("example", QUESTIONS["example"]["choices"].values())
def test_python_of_an_example_is_rendered_unchanged(render: Renderer, example: str) -> None:
    """It is included through Jinja, which would take `{{` in it for its own."""
    project = render({"example": example, "package_name": "demo"})
    sources = list((TEMPLATE / "examples" / example).glob("*.py"))
    assert len(sources) == 5
    for source in sources:
        folder = "tests" if source.name == "test_learns.py" else "src/demo"
        assert project[f"{folder}/{source.name}"] == source.read_text("utf-8"), source


@pytest.mark.shows("uvx copier copy gh:*", "pipx run copier copy gh:*")
@pytest.mark.shows("python3 -m venv ~/copier && *", "~/copier/bin/copier copy gh:*")
@pytest.mark.shows("*/copier/bin/pip install copier")
@pytest.mark.usefixtures("pipx")
@pytest.mark.parametrize("tool", ["uvx ", "pipx run ", "~/copier/bin/"])
def test_the_commands_of_the_readme_copy_the_newest_release(
    tool: str, template: Path, tmp_path: Path
) -> None:
    """Without --trust. For git, a local repository has the address on GitHub."""
    shutil.copytree(template, tmp_path / "repository")
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "-qm", "All"], ["tag", "v1.2.3"]):
        subprocess.run([*git, *command], cwd=tmp_path / "repository", check=True)
    readme = (TEMPLATE / "README.md").read_text("utf-8")
    (command, *_) = re.findall(rf"{tool}copier copy [^`#]+", readme)
    (install,) = re.findall("python3 -m venv .*copier(?= #)", readme)
    command = f"{command.strip()} --defaults --quiet"
    env = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{tmp_path}/repository.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/OWNER/copier-slurm-ddp.git",
    }
    if tool.startswith("~"):
        command, env = f"{install} --quiet && {command}", {**env, "HOME": str(tmp_path)}
    subprocess.run(command, shell=True, cwd=tmp_path, env={**os.environ, **env}, check=True)
    answers = yaml.safe_load((tmp_path / "my-project" / ".copier-answers.yml").read_text())
    assert (answers["_commit"], answers["_src_path"]) == ("v1.2.3", "gh:OWNER/copier-slurm-ddp")


def test_nothing_can_run_at_copy() -> None:
    assert not {"_tasks", "_jinja_extensions"} & set(QUESTIONNAIRE)


def test_pytest_copie_renders_it_too(copie: Any) -> None:  # noqa: ANN401 - the plugin's
    result = copie.copy(extra_answers={"package_name": "demo"})
    assert result.exit_code == 0 and result.exception is None
    assert (result.project_dir / "src" / "demo" / "train.py").is_file()


@pytest.mark.shows("git init && *")
@pytest.mark.parametrize("modes", [["cpu"], ["multi_node"]])
@pytest.mark.parametrize("container", ["none", "apptainer"])
def test_the_message_after_copy_names_commands_that_exist(
    template: Path,
    tool: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    modes: list[str],
    container: str,
) -> None:
    data = [f"--data=launch_modes={json.dumps(modes)}", f"--data=container={container}"]
    project = tmp_path / "my project"
    done = subprocess.run(
        [tool["copier"], "copy", "--defaults", *data, str(template), str(project)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    lines = done.stderr.splitlines()
    commands = [line.strip() for line in lines if line.startswith("    ")]
    commands = commands[commands.index(f"cd '{project}'") :]
    readme = (project / "README.md").read_text("utf-8")
    assert f"\n{commands[1]} " in readme.partition("## 2.")[0]
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@example.org")
    subprocess.run(commands[1], shell=True, cwd=project, check=True, capture_output=True)
    assert not subprocess.check_output(["git", "status", "--porcelain"], cwd=project)
    made = [line.split()[1] for line in commands[2:-1] if line.startswith("make ")]
    assert made == (["setup", "train"] if container == "none" else ["image"])
    for target in made:
        assert f"\n{target}:" in (project / "Makefile").read_text()
    assert commands[-1].startswith("sbatch ")
    assert (project / commands[-1].split()[1]).is_file()
