"""The pages say what the template does: they are made of it, or name only what is there."""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import PurePosixPath

import pages
import presets
import pytest
from classes import KINDS, Classes
from questions import page
from renderer import TEMPLATE, Renderer
from tiers import FULL, is_full
from variants import MODES, SERVERS, TRACKERS, Answers, pairwise_variants, subsets

VARIANTS = """\
# Which variants the tests run

This page is for people who change the template, or want to know how much of it is tested. The
answers lead to many different projects, the *variants*. The tests render {} of them:

- every combination of launch modes, launcher, container and environment
- every set of trackers, with their servers and sweeps
- variants in which each value of each question meets each value of every other question

Many variants have some files with the same content. The tests run each distinct content once:

{}
How they run it:

- **`src/` and `configs/`**: each distinct tree is imported. Two ranks train, stop and resume each
  tree that differs in what a training reads.
- **Batch scripts** are submitted to a Slurm cluster. Small programs run in place of Python
  and Apptainer, and record their arguments.
- **Commands** of Makefiles and of a project's own CI run in environments that borrow the packages
  of the tests.
- **Container definitions** are built by Apptainer, with small packages in place of the real
  ones. One image is built with the real packages, and a training runs in it.

## What each target runs

`make test` takes about ten minutes on two cores, and needs neither root nor Slurm. It renders every
variant and reads what is rendered. It also trains, stops and resumes with DDP and FSDP, and updates
projects. `make test-all` runs the rest, too:

{}
`make test-nightly` adds the tests with the mark `slow`: more launchers, strategies, signals and
numbers of ranks. On every push, CI runs `make test-all`.

`tests/render/classes.py` defines which content counts as the same, and `tests/tiers.py` what `make
test` leaves out. `tests/render/test_docs.py` makes this page.
"""
# The page on Slurm is run line by line, and the recipes and the page on data block by block.
RUN_PAGES = ("docs/slurm.md", "docs/recipes.md", "docs/data.md")
ON_SLURM = "tests/slurm/test_docs.py::def test_the_commands_of_the_page_on_slurm("
# Which file runs a command in the tests, and which text in it shows that.
UPDATE_PAGE = "tests/update/test_page.py::def test_the_commands_of_the_page_on_updates("
UPDATES = {
    "git *": UPDATE_PAGE,
    "make update*": UPDATE_PAGE,
    "make setup test": "tests/run/test_setup.py::made(newcomer, *setup)",
    "pip* install copier": "scripts/demo.sh::pip install --quiet 'copier",
}
SUPPORT_PAGE = "tests/slurm/test_support_page.py::def test_the_commands_of_the_page("
# In this repository:
OURS = {
    **UPDATES,
    "python3 probe_cluster.py --site *": SUPPORT_PAGE,
    "python3 -m venv /software/*": SUPPORT_PAGE,
    "*/bin/pip install copier": UPDATES["pip* install copier"],
    "mkdir /software/*": SUPPORT_PAGE,
    "ln -s *": SUPPORT_PAGE,
    "chmod -R *": SUPPORT_PAGE,
    "module use /software/*": SUPPORT_PAGE,
    "module load slurm-ddp": SUPPORT_PAGE,
    "copier copy $SLURM_DDP_TEMPLATE my-project": SUPPORT_PAGE,
    ".venv/bin/python -m pytest tests/update": ".ci/run::make test",
    "git clone --bare *": SUPPORT_PAGE,
    "git -C *": SUPPORT_PAGE,
    "make setup": "tests/run/test_setup.py::made(newcomer, *setup)",
    "make acceptance *": "tests/slurm/test_acceptance.py::def test_a_new_site_from_its_module_to_",
    "sed -i *": UPDATE_PAGE,
    "make demo": "tests/run/test_docs.py::def test_the_demo(",
    "make test": ".ci/run::make test",
    "make test-all": ".ci/run:::-test-all}",
    "cd copier-slurm-ddp": "tests/run/test_docs.py::cwd=root",
    ".venv/bin/python -m pytest tests/render -k license": ".ci/run::make test",
    "copier copy <address of this repository> my-project": (
        "tests/render/test_copier.py::def test_a_tagged_repository_is_copied_without_trust("
    ),
    "python3 probe_cluster.py cluster.yml": "tests/slurm/test_probe.py::def probed(",
    "copier copy --data-file lumi.yml *": "tests/slurm/test_sites.py::def test_a_preset_meets_the_",
    "copier copy --data-file cluster.yml *": "tests/slurm/test_probe.py::--data-file=cluster.yml",
}
# In a project:
THEIRS = {
    **UPDATES,
    "git init && *": "tests/render/test_copier.py::commands[1], shell=True",
    "make setup": "tests/run/test_setup.py::made(newcomer, *setup)",
    "make setup TORCH=*": 'tests/run/test_setup.py::made(newcomer, "setup", f"TORCH={torch}")',
    "make setup SITE_PACKAGES=1": "tests/run/test_setup.py::def test_a_pytorch_of_the_site_is_",
    "make setup-cpu": 'tests/run/test_setup.py::made(project, "setup-cpu", f"CONDA={conda}")',
    "PIP_NO_INDEX=1 *make setup": "tests/run/test_setup.py::def test_a_site_without_internet_has",
    "make lock": 'tests/run/test_setup.py::made(newcomer, "lock")',
    "make clean-env setup lock": 'tests/run/test_setup.py::made(newcomer, "clean-env")',
    "make doctor": 'tests/run/test_doctor.py::command = ["demo", "doctor", *flags]',
    "make test": 'tests/run/test_setup.py::made(newcomer, "test")',
    "make lint test": "tests/run/test_docs.py::def test_its_own_tests_and_linters_pass(",
    "pre-commit install": "tests/run/test_pre_commit.py::bin/pre-commit install",
    "make train ARGS=*": 'tests/run/test_setup.py::made(newcomer, "train"',
    "make train": "scripts/demo.sh::train ARGS=",
    "make image": "tests/slurm/test_container.py::slurm/build_image.sbatch",
    "sbatch --wait slurm/build_image.sbatch": (
        "tests/slurm/test_finished_image.py::slurm/build_image.sbatch"
    ),
    "module load *": "tests/slurm/test_modules.py::def test_a_training_has_the_modules(",
    "sbatch slurm/train_*": "tests/slurm/test_submit.py::def test_every_launch_mode_trains(",
    "sbatch --time=30 slurm/*": "tests/slurm/test_stops.py::def test_the_time_limit_nears(",
    "sbatch *slurm/sweep.sbatch --trials 50": "tests/slurm/test_sweep.py::def test_the_tasks_of_",
    "sbatch slurm/doctor.sbatch": "tests/slurm/test_checks.py::def test_the_nodes_of_a_job_agree(",
    "sbatch *slurm/check_comm.sbatch*": "tests/slurm/test_checks.py::def test_a_slow_link_stands_",
    "srun --nodes=2 --ntasks=2 --label ip -br address": ON_SLURM,
    "python -m demo runs": "tests/run/test_show.py::def test_a_list_has_start_commit_and_flags(",
    "python -m demo costs *": "tests/slurm/test_usage.py::def told(",
    "python -m demo runs RUN_DIR": "tests/run/test_show.py::def test_a_screen_says_everything_of_",
    "python -m demo runs RUN_DIR RUN_DIR": "tests/run/test_show.py::def test_the_difference_of_",
    "python -m demo prune *": "tests/run/test_prune.py::def test_what_stays_of_a_finished_run(",
    "python -m demo report * --output *": "tests/slurm/test_docs.py::def test_the_picture_of_a_",
    "python -m demo report RUN_DIR": "tests/run/test_report.py::def test_a_page_says_everything_of",
    "python -m demo evaluate *": "tests/run/test_evaluate.py::def test_it_gives_the_numbers_of_",
    "python -m demo predict *": "tests/run/test_docs.py::def test_an_example_predicts_and_is_",
    "python -m demo export *": "tests/run/test_docs.py::def test_an_example_predicts_and_is_",
    "python -m tensorboard.main *": "tests/slurm/test_monitor.py::on_every_page(",
    "aim up *": "tests/slurm/test_monitor.py::on_every_page(",
    "TRACKIO_DIR=*/bin/trackio show": "tests/slurm/test_monitor.py::on_every_page(",
    "mlflow server *": 'tests/run/trackers/test_mlflow.py::"mlflow", "server"',
    "python -m demo monitor start": "tests/slurm/test_monitor.py::on_every_page(",
    "python -m demo monitor start mlflow *": "tests/slurm/test_monitor.py::--listen=node",
    "python -m demo monitor start aim-server": 'tests/slurm/test_monitor.py::"aim-server"',
    "export *": "tests/slurm/test_site.py::def test_facts_of_the_site_reach_every_rank(",
    "MASTER_ADDR=*": "tests/slurm/test_site.py::def test_the_first_node_may_have_two_names(",
    "PROJECT_PYTHON=*": "tests/slurm/test_site.py::def test_the_site_may_bring_python(",
    "module use *": "tests/slurm/test_modules.py::def test_modules_come_from_where_the_site_says(",
}
# Commands that are not called like their modules.
IN_MODULES = {
    "download": "data",
}
ROOMS = ("", "tools/")
ENDS = (".py", "/__init__.py")
# What users or commands make.
MADE = {"slurm/site.sh", "container/image.sif", "container/release.sif"}


