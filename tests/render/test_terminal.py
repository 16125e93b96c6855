"""A person answers the questions in a terminal of 80 columns."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from questions import FULL
from renderer import QUESTIONNAIRE, QUESTIONS, TEMPLATE, Renderer
from terminal import CLEAR, DOWN, END_OF_TEXT, ENTER, TOGGLE_ALL, Terminal, head

from scripts.record import ANSWERS, CELL

SVG = "{http://www.w3.org/2000/svg}"
# A bad answer to each question that has a validator, the end of what is said, and a good one.
TYPED = {
    "project_name": ("a\u200bb", "invisible characters", "Digits"),
    "package_name": ("json", "is taken", "demo"),
    "description": (" a", "at either end", ""),
    "author_name": ("x" * 121, "at most 120 characters", "Ada"),
    "nodes": ("1", "expected 2 to 4096", "2"),
    "gpus_per_node": ("17", "expected 1 to 16", "4"),
    "gpu_type": ("gpu:a100", "such as a100", "a100"),
    "cpus_per_task": ("0", "expected 1 to 256", "4"),
    "memory": ("64GB", "such as 64G", "64G"),
    "time_limit": ("1h", "such as 12:00:00", "00:01:00"),
    "partition": ("a b", "such as gpu", ""),
    "cpu_partition": ("a;b", "such as cpu", ""),
    "account": ("$(id)", "such as proj-0042", ""),
    "qos": ("'", "such as normal", ""),
    "constraint": ("a b", "such as a100|h100", ""),
    "signal_lead_seconds": ("120", "expected 30 to 59", "31"),
    "sbatch_options": ("--account=a", "answer account", ""),
    "modules": ("cuda 12", "such as cuda/12.4", "cuda/12.4"),
    "container_image": ("torch.sif", "path such as", ""),
    "shared_root": ("~/runs", "such as /scratch/ada", ""),
}


def answers_of(project: Path) -> dict[str, Any]:
    """Return the recorded answers of a project."""
    return yaml.safe_load((project / ".copier-answers.yml").read_text("utf-8"))


def test_what_a_validator_says_is_read_in_full(
    template: Path, tool: dict[str, str], tmp_path: Path
) -> None:
    terminal = Terminal(tool["copier"], "copy", template, tmp_path / "project")
    for name, question in QUESTIONS.items():
        if question.get("when") is False or question.get("ask") is False:
            continue
        terminal.wait_for(head(name))
        if name in TYPED:
            bad, message, good = TYPED[name]
            enter = END_OF_TEXT if question.get("multiline") else ENTER
            terminal.type(CLEAR, bad, enter)
            terminal.wait_for_message(name, message)
            terminal.type(CLEAR, good, enter)
        elif name == "launch_modes":
            terminal.type(TOGGLE_ALL, ENTER)
            terminal.wait_for_message(name, "at least one")
            terminal.type(TOGGLE_ALL, ENTER)
        elif name in ("setup", "container"):
            terminal.type(DOWN, ENTER)
        else:
            terminal.type(ENTER)
    terminal.wait_for_end()
    said = answers_of(tmp_path / "project")
    assert {name: said.get(name, "") for name in TYPED} == {
        name: int(good) if QUESTIONS[name]["type"] == "int" else good
        for name, (_, _, good) in TYPED.items()
    }
    texts = {
        name
        for name, question in QUESTIONS.items()
        if "validator" in question and "choices" not in question
        if question.get("when") is not False and question.get("ask") is not False
    }
    assert set(TYPED) == texts


def test_a_time_limit_that_may_be_meant_as_hours(
    template: Path, tool: dict[str, str], tmp_path: Path
) -> None:
    """Slurm takes 2 as minutes. And what the quick questions leave out fits a short limit."""
    terminal = Terminal(tool["copier"], "copy", template, tmp_path / "project")
    for name in ("setup", "project_name", "launch_modes", "gpus_per_node"):
        terminal.wait_for(head(name))
        terminal.type(*(["Digits"] if name == "project_name" else []), ENTER)
    terminal.wait_for(head("time_limit"))
    terminal.type(CLEAR, "2", ENTER)
    terminal.wait_for_message("time_limit", "2 is minutes: type 2:00:00")
    terminal.type(CLEAR, "2:00", ENTER)
    for name in ("partition", "account", "modules", "trackers", "example"):
        terminal.wait_for(head(name))
        terminal.type(*([ENTER, END_OF_TEXT] if name == "modules" else [ENTER]))
    terminal.wait_for_end()
    said = answers_of(tmp_path / "project")
    # Nothing was filled in where it was typed, and Enter alone names no module.
    assert said["project_name"] == "Digits"
    assert "load_module" not in (tmp_path / "project/slurm/common.sh").read_text()
    assert (said["time_limit"], said["signal_lead_seconds"]) == ("2:00", 60)


def test_a_site_answers_all_but_three_questions(
    template: Path, tool: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster whose module sets COPIER_SETTINGS_PATH."""
    preset = TEMPLATE / "sites/delta.yml"
    more = 'launch_modes: [cpu, single_node]\ntime_limit: "12:00:00"\ntrackers: []\n'
    modules = "modules: |-\n  gcc\n  python/3.12\n"
    (tmp_path / "site.yml").write_text(preset.read_text() + more + modules)
    probe = (sys.executable, TEMPLATE / "hooks/probe_cluster.py", "--site", "site", "site.yml")
    subprocess.run(probe, cwd=tmp_path, check=True)
    monkeypatch.setenv("COPIER_SETTINGS_PATH", str(tmp_path / "site/settings.yml"))
    terminal = Terminal(tool["copier"], "copy", template, tmp_path / "project")
    for name, typed in (("project_name", "Digits"), ("account", "lab-7"), ("example", "")):
        terminal.wait_for(head(name))
        terminal.type(typed, ENTER)
    terminal.wait_for_end()
    said = answers_of(tmp_path / "project")
    assert (said["account"], said["setup"]) == ("lab-7", "quick")
    given = yaml.safe_load((tmp_path / "site/settings.yml").read_text())["defaults"]
    assert {name: said[name] for name in given} == given
    assert {"partition", "gpus_per_node", "modules"} < set(given)


