"""Tells a webhook, for example of a chat, how a run ended. NOTIFY_URL in .env is its address.

The address is a secret, so log lines contain only its host.
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
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from ..engine.errors import without_secrets

if TYPE_CHECKING:
    from ..engine import Training
    from ..engine.run.description import Run
    from ..engine.run.status import StatusFile

log = logging.getLogger(__name__)

# Seconds for which the end of a run waits for an answer. A job that is stopped has less time.
SECONDS = {"finished": 5, "failed": 5, "preempted": 2}
PACKAGE = __package__.partition(".")[0]


class Plugin:
    """Posts how a run ended, after its trackers have finished."""

    def __init__(self, _training: "Training") -> None:
        pass

    def on_close(self, training: "Training", _error: BaseException | None) -> None:
        """Post the message from rank 0."""
        if training.world.is_main:
            notify(training.logger.status, training.logger.run, training.logger.tested)


def notify(state: "StatusFile", run: "Run", metrics: Mapping[str, float]) -> None:
    """Post the final state and the metrics of a run as JSON. A failure is only logged.

    Trials of a sweep post nothing, since there are many.
    """
    url, seconds = os.environ.get("NOTIFY_URL"), SECONDS[state.status]
    if not url or "SWEEP_TRIAL" in os.environ:
        return
    failures = queue.SimpleQueue[str]()

    def post() -> None:
        failures.put(_post(url, seconds, state, run, metrics))

    try:
        # A thread is used because the DNS lookup has no time limit of its own.
        threading.Thread(target=post, name="notify", daemon=True).start()
        failure = failures.get(timeout=seconds)
    except queue.Empty:
        failure = f"no answer within {seconds} seconds"
    except RuntimeError as error:  # the limit on threads is reached
        failure = str(error)
    if failure:
        log.warning("NOTIFY_URL was not told how the run ended: %s", failure)


def _body(state: "StatusFile", run: "Run", metrics: Mapping[str, float]) -> bytes:
    """Return the JSON to post. Slack and Mattermost show `text`, Discord shows `content`."""
    best = {} if state.best_score is None else {state.best_metric: state.best_score}
    numbers = {name: x for name, x in {**best, **metrics}.items() if math.isfinite(x)}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    # Remove secrets before the text is cut: half of a secret would not be found.
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
    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - urllib's own types
        """Follow no redirect: the message is only for the host that the user named."""


def _post(
    url: str, seconds: float, state: "StatusFile", run: "Run", metrics: Mapping[str, float]
) -> str:
    """Post how a run ended; return the reason of a failure, "" if there was none."""
    host = "it"
    try:
        address = urlsplit(url)
        host = address.hostname or ""
        # urllib would take a login as a part of the host's name.
        if address.scheme not in ("http", "https") or not host or "@" in address.netloc:
            return "it must begin with https://, or http://, and a host, without a login"
        # Discord refuses urllib's own User-Agent.
        headers = {"Content-Type": "application/json", "User-Agent": PACKAGE}
        request = urllib.request.Request(url, _body(state, run, metrics), headers)
        # Longer than the caller waits, whose message is the clearer one.
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=2 * seconds):
            return ""
    except HTTPError as error:
        return f"{host} answered {error.code}"
    except Exception as error:  # errors of the socket, TLS, HTTP or the URL have many classes
        cause = getattr(error, "reason", error)
        # A reason that is a text has no part of the URL, but the text of other errors may.
        known = cause if isinstance(cause, str) else getattr(cause, "strerror", None)
        return f"{host}: {without_secrets(known or type(cause).__name__)}"
