"""MLflow: a database in the experiment's folder, or the server of MLFLOW_TRACKING_URI."""

import getpass
import logging
import os
import shutil
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any

# With these variables, MLflow sends no telemetry, gives up a server that is down within a minute,
# and logs only warnings. MLflow repeats a request that times out: with a shorter time limit, a slow
# server would start a run twice.
os.environ.update(
    {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "25",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        **os.environ,
    }
)

from filelock import SoftFileLock, Timeout
from mlflow import MlflowClient, MlflowException
from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from ..engine.errors import without_secrets
from ..engine.foreign import open_regular
from ..engine.nested import length, map_tensors
from ..engine.run.status import Status
from . import Backend, History, Run

if TYPE_CHECKING:
    import numpy as np
    from mlflow.entities import Run as Found
    from torch import nn

log = logging.getLogger(__name__)

SQLITE = "sqlite:///"
STATUS = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}
LONGEST = 5000  # characters of a parameter or tag; MLflow's own limit is a little higher
STALE = 60  # seconds; an older lock file belongs to a dead process


class Tracker(Backend):
    """A run in MLflow.

    Metrics are collected and sent every few seconds, since each call takes milliseconds. A resumed
    run removes the metrics after its checkpoint from a local database. A server can't remove
    metrics, so there the first value of a step stays. MLflow does not support histograms.
    """

    SECONDS, METRICS = 10, 500  # send metrics after this many seconds, or this many metrics
    MOST = 1000  # MLflow's limit of metrics in one call

    def __init__(self, run: Run) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or database(run.store)
        file = Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None
        lock = partial(locked, file.with_name(f"{file.name}.lock")) if file else nullcontext
        with lock():
            self.client: Any = _Careful(MlflowClient(uri), lock)
        self.waiting: list[Metric] = []
        self.sent = monotonic()

        if before := self._found(run.run_id):
            self.run_id, self.experiment = before.info.run_id, before.info.experiment_id
            self.client.update_run(self.run_id, "RUNNING")
            if "error" in before.data.tags:
                self.client.delete_tag(self.run_id, "error")
            if file:
                with lock():
                    _forget(file, self.run_id, run.resume_step)
        else:
            artifacts = (file.parent / "mlartifacts").as_uri() if file else None
            self.experiment = self._experiment(run.experiment, artifacts)
            new = self.client.create_run(self.experiment, run_name=run.name, tags=_facts(run))
            self.run_id = new.info.run_id
        self._describe(run, before)

    def _found(self, run_id: str | None) -> "Found | None":
        """Return a run, or None if it was deleted or is on another server."""
        try:
            found = self.client.get_run(run_id) if run_id else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return found if found and found.info.lifecycle_stage == "active" else None

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment; create it if it does not exist."""
        if not (found := self.client.get_experiment_by_name(name)):
            try:
                return self.client.create_experiment(name, artifacts)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self.client.get_experiment_by_name(name)  # another job was first
        return found.experiment_id

    def _describe(self, run: Run, before: "Found | None") -> None:
        """Record settings and provenance, which may have changed since the last attempt."""
        settings = {name: str(value)[:LONGEST] for name, value in run.settings.items()}
        known, said = (before.data.params, before.data.tags) if before else ({}, {})
        params = [Param(name, value) for name, value in settings.items() if name not in known]
        tags = _facts(run)
        for name, value in settings.items():
            # MLflow does not allow a parameter to change, so a tag has the new value.
            if known.get(name, value) != value or f"now.{name}" in said:
                tags[f"now.{name}"] = value
        self.client.log_batch(
            self.run_id, params=params, tags=[RunTag(name, value) for name, value in tags.items()]
        )
        self.client.log_dict(self.run_id, dict(run.settings), "config.yaml")
        self.client.log_dict(self.run_id, dict(run.provenance), "provenance.json")

    def history(self) -> History:
        """Return all metrics that the run has."""
        return {
            name: {
                each.step: each.value for each in self.client.get_metric_history(self.run_id, name)
            }
            for name in self.client.get_run(self.run_id).data.metrics
        }

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Collect the metrics; send them if they are many or have waited long enough."""
        self.waiting += [
            Metric(name, value, round(time * 1000), step) for name, value in metrics.items()
        ]
        if monotonic() - self.sent > self.SECONDS or len(self.waiting) > self.METRICS:
            self.flush()

    def log_image(self, name: str, image: "np.ndarray", step: int) -> None:
        """Record a picture, unless an earlier attempt recorded it."""
        stem = f"images/{name.replace('/', '~')}+step+{step}+"
        there = self.client.list_artifacts(self.run_id, "images")
        if not any(each.path.startswith(stem) for each in there):
            self.client.log_image(self.run_id, image, key=name, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text as a file."""
        self.client.log_text(self.run_id, text, f"{name}.txt")

    def log_model(
        self, network: "nn.Module", example: tuple[Any, ...], name: str, step: int | None = None
    ) -> None:
        """Put a network into the model registry, as a new version, with its signature."""
        if len(example) != 1 or isinstance(network, dict):
            log.warning(
                "nothing is registered: MLflow's registry takes only one network with one input"
            )
            return
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            _save(network, example[0], folder)
            model = self.client.create_logged_model(self.experiment, name, self.run_id)
            self.client.log_model_artifacts(model.model_id, str(folder))
        self.client.finalize_logged_model(model.model_id, "READY")
        self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step or 0)])
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        self.client.create_model_version(
            name,
            model.artifact_location,
            self.run_id,
            tags={"run": self.run_id} | ({} if step is None else {"step": step}),
            model_id=model.model_id,
        )

    def flush(self) -> None:
        """Send the collected metrics."""
        while self.waiting:
            self.client.log_batch(self.run_id, self.waiting[: self.MOST])
            del self.waiting[: self.MOST]
        self.sent = monotonic()

    def finish(self, status: Status, error: str | None) -> None:
        """Send the collected metrics, and record how the run ended."""
        self.flush()
        if error:
            self.client.set_tag(self.run_id, "error", error[:LONGEST])
        self.client.set_tag(self.run_id, "status", status)
        self.client.set_terminated(self.run_id, STATUS[status])


class _Careful:
    """A client that holds a lock during each of its calls."""

    def __init__(self, client: MlflowClient, lock: Callable[[], AbstractContextManager]) -> None:
        self.client, self.lock = client, lock

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)

        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - what the method takes
            with self.lock():
                return method(*arguments, **named)

        return call


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that works across nodes: a file.

    SQLite's own locks have no effect on some shared file systems. If a process dies, its lock file
    stays, and another process removes it after STALE seconds.
    """
    lock = SoftFileLock(str(path), timeout=1)
    holder, since = None, monotonic()
    while not lock.is_locked:
        try:
            lock.acquire()
        except Timeout:
            with suppress(FileNotFoundError), open_regular(path) as file:
                status = os.fstat(file.fileno())
                if holder != (found := (status.st_ino, status.st_mtime_ns)):
                    holder, since = found, monotonic()
                elif monotonic() - since > STALE:
                    path.unlink()
    try:
        yield
    finally:
        lock.release()


def database(root: Path) -> str:
    """Return the URI of the SQLite file in a folder; create the file if it does not exist.

    A new file is created in another place and then linked. Several jobs may start at the same time,
    and none of them may see an incomplete file.
    """
    file = root.absolute() / "mlflow.db"
    if not file.exists():
        root.mkdir(parents=True, exist_ok=True)
        # Ignore errors of the cleanup: they would hide an error of the file's creation.
        with TemporaryDirectory(dir=root, prefix=".mlflow-", ignore_cleanup_errors=True) as folder:
            fresh = Path(folder, "mlflow.db")
            artifacts = (root.absolute() / "mlartifacts").as_uri()
            SqlAlchemyStore(f"{SQLITE}{fresh}", artifacts).engine.dispose()
            with suppress(FileExistsError):  # another job was first
                os.link(fresh, file)
    return f"{SQLITE}{file}"


def _forget(file: Path, run_id: str, step: int) -> None:
    """Remove the metrics of a run after a step. MLflow has no function for this."""
    with closing(sqlite3.connect(file, timeout=20)) as connection, connection:
        for table in ("metrics", "latest_metrics"):
            connection.execute(
                f"DELETE FROM {table} WHERE run_uuid = ? AND step > ?", (run_id, step)
            )
        # In SQLite, MAX(step) also selects the row that the other columns are taken from.
        connection.execute(
            "INSERT OR IGNORE INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
            "SELECT key, value, timestamp, MAX(step), is_nan, run_uuid FROM metrics "
            "WHERE run_uuid = ? GROUP BY key",
            (run_id,),
        )


def _facts(run: Run) -> dict[str, str]:
    """Return a run's tags, with MLflow's own names where these exist."""
    facts = run.provenance
    git, template, slurm = (facts.get(name) or {} for name in ("git", "template", "slurm"))
    tags = {
        "status": "running",
        "tags": " ".join(run.tags),
        "run_dir": run.directory,
        "world_size": facts.get("world_size"),
        "hostnames": " ".join(facts.get("hostnames", ())),
        "slurm.job": slurm.get("SLURM_JOB_ID"),
        "template.commit": template.get("_commit"),
        "git.changes": git.get("changes"),
        "mlflow.source.git.commit": git.get("commit"),
        "mlflow.source.name": " ".join(facts.get("command", ())),
        "mlflow.source.type": "JOB" if slurm else "LOCAL",
    }
    with suppress(KeyError, OSError):  # in a container, the user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return {name: str(value)[:LONGEST] for name, value in tags.items() if value not in (None, "")}


def _save(network: "nn.Module", example: Any, folder: Path) -> None:  # noqa: ANN401 - of any nesting
    """Save a network and its signature as a graph, which loads without this project's code.

    If the network can't be exported as a graph, it is pickled together with a copy of the code.
    """
    import mlflow.pytorch
    import torch
    from mlflow.models import infer_signature

    if length(example) == 1:  # a graph exported with one sample takes only one
        example = map_tensors(lambda tensor: torch.cat([tensor, tensor]), example)
    with torch.no_grad():
        outputs = network(example)
    inputs, outputs = map_tensors(torch.Tensor.numpy, (example, outputs))
    save = partial(
        mlflow.pytorch.save_model,
        network,
        folder,
        signature=infer_signature(inputs, outputs),
        input_example=inputs,
    )
    # This warning of torch.export does not matter for a network on the CPU.
    warnings.filterwarnings("ignore", "No complete tensor found")
    versions = {each.__name__: str(each.__version__) for each in (mlflow, torch)}
    needed = [f"{name}=={version.partition('+')[0]}" for name, version in versions.items()]
    try:
        save(serialization_format="pt2", pip_requirements=needed)
    except Exception as error:  # torch.export does not document what it raises
        reason = without_secrets(str(error) or type(error).__name__).splitlines()[0]
        log.warning("the network can't be exported as a graph, so it is pickled: %s", reason)
        shutil.rmtree(folder, ignore_errors=True)
        # Without pip_requirements, MLflow finds out the requirements by itself.
        save(serialization_format="pickle", code_paths=[str(Path(__file__).parents[1])])