def test_the_page_of_questions_is_current(render: Renderer, pytestconfig: pytest.Config) -> None:
    golden(pytestconfig, "questions.md", page(render))


def test_the_page_of_variants_is_current(classes: Classes, pytestconfig: pytest.Config) -> None:
    table = "| files | rendered | distinct, and run | test | target |\n|---|---|---|---|---|\n"
    for kind, found in classes.kinds.items():
        rendered = sum(each.count for each in found.values())
        target = "test-all" if is_full(TEMPLATE / KINDS[kind]) else "test"
        cells = (kind, f"{rendered:,}", str(len(found)), f"`{KINDS[kind]}`", f"`make {target}`")
        table += f"| {' | '.join(cells)} |\n"
    left_out = "| left out of `make test` | in `tests/` |\n|---|---|\n"
    for reason, paths in FULL.items():
        left_out += f"| {reason} | {', '.join(f'`{path}`' for path in paths)} |\n"
    text = VARIANTS.format(len(classes.variants), table, left_out)
    golden(pytestconfig, "variants.md", text)


def test_the_table_of_sites_is_current(pytestconfig: pytest.Config) -> None:
    """It is made of what is at the top of each preset; tests/slurm/test_sites.py takes them all."""
    rows = []
    for preset in presets.read_all():
        done = ["submitted", "trained"]
        if list(TEMPLATE.glob(f"tests/slurm/sites/*/{preset.name}.lua")):
            done.append("refused without preset")
        link = f"[{preset.name}.yml](../sites/{preset.name}.yml)"
        cells = [preset.about, link, str(preset.compared), preset.unusual, ", ".join(done)]
        rows.append(f"| {' | '.join(cells)} |\n")
    text = (TEMPLATE / "docs/sites.md").read_text("utf-8")
    before, _, after = re.split(r"(?<=\|---\|\n)((?:\|.*\n)+)", text)
    golden(pytestconfig, "sites.md", before + "".join(rows) + after)


