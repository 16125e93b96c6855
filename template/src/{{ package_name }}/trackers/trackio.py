"""trackio: files in the experiment's folder `trackio`, or in the folder that TRACKIO_DIR names.

A run writes the same files as trackio's own clients on network file systems: small files in
`inbox/` that never change, with a folder for each process. trackio's server (`trackio show`, or the
job of `monitor`) moves their lines into the experiment's SQLite file. Each line has an id, so that
it is stored only once. Runs therefore need no locks on any file system, and no run waits for
another. The consequences are:

- A page shows what a run logged up to a minute ago. trackio's commands without a server, such as
  `trackio list`, show only what a server has moved.
- On the server's machine, SQLite needs a file system with working locks. Run only one server for an
  experiment. Two servers do the same work twice, but the result is the same.
- Until your server has moved the files of your runs, only you can read them.

Nothing is sent to other machines. This module does not call `trackio.init`, which would ask Hugging
Face for the user's name, and would only warn if it can't write some numbers. `trackio sync`
publishes an experiment.
"""

import hashlib
import json
import os
import sqlite3
import time as clock
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from trackio import Histogram, Table, fragments
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import canonical_project_name, deserialize_values

from ..engine.filesystem import write_atomically
from ..engine.run.media import binned
from ..engine.run.status import Status
from . import Backend, History, Run


class Tracker(Backend):
    """A run in trackio. The experiment is its project, and its status is in the run's settings.

    trackio deletes nothing: if a resumed run repeats steps, their first values stay. A failed run
    also gets an alert. Texts, such as the log, are files of the project.
    """

    SECONDS, LINES = 30, 500  # write lines after this many seconds, or this many lines

    def __init__(self, run: Run) -> None:
        self.folder, self.project = storage(run.store), project(run.experiment)
        self.inbox = self.folder / fragments.INBOX_DIR_NAME
        self.media = self.folder / "media" / self.project
        self.name = run.name
        self.run_id = run.run_id or uuid.uuid4().hex
        # Names sort by time, so that the settings of the last attempt replace earlier ones.
        self.writer = fragments.FragmentWriter(f"{self.run_id}-{clock.time_ns()}")
        self.waiting: list[dict[str, Any]] = []
        self.written, self.step = clock.monotonic(), run.resume_step
        config = {
            **run.settings,
            "provenance": run.provenance,
            "tags": list(run.tags),
            "directory": run.directory,
            "status": "running",
            "error": None,
            "_Group": run.experiment,
            "_Created": _iso(clock.time()),
        }
        self.config = _writable(config)
        self._log({}, self.step, clock.time())
        self.flush()  # makes the run visible, and checks that the folder can be written

    def history(self) -> History:
        """Return what earlier attempts logged, with the value 0 for pictures and other media."""
        lines: list[tuple[Any, Any]] = []
        for path in sorted(self.inbox.glob(f"{self.run_id}-*/*.jsonl")):
            with suppress(FileNotFoundError):  # a server has just moved it
                records = fragments.parse_fragment_bytes(path.read_bytes())
                lines += [(each.get("step"), each.get("metrics")) for each in records]
        database = self.folder / SQLiteStorage.get_project_db_filename(self.project)
        if database.exists():
            query = "SELECT step, metrics FROM metrics WHERE run_id = ?"
            with closing(sqlite3.connect(database, timeout=20)) as connection:
                found = connection.execute(query, (self.run_id,)).fetchall()
            lines += [(step, json.loads(metrics or "null")) for step, metrics in found]
        held: History = {}
        for step, values in lines:
            if not isinstance(step, int) or not isinstance(values, dict):
                continue  # an alert, or a line of another client
            for name, value in deserialize_values(values).items():
                number = float(value) if isinstance(value, int | float) else 0.0
                held.setdefault(name, {})[step] = number
        return held

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Collect the metrics; write them if they are many or have waited long enough."""
        self._log({name: float(value) for name, value in metrics.items()}, step, time)

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write a picture as a file."""
        path = self.media / self.name / str(step) / f"{name.replace('/', '~')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: Image.fromarray(image).save(file, "png"))
        place = str(path.relative_to(self.media.parent))
        self._log({name: {"_type": "trackio.image", "file_path": place, "caption": None}}, step)

    def log_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        """Record a histogram of the finite values."""
        self._log({name: Histogram(np_histogram=binned(values))._to_dict()}, step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table."""
        plain = bool | int | float | str | np.generic | None
        cells = [[each if isinstance(each, plain) else str(each) for each in row] for row in rows]
        table = Table(columns=list(columns), data=cells)
        self._log({name: table._to_dict(self.project, self.name, step)}, step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text as a file."""
        path = self.media / "files" / self.name / f"{name.replace('/', '-')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(errors="replace"))

    def flush(self) -> None:
        """Write the collected lines. Each file has the settings, so that it can show the run."""
        if self.waiting:
            self.waiting[0]["config"] = self.config
            try:
                self.writer.write_local(self.waiting, self.inbox)
            except TypeError:  # a lone surrogate, or an integer of more than 64 bits
                self.writer.write_local(_writable(self.waiting), self.inbox)
        self.waiting, self.written = [], clock.monotonic()

    def finish(self, status: Status, error: str | None) -> None:
        """Write the collected lines, and how the run ended."""
        self.config |= {"status": status, "error": error}
        self._log({}, self.step, clock.time())
        if status == "failed":
            alert = {"title": "failed", "text": error, "level": "error", "step": self.step}
            alert |= {"timestamp": _iso(clock.time()), "alert_id": uuid.uuid4().hex}
            self.waiting.append(fragments.alert_record({**self._identity, **alert}))
        self.flush()

    @property
    def _identity(self) -> dict[str, str]:
        return {"project": self.project, "run": self.name, "run_id": self.run_id}

    def _log(self, values: Mapping[str, Any], step: int, time: float | None = None) -> None:
        """Collect a line. Its id has the step and the names, so a repeated line is stored once."""
        self.step = max(self.step, step)
        names = hashlib.sha256("\0".join(sorted(values)).encode()).hexdigest()[:16]
        line = {"metrics": values, "step": step, "timestamp": _iso(time or clock.time())}
        line["log_id"] = f"{self.run_id}-{step}-{names if values else clock.time_ns()}"
        self.waiting.append(fragments.metric_record({**self._identity, **line}))
        late = clock.monotonic() - self.written > self.SECONDS
        if late or len(self.waiting) > self.LINES:
            self.flush()


def storage(store: Path) -> Path:
    """Return trackio's folder for an experiment: TRACKIO_DIR, or `trackio` in `store`."""
    return Path(os.environ.get("TRACKIO_DIR") or store / "trackio").absolute()


def project(experiment: str) -> str:
    """Return the name of an experiment's project: the same name, if trackio does not change it.

    trackio removes some characters, so that `a.b` and `ab` would be the same project, and it
    refuses some names. The project of such an experiment has a hash in its name.
    """
    name = canonical_project_name(experiment)
    with suppress(ValueError):
        SQLiteStorage.validate_project_name(name)
        if name == experiment:
            return name
    digest = hashlib.sha256(experiment.encode(errors="surrogatepass")).hexdigest()[:12]
    # This name does not begin with `registry-` or end with a word that trackio reserves.
    return f"{name.replace('-', '_')[:50]}_{digest}"


def _writable(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a value that trackio can write: no lone surrogates, no integers of over 64 bits."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text.encode(errors="replace").decode()
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int | str:
    return int(digits) if -(2**63) <= int(digits) < 2**63 else digits


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
