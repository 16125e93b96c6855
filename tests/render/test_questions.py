"""The questions: which are asked, when, and what answers without an effect do."""

import keyword
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import copier
import copier._main
import jinja2
import pytest
import yaml
from renderer import QUESTIONNAIRE, QUESTIONS, TEMPLATE, Renderer

# The public surface: users' data files name them. A question is renamed by a default that carries
# the old answer over, never just here.
SURFACE = """
    setup
    project_name package_name description author_name author_email license
    launch_modes launcher nodes gpus_per_node accelerator gpu_type gpu_request task_options
    cpus_per_task memory memory_scope time_limit partition cpu_partition account qos constraint
    reservation exclusive mail_user mail_type requeue signal_lead_seconds
    sbatch_options cpu_sbatch_options srun_options site_script
    environment modules module_purge container container_image container_base_image
    trackers shared_root monitoring_servers sweep
    example tools ci pre_commit
"""
NAMES = SURFACE.split()
COMPUTED = ["former_site_script", "run_root"]
# Only presets, data files and --data answer the others.
ASKED = [name for name in NAMES if QUESTIONS[name].get("ask") is not False]

# Answers to questions that other answers make pointless, and those others.
POINTLESS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"launch_modes": ["cpu"]},
        {"nodes": 9, "gpus_per_node": 8, "accelerator": "amd", "gpu_request": "gpus_per_node"},
    ),
    ({"launch_modes": ["cpu"]}, {"cpu_partition": "cpu", "cpu_sbatch_options": "--qos=cpu"}),
    ({"launch_modes": ["single_node"]}, {"nodes": 9, "cpu_partition": "cpu"}),
    ({"memory": ""}, {"memory_scope": "cpu"}),
    ({"mail_user": ""}, {"mail_type": ["ALL"]}),
    ({"modules": ""}, {"module_purge": False}),
    ({"container": "none"}, {"container_base_image": "debian:13"}),
    ({"container": "none"}, {"container_image": "/images/torch.sif"}),
    ({"trackers": ["wandb"]}, {"monitoring_servers": []}),
]


def test_the_names_of_the_questions_stay() -> None:
    assert [name for name in QUESTIONS if name not in COMPUTED] == NAMES
    assert list(QUESTIONS)[-len(COMPUTED) :] == COMPUTED


@pytest.mark.parametrize("name", NAMES)
def test_a_question_helps_and_has_a_default(name: str) -> None:
    question = QUESTIONS[name]
    assert "default" in question
    assert question["help"][-1] in ".?"
    # These validate themselves; everything else says what is wrong and what is right.
    assert "validator" in question or "choices" in question or question["type"] == "bool"


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_of_the_wrong_type_is_refused_by_name(render: Renderer, name: str) -> None:
    """Copier alone takes "maybe" for yes, cuts 2.5 to 2, and does not name the question."""
    question = QUESTIONS[name]
    kind = "list" if question.get("multiselect") else question["type"]
    wrong = {
        "list": ["cpu", "", None, 3, {}],
        "int": ["two", "", None, 2.5, True, [2], "1 2"],
        "bool": ["maybe", "", None, [True], 2],
        "yaml": ["maybe", "expedite", "", None, [True], 2, 1, {}],
        "str": [None],
    }
    for value in wrong[kind]:
        with pytest.raises((ValueError, TypeError), match=name):
            render({name: value})


def asked(template: Path, project: Path, **answers: Any) -> list[str]:  # noqa: ANN401
    """Return the questions that a person is asked who accepts all defaults but these answers."""
    names = []

    def accept(structures: list[dict[str, Any]], answers: dict[str, Any]) -> dict[str, Any]:
        (structure,) = structures
        if structure["when"]({}):
            names.append(structure["name"])
            # On 80 columns, Copier's mark before it; what is longer would be cut off.
            assert max(map(len, structure["message"].splitlines())) <= 76
            if "default" not in structure:  # nothing is filled in, so that something is typed
                answers[structure["name"]] = "Digits"
        return answers

    with mock.patch.object(copier._main, "unsafe_prompt", accept):
        copier.run_copy(str(template), project, user_defaults=answers, quiet=True)
    return names


