"""What only MLflow does: its parameters, statuses and registry, its database and its server."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ..conftest import PACED, PATIENCE, Job, free_port, spawn, srun
from . import check_numbers
from .conftest import Past
from .mlflow import Reader, local, mlflow


def test_a_run_says_where_it_came_from(resumed: Past) -> None:
    reader = local(resumed.run_dir.parent)
    run = reader.runs["trial/run"]
    params, tags = run.data.params, run.data.tags
    assert (params["max_steps"], params["batch_size"], params["seed"]) == ("200", "32", "0")
    assert "max_steps: 200\n" in reader.text(run, "config.yaml")
    assert (tags["tags"], tags["status"], tags["world_size"]) == ("odd even", "finished", "2")
    assert tags["slurm.job"] == "77"
    provenance = json.loads(reader.text(run, "provenance.json"))
    assert provenance == json.loads((resumed.run_dir / "provenance.json").read_text())
    assert provenance["packages"]["mlflow"] == mlflow.__version__
    assert tags["template.commit"] == provenance["template"]["_commit"]
    assert tags["mlflow.user"] and tags["mlflow.source.type"] == "JOB"
    # Nothing of the environment but what Slurm says.
    assert "PYTHONPATH" not in reader.text(run, "provenance.json")
    assert "mlflow" not in resumed.log


def test_the_best_network_is_in_the_registry(
    resumed: Past, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo.model import Model

    reader = local(resumed.run_dir.parent)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{resumed.run_dir.parent}/mlflow.db")
    (version,) = reader.client.search_model_versions("name='Digits'")
    run_id = reader.runs["trial/run"].info.run_id
    assert (version.run_id, version.tags["run"]) == (run_id, run_id)
    images, labels = digits()
    with torch.no_grad():
        outputs = registered()(images)
    torch.testing.assert_close(outputs, Model.load(resumed.run_dir).predict((images, labels)))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels on which runs with the synthetic set are scored."""
    from demo.data import Digits
    from demo.mnist import synthesize

    return Digits(*synthesize(1_001, seed=2)).__getitems__(range(1_001))


def registered() -> torch.nn.Module:
    """Return the first version of the model in the registry, checked for its signature."""
    signature = mlflow.models.get_model_info("models:/Digits/1").signature
    assert signature.inputs.inputs[0].shape == (-1, 1, 28, 28)
    assert signature.outputs.inputs[0].shape == (-1, 10)
    return mlflow.pytorch.load_model("models:/Digits/1")


def test_mlflow_has_statuses_of_its_own(resumed: Past, failed: tuple[Path, Past]) -> None:
    before, after = failed[0].parent, failed[1].run_dir.parent
    stores = {"FINISHED": resumed.run_dir.parent, "KILLED": before, "FAILED": after}
    for status, store in stores.items():
        run = local(store).runs["trial/run"]
        assert run.info.status == status and run.info.end_time >= run.info.start_time + 1000
    # MLflow lets no parameter change.
    assert (run.data.params["lr"], run.data.tags["now.lr"]) == ("0.15", "1000000000.0")


WRITER = """
import os, sys, time
from pathlib import Path
from demo.trackers import Run, mlflow
folder, me = Path(sys.argv[1]), sys.argv[2]
os.chdir(folder)
mlflow.STALE = 5
connect = mlflow.MlflowClient
for round in ("fresh", "old"):  # what the store is in that round
    (folder / f"{round}-{me}").touch()
    while len(list(folder.glob(f"{round}-*"))) < 4:
        time.sleep(0.01)
    if round == "old":  # as on a file system where SQLite's own locks do nothing
        without = ("sqlite:///", "sqlite:///file:", "?vfs=unix-none&uri=true")
        mlflow.MlflowClient = lambda uri: connect(uri.replace(*without[:2]) + without[2])
    run = Run(folder, folder / "store", f"{round}-{me}", "trial", {"me": me})
    tracker = mlflow.Tracker(run)
    for step in range(100):
        tracker.log_metrics({"a": step, "b": int(me)}, step, time.time())
        if step % 5 == 0:
            tracker.flush()
    tracker.finish("finished", None)
"""


@pytest.mark.slow
def test_four_processes_write_to_one_store_at_once(full_project: Path, tmp_path: Path) -> None:
    # A process of another node died here, in the middle of a write.
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mlflow.db.lock").write_text("1\nelsewhere\n")
    (tmp_path / "writer.py").write_text(WRITER)
    env = {"PYTHONPATH": f"{full_project / 'src'}:{tmp_path}"}
    commands = [["writer", str(tmp_path), str(number)] for number in range(4)]
    job = spawn(full_project, tmp_path / "run", commands, [env] * 4).wait()
    assert job.codes == [0] * 4, job.log
    reader = local(tmp_path / "store")
    assert set(reader.runs) == {f"{when}-{me}" for when in ("fresh", "old") for me in range(4)}
    for name, run in reader.runs.items():
        assert run.info.status == "FINISHED"
        assert run.data.params == {"me": name[-1]}
        numbers = reader.shown(run).numbers
        assert numbers["a"] == {step: step for step in range(100)}
        assert numbers["b"] == dict.fromkeys(range(100), int(name[-1]))
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"mlflow.db", "mlartifacts"}


