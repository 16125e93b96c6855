"""Any text as an answer arrives unchanged, or is refused with one message."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from citation import EMAIL, check_citation
from copier.errors import InvalidTypeError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from renderer import QUESTIONS, Renderer, tomllib

CASES = 400  # of each test here

# Answers that say where each of them arrives: words that occur nowhere else.
MARKED = {
    "project_name": "Zzproject",
    "description": "Zzdescription",
    "author_name": "Zzauthor",
    "author_email": "zzauthor@example.org",
    "gpu_type": "zzgpu",
    "memory": "7331G",
    "time_limit": "7-07:07:07",
    "partition": "zzpartition",
    "cpu_partition": "zzcpu",
    "account": "zzaccount",
    "qos": "zzqos",
    "constraint": "zzconstraint",
    "reservation": "zzreservation",
    "mail_user": "zzmail@example.org",
    "modules": "zzmodule",
    "container_base_image": "zzimage",
    "shared_root": "/zzshared",
}
WHOLE = {"setup": "full", "package_name": "demo", "container": "apptainer", **MARKED}
NUMBERS = {"nodes": 77, "gpus_per_node": 7, "cpus_per_task": 77, "signal_lead_seconds": 777}

PIECES = st.sampled_from(
    [
        *["'", '"', "`", "\\", "$", "$(id)", "${HOME}", "~", "!", "#", "&&", "|", ";", ">", "*"],
        *["{{", "}}", "{{ 7*7 }}", "{%", "%}", "{% raw %}", "{=#", "#=}", "{#", "${#a[@]}"],
        *["\n", "\r", "\t", "\0", "\x1b[31m", "\u2028", "\u202e", "\ufeff", " ", "\u00a0"],
        *["\n#SBATCH --uid=0", "]]", '"""', "<<END\n", "%j", "%x", "://", "../", "-", "=", ","],
        *["é", "ß", "日本", "🙂", "٣", "İ", "ﬀ", "null", "true", "0", "1e9", "0x10", "012", "é"],
        *["a", "gpu", "python/3.12", "ada@example.org", "64G", "12:00:00", "100", "/scratch"],
    ]
)
TEXTS = st.one_of(
    st.lists(PIECES, max_size=4).map("".join),
    st.text(max_size=12),
    st.from_regex(r"[\w./:@%+-]{1,20}", fullmatch=True),
    st.integers().map(str),
)
OTHERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.lists(TEXTS, max_size=2),
    st.dictionaries(st.text(max_size=3), TEXTS, max_size=2),
)

many = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Project(dict[str, str]):
    """Files by path; shown in few words where a test fails."""

    def __repr__(self) -> str:
        return f"<{len(self)} files>"


@pytest.fixture(scope="module")
def marked(render: Renderer) -> Project:
    """The project of the marked answers."""
    return Project(render(WHOLE))


@pytest.fixture(scope="module")
def parses() -> Callable[[str], bool]:
    """Return what tells whether bash can parse a script."""
    known: dict[str, bool] = {}

    def check(script: str) -> bool:
        if script not in known:
            done = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True)
            known[script] = done.returncode == 0 and not done.stderr
        return known[script]

    return check


def attempt(render: Renderer, name: str, value: object) -> Project | None:
    """Return the project for an answer, None if it is refused as it should be."""
    try:
        return Project(render({**WHOLE, name: value}))
    except (ValueError, InvalidTypeError) as error:
        message = str(error)
    # What it makes of its first question's type is Copier's affair: no validator has run by then.
    assert name in message or name == "setup"
    lines = message.splitlines()
    assert len(lines) <= 2 and len(lines[-1]) > 10, message
    return None


def directives(script: str) -> list[str]:
    """Return what a script asks of Slurm, a line each."""
    return [line for line in script.splitlines() if line.startswith("#SBATCH")]


def replaced(node: Any, old: str, new: str) -> Any:  # noqa: ANN401 - what a parser returns
    """Return a parsed file with a text replaced in all of its strings."""
    if isinstance(node, dict):
        return {key: replaced(value, old, new) for key, value in node.items()}
    if isinstance(node, list):
        return [replaced(each, old, new) for each in node]
    return node.replace(old, new) if isinstance(node, str) else node


