"""NOTIFY_URL gets a message about the end of a run, and no answer of it changes the run."""

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import PACED, Job, Launch, clean_environment, edited, free_port, srun

PATH = "/hooks/T0KEN-of-a-chat"
SHORT = ("--max-steps=2",)


class Hook(ThreadingHTTPServer):
    """A webhook.

    Attributes:
        answer: the code that it answers with; or "never", or what it sends that is not HTTP.
        posts: paths, headers and bodies that came.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: int | str = 200
        self.posts: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        """Its address, whose path is the secret."""
        return f"http://127.0.0.1:{self.server_port}{PATH}"

    def body(self) -> dict[str, Any]:
        """Return the one body that came."""
        ((path, headers, body),) = self.posts
        assert path == PATH and headers["content-type"] == "application/json"
        assert "T0KEN" not in json.dumps(body)
        return body


class Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:  # the name is of http.server
        hook, length = self.server, int(self.headers["Content-Length"])
        headers = {name.lower(): value for name, value in self.headers.items()}
        hook.posts.append((self.path, headers, json.loads(self.rfile.read(length))))
        if hook.answer == "never":
            hook.over.wait()
        elif isinstance(hook.answer, str):
            self.wfile.write(hook.answer.encode())
        else:
            self.send_response(hook.answer)
            self.send_header("Location", f"{PATH}/elsewhere")
            self.end_headers()

    def do_GET(self) -> None:
        """As a redirect would ask, in which the body is lost."""
        self.server.posts.append((self.path, {}, {}))

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def untold(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run without a webhook."""
    return srun(project, tmp_path_factory.mktemp("untold") / "run", 2, *SHORT).wait()


def warnings(job: Job) -> list[str]:
    """Return the log's warnings about the webhook, which must be in log.txt too."""
    said, kept = (
        re.findall(r"NOTIFY_URL was not told.*?: (.*)", text)
        for text in (job.log, (job.run_dir / "log.txt").read_text())
    )
    assert said == kept
    return said


def files(run: Path) -> set[str]:
    """Return the names of the files of a run."""
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def check_undisturbed(job: Job, untold: Job) -> None:
    """Check that a run is the same as without a webhook, and that no file has the address."""
    assert job.codes == [0, 0], job.log
    assert job.summary["parameters_sha256"] == untold.summary["parameters_sha256"]
    assert files(job.run_dir) == files(untold.run_dir)
    written = [path.read_bytes() for path in job.run_dir.rglob("*") if path.is_file()]
    assert b"T0KEN" not in b"".join([*written, job.log.encode()])


def test_a_finished_run_tells_its_end(hook: Hook, launch: Launch, untold: Job) -> None:
    job = launch(2, *SHORT, NOTIFY_URL=hook.url)
    check_undisturbed(job, untold)
    assert warnings(job) == []
    body, summary = hook.body(), job.summary
    assert body["metrics"] == {
        "validation/accuracy": summary["validation_accuracy"],
        **{name: summary[name] for name in ("test_accuracy", "test_loss")},
    }
    status = json.loads((job.run_dir / "status.json").read_text())
    assert status["status"] == body["status"] == "finished", "it is written before"
    told = {name: body[name] for name in ("project", "experiment", "run", "step", "job", "error")}
    assert told == {
        "project": "demo",
        "experiment": "demo",
        "run": "demo/run",
        "step": 2,
        "job": "77",
        "error": None,
    }
    assert body["hostname"] == socket.gethostname() and body["seconds"] >= 0
    assert body["text"] == body["content"]
    assert body["text"].startswith("demo: demo/run finished at step 2: validation/accuracy 0.")


@pytest.mark.parametrize(
    ("answer", "said"), [(307, "127.0.0.1 answered 307"), ("never", "no answer within 5 seconds")]
)
def test_an_answer_changes_nothing(
    hook: Hook, launch: Launch, untold: Job, answer: int | str, said: str
) -> None:
    hook.answer = answer
    job = launch(2, *SHORT, NOTIFY_URL=hook.url)
    check_undisturbed(job, untold)
    assert warnings(job) == [said]
    assert hook.body()["status"] == "finished"


Notify = Callable[[str], list[str]]


