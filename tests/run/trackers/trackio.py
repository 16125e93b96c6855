"""Reads runs with trackio's own reader and server."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from PIL import Image

from ..conftest import clean_environment
from . import Shown, by_step

# trackio finds its folder at its import, so each reader is a process.
READ = """
import json, trackio
from trackio import fragments, server
from trackio.sqlite_storage import SQLiteStorage
projects, moved = {}, fragments.import_inbox_dir()
for project in SQLiteStorage.get_projects():
    runs = {}
    for run in trackio.Api().runs(project):
        logs = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
        runs[run.name] = {"id": run.id, "config": run.config, "logs": logs, "alerts": run.alerts()}
    files = server.get_project_files(project)
    texts = {each["name"]: open(each["path"]).read() for each in files}
    projects[project] = {"runs": runs, "files": texts}
print(json.dumps({"projects": projects, "moved": moved}))
"""
OFFLINE = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}


def places(run_dir: Path) -> list[Path]:
    """Return what trackio makes for a run."""
    return [run_dir.parent / "trackio"]


def read(folder: Path) -> dict[str, Any]:
    """Return what trackio shows of a folder."""
    env = {**clean_environment(folder), **OFFLINE, "TRACKIO_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", READ], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def values(run: dict[str, Any]) -> dict[str, dict[int, Any]]:
    """Return all values of a run, by name and step."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for line in run["logs"]:
        for name in line.keys() - {"step", "timestamp"}:
            found.setdefault(name, []).append((line["step"], line[name]))
    return {name: by_step(name, pairs) for name, pairs in found.items()}


def runs(store: Path) -> list[Shown]:
    """Return what trackio shows of the runs in a store."""
    return [
        shown(store, name, run, project["files"])
        for project in read(store / "trackio")["projects"].values()
        for name, run in project["runs"].items()
    ]


def shown(store: Path, name: str, run: dict[str, Any], files: dict[str, str]) -> Shown:
    """Return what trackio shows of a run."""
    config, numbers = run["config"], {}
    media: dict[str, dict[str, dict[int, Any]]] = {}  # by kind and name
    for metric, found in values(run).items():
        first = next(iter(found.values()))
        if isinstance(first, dict):
            media.setdefault(first["_type"], {})[metric] = found
        else:
            numbers[metric] = found
    losses = [line for line in run["logs"] if "train/loss" in line]
    return Shown(
        name=name,
        experiment=config["_Group"],
        tags=config["tags"],
        settings=config,
        provenance=config["provenance"],
        status=config["status"],
        error=config["error"],
        numbers=numbers,
        times={
            line["step"]: datetime.fromisoformat(line["timestamp"]).timestamp() for line in losses
        },
        images={
            name: {
                step: size(store / "trackio/media" / e["file_path"]) for step, e in found.items()
            }
            for name, found in media.get("trackio.image", {}).items()
        },
        histograms={
            name: {step: sum(each["values"]) for step, each in found.items()}
            for name, found in media.get("trackio.histogram", {}).items()
        },
        tables={name: [*found] for name, found in media.get("trackio.table", {}).items()},
        texts={
            path.removeprefix(f"{name}/").removesuffix(".txt"): text
            for path, text in files.items()
            if path.startswith(f"{name}/")
        },
        keeps=True,
    )


def size(path: Path) -> tuple[int, int]:
    """Return width and height of a picture."""
    with Image.open(path) as picture:
        return picture.size