@pytest.mark.parametrize(
    "answers",
    [{}, {"launch_modes": ["cpu"]}, {"modules": "gcc", "trackers": ["aim"], "memory": "1G"}],
    ids=str,
)
def test_quick_asks_under_ten_questions(
    template: Path, tmp_path: Path, answers: dict[str, Any]
) -> None:
    first, *names = asked(template, tmp_path / "project", **answers)
    assert first == "setup" and 5 <= len(names) < 10
    assert {"project_name", "launch_modes", "partition", "time_limit", "example"} <= set(names)


def test_full_asks_all_that_matters(template: Path, tmp_path: Path) -> None:
    everything = {"memory": "1G", "container": "apptainer"}
    names = asked(template, tmp_path / "all", setup="full", modules="gcc", **everything)
    assert names == ASKED and len(names) <= 36
    few = asked(template, tmp_path / "few", setup="full", launch_modes=["cpu"], trackers=[])
    missing = (
        "cpu_partition nodes gpus_per_node accelerator gpu_type gpu_request memory_scope "
        "container_image monitoring_servers"
    )
    assert {*ASKED} - {*few} == {*missing.split()}


@pytest.mark.parametrize(("parents", "pointless"), POINTLESS, ids=[str(p) for p, _ in POINTLESS])
def test_an_answer_that_does_not_matter_changes_nothing(
    render: Renderer, parents: dict[str, Any], pointless: dict[str, Any]
) -> None:
    full = {"setup": "full", "sweep": "optuna", **parents}
    files = render({**full, **pointless})
    assert files == render(full)
    assert not set(pointless) & set(yaml.safe_load(files[".copier-answers.yml"]))


@pytest.mark.parametrize(
    ("limit", "lead"),
    [("0:01", 30), ("00:01:00", 30), ("2", 60), ("3:59", 120), ("1-0", 120), ("UNLIMITED", 120)],
)
def test_the_lead_of_the_signal_follows_from_the_time_limit(
    render: Renderer, limit: str, lead: int
) -> None:
    """Slurm rounds limits up to minutes."""
    script = render({"time_limit": limit})["slurm/train_cpu.sbatch"]
    assert f"#SBATCH --signal=USR2@{lead}\n" in script


def test_recorded_answers_stay_good(template: Path, tmp_path: Path) -> None:
    """A short time limit is questioned only where it is typed."""
    answers = {"time_limit": "3", "signal_lead_seconds": 120}
    copier.run_copy(str(template), tmp_path, data=answers, defaults=True, quiet=True)
    copier.run_recopy(tmp_path, defaults=True, overwrite=True, quiet=True)
    said = yaml.safe_load((tmp_path / ".copier-answers.yml").read_text())
    assert {name: said[name] for name in answers} == answers


@pytest.mark.parametrize(
    ("given", "typed", "blamed"),
    [
        ({"signal_lead_seconds": 60}, {"time_limit": "00:01:00"}, "time_limit"),
        ({"memory_scope": "gpu"}, {"launch_modes": ["cpu"]}, "launch_modes"),
        ({"memory_scope": "cpu"}, {"memory": "0"}, "memory"),
        ({"monitoring_servers": ["aim"]}, {"trackers": ["mlflow"]}, "trackers"),
        ({"monitoring_servers": "[aim]"}, {"trackers": ["mlflow"]}, "trackers"),
    ],
)
def test_what_contradicts_a_given_answer_is_refused_where_it_is_typed(
    render: Renderer, given: dict[str, Any], typed: dict[str, Any], blamed: str
) -> None:
    """At the later question nobody could change it any more, and all answers were lost."""
    with pytest.raises(ValueError, match=f"question '{blamed}'"):
        render({**given, **typed})