def golden(config: pytest.Config, name: str, text: str) -> None:
    """Compare a text with a page in docs/, or write it there if that is asked for."""
    file = TEMPLATE / "docs" / name
    if config.getoption("update_golden"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8"), "pytest tests/render/test_docs.py --update-golden"


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    """The pages of this repository, by path."""
    paths = [*TEMPLATE.glob("*.md"), *TEMPLATE.glob("docs/*.md")]
    return {str(path.relative_to(TEMPLATE)): path.read_text("utf-8") for path in paths}


@pytest.fixture(scope="module")
def theirs(render: Renderer) -> list[dict[str, str]]:
    """The files of projects, with pages of all kinds."""
    variants: list[Answers] = [{"launch_modes": modes} for modes in subsets(MODES, least=1)]
    variants += [{"trackers": list(TRACKERS), "monitoring_servers": list(SERVERS)}]
    variants += pairwise_variants()
    return [render({**answers, "package_name": "demo"}) for answers in variants]


def test_every_command_is_run_or_says_what_it_needs(
    ours: dict[str, str], theirs: list[dict[str, str]]
) -> None:
    untested, used = {}, set()
    for path, text in ours.items():
        untested |= {line: path for line in unmapped(text, OURS, used)}
    for project in theirs:
        run = {command.line for command in pages.commands(project["docs/slurm.md"])}
        for path, text in project.items():
            if path.endswith(".md") and path not in RUN_PAGES:
                found = unmapped(text, THEIRS, used)
                untested |= {line: path for line in found if line not in run}
    assert not untested, "run these in a test, or say (needs ...) in their comments"
    unused = {*OURS, *THEIRS} - used
    assert not unused, "nothing like this is in a page any more"


def unmapped(text: str, tests: Mapping[str, str], used: set[str]) -> Iterator[str]:
    """Yield the commands of a page that no test runs, and that need nothing special."""
    for command in pages.commands(text):
        line = re.sub(r"^\.(venv|conda)/bin/(?!python -m pytest)", "", command.line)
        patterns = [pattern for pattern in tests if fnmatchcase(line, pattern)]
        used.update(patterns)
        if not patterns and not command.needs:
            yield command.line


@pytest.mark.parametrize("test", sorted({*OURS.values(), *THEIRS.values(), ON_SLURM}))
def test_the_test_that_runs_a_command_is_there(test: str) -> None:
    path, _, words = test.partition("::")
    assert words in (TEMPLATE / path).read_text("utf-8")


def test_links_of_this_repository_lead_somewhere(ours: dict[str, str]) -> None:
    def lookup(path: str) -> str | None:
        file = TEMPLATE / path
        if path.endswith((".md", ".md.jinja")) and file.is_file():
            return file.read_text("utf-8")
        return "" if file.exists() else None

    for path, text in ours.items():
        assert not list(broken(path, text, lookup)), path


def test_pages_of_a_project_name_only_what_it_has(theirs: list[dict[str, str]]) -> None:
    """Links, make targets, files, and commands of the package."""
    for project in theirs:
        targets = set(re.findall(r"^([a-z-]+):", project["Makefile"], re.MULTILINE))
        for path, text in project.items():
            if not path.endswith(".md"):
                continue
            assert not list(broken(path, text, project.get)), path
            commands = [command.line for command in pages.commands(text)]
            for words in (*commands, *re.findall(r"`([^`\n]+)`", text)):
                if words.startswith("make "):
                    named = takewhile(re.compile(r"[a-z-]+$").match, words.split()[1:])
                    assert targets.issuperset(named), (path, words)
                for file in re.findall(r"(?:slurm|configs|container|tests)/[\w./-]+\.\w+", words):
                    assert file in project or file in MADE, (path, words)
                for name in re.findall(r"-m demo ([a-z-]+)", words):
                    module = IN_MODULES.get(name, name.replace("-", "_"))
                    there = {f"src/demo/{room}{module}{end}" for room in ROOMS for end in ENDS}
                    assert there & project.keys(), (path, words)


def test_the_maps_of_a_project_name_all_its_modules(theirs: list[dict[str, str]]) -> None:
    for project in theirs:
        paths = [path.removeprefix("src/demo/") for path in project if path.startswith("src/demo/")]
        modules = {path for path in paths if "/" not in path} - {"__init__.py"}
        rooms = {path.partition("/")[0] + "/" for path in paths if "/" in path}
        shown = project["README.md"].partition("\nsrc/demo/\n")[2].partition("```")[0]
        assert set(re.findall(r"(?<!/)\b\w+\.py", shown)) == modules
        assert set(re.findall(r"^  (\S+/) ", shown, re.MULTILINE)) == rooms
        parts = {path.removeprefix("engine/") for path in paths if path.startswith("engine/")}
        named = re.findall(r"\b\w+(?:\.py|/(?= ))", project["src/demo/engine/__init__.py"])
        theirs_too = {"model.py", "data.py", "settings.py"}
        assert {re.sub("/.*", "/", part) for part in parts} - {"__init__.py"} == (
            {*named} - theirs_too
        )


def broken(path: str, text: str, lookup: Callable[[str], str | None]) -> Iterator[str]:
    """Yield the links of a page that lead nowhere.

    Args:
        lookup: returns the text of a path, None where there is none.
    """
    for link in pages.links(text):
        name, _, anchor = link.partition("#")
        target = lookup(resolved(path, name)) if name else text
        if target is None or (anchor and anchor not in pages.anchors(target)):
            yield link


def resolved(page: str, link: str) -> str:
    """Return the path that a link of a page means."""
    return posixpath.normpath(PurePosixPath(page).parent / link)
