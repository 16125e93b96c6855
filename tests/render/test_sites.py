"""Each preset names its sources and its date, and the issue form asks for the same."""

import json
import shutil
import subprocess
import sys
import warnings
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml
from presets import Preset, not_compared_for_a_year, ran, read_all
from renderer import TEMPLATE, copy_template

FORM = TEMPLATE / ".github/ISSUE_TEMPLATE/site.yml"
HEAD = '# A machine. From "Jobs"{}, compared {}.\n# To be answered: account.\nnodes: 2\n'


def test_presets_name_their_pages_and_the_day_of_the_comparison() -> None:
    """Old ones are named in a warning: no test begins to fail because a year has passed."""
    presets = read_all()
    assert len(presets) > 20
    # A clock may be a day ahead. A year that does not come soon is a slip of the pen.
    assert [p.name for p in presets if p.compared > date.today() + timedelta(days=1)] == []
    if old := not_compared_for_a_year(presets, date.today()):
        warnings.warn(f"compare with their pages again: {', '.join(old)}", stacklevel=1)


FACTS = yaml.safe_load(Path(__file__).with_name("sites.yaml").read_text("utf-8"))


def test_each_site_has_facts() -> None:
    assert FACTS.keys() == {preset.name for preset in read_all()}


@pytest.mark.parametrize("name", FACTS)
def test_a_preset_fits_the_nodes_of_its_site(name: str) -> None:
    answers, facts = (
        yaml.safe_load((TEMPLATE / f"sites/{name}.yml").read_text("utf-8")),
        FACTS[name],
    )
    named = {answers[key] for key in ("partition", "cpu_partition") if key in answers}
    assert named == set(facts["partitions"])
    assert answers.get("gpus_per_node") == facts.get("gpus")
    assert answers.get("constraint") == facts.get("constraint")
    if "cores" in facts and "cpus_per_task" in answers:
        taken = answers["gpus_per_node"] * answers["cpus_per_task"]
        assert taken == facts["cores"] or (taken < facts["cores"] and facts.get("fewer"))
    if "time_limit" in answers:
        assert int(answers["time_limit"].partition(":")[0]) <= facts["hours"]


@pytest.mark.parametrize(
    ("page", "day"),
    [
        ("", "on 2026-11-23"),
        (" (of its documentation)", "on 2026-11-23"),
        (" (docs.example.org/jobs)", "in 2026"),
        (" (docs.example.org/jobs)", "on 2026-13-01"),
    ],
)
def test_a_preset_without_page_or_day_is_refused(tmp_path: Path, page: str, day: str) -> None:
    file = tmp_path / "site.yml"
    file.write_text(HEAD.format(page, day))
    with pytest.raises(ValueError):
        Preset.read(file)
    file.write_text(HEAD.format(" (https://docs.example.org/jobs.html)", "on 2026-11-23"))
    read = Preset.read(file)
    assert read.sources == ("https://docs.example.org/jobs.html",)
    assert (read.compared, read.left) == (date(2026, 11, 23), ("account",))


def test_a_preset_is_old_after_a_year() -> None:
    days = {"fresh": date(2026, 11, 23), "edge": date(2025, 11, 26), "old": date(2025, 11, 25)}
    presets = [Preset(name, "", ("docs.example.org",), day, ()) for name, day in days.items()]
    assert not_compared_for_a_year(presets, today=date(2026, 11, 26)) == ["old"]
    assert not_compared_for_a_year(presets, today=date(2027, 11, 24)) == list(days)


def test_the_form_for_a_preset_is_one_of_github() -> None:
    """The keys are those of GitHub's page "Syntax for GitHub's form schema"."""
    form = yaml.safe_load(FORM.read_text("utf-8"))
    assert form.keys() >= {"name", "description", "body"}
    assert form.keys() <= {"name", "description", "body", "title", "labels"}
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    labels = [field["attributes"]["label"] for field in fields]
    assert len(ids) == len(set(ids)) and len(labels) == len(set(labels))
    assert ids == ["site", "page", "answers", "refuses", "tried", "record", "probe"]
    for each in form["body"]:
        known = {"type", "id", "attributes", "validations"}
        assert each.keys() <= known and each["type"] in ("markdown", "input", "textarea")
        if each["type"] == "markdown":
            assert each["attributes"].keys() == {"value"}
            continue
        described = {"label", "description", "placeholder", "value", "render"}
        assert each["attributes"].keys() <= described - (
            {"render"} if each["type"] == "input" else set()
        )
        assert all(isinstance(text, str) and text for text in each["attributes"].values())
        assert all(isinstance(value, bool) for value in each.get("validations", {}).values())
    assert "python3 hooks/probe_cluster.py" in FORM.read_text("utf-8")
    assert (TEMPLATE / "hooks/probe_cluster.py").exists()