@many
@given(name=st.sampled_from(sorted(MARKED)), value=TEXTS, tail=st.none() | PIECES)
@example("description", "{{ 7*7 }} $(id) `id` \"'\\", None)
@example("partition", "a\n#SBATCH --uid=0", None)
@pytest.mark.slow
def test_text_arrives_unchanged_or_is_refused(
    render: Renderer,
    marked: Project,
    parses: Callable[[str], bool],
    name: str,
    value: str,
    tail: str | None,
) -> None:
    if tail is not None:
        value = MARKED[name] + tail  # a good answer, and more
    files = attempt(render, name, value)
    if files is None:
        return
    said = yaml.safe_load(files[".copier-answers.yml"])
    assert said.get(name, value) == value
    for path, text in files.items():
        if path.endswith(".sbatch"):
            assert parses(text), path
            asked, usual = directives(text), directives(marked[path])
            assert len(asked) <= len(usual), path
            assert all(len(shlex.split(line)) == 2 for line in asked), path
    if not value.split() or name == "modules":
        return  # lines go with it
    mark = MARKED[name]
    assert files.keys() == marked.keys()
    for path, text in files.items():
        if path != "CITATION.cff":  # has no address that its format refuses
            assert len(text.splitlines()) == len(marked[path].splitlines()), path
        if path == ".copier-answers.yml":
            assert said == replaced(yaml.safe_load(marked[path]), mark, value)
        elif path == "pyproject.toml":
            assert tomllib.loads(text) == replaced(tomllib.loads(marked[path]), mark, value)
        elif path == "CITATION.cff":
            check_citation(text)
            cited, usual = yaml.safe_load(text), yaml.safe_load(marked[path])
            if name == "author_email" and not re.search(EMAIL, value):
                del usual["authors"][0]["email"]
            assert cited == replaced(usual, mark, value)
        else:
            assert text == marked[path].replace(mark, value), path


@many
@given(value=st.lists(TEXTS, max_size=3).map("\n".join))
def test_modules_are_loaded_by_their_names(
    render: Renderer, parses: Callable[[str], bool], value: str
) -> None:
    files = attempt(render, "modules", value)
    if files is None:
        return
    script = files["slurm/train_single_node.sbatch"]
    assert parses(script)
    found = re.findall(r"(?m)^(?:load_module|module) (.*?)(?: \|\| fail .*)?$", script)
    assert found == [line for line in value.split("\n") if line]


@many
@given(
    name=st.sampled_from(["sbatch_options", "cpu_sbatch_options", "srun_options"]),
    value=st.lists(st.one_of(TEXTS, TEXTS.map("--{}".format)), max_size=3).map("\n".join),
)
def test_options_arrive_as_they_are(
    render: Renderer, parses: Callable[[str], bool], name: str, value: str
) -> None:
    files = attempt(render, name, value)
    if files is None:
        return
    kind = "cpu" if name == "cpu_sbatch_options" else "single_node"
    script = files[f"slurm/train_{kind}.sbatch"]
    assert parses(script)
    if name == "srun_options":
        assert "".join(f"\n    {line} \\" for line in value.split()) in script
    else:
        asked = directives(script)
        assert asked[len(asked) - len(value.split()) :] == [f"#SBATCH {v}" for v in value.split()]


@many
@given(
    name=st.sampled_from(sorted(NUMBERS)),
    value=st.one_of(st.integers(), st.integers(-5, 5000), st.integers().map(str), TEXTS),
)
def test_numbers_arrive_or_are_refused(render: Renderer, name: str, value: int | str) -> None:
    files = attempt(render, name, value)
    if files is None:
        return
    script = files["slurm/train_multi_node.sbatch"]
    said = {
        "nodes": f"#SBATCH --nodes={int(value)}\n",
        "gpus_per_node": f"#SBATCH --gres=gpu:zzgpu:{int(value)}\n",
        "cpus_per_task": f"#SBATCH --cpus-per-task={int(value)}\n",
        "signal_lead_seconds": f"#SBATCH --signal=USR2@{int(value)}\n",
    }
    assert said[name] in script
    assert yaml.safe_load(files[".copier-answers.yml"])[name] == int(value)


@many
@given(name=st.sampled_from(sorted(QUESTIONS)), value=OTHERS)
def test_a_value_of_another_type_is_taken_for_what_it_says_or_refused(
    render: Renderer, parses: Callable[[str], bool], name: str, value: object
) -> None:
    files = attempt(render, name, value)
    if files is None:
        return
    said = yaml.safe_load(files[".copier-answers.yml"]).get(name, value)
    if QUESTIONS[name]["type"] == "str" and "multiselect" not in QUESTIONS[name]:
        assert isinstance(value, int | float) and not isinstance(value, bool)
    assert said == value or str(said).lower() == str(value).lower(), (name, value, said)
    tomllib.loads(files["pyproject.toml"])
    json.dumps(said)
    assert all(parses(text) for path, text in files.items() if path.endswith(".sbatch"))
