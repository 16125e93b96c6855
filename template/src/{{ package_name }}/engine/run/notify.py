"""Tells a webhook, such as a chat's, how a run ended: NOTIFY_URL in .env is its address.

The address is a secret: what is logged has no more of it than the host.
"""

import json
import logging
import math
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from ..errors import without_secrets
from .description import Run
from .status import StatusFile

log = logging.getLogger(__name__)

# How long the end of a run waits for the answer; a job that is stopped has less time.
SECONDS = {"finished": 5, "failed": 5, "preempted": 2}
PACKAGE = __package__.partition(".")[0]


def notify(state: StatusFile, run: Run, metrics: Mapping[str, float]) -> None:
    """Post the last state of a run and its metrics, as JSON; a failure is a line in the log.

    Trials of a sweep tell nothing: they are many.
    """
    url, seconds = os.environ.get("NOTIFY_URL"), SECONDS[state.status]
    if not url or "SWEEP_TRIAL" in os.environ:
        return
    failures = queue.SimpleQueue[str]()

    def post() -> None:
        failures.put(_post(url, seconds, state, run, metrics))

    try:
        # In a thread: nothing else limits how long a name is looked up.
        threading.Thread(target=post, name="notify", daemon=True).start()
        failure = failures.get(timeout=seconds)
    except queue.Empty:
        failure = f"no answer within {seconds} seconds"
    except RuntimeError as error:  # the limit of threads
        failure = str(error)
    if failure:
        log.warning("NOTIFY_URL did not take how the run ended: %s", failure)


def _body(state: StatusFile, run: Run, metrics: Mapping[str, float]) -> bytes:
    """Return what is posted; Slack and Mattermost show `text`, Discord `content`."""
    best = {} if state.best_score is None else {state.best_metric: state.best_score}
    numbers = {name: x for name, x in {**best, **metrics}.items() if math.isfinite(x)}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    # Cut only after the secrets are out: the half of one would not be found.
    error = state.error and without_secrets(state.error)[:1000]
    text = f"{PACKAGE}: {run.name} {state.status} at step {state.step}"
    text = without_secrets(text + "".join(f": {each}" for each in (error, shown) if each))
    values = {
        "project": PACKAGE,
        "run": run.name,
        "experiment": run.experiment,
        "status": state.status,
        "step": state.step,
        "metrics": numbers,
        "seconds": round(time.time() - state.started),
        "job": state.job,
        "error": error,
        "hostname": state.host,
        "text": text[:1900],  # Discord takes 2000 characters
        "content": text[:1900],
    }
    told = {k: without_secrets(v) if isinstance(v, str) else v for k, v in values.items()}
    return json.dumps(told).encode()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - as urllib has it
        """Follow none: the body is for the host that the user named."""


def _post(
    url: str, seconds: float, state: StatusFile, run: Run, metrics: Mapping[str, float]
) -> str:
    """Post the end of a run; return what failed, "" if nothing did."""
    host = "it"
    try:
        address = urlsplit(url)
        host = address.hostname or ""
        # Of a login, urllib would make a part of the host's name.
        if address.scheme not in ("http", "https") or not host or "@" in address.netloc:
            return "it must begin with https://, or http://, and a host, without a login"
        # Discord refuses what urllib calls itself.
        headers = {"Content-Type": "application/json", "User-Agent": PACKAGE}
        request = urllib.request.Request(url, _body(state, run, metrics), headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=seconds):
            return ""
    except HTTPError as error:
        return f"{host} answered {error.code}"
    except Exception as error:  # of the socket, of TLS, of the protocol, of the address
        cause = getattr(error, "reason", error)
        # A reason in words has none of the address; the text of another error may.
        known = cause if isinstance(cause, str) else getattr(cause, "strerror", None)
        return f"{host}: {without_secrets(known or type(cause).__name__)}"
