"""Each preset names its sources and its date, and the issue form asks for the same."""

import warnings
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml
from presets import Preset, not_compared_for_a_year, read_all
from renderer import TEMPLATE

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
    assert read.compared == date(2026, 11, 23)


def test_a_preset_is_old_after_a_year() -> None:
    days = {"fresh": date(2026, 11, 23), "edge": date(2025, 11, 26), "old": date(2025, 11, 25)}
    presets = [Preset(name, "", ("docs.example.org",), day) for name, day in days.items()]
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
    assert ids == ["site", "page", "answers", "refuses", "tried", "probe"]
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
