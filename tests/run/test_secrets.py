"""No secret of the environment or of an address is told, however it is written."""

import json
import re
import time
from base64 import b64encode
from importlib import import_module
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from .conftest import edited, srun

SECRET = "p@ss/w:rd?&staple"


@pytest.mark.parametrize(
    "text",
    [
        f"no login for {SECRET}",
        f"no answer from http://me:{SECRET}@example.org/api",
        f"http://me:{quote(SECRET, safe='')}@example.org and http://me:{quote(SECRET)}@example.org",
        f"form password={quote_plus(SECRET)}",
        *(
            f"Basic {b64encode(f'{user}:{SECRET}'.encode()).decode()}"
            for user in ("m", "me", "you")
        ),
        "ftp://else:w/h@t@example.org",
    ],
)
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SOME_PASSWORD", SECRET),
        ("db_pass", SECRET),
        ("MYSQL_PWD", SECRET),
        ("NOTIFY_URL", SECRET),
        ("https_proxy", f"http://me:{quote(SECRET, safe='')}@proxy.example:3128"),
        ("AIM_REPO", f"aim://me:{SECRET}@example.org"),
    ],
)
def test_no_secret_is_told_however_it_is_written(
    project: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv(variable, value)
    told = import_module("demo.engine.errors").without_secrets(text)
    assert not re.search("staple|p@ss|p%40ss|w/h@t", told)
    basic = text.partition("Basic ")[2]
    assert not [i for i in range(len(basic) - 7) if basic[i : i + 8] in told], told
    assert "example.org" in told or variable in told


def test_no_secret_of_an_error_reaches_the_trackers(project: Path, tmp_path: Path) -> None:
    fault = "raise OSError('no answer from https://me:hunter2@example.org')"
    old = "images, labels = batch\n        return F.cross_entropy("
    copy = edited(project, tmp_path, "model.py", old, f"{fault}\n        {old}")
    job = srun(copy, tmp_path / "run", 1).wait()
    assert job.codes == [1] and "hunter2" in job.log, job.log
    error = json.loads((job.run_dir / "status.json").read_text())["error"]
    assert error == "OSError: no answer from https://<login>@example.org"
    (job.run_dir / "log.txt").write_text("reading https://me:hunter2@example.org\n")
    read_log = import_module("demo.engine.run.logging_setup").read_log
    assert read_log(job.run_dir) == "reading https://<login>@example.org\n"


def test_a_long_line_of_addresses_takes_no_minutes(project: Path) -> None:
    without_secrets = import_module("demo.engine.errors").without_secrets
    text = ",".join(["https://example.org/a"] * 100_000)
    began = time.monotonic()
    assert without_secrets(text) == text
    assert time.monotonic() - began < 20


def test_of_two_secrets_the_longer_one_is_hidden_as_a_whole(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "battery")
    monkeypatch.setenv("B_TOKEN", "battery-staple")
    without_secrets = import_module("demo.engine.errors").without_secrets
    assert without_secrets("battery-staple battery") == "<B_TOKEN> <A_TOKEN>"
