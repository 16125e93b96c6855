"""What was logged to MLflow is there, read with MLflow's own client, however the run ended."""

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

from .conftest import PACED, PATIENCE, Job, free_port, spawn, srun

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
mlflow = pytest.importorskip("mlflow")

SHORT = ("--trackers=mlflow", "--experiment=trial", "--max-steps=60", "--log-every=5")
MEASURED = ("train/loss", "train/lr", "train/samples_per_second", "train/gradient_norm")


class Reader:
    """MLflow's own view of the runs of an experiment."""

    def __init__(self, uri: str, experiment: str = "trial") -> None:
        self.client = mlflow.MlflowClient(uri)
        found = self.client.get_experiment_by_name(experiment)
        runs = self.client.search_runs([found.experiment_id], max_results=1000)
        self.runs = {run.info.run_name: run for run in runs}
        assert len(self.runs) == len(runs), "there are runs of the same name"

    def history(self, run: str, metric: str) -> list[tuple[int, float]]:
        """Return all values of a metric, with their steps, in the order of the steps."""
        found = self.client.get_metric_history(self.runs[run].info.run_id, metric)
        return sorted((each.step, each.value) for each in found)

    def text(self, run: str, path: str) -> str:
        """Return a file that the run has logged."""
        return mlflow.artifacts.load_text(f"{self.runs[run].info.artifact_uri}/{path}")

    def assert_holds(self, job: Job) -> None:
        """Each number of metrics.jsonl is there once, with its value, and no other."""
        run, lines = f"trial/{job.run_dir.name}", job.metrics()
        names = {name for line in lines for name in line} - {"step", "time"}
        assert set(self.runs[run].data.metrics) == names > set(MEASURED)
        for name in names:
            logged = [(line["step"], line[name]) for line in lines if name in line]
            assert self.history(run, name) == logged, name


def train(project: Path, run_dir: Path, *flags: str, ranks: int = 1, **env: str) -> Job:
    """Start a training that logs to MLflow, in runs/ next to its run folder."""
    root = f"--run-root={run_dir.parent / 'runs'}"
    return srun(project, run_dir, ranks, *SHORT, root, *flags, **env)