RESUMED = """
import os, sys
from dataclasses import replace
from pathlib import Path
from demo.trackers import Run, mlflow
folder = Path(sys.argv[1])
for kept in (10, 5):  # on the server, and in a database of our own
    source = {"git": {"commit": "c0ffee", "changes": " M model.py"}}
    run = Run(folder, folder / "store", "resumed", "trial", {"lr": 1, "seed": 0}, source)
    killed = mlflow.Tracker(run)
    for step in range(1, 11):
        killed.log_metrics({"loss": step, "lr": 1}, step, step)
    killed.flush()
    for lr in (2, 1):
        changed = replace(run, settings={"lr": lr, "seed": 0}, run_id=killed.run_id, resume_step=5)
        again = mlflow.Tracker(changed)
        found = again.client.get_run(killed.run_id).data
        assert found.metrics["loss"] == kept
        assert (found.params["lr"], found.tags["now.lr"]) == ("1", str(lr))
        assert found.tags["mlflow.source.git.commit"] == "c0ffee"
        assert again.history()["loss"] == {step: step for step in range(1, kept + 1)}
    again.finish("finished", None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
"""


class Server:
    """An MLflow server; with a login, where MLflow's packages for that are there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        (folder / "accounts.ini").write_text(
            "[mlflow]\n"
            "default_permission = NO_PERMISSIONS\n"
            f"database_uri = sqlite:///{folder}/accounts.db\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        self.secrets = {
            "MLFLOW_TRACKING_USERNAME": "somebody",
            "MLFLOW_TRACKING_PASSWORD": "correct-horse-battery",
        }
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--workers=1", f"--port={self.port}"]
        command += [f"--backend-store-uri=sqlite:///{self.folder}/mlflow.db"]
        command += [f"--artifacts-destination={self.folder}/mlartifacts"]
        env = {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "for-a-test",
            "MLFLOW_AUTH_CONFIG_PATH": f"{self.folder}/accounts.ini",
            "MLFLOW_AUTH_ADMIN_USERNAME": self.secrets["MLFLOW_TRACKING_USERNAME"],
            "MLFLOW_AUTH_ADMIN_PASSWORD": self.secrets["MLFLOW_TRACKING_PASSWORD"],
        }
        if find_spec("flask_wtf"):
            command += ["--app-name=basic-auth"]
        log = (self.folder / "server.log").open("a")
        self.process = subprocess.Popen(
            command, env=os.environ | env, stdout=log, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + PATIENCE
        while not self.answers():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return whether it is up."""
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        """End it at once, with all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that is up."""
    server = Server(tmp_path)
    yield server
    server.kill()


@pytest.mark.shows("mlflow server *")
@pytest.mark.slow
def test_a_server_that_dies_stops_no_run_and_gets_the_rest_later(
    project: Path,
    full_project: Path,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = {"MLFLOW_TRACKING_URI": server.uri, **server.secrets}

    def start(name: str, *flags: str, **more: str) -> Job:
        mine = ("--trackers=mlflow", "--experiment=trial", "--max-steps=60", "--log-every=5")
        return srun(full_project, tmp_path / "trial" / name, 1, *mine, *flags, **env, **more)

    whole = start("whole", "--register-model=Digits").wait()
    broken = start("broken", "--max-steps=160", "--log-every=1", "--epochs=9", **PACED)
    broken.wait_for_step(40)
    server.kill()
    absent = start("absent")
    for job in (broken.wait(), absent.wait()):
        assert job.summary
        assert f"sync {job.run_dir}" in job.log
        assert "battery" not in job.log
    server.start()
    sync = ["demo", "sync", str(broken.run_dir), str(absent.run_dir)]
    (tmp_path / "resumed.py").write_text(RESUMED)
    path = f"{full_project / 'src'}:{tmp_path}"
    others = [sync, ["resumed", str(tmp_path)]]
    sent = spawn(full_project, tmp_path / "sent", others, [env, env | {"PYTHONPATH": path}]).wait()
    assert sent.codes == [0, 0], sent.log

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    reader = Reader(server.uri)
    for job in (whole, broken, absent):
        run = reader.runs[f"trial/{job.run_dir.name}"]
        shown = reader.shown(run)
        check_numbers(shown, job.run_dir)
        assert run.info.status == "FINISHED" and "step 60" in shown.texts["log"]
    images, labels = digits()
    with torch.no_grad():
        outputs = registered()(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    assert accuracy == pytest.approx(whole.summary["test_accuracy"], abs=1 / 1_001)
