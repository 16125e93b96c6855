"""Reads the rank, the world size and MASTER_ADDR from the environment of torchrun or srun.

In a batch job, slurm/common.sh sets MASTER_ADDR, since containers lack scontrol. This module
chooses the port of each step.
"""

import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass

from ..errors import UsageError
from .slurm_commands import ask

# Slurm gives this number or a larger one to steps that srun did not start, such as the batch
# script. Slurm 26.05 and later give them negative numbers.
FIRST_SPECIAL_STEP = 4294967290

# Ports for the rendezvous, one for each step, below the ports that the kernel assigns. The stride
# keeps the ports of a job's steps away from the ports of the jobs with the next ids.
PORTS = range(20_000, 32_000)
STRIDE = 7417


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, as its launcher gave it.

    Attributes:
        launcher: "torchrun", "srun", or "none" for a single process.
        rank: from 0, over all nodes.
        size: the world size.
        local_rank: from 0, on this node.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Ranks":
        """Read the variables of torchrun; if they are not set, those of srun.

        Without either, this is a single process. The variables of torchrun come first: if srun
        starts torchrun, SLURM_PROCID is the index of the node. But in PyTorch's images, pyxis sets
        RANK and WORLD_SIZE to the values of srun. Then the launcher is srun.

        Raises:
            UsageError: a variable of the launcher is missing, or the allocation has several tasks
                but srun did not start this process.
        """
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        launcher, names = "srun", ("SLURM_PROCID", tasks, "SLURM_LOCALID")
        torchs = (env.get("RANK"), env.get("WORLD_SIZE"))
        copied = torchs == (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
        if any(torchs) and ("TORCHELASTIC_RUN_ID" in env or not copied):
            launcher, names = "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        elif srun_step(env) is None:
            if env.get("SLURM_NTASKS", "1") == "1":
                return cls("none", 0, 1, 0)
            raise UsageError(
                f"this allocation has {env['SLURM_NTASKS']} tasks, but srun did not start this "
                "process: put srun in front of the command, or unset SLURM_NTASKS"
            )
        if missing := [name for name in names if name not in env]:
            raise UsageError(
                f"{missing[0]} is not set, but other variables of {launcher} are: start with "
                "torchrun or srun, and unset the variables of the other"
            )
        return cls(launcher, *(int(env[name]) for name in names))

    def cpus(self, env: Mapping[str, str]) -> int:
        """Return the number of CPUs that this rank may use without sharing them."""
        if self.launcher == "srun":
            return int(env.get("SLURM_CPUS_PER_TASK", 1))
        # The ranks of torchrun share the CPUs of one task.
        ranks = int(env.get("LOCAL_WORLD_SIZE", 1)) if self.launcher == "torchrun" else 1
        return max(int(env.get("SLURM_CPUS_PER_TASK", bound_cpus())) // ranks, 1)


def bound_cpus() -> int:
    """Return the number of CPUs that this process may use: on macOS and Windows, all CPUs."""
    bound = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1


def srun_step(env: Mapping[str, str]) -> int | None:
    """Return the number of this process's Slurm step, None if srun did not start the process."""
    step = int(env.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP))
    return step if 0 <= step < FIRST_SPECIAL_STEP else None


def rendezvous_address(env: MutableMapping[str, str]) -> str:
    """Return `MASTER_ADDR:MASTER_PORT`; with srun, set the variables that are not set.

    Raises:
        UsageError: neither the environment nor Slurm gives them.
    """
    if "MASTER_ADDR" not in env and "SLURM_STEP_NODELIST" in env:
        with suppress(UsageError):  # a container may lack Slurm's commands
            names = ask("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"])
            env["MASTER_ADDR"] = names.split()[0]
    if "MASTER_PORT" not in env and "SLURM_JOB_ID" in env:
        number = int(env["SLURM_JOB_ID"]) + STRIDE * (srun_step(env) or 0)
        env["MASTER_PORT"] = str(PORTS[number % len(PORTS)])
    try:
        return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    except KeyError as error:
        raise UsageError(
            f"{error.args[0]} is not set, and Slurm does not provide it: start with torchrun, or "
            "export MASTER_ADDR and MASTER_PORT before srun"
        ) from None
