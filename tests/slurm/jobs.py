"""Jobs of a rendered project on the cluster."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metrics
import psutil

from .cluster import Cluster, wait_for

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}


@dataclass
class Project:
    """A rendered project that was set up on a cluster."""

    cluster: Cluster
    root: Path

    def sbatch(self, *arguments: str, **env: str) -> "Job":
        """Submit a job from the project's root, as a user does: options, script, arguments."""
        done = self.cluster.run("sbatch", *arguments, cwd=self.root, check=False, **env)
        found = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)
        assert found, done.stdout + done.stderr
        return Job(self, found.group(1))


@dataclass
class Job:
    """A submitted job, or a task of a job array, whose id has both numbers, such as 12_0."""

    project: Project
    id: str

    @property
    def facts(self) -> dict[str, str]:
        """The output of `scontrol show job`, by key."""
        shown = self.project.cluster.run("scontrol", "show", "job", "--oneliner", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))

    @property
    def state(self) -> str:
        """The state of the job, such as PENDING, RUNNING, COMPLETED."""
        return self.facts["JobState"]

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return int(self.facts["Restarts"])

    @property
    def log(self) -> str:
        """The log of all attempts of the job, without the lines of steps."""
        paths = self.project.root.glob(f"logs/*-{self.facts['JobId']}.out")
        lines = [line for path in paths for line in path.read_text().splitlines()]
        return "\n".join(line for line in lines if not re.search(r"\] step \d+ ", line))

    def wait_until(self, *states: str) -> "Job":
        """Wait until the job is in one of these states."""
        wait_for(
            lambda: self.state in states, lambda: f"job {self.id} is {self.facts}\n{self.log}", 0.2
        )
        return self

    def wait(self) -> "Job":
        """Wait for the job's end."""
        return self.wait_until(*ENDED)

    def wait_for_restart(self) -> "Job":
        """Wait until the job was requeued; it may run again already."""
        wait_for(
            lambda: self.restarts > 0 or self.state in ENDED,
            lambda: f"{self.facts}\n{self.log}",
            0.2,
        )
        assert self.restarts == 1, f"{self.facts}\n{self.log}"
        return self

    def wait_for_step(self, step: int) -> "Job":
        """Wait until the run has logged a step."""
        polls = itertools.count()
        wait_for(
            lambda: (
                metrics.logged(self.run_dir, step)
                or (next(polls) % 20 == 0 and self.state in ENDED)
            ),
            lambda: f"no step {step}: {self.facts}\n{self.log}",
        )
        assert self.state not in ENDED, self.log
        return self

    def metrics(self) -> list[dict[str, float]]:
        """The complete lines of metrics.jsonl."""
        return metrics.read(self.run_dir)

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.project.root / "runs" / "demo" / self.id

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary.json. The job must have succeeded."""
        assert self.wait().state == "COMPLETED", f"{self.facts}\n{self.log}"
        return json.loads((self.run_dir / "summary.json").read_text())

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes that run now, by rank."""
        found = {}
        for process, env, words in self._processes():
            # The launchers of ranks also have the ranks' command in their command lines.
            starts = "demo.tools.torchrun" in words or "sweep" in words
            if "demo" in words and "train" in words and not starts:
                found[int(env.get("RANK", env.get("SLURM_PROCID", -1)))] = process
        return found

    def meets(self) -> bool:
        """Return whether a process listens on the port where the ranks of the first step meet."""
        ports = (20_000 + (int(self.id) + 7417 * step) % 12_000 for step in (0, 1))
        served = re.compile(":({:04X}|{:04X}) \\S+ 0A".format(*ports))
        for process, _, _ in self._processes():
            for name in ("tcp", "tcp6"):
                with suppress(OSError):  # it ended meanwhile
                    if served.search(Path(f"/proc/{process.pid}/net/{name}").read_text()):
                        return True
        return False

    def batch_shell(self) -> psutil.Process:
        """The shell that runs the batch script."""
        (shell,) = [
            process
            for process, env, words in self._processes()
            if words and Path(words[0]).name.lstrip("-") == "bash"
            # Since Slurm 26.05, the batch script is a step too.
            if env.get("SLURM_STEP_ID", "-5") == "-5"
        ]
        return shell

    def _processes(self) -> Iterator[tuple[psutil.Process, dict[str, str], list[str]]]:
        """Yield the job's running processes, each with its environment and its command."""
        for process in psutil.process_iter():
            try:
                env, words = process.environ(), process.cmdline()
                if env.get("SLURM_JOB_ID") == self.id and self.project.root == Path(
                    env.get("SLURM_SUBMIT_DIR", "/")
                ):
                    yield process, env, words
            except psutil.Error:  # it ended meanwhile
                continue
