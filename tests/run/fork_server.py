"""Starts ranks and commands from a process that has imported torch: in milliseconds, not seconds.

Each is a fork that does the same as `python -m demo train`. Tests of the start itself, and
all tests in tests/slurm, start new interpreters.
"""

import email
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pydantic

IMPORTED = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "numpy.random",
    "psutil",
    "pydantic.dataclasses",
    "tensorboard.backend.event_processing.event_accumulator",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "tqdm",
    "typeguard",
    "tyro",
    "yaml",
)
# Prefixes of variables that are read when an interpreter starts or when torch is imported.
READ_AT_START = ("LD_", "MKL_", "OMP_", "PYTHON", "TORCH_")
SIZE = 2**20  # upper limit of a message, in bytes


class Fork:
    """A started process, with the part of subprocess.Popen's interface that tests use.

    Attributes:
        returncode: the exit code, negative for a signal; None before `poll` or `wait` has seen the
            end.
    """

    def __init__(self, server: "ForkServer", pid: int, args: Sequence[str]) -> None:
        self.server, self.pid, self.args = server, pid, list(args)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        self.server.read(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return the exit code."""
        deadline = time.monotonic() + (timeout or float("inf"))
        while (code := self.returncode) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.server.read(min(left, 60))
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The tests' side of the process that forks. Each process that runs tests has one."""

    def __init__(self) -> None:
        # By process id. The kernel can use the id of an ended process again.
        self.running: dict[int, Fork] = {}
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # one packet, one message
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.socket = ours

    def start(
        self, args: Sequence[str], cwd: Path, env: Mapping[str, str], log: Path, errors: Path
    ) -> Fork:
        """Start `python ARGS` in its own session, with its output in files."""
        request = {"args": list(args), "cwd": str(cwd), "env": dict(env)}
        request["files"] = [str(log), str(errors)]
        _send(self.socket, request)
        while "pid" not in (reply := self._reply()):
            pass
        fork = self.running[reply["pid"]] = Fork(self, reply["pid"], ["python", *args])
        return fork

    def read(self, timeout: float) -> None:
        """Read which processes have ended; wait at most `timeout` seconds for one."""
        while select.select([self.socket], [], [], timeout)[0]:
            self._reply()
            timeout = 0

    def close(self) -> None:
        """End the server, which exits when its connection closes."""
        self.socket.close()
        self.process.wait()

    def _reply(self) -> dict[str, Any]:
        reply = json.loads(self.socket.recv(SIZE))
        if "ended" in reply:
            self.running.pop(reply["ended"]).returncode = reply["code"]
        return reply


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the child, and None in the server at its end."""
    for name in IMPORTED:
        import_module(name)
    pydantic.TypeAdapter(int)  # reads the entry points of all packages, for plug-ins
    # What each rank would parse again: a run names all packages with their versions.
    email.message_from_string = functools.cache(email.message_from_string)
    for package in distributions():
        package.metadata  # noqa: B018
    gc.freeze()  # so that ranks neither search nor copy what is imported here
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1000)
            for pid, code in _ended():
                _send(connection, {"ended": pid, "code": code})
        if connection not in ready:
            continue
        request = connection.recv(SIZE)
        if not request:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has no thread but the one"
        pid = os.fork()
        if pid:
            _send(connection, {"pid": pid})
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (woken, wake):
            os.close(each)
        return json.loads(request)


def _ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode())


def run(request: dict[str, Any]) -> None:
    """Do the same as `python -m MODULE` or `python -c CODE` in this process."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, path in enumerate(request["files"], 1):
        log = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, number)
        os.close(log)
    sys.path[:1] = [request["cwd"], *request["env"].get("PYTHONPATH", "").split(os.pathsep)]
    option, code, *sys.argv[1:] = request["args"]
    if option == "-c":
        exec(code, {"__name__": "__main__"})
    else:
        runpy.run_module(code, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as server:
        wanted = serve(server)
    if wanted:
        run(wanted)