@pytest.fixture
def notify(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Notify:
    """Return a function that tells an address about a run, and returns the log's lines."""
    from demo.plugins import notify

    state = {"status": "finished", "step": 2, "best_score": None, "error": None}
    about = SimpleNamespace(**state, started=0.0, job=None, host="n1", name="run", experiment="x")

    def tell(url: str) -> list[str]:
        monkeypatch.setenv("NOTIFY_URL", url)
        notify.notify(about, about, {})
        assert "T0KEN" not in caplog.text
        return caplog.messages

    return tell


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (204, None),
        (500, "127.0.0.1 answered 500"),
        (302, "127.0.0.1 answered 302"),
        ("no HTTP\r\n", "127.0.0.1: BadStatusLine"),
        ("", "127.0.0.1: RemoteDisconnected"),
    ],
)
def test_an_answer_is_at_most_one_line(
    notify: Notify, hook: Hook, answer: int | str, said: str | None
) -> None:
    hook.answer = answer
    assert [line.rpartition("ended: ")[2] for line in notify(hook.url)] == ([said] if said else [])
    assert hook.body()["status"] == "finished"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:{port}/T0KEN", "127.0.0.1: Connection refused"),
        ("http://me:T0KEN@127.0.0.1:{port}/", "https://"),
        ("http://127.0.0.1/T0KEN with a space", "127.0.0.1: InvalidURL"),
        ("file:///T0KEN", "https://"),
        ("ftp://127.0.0.1/T0KEN", "https://"),
        ("https:///T0KEN", "https://"),
        ("http://[T0KEN/", "it: ValueError"),
        ("http://127.0.0.1/T0KENé", "127.0.0.1: ordinal"),
        ("T0KEN", "https://"),
    ],
)
def test_a_wrong_address_is_one_line(notify: Notify, url: str, said: str) -> None:
    (line,) = notify(url.format(port=free_port()))
    assert said in line


@pytest.mark.parametrize("answer", [200, "never"])
def test_a_stopped_run_tells_it(
    hook: Hook, project: Path, tmp_path: Path, answer: int | str
) -> None:
    hook.answer = answer
    job = srun(project, tmp_path / "run", 2, "--log-every=1", NOTIFY_URL=hook.url, **PACED)
    job.stop(2, rank=0)
    assert warnings(job) == ([] if answer == 200 else ["no answer within 2 seconds"])
    body = hook.body()
    saved = (job.run_dir / "checkpoints/latest").read_text()
    assert body["status"] == "preempted" and saved == f"step-{body['step']:08}.pt"
    assert body["metrics"] == {} and body["text"].startswith("demo: demo/run preempted")


FAULT = """if int(os.environ["SLURM_PROCID"]) == {rank}:
            url = os.environ["NOTIFY_URL"]
            raise OSError(f"no {{url}} at https://me:hunter2@example.org {{'x' * 2000}}")
        """


@pytest.mark.parametrize(
    ("rank", "error"),
    [(0, "OSError: no <NOTIFY_URL> at https://<login>@example.org"), (1, "lost another rank")],
)
def test_a_failed_run_tells_its_error(
    hook: Hook, project: Path, tmp_path: Path, rank: int, error: str
) -> None:
    """Also if another rank fails: the launcher of these tests does not end rank 0."""
    old = "images, labels = batch\n        return F.cross_entropy("
    copy = edited(project, tmp_path, "model.py", old, FAULT.format(rank=rank) + old)
    job = srun(copy, tmp_path / "run", 2, NOTIFY_URL=hook.url).wait()
    assert 1 in job.codes and 0 not in job.codes, job.log
    body = hook.body()
    assert body["status"] == "failed" and error in body["error"] and body["error"] in body["text"]
    assert "hunter2" not in json.dumps(body)
    kept = json.loads((job.run_dir / "status.json").read_text())["error"]
    assert kept.startswith(body["error"]) and len(body["error"]) == min(len(kept), 1000)


def test_a_project_has_the_address_in_its_env_file_and_its_tests_do_not_use_it(
    hook: Hook, project: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(project, tmp_path / "demo")
    example = (copy / ".env.example").read_text()
    (copy / ".env").write_text(re.sub("# (NOTIFY_URL)=.*", rf"\1={hook.url}", example))
    assert srun(copy, tmp_path / "run", 1, *SHORT).wait().codes == [0]
    assert hook.body()["status"] == "finished"
    # All of its tests that train do so by this fixture.
    (copy / "tests/test_one.py").write_text("def test(start):\n    assert not start(1)[0].wait()\n")
    tests = [sys.executable, "-m", "pytest", "-q", "tests/test_one.py"]
    subprocess.run(tests, cwd=copy, env=clean_environment(copy), check=True)
    assert len(hook.posts) == 1


def test_who_tells_nothing(hook: Hook, launch: Launch, project: Path, tmp_path: Path) -> None:
    """A trial of a sweep, a dry run, a run that has finished, and one that never began."""
    assert launch(1, *SHORT, NOTIFY_URL=hook.url, SWEEP_TRIAL="1").codes == [0]
    assert launch(1, *SHORT, NOTIFY_URL=hook.url).codes == [0]
    assert launch(1, "--dry-run", NOTIFY_URL=hook.url, name="dry").codes == [0]
    assert launch(1, "--world-size=3", NOTIFY_URL=hook.url, name="wrong").codes == [1]
    assert hook.posts == []