RECORD = {
    "date": "2026-11-27",
    "template": "v1.0.0",
    "slurm": "24.11.5",
    "python": "3.12.3",
    "torch": "2.11.0",
    "cuda": "12.8",
    "nccl": "2.27.3",
    "driver": "550.54.15",
    "backend": "nccl",
    "gpu": "NVIDIA A100-SXM4-40GB",
    "gpus_per_node": "4",
    "launch_modes": "single_node multi_node",
    "checks": [
        {"name": "train multi_node", "result": "pass", "seconds": "71"},
        {"name": "requeue", "result": "FAIL", "seconds": "5"},
    ],
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template with its presets and the script that keeps records."""
    copy = copy_template(tmp_path_factory.mktemp("records") / "template")
    shutil.copytree(TEMPLATE / "sites", copy / "sites")
    (copy / "scripts").mkdir()
    shutil.copy(TEMPLATE / "scripts/site_record.py", copy / "scripts")
    return copy


def keep(copy: Path, preset: str, text: str) -> subprocess.CompletedProcess[str]:
    """Let the script keep a record."""
    (copy / "sent.json").write_text(text)
    command = [sys.executable, "scripts/site_record.py", preset, "sent.json"]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True)


def test_a_record_is_kept_for_the_table_as_it_was_sent(copy: Path) -> None:
    sent = json.dumps(RECORD, indent=2) + "\n"
    assert keep(copy, "delta", sent).returncode == 0
    kept = copy / "sites/records/delta.json"
    assert kept.read_text() == sent
    assert ran(kept) == (
        "2026-11-27: 1 of 2 checks passed, 4 × NVIDIA A100-SXM4-40GB a node, torch 2.11.0, "
        "CUDA 12.8, NCCL 2.27.3, driver 550.54.15, Slurm 24.11.5"
    )
    later = {"date": "2026-12-01", "checks": [{**RECORD["checks"][0]}]}
    assert keep(copy, "delta", json.dumps(later)).returncode == 0
    assert ran(kept) == "2026-12-01: 1 of 1 checks passed, no GPU"
    assert ran(copy / "sites/records/lumi.json") == "never"


CHECK = RECORD["checks"][0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "JSON"),
        ("\xff", "JSON"),
        ({"date": 20261127}, "JSON"),
        ({"date": "2026-02-30"}, "date"),
        ({"date": "20261127"}, "20261127"),
        ({"checks": []}, "checks"),
        ({"checks": "requeue"}, "checks"),
        ({"checks": [{**CHECK, "why": "/scratch/user42"}]}, "/scratch/user42"),
        ({"checks": [{"name": "requeue", "result": "pass"}]}, "seconds"),
        ({"checks": [{**CHECK, "result": "passed"}]}, "passed"),
        ({"checks": [{**CHECK, "seconds": 71}]}, "71"),
        ({"host": "login01"}, "login01"),
        ({"gpu": "NVIDIA A100 | <img src=x>"}, "<img"),
        ({"slurm": "24.11.5\n"}, "24.11.5"),
        ({"driver": "\x1b[31m550.54"}, "\\x1b[31m550.54"),
        ({"nccl": None}, "nccl"),
        ({"\x1b[31m\n": "4"}, "\\x1b[31m"),
        ({"checks": {}}, "checks"),
    ],
)
def test_a_record_with_anything_else_is_refused(
    copy: Path, text: str | dict[str, object], said: str
) -> None:
    """In one line, which cannot change a terminal."""
    wrong = text if isinstance(text, str) else json.dumps({**RECORD, **text})
    done = keep(copy, "lumi", wrong)
    assert done.returncode == 1 and not (copy / "sites/records/lumi.json").exists()
    assert done.stderr.startswith("error: sent.json ") and done.stderr.count("\n") == 1
    assert said in done.stderr and done.stderr[:-1].isprintable()


def test_a_record_belongs_to_a_preset(copy: Path) -> None:
    done = keep(copy, "nowhere", json.dumps(RECORD))
    assert done.returncode == 1 and "sites/nowhere.yml" in done.stderr
    presets = {preset.name for preset in read_all()}
    assert {file.stem for file in TEMPLATE.glob("sites/records/*")} <= presets
