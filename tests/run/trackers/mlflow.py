"""Reads runs with MLflow's own client."""

import json
import os
from pathlib import Path

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import mlflow
from mlflow.entities import Run

from . import Shown, by_step


def places(run_dir: Path) -> list[Path]:
    """Return what MLflow makes for a run, first the lock of its database."""
    # If the database itself can't be opened, MLflow tries it again for an hour.
    return [run_dir.parent / name for name in ("mlflow.db.lock", "mlflow.db", "mlartifacts")]


class Reader:
    """MLflow's own view of the runs in a database or on a server, by name."""

    def __init__(self, uri: str) -> None:
        self.client = mlflow.MlflowClient(uri)
        self.experiments = {e.experiment_id: e.name for e in self.client.search_experiments()}
        runs = self.client.search_runs(list(self.experiments), max_results=1000)
        self.runs = {run.info.run_name: run for run in runs}
        assert len(self.runs) == len(runs), "there are runs of the same name"

    def text(self, run: Run, path: str) -> str:
        """Return a file that a run has logged."""
        return mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{path}")

    def paths(self, run: Run, folder: str = "") -> list[str]:
        """Return the paths of the files of a run, without those in other folders."""
        found = self.client.list_artifacts(run.info.run_id, folder)
        return [
            path
            for each in found
            for path in (self.paths(run, each.path) if each.is_dir else [each.path])
        ]

    def shown(self, run: Run) -> Shown:
        """Return what MLflow shows of a run."""
        values = {
            name: self.client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
        }
        images: dict[str, list] = {}
        paths = self.paths(run)
        for path in paths:
            if path.startswith("images/") and path.endswith(".png"):
                name, _, step, *_ = path.removeprefix("images/").split("+")
                image = mlflow.artifacts.load_image(f"{run.info.artifact_uri}/{path}")
                images.setdefault(name.replace("~", "/"), []).append((int(step), image.size))
        texts = [path for path in paths if path.endswith(".txt")]
        return Shown(
            name=run.info.run_name,
            experiment=self.experiments[run.info.experiment_id],
            tags=run.data.tags.get("tags", "").split(),
            settings=run.data.params,
            provenance=json.loads(self.text(run, "provenance.json")),
            status=run.data.tags["status"],
            error=run.data.tags.get("error"),
            numbers={
                n: by_step(n, [(e.step, e.value) for e in found]) for n, found in values.items()
            },
            times={each.step: each.timestamp / 1000 for each in values.get("train/loss", ())},
            images={name: by_step(name, found) for name, found in images.items()},
            texts={p.removesuffix(".txt").replace("/", "-"): self.text(run, p) for p in texts},
        )


def local(store: Path) -> Reader:
    """Return the view of the database in a store."""
    return Reader(f"sqlite:///{store}/mlflow.db")


def runs(store: Path) -> list[Shown]:
    """Return what MLflow shows of the runs in a store."""
    reader = local(store)
    return [reader.shown(run) for run in reader.runs.values()]