def test_quick_and_full_differ_in_nothing_but_what_they_ask(render: Renderer) -> None:
    """An answer given on the command line counts, and is kept for updates, in either."""
    answers = {"qos": "high", "environment": "uv", "trackers": ["mlflow"], "requeue": False}
    quick, full = (render({"setup": setup, **answers}) for setup in ("quick", "full"))
    assert quick.pop(".copier-answers.yml") == full.pop(".copier-answers.yml").replace(
        "setup: full", "setup: quick"
    )
    assert quick == full


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        *[(True, "true"), ("true", "true"), ("yes", "true"), (False, "false"), ("no", "false")],
        ("expedited", "expedited"),
    ],
)
def test_requeue_is_recorded_as_before_it_had_a_third_choice(
    render: Renderer, given: object, recorded: str
) -> None:
    files = render({"requeue": given})
    assert f"\nrequeue: {recorded}\n" in files[".copier-answers.yml"]
    assert ("slurm/guard.sh" in files) == (recorded != "false")


def test_computed_values_cannot_be_set(render: Renderer) -> None:
    for name in COMPUTED:
        with pytest.raises(ValueError, match=f"{name}.*is computed"):
            render({name: "x"})


def test_package_names_that_hide_a_module_are_reserved() -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE), **_plain(QUESTIONNAIRE["_envops"])
    )
    reserved = set(environment.get_template("hooks/reserved.jinja").module.reserved_names)
    ours = (
        "torch numpy yaml tyro pydantic tqdm tensorboard wandb aim mlflow trackio optuna tests src "
        "python pytorch_cpu pytorch_gpu"
    )
    modules = {name for name in sys.stdlib_module_names if name[0] != "_" and name.islower()}
    words = {name for name in keyword.kwlist + keyword.softkwlist if name[0] != "_"}
    assert modules | {name for name in words if name.islower()} | set(ours.split()) <= reserved


def _plain(envops: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in envops.items() if name != "undefined"}


@pytest.mark.parametrize(
    ("project", "package"),
    [
        ("MNIST DDP", "mnist_ddp"),
        ("Torch", "torch_project"),
        ("3D -- scans!", "project_3d_scans"),
        ("日本語", "project"),
        ("Ünïcode net", "uenicode_net"),
        ("Größe", "groesse"),
        ("class", "class_project"),
        ("x" * 99, "x" * 30),
        ("a" * 29 + " b", "a" * 29),
    ],
)
def test_the_package_is_named_after_the_project(
    render: Renderer, project: str, package: str
) -> None:
    assert f"src/{package}/__init__.py" in render({"project_name": project})


def test_a_time_that_yaml_reads_as_a_number_is_refused(render: Renderer) -> None:
    """Without quotes, 12:00:00 in a data file is 43200, which Slurm takes for a month."""
    time_limit = yaml.safe_load("12:00:00")
    with pytest.raises(ValueError, match="time_limit: expected quotes"):
        render({"time_limit": time_limit})


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what sets the user's Copier settings to some answers."""

    def set_to(**answers: object) -> None:
        path = tmp_path / "settings.yml"
        path.write_text(yaml.safe_dump({"defaults": answers}))
        monkeypatch.setenv("COPIER_SETTINGS_PATH", str(path))

    return set_to


# What a support team may answer for all users, in their Copier settings.
OF_A_SITE: dict[str, Any] = {
    "launch_modes": ["cpu", "multi_node"],
    "gpus_per_node": 8,
    "time_limit": "12:00:00",
    "partition": "gpu",
    "modules": "gcc\npython/3.12\n",
    "trackers": ["mlflow"],
    "qos": "long",
    "exclusive": True,
    "another_templates": "{{ year }}",
}


