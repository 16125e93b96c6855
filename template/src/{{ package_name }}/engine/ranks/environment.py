"""This rank, the world size, and where ranks meet, from the environment of torchrun or srun.

In a batch job, slurm/common.sh chooses the address, by the same rule.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ..errors import UsageError
from .slurm_commands import ask

# Slurm's numbers of the steps that srun did not start, such as the batch shell, begin here. From
# 26.05 on they are shown as negative numbers.
FIRST_SPECIAL_STEP = 4294967290

# Where ranks meet: below the ports that the kernel hands out, and another one for each step. The
# stride keeps the steps of a job away from the jobs after it.
PORTS = range(20_000, 32_000)
STRIDE = 7417


@dataclass(frozen=True)
class Ranks:
    """This process among its peers, as its launcher says.

    Source: the variables that torchrun and srun set for each process they start.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "Ranks":
        """Read torchrun's variables, else srun's, else take a single process.

        Torchrun goes first: under srun and torchrun together, SLURM_PROCID is the node's index. In
        PyTorch's images, pyxis sets the same variables to what srun's say: that is srun.

        Raises:
            UsageError: the launcher's variables are incomplete, or an allocation of several tasks
                is used without srun.
        """
        try:
            same = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
            copied = all(env.get(torchs) == env.get(slurms) for torchs, slurms in same)
            elastic = "TORCHELASTIC_RUN_ID" in env
            if ("RANK" in env or "WORLD_SIZE" in env) and (elastic or not copied):
                names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
                return cls("torchrun", *(int(env[name]) for name in names))
            if srun_step(env) is not None:
                size = env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]
                return cls("srun", int(env["SLURM_PROCID"]), int(size), int(env["SLURM_LOCALID"]))
        except KeyError as error:
            raise UsageError(
                f"{error.args[0]} is missing from the environment that torchrun or srun should "
                "have set: start with torchrun, with srun, or unset the others' variables"
            ) from None
        tasks = env.get("SLURM_NTASKS", "1")
        if tasks != "1":
            raise UsageError(
                f"this allocation has {tasks} tasks, but srun did not start this process: put "
                "srun in front of the command, or unset SLURM_NTASKS to use one process"
            )
        return cls("none", 0, 1, 0)

    def serves_store(self, env: Mapping[str, str]) -> bool:
        """Return whether the others meet here: the first of srun's tasks on the first node.

        Rank 0 may be on another node, by `--distribution` or by a topology.
        """
        first = self.local_rank == 0 and env.get("SLURM_NODEID", "0") == "0"
        return self.launcher == "srun" and first  # torchrun has a store of its own

    def cpus(self, env: Mapping[str, str]) -> int:
        """Return how many CPUs this rank has for itself."""
        if self.launcher == "srun":
            return int(env.get("SLURM_CPUS_PER_TASK", 1))
        # torchrun's ranks are processes of one task, and have its CPUs together.
        ranks = int(env["LOCAL_WORLD_SIZE"]) if self.launcher == "torchrun" else 1
        return max(int(env.get("SLURM_CPUS_PER_TASK", bound_cpus())) // ranks, 1)


def bound_cpus() -> int:
    """Return how many CPUs this process may use; on macOS and Windows, all that there are."""
    bound = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1


def srun_step(env: Mapping[str, str]) -> int | None:
    """Return the number of the step that srun started this process in, None if it did not."""
    step = int(env.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP))
    return step if 0 <= step < FIRST_SPECIAL_STEP else None


def rendezvous_address(env: MutableMapping[str, str]) -> str:
    """Return `MASTER_ADDR:MASTER_PORT`; under srun, fill in what is not set.

    Raises:
        UsageError: neither the environment nor Slurm tells.
    """
    if "MASTER_ADDR" not in env and "SLURM_STEP_NODELIST" in env:
        try:
            names = ask("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"])
        except UsageError as error:
            raise UsageError(
                f"MASTER_ADDR is not set and the first node not known ({error}): "
                "export MASTER_ADDR and MASTER_PORT before srun"
            ) from None
        env["MASTER_ADDR"] = names.split()[0]
    if "MASTER_PORT" not in env and "SLURM_JOB_ID" in env:
        number = int(env["SLURM_JOB_ID"]) + STRIDE * (srun_step(env) or 0)
        env["MASTER_PORT"] = str(PORTS[number % len(PORTS)])
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not set: start with torchrun, or export them")
    return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