def test_the_recording_shows_what_copier_prints_today(render: Renderer) -> None:
    """README.md shows it; `python scripts/record.py docs/copy.svg` records it again."""
    quick = [
        name
        for name, question in QUESTIONS.items()
        if question.get("ask") not in (FULL, False) and question.get("when") is not False
    ]
    assert list(ANSWERS) == quick
    picture = (TEMPLATE / "docs/copy.svg").read_text("utf-8")
    shown = lines_of(picture)
    asked = {line.removeprefix("🎤").strip() for line in shown if line.startswith("🎤")}
    assert asked == {QUESTIONS[name]["help"] for name in ANSWERS}
    message = QUESTIONNAIRE["_message_after_copy"].splitlines()
    assert shown >= {line.strip() for line in message if line and "{" not in line}

    typed = {name: "".join(filter(str.isprintable, keys)) for name, keys in ANSWERS.items()}
    typed = {name: text for name, text in typed.items() if text.strip()}
    project = render({**typed, "trackers": ["tensorboard", "wandb"]})
    options = re.findall("^#SBATCH.*", project["slurm/train_multi_node.sbatch"], re.M)
    assert {line for line in shown if line.startswith("#SBATCH")} == set(options)
    names = {path.partition("/")[0] for path in project}
    assert {name for name in names if name[0] != "."} <= set(" ".join(shown).split())
    assert len(picture) < 300_000 and not re.search(
        "<script|/tmp|/home|https?://(?!www.w3)", picture
    )


def lines_of(picture: str) -> set[str]:
    """Return the lines of text that a recording shows, without the space around them."""
    lines: dict[tuple[int, str | None], str] = {}
    for number, window in enumerate(ElementTree.fromstring(picture).iter(f"{SVG}g")):
        for text in window:
            place = (number, text.get("y"))
            before = lines.get(place, "")
            gap = round(float(text.get("x", 0)) / CELL) - len(before)
            lines[place] = before + " " * gap + (text.text or "")
    return {line.strip() for line in lines.values()}
