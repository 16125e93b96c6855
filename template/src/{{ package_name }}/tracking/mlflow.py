"""MLflow: a SQLite file in the run root, or the server that MLFLOW_TRACKING_URI names."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

# Before the import, which reads them: send nothing to MLflow's makers, and give up on a server
# that is down within seconds, not minutes.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow import MlflowClient, MlflowException
from mlflow.entities import Metric, Param, RunStatus
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from . import Run, Status

STATUS = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}


class Tracker:
    """A run in MLflow.

    Metrics are sent together, every few seconds: one at a time takes milliseconds. MLflow takes
    nothing back: where a resumed run repeats steps, the first values stay.
    """

    SECONDS, METRICS = 10, 500  # after which metrics are sent; MLflow takes 1000 at once

    def __init__(self, run: Run) -> None:
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            root = Path(run.settings["run_root"]).absolute()
            uri, artifacts = database(root), (root / "mlartifacts").as_uri()
        self.client = MlflowClient(uri)
        self.waiting: list[Metric] = []
        self.sent = time.monotonic()
        self.last_steps: dict[str, int] = {}
        known: Mapping[str, str] = {}
        if run.run_id:
            self.run_id = run.run_id
            data = self.client.get_run(self.run_id).data
            known = data.params
            for name in data.metrics:
                history = self.client.get_metric_history(self.run_id, name)
                self.last_steps[name] = max(metric.step for metric in history)
            self.client.update_run(self.run_id, RunStatus.to_string(RunStatus.RUNNING))
        else:
            experiment = self._experiment(run.experiment, artifacts)
            tags = {"tags": " ".join(run.tags)}
            self.run_id = self.client.create_run(
                experiment, tags=tags, run_name=run.name
            ).info.run_id
        # MLflow refuses to change a parameter.
        new = [Param(name, str(value)) for name, value in run.settings.items() if name not in known]
        self.client.log_batch(self.run_id, params=new)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment, made if need be."""
        with suppress(MlflowException):  # it is there, perhaps since this moment
            return self.client.create_experiment(name, artifacts)
        return self.client.get_experiment_by_name(name).experiment_id

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take note of the metrics, and send what has waited long enough."""
        now = int(time.time() * 1000)
        self.waiting += [
            Metric(name, value, now, step)
            for name, value in metrics.items()
            if step > self.last_steps.get(name, -1)
        ]
        if time.monotonic() - self.sent > self.SECONDS or len(self.waiting) > self.METRICS:
            self.flush()

    def flush(self) -> None:
        """Send what is waiting."""
        self.client.log_batch(self.run_id, self.waiting)
        self.waiting.clear()
        self.sent = time.monotonic()

    def finish(self, status: Status) -> None:
        """Send what is waiting, and note how the run ended."""
        self.flush()
        self.client.set_terminated(self.run_id, STATUS[status])


def database(root: Path) -> str:
    """Return the URI of the SQLite file in a folder; make the file where there is none yet.

    It is made elsewhere and then linked into place: of several jobs that start at once one wins,
    and none sees half of it.
    """
    file = root / "mlflow.db"
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=".mlflow-") as folder:
            fresh = Path(folder, "mlflow.db")
            artifacts = (root / "mlartifacts").as_uri()
            SqlAlchemyStore(f"sqlite:///{fresh}", artifacts).engine.dispose()
            with suppress(FileExistsError):  # another job was first
                os.link(fresh, file)
    return f"sqlite:///{file}"