def test_a_killed_run_of_two_ranks_comes_to_its_end(
    project: Path, full_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two epochs, each has 117 steps and a checkpoint at its end. By step 200, metrics were sent
    # that come again.
    flags = ("--batch-size=64", "--epochs=2", "--max-steps=1000", "--log-every=1", "--tags", "odd")
    flags += ("--register-model=Digits",)
    uri = f"sqlite:///{tmp_path}/runs/trial/mlflow.db"

    def start(**env: str) -> Job:
        return train(full_project, tmp_path / "run", *flags, ranks=2, **env)

    killed = start(**PACED)
    killed.wait_for_tracker(205, "mlflow")
    killed.kill()
    assert newest_checkpoint(killed) == 117
    reader = Reader(uri)
    assert reader.runs["trial/run"].info.status == "RUNNING"
    assert reader.history("trial/run", "train/loss")[-1][0] > 117

    job = start().wait()
    assert job.summary["resumed_from_step"] == 117
    reader = Reader(uri)
    reader.assert_holds(job)
    assert_each_step_is_there_once(reader, job)
    assert_it_says_where_it_came_from(reader, job)
    assert_figures_and_text_are_there(reader, job)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert_the_best_network_is_in_the_registry(reader, job)


def newest_checkpoint(job: Job) -> int:
    """Return the step of the newest checkpoint of a run."""
    return max(int(path.stem.partition("-")[2]) for path in job.run_dir.glob("checkpoints/*.pt"))


def assert_each_step_is_there_once(reader: Reader, job: Job) -> None:
    assert [step for step, _ in reader.history("trial/run", "train/loss")] == list(range(1, 235))
    run = reader.runs["trial/run"]
    assert run.info.status == "FINISHED"
    assert run.info.end_time >= run.info.start_time + 1000
    assert "error" not in run.data.tags
    # As they were measured, not as they were sent.
    logged = {line["step"]: line["time"] for line in job.metrics() if "train/loss" in line}
    for metric in reader.client.get_metric_history(run.info.run_id, "train/loss"):
        assert metric.timestamp == pytest.approx(1000 * logged[metric.step], abs=1)


def assert_it_says_where_it_came_from(reader: Reader, job: Job) -> None:
    run = reader.runs["trial/run"]
    params, tags = run.data.params, run.data.tags
    assert (params["max_steps"], params["batch_size"], params["seed"]) == ("1000", "64", "0")
    assert "max_steps: 1000\n" in reader.text("trial/run", "config.yaml")
    assert (tags["tags"], tags["status"]) == ("odd", "finished")
    assert (tags["world_size"], tags["slurm.job"]) == ("2", "77")
    provenance = json.loads(reader.text("trial/run", "provenance.json"))
    assert provenance == json.loads((job.run_dir / "provenance.json").read_text())
    assert provenance["packages"]["mlflow"] == mlflow.__version__
    assert tags["template.commit"] == provenance["template"]["_commit"]
    assert tags["mlflow.user"] and tags["mlflow.source.type"] == "JOB"
    # Nothing of the environment but what Slurm says.
    assert "PYTHONPATH" not in reader.text("trial/run", "provenance.json")


def assert_figures_and_text_are_there(reader: Reader, job: Job) -> None:
    run = reader.runs["trial/run"]
    images = [each.path for each in reader.client.list_artifacts(run.info.run_id, "images")]
    for name in ("test~confusion_matrix", "test~predictions"):
        (path,) = (p for p in images if p.startswith(f"images/{name}+step+234+") and "png" in p)
        image = mlflow.artifacts.load_image(f"{run.info.artifact_uri}/{path}")
        assert min(image.size) > 200
    assert "step 234" in reader.text("trial/run", "log.txt")
    assert "mlflow" not in job.log and "Warning" not in job.log, job.log


def assert_the_best_network_is_in_the_registry(reader: Reader, job: Job) -> None:
    from demo.model import Model

    (version,) = reader.client.search_model_versions("name='Digits'")
    run_id = reader.runs["trial/run"].info.run_id
    assert (version.run_id, version.tags["run"]) == (run_id, run_id)
    images, labels = digits()
    with torch.no_grad():
        outputs = registered()(images)
    torch.testing.assert_close(outputs, Model.load(job.run_dir).predict((images, labels)))


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


def test_a_run_that_is_stopped_or_fails_says_so(full_project: Path, tmp_path: Path) -> None:
    flags = ("--epochs=9", "--max-steps=2000")
    uri = f"sqlite:///{tmp_path}/runs/trial/mlflow.db"
    stopped = train(full_project, tmp_path / "run", *flags, **PACED)
    stopped.wait_for_tracker(30, "mlflow", saved=False)
    stopped.processes[0].terminate()
    assert stopped.wait().codes == [75], stopped.log
    run = Reader(uri).runs["trial/run"]
    assert (run.info.status, run.data.tags["status"]) == ("KILLED", "preempted")

    failed = train(full_project, tmp_path / "run", *flags, "--lr=1e9").wait()
    assert failed.codes == [1], failed.log
    run = Reader(uri).runs["trial/run"]
    assert (run.info.status, run.data.tags["status"]) == ("FAILED", "failed")
    assert run.data.tags["error"].startswith("train/loss is ")
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
    reader = Reader(f"sqlite:///{tmp_path}/store/mlflow.db")
    assert set(reader.runs) == {f"{when}-{me}" for when in ("fresh", "old") for me in range(4)}
    for name, run in reader.runs.items():
        assert run.info.status == "FINISHED"
        assert run.data.params == {"me": name[-1]}
        assert reader.history(name, "a") == [(step, step) for step in range(100)]
        assert reader.history(name, "b") == [(step, int(name[-1])) for step in range(100)]
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
        return train(full_project, tmp_path / name, *flags, **env, **more)

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
        reader.assert_holds(job)
        assert reader.runs[f"trial/{job.run_dir.name}"].info.status == "FINISHED"
        assert "step 60" in reader.text(f"trial/{job.run_dir.name}", "log.txt")
    images, labels = digits()
    with torch.no_grad():
        outputs = registered()(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    assert accuracy == pytest.approx(whole.summary["test_accuracy"], abs=1 / 1_001)