def test_what_the_settings_answer_is_not_asked(
    template: Path, tmp_path: Path, settings: Callable[..., None]
) -> None:
    settings(setup="quick", **OF_A_SITE)
    assert asked(template, tmp_path / "project") == ["project_name", "account", "example"]
    said = yaml.safe_load((tmp_path / "project/.copier-answers.yml").read_text())
    assert {name: said.get(name, "{{ year }}") for name in OF_A_SITE} == OF_A_SITE
    # `full` asks for them too, and has them filled in.
    settings(setup="full", **OF_A_SITE)
    names = asked(template, tmp_path / "full", project_name="Digits")
    assert names[:3] == ["project_name", "package_name", "description"]
    assert {*OF_A_SITE, "account"} & {*ASKED} < {*names}
    said = yaml.safe_load((tmp_path / "full/.copier-answers.yml").read_text())
    assert {name: said.get(name, "{{ year }}") for name in OF_A_SITE} == OF_A_SITE


def test_each_quick_question_may_be_answered_by_the_settings(
    template: Path, tmp_path: Path, settings: Callable[..., None]
) -> None:
    """An `ask` that names another question would ask, or be silent, at the wrong one."""
    quick = asked(template, tmp_path / "project")
    defaults = yaml.safe_load((tmp_path / "project/.copier-answers.yml").read_text())
    for name in quick:
        settings(**{name: defaults[name]})
        others = asked(template, tmp_path / name)
        # A project always has a name of its own.
        assert others == [other for other in quick if other != name or other == "project_name"]


def test_an_answer_given_or_recorded_comes_before_the_settings(
    template: Path, tmp_path: Path, settings: Callable[..., None]
) -> None:
    project = tmp_path / "project"
    copier.run_copy(str(template), project, data={"partition": "big"}, defaults=True, quiet=True)
    settings(setup="full", **{**OF_A_SITE, "partition": "gpu"})
    before = yaml.safe_load((project / ".copier-answers.yml").read_text())
    copier.run_recopy(project, defaults=True, overwrite=True, quiet=True)
    after = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert (after, after["partition"]) == (before, "big")
    copier.run_copy(
        str(template), tmp_path / "other", data={"qos": "short"}, defaults=True, quiet=True
    )
    said = yaml.safe_load((tmp_path / "other/.copier-answers.yml").read_text())
    assert (said["qos"], said["partition"]) == ("short", "gpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_answer_in_the_settings_is_refused_by_name(
    render: Renderer, settings: Callable[..., None], name: str
) -> None:
    """Also one that no validator sees as it was written: of another type, or rendered by Jinja."""
    question = QUESTIONS[name]
    kind = "list" if question.get("multiselect") else question["type"]
    wrong: dict[str, list[Any]] = {
        "list": ["cpu", None, 3, {"a": 1}],
        "int": ["two", None, 2.5, True, [2]],
        "bool": ["maybe", None, [True]],
        "yaml": ["maybe", None, 2, {"a": 1}],
        "str": [None, True, ["a"], date(2026, 11, 26)],
    }
    if name == "time_limit":
        wrong["str"].append(43200)
    # Copier itself refuses what is no choice of the first question.
    head = "Copier settings, "
    if name == "setup":
        head, wrong["str"] = "", [None, True]
    for value in (*wrong[kind], "{{ 4 }}", "a{% if true %}b{% endif %}", "${a[@]}{=# b #=}"):
        settings(**{name: value})
        with pytest.raises((ValueError, TypeError), match=f"{head}{name}"):
            render({})


@pytest.mark.parametrize(
    ("name", "value"), [("partition", "a b"), ("gpus_per_node", 17), ("trackers", ["comet"])]
)
def test_what_a_validator_refuses_is_refused_in_the_settings(
    render: Renderer, settings: Callable[..., None], name: str, value: object
) -> None:
    settings(**{name: value})
    with pytest.raises(ValueError, match=name):
        render({})


@pytest.mark.parametrize("preset", sorted(TEMPLATE.glob("sites/*.yml")), ids=lambda path: path.stem)
def test_a_preset_in_the_settings_is_as_good_as_a_data_file(
    render: Renderer, settings: Callable[..., None], preset: Path
) -> None:
    """Also its lines of shell, though Copier renders what is in the settings."""
    answers = yaml.safe_load(preset.read_text("utf-8"))
    expected = render(answers)
    settings(**answers)
    assert render({}) == expected
