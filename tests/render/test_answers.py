"""Bad answers are refused with one clear message. Unusual but good answers arrive unchanged."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unicodedata import category

import jinja2
import pytest
import yaml
from renderer import QUESTIONS, TEMPLATE, Renderer, tomllib

LONG = "a" * 10_000
INJECTIONS = [
    "a\nb",
    "a b\n#SBATCH --uid=0",
    'a"b',
    "a'b",
    "a`id`",
    "$(id)",
    "${HOME}",
    "a;id",
    "a&&id",
    "a\\b",
    "a\0b",
    "{{ 7 * 7 }}",
    "{% raw %}",
    " a",
    "a ",
    "-a",
    LONG,
]
# Questions whose answers reach #SBATCH lines or the shell as they are.
RAW = ("partition", "cpu_partition", "account", "qos", "reservation", "gpu_type", "mail_user")

BAD: dict[str, list[Any]] = {
    **{name: INJECTIONS for name in RAW},
    "constraint": [
        *(text for text in INJECTIONS if text != "a&&id"),
        "a|b c",
        'a"|"b',
        "[rack1*2&rack2*2]",
    ],
    "package_name": [
        *INJECTIONS,
        *["", "1a", "Demo", "a-b", "class", "torch", "wandb", "aim", "mlflow", "tensorboard"],
        *["json", "logging", "numpy", "yaml", "tests", "src", "ä", "a" * 41, "_a", "a__b", "a.b"],
    ],
    "time_limit": [
        *["", "0", "0:00", "00:00:00", "1h", "12:60:00", "1-24", "1-1:60", "a", "-5", "1:2:3:4"],
        *["12:00:00\n", "1 day", "1.5", "0-0", LONG],
    ],
    "memory": ["64GB", "64 G", "-1", "G", "1.5G", "64G\n", "$(id)", "01G", LONG],
    "gpu_type": [*INJECTIONS, "gpu:a100", "a100:4", "4"],
    "nodes": [0, 1, -3, "two", 2.5, 5000, "", True, "9" * 5000],
    "gpus_per_node": [0, 17, "a100:4", 1.5],
    "cpus_per_task": [0, 257, "x"],
    "signal_lead_seconds": [0, 10, 4000, "x", 3600],
    "mail_user": [*INJECTIONS, "ada", "ada@", "@example.org", "a@b@c", "a@b,c@d", f"a@{LONG}"],
    "author_email": ["ada", "a b@example.org", 'a"@example.org', f"a@{LONG}"],
    "launch_modes": [[], "cpu", ["gpu"], ["cpu", "tpu"], {"cpu": 1}],
    "trackers": ["tensorboard", ["comet"]],
    "monitoring_servers": [["wandb"], ["aim"]],
    "modules": [
        *["cuda 12", "cuda/12;id", "$(id)", "a\n\n$(id)", "'a'", "-a", ["cuda"]],
        *[LONG, "a" * 300, "cuda/12.4\n" * 300],
        *["use mine", "use /a b", "load cuda", "--force", "purge"],
    ],
    "sbatch_options": [
        *["-p gpu", "--hint nomultithread", "--comment='a b'", "--comment=$(id)", "--a;id", "hint"],
        *["--account=a", "--hint=x\n--array=0-3", "--gres=gpu:1", "--nodes=2", "--output=x"],
        *["--wrap=x", "--mem=1G", "--signal=USR1@9", "--exclusive", LONG, ["--hint=x"]],
    ],
    "cpu_sbatch_options": [
        "--signal=USR1@9",
        "--cpus-per-gpu=4",
        "--array=0-3",
        "--cpus-per-task=9",
        "--time=1",
        "--hint=$x",
    ],
    "srun_options": [
        "--cpus-per-task=9",
        "--label;id",
        "--wait=0",
        "--cpu-bind=`id`",
        "-n 4",
        "--exclude=n[1-2]",
    ],
    "site_script": [
        *["#SBATCH --time=1", "export A=1\n  #SBATCH --mem=0"],
        *["exit 1", "export A=1\nreturn", "exec bash", "exec srun a > b"],
        *["set -eu", "set -o errexit", "set -u -o pipefail -e", "set -Eeuo pipefail"],
        *["a\r\nb", "a\0b", "a\u200bb", LONG, ["export A=1"]],
    ],
    "task_options": ["both", "srun"],
    "memory_scope": ["gpu"],
    "gpu_request": ["gpu"],
    "shared_root": [
        *["runs", "~/runs", "$HOME/runs", "/a b", "/a/../b", "/a/", "/a;b", "/", "/a\n"],
        f"/{LONG}",
    ],
    "container_image": ["torch.sif", "/a b", "/$(id)", "/a/../b", "python:3.12", "/x\n"],
    "container_base_image": ["", "docker://python", "a b", "$(id)", "python:3.12\n", LONG],
    "project_name": ["", "a\nb", "a\tb", " a", "!!!", "x" * 121, "a\x1bb"],
    "description": ["a\nb", "x" * 121, " a"],
    "author_name": ["", "a\nb"],
    "launcher": ["mpirun", ""],
    "environment": ["poetry"],
    "license": ["GPL"],
    "sweep": ["ray"],
    "ci": ["jenkins"],
    "setup": ["medium"],
    "requeue": ["maybe"],
}
# What makes a question asked at all.
PARENTS: dict[str, dict[str, Any]] = {
    "task_options": {"gpu_request": "gpus_per_task"},
    "memory_scope": {"memory": "8G", "gpu_request": "none"},
    "container_image": {"container": "apptainer"},
    "container_base_image": {"container": "apptainer"},
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{n}-{v!r}"[:60] for n, v in CASES])
def test_a_bad_answer_is_refused(render: Renderer, name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError) as caught:
        render({"setup": "full", **PARENTS.get(name, {}), name: value})
    message = str(caught.value)
    assert name in message
    # After the head that Copier puts before it: one line, with something to go by.
    said = message.split(":", 1)[-1].strip()
    assert len(said) > 10 and len(message.splitlines()) <= 2, message
    # In a terminal of 80 columns, Copier cuts off the rest.
    if message.startswith("Validation error") and "question 'setup'" not in message:
        assert len(message) <= 80, message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("package_name", "torch"),
        ("time_limit", "1h"),
        ("launch_modes", "[]"),
        ("partition", "gpu; id"),
        ("mail_user", "ada"),
        ("nodes", "one"),
    ],
)
def test_the_command_line_refuses_it_and_writes_nothing(
    template: Path, tool: dict[str, str], tmp_path: Path, name: str, value: str
) -> None:
    project = tmp_path / "project"
    done = subprocess.run(
        [tool["copier"], "copy", "--defaults", f"--data={name}={value}", template, project],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert name in done.stderr
    assert not project.exists()


@pytest.mark.parametrize("gpu_type", ["a100", "1g.10gb", "2080ti", "rtx_6000-ada"])
def test_gpu_types_arrive(render: Renderer, gpu_type: str) -> None:
    script = render({"gpu_type": gpu_type})["slurm/train_single_node.sbatch"]
    assert f"#SBATCH --gres=gpu:{gpu_type}:4\n" in script


@pytest.mark.parametrize("time_limit", ["90", "90:30", "12:00:00", "1-0", "2-12", "2-12:30"])
@pytest.mark.parametrize("more", [{}, {"launcher": "torchrun"}])
def test_walltimes_arrive(render: Renderer, time_limit: str, more: dict[str, str]) -> None:
    files = render({"time_limit": time_limit, **more})
    assert f"#SBATCH --time={time_limit}\n" in files["slurm/train_cpu.sbatch"]


@pytest.mark.parametrize(
    "text",
    [
        "O'Neil & Søns",
        'say "hi"',
        "back\\slash",
        "{{ 7*7 }}",
        "{% if %}",
        "$(id) `id`",
        "# 日本語 🙂",
    ],
)
def test_free_text_arrives_unchanged(render: Renderer, text: str) -> None:
    files = render({"project_name": f"x{text}", "description": text, "author_name": f"x{text}"})
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["description"] == text
    assert project["authors"][0]["name"] == f"x{text}"
    assert files["README.md"].startswith(f"# x{text}\n")
    assert f"x{text}" in files["LICENSE"]
    cited = yaml.safe_load(files["CITATION.cff"])
    assert (cited["title"], cited["abstract"]) == (f"x{text}", text)
    assert cited["authors"] == [{"name": f"x{text}"}]
    saved = yaml.safe_load(files[".copier-answers.yml"])
    assert (saved["project_name"], saved["description"]) == (f"x{text}", text)
    for path, content in files.items():
        if path.endswith(".sbatch"):
            assert text not in content, "free text has no place in a script"


@pytest.mark.parametrize(
    "lines",
    [
        *["export NCCL_IB_HCA=mlx5", "http_proxy=http://user:$pass@proxy:3128"],
        *["exec 2>&1", "exec > >(tee log)", "exec 3<f", "exec &>log", "exec {fd}>log", "set +e"],
        *["set -u", "set -o pipefail", "if true; then\n    exit 0\nfi"],
        *["X=$'it\\'s'", "cat <<END\nit's\nEND", "A=$(awk -F'\"' '{print $1}' f)", "A=1;# don't"],
        *['A="${b//\'"\'/}"', "\n" * 3000],
    ],
)
def test_lines_for_a_site_arrive(render: Renderer, lines: str) -> None:
    assert lines.strip() in render({"site_script": lines})["slurm/site.sh"]


def test_many_empty_lines_are_refused_at_once(render: Renderer) -> None:
    """Patterns that look at each line after each other take time."""
    with pytest.raises(ValueError, match="at most 4000"):
        render({"site_script": "\n" * 500_000})


LINES = [name for name, question in QUESTIONS.items() if question.get("multiline")]


@pytest.mark.parametrize("name", LINES)
def test_white_space_alone_is_no_line(render: Renderer, name: str) -> None:
    """Enter leaves a newline, in a terminal and in a file of answers."""

    def files(text: str) -> dict[str, str]:
        found = render({"setup": "full", "package_name": "demo", name: text})
        said = yaml.safe_load(found.pop(".copier-answers.yml"))
        assert ("module_purge" in said) == (name == "modules" and text.strip() != "")
        return found

    nothing = files("")
    for text in ("\n", " \n\t\n", "\r\n"):
        assert files(text) == nothing
    good = {"modules": "gcc\nuse /a\ncuda/12"}.get(name, "--quiet\n--hint=x")
    assert files(f"\n {good} \n\n") == files(good) != nothing


TEXTS = [
    name
    for name, question in QUESTIONS.items()
    if question["type"] == "str" and "choices" not in question and name not in LINES
    if question.get("when") is not False
]


@pytest.mark.parametrize("name", TEXTS)
def test_white_space_alone_is_no_text(render: Renderer, name: str) -> None:
    for text in (" ", "\n", "\t", "\u3000"):
        with pytest.raises(ValueError, match=name):
            render({"setup": "full", **PARENTS.get(name, {}), name: text})


def test_further_options_take_the_place_of_answers(render: Renderer) -> None:
    """And what only trainings or GPUs need is left out where they are not."""
    files = render(
        {
            "setup": "full",
            "account": "lab-gpu",
            "memory": "64G",
            "gpu_request": "gpus",
            "monitoring_servers": ["tensorboard"],
            "sbatch_options": "--mem-bind=local",
            "cpu_sbatch_options": "--account=lab-cpu\n--mem=8G\n--exclusive",
            "srun_options": "--gpu-bind=closest\n--mpi=pmi2",
        }
    )

    def asked(name: str) -> set[str]:
        return set(re.findall(r"^#SBATCH (--(?:account|mem|exclusive|gpus).*)", files[name], re.M))

    def given(name: str) -> list[str]:
        return re.findall(r"^    (--(?:gpu|mpi)\S+) \\$", files[name], re.M)

    cpu, multi = "slurm/train_cpu.sbatch", "slurm/train_multi_node.sbatch"
    assert asked(cpu) == {"--account=lab-cpu", "--mem=8G", "--exclusive"}
    assert asked("slurm/monitoring/tensorboard.sbatch") == {"--account=lab-cpu"}
    memory = {"--account=lab-gpu", "--mem=64G", "--mem-bind=local"}
    assert asked(multi) == {*memory, "--gpus=8", "--gpus-per-node=4"}
    assert asked("slurm/train_single_node.sbatch") == {*memory, "--gpus=4"}
    assert given(multi) == ["--gpu-bind=closest", "--mpi=pmi2"]
    assert given(cpu) == given("slurm/doctor.sbatch") == ["--mpi=pmi2"]


def test_a_server_asks_for_no_resources_of_a_training(render: Renderer) -> None:
    answers = {"memory": "64G", "exclusive": True, "monitoring_servers": ["tensorboard"]}
    files = render({"setup": "full", **answers})
    for line in ("#SBATCH --mem=64G", "#SBATCH --exclusive"):
        assert line in files["slurm/train_single_node.sbatch"]
        assert line not in files["slurm/monitoring/tensorboard.sbatch"]


def test_directives_follow_their_answers(render: Renderer) -> None:
    files = render(
        {
            "setup": "full",
            "partition": "gpu",
            "cpu_partition": "cpu",
            "account": "proj-1",
            "qos": "high",
            "constraint": "a100|h100",
            "reservation": "course",
            "exclusive": True,
            "mail_user": "ada@example.org",
            "mail_type": ["FAIL"],
            "memory": "8G",
            "memory_scope": "cpu",
            "gpu_type": "a100",
            "gpus_per_node": 2,
            "gpu_request": "gpus_per_node",
            "nodes": 3,
            "requeue": False,
            "signal_lead_seconds": 90,
            "modules": "python/3.12\ncuda/12.4\nnccl",
        }
    )
    multi, cpu = files["slurm/train_multi_node.sbatch"], files["slurm/train_cpu.sbatch"]
    for line in (
        "--partition=gpu",
        "--account=proj-1",
        "--qos=high",
        '--constraint="a100|h100"',
        "--reservation=course",
        "--exclusive",
        "--mail-user=ada@example.org",
        "--mail-type=FAIL",
        "--mem-per-cpu=8G",
        "--gpus-per-node=a100:2",
        "--ntasks-per-node=2",
        "--nodes=3",
        "--no-requeue",
        "--signal=USR2@90",
    ):
        assert f"#SBATCH {line}\n" in multi
    assert "scontrol requeue" not in files["slurm/resume.sh"]
    for name in ("python/3.12", "cuda/12.4", "nccl"):
        assert f"\nload_module {name}\n" in multi
    # The CPU script asks for no GPU and loads nothing that is for one.
    assert "#SBATCH --partition=cpu\n" in cpu
    assert "\nload_module python/3.12\n" in cpu
    lines = cpu.splitlines()
    assert not [line for line in lines if line.startswith("#SBATCH") and "gpu" in line.lower()]
    assert "load_module cuda" not in cpu and "load_module nccl" not in cpu


@pytest.mark.parametrize(
    ("answers", "queue"),
    [
        ({"partition": "gpu"}, None),  # one with GPUs often refuses jobs without
        ({"partition": "gpu", "cpu_partition": "small"}, "small"),
        ({"partition": "main", "launch_modes": ["cpu"]}, "main"),
    ],
)
def test_the_partition_of_jobs_without_a_gpu(
    render: Renderer, answers: dict[str, Any], queue: str | None
) -> None:
    lines = render(answers)["slurm/train_cpu.sbatch"].splitlines()
    found = [line for line in lines if line.startswith("#SBATCH --partition")]
    assert found == ([f"#SBATCH --partition={queue}"] if queue else [])


@pytest.mark.parametrize("container", ["none", "apptainer"])
def test_whose_python_a_module_brings(render: Renderer, container: str) -> None:
    """Jobs in a container have that of its image."""
    readme = render({"modules": "python/3.12", "container": container})["README.md"]
    assert ("Python of your" in readme) == (container == "none")


def test_text_has_no_character_that_hides_or_turns_it() -> None:
    """Such as zero-width and direction marks, and the tags of Unicode."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"],
    )
    check = environment.get_template("hooks/validators.jinja").module.free_text
    kinds = {chr(point): category(chr(point)) for point in range(sys.maxunicode + 1)}
    hidden = [c for c, kind in kinds.items() if kind in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert {"\u200b", "\ufeff", "\u061c", "\U000e0041"} < set(hidden)
    assert not [c for c in hidden if "invisible" not in check(f"a{c}b")]
    assert "invisible" not in check(
        "".join(c for c, kind in kinds.items() if kind[0] != "C" and kind not in ("Zl", "Zp"))
    )


def test_an_answer_to_no_question_is_refused_by_the_test_helper(render: Renderer) -> None:
    with pytest.raises(KeyError, match="partitoin"):
        render({"partitoin": "gpu"})
