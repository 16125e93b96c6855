"""The device and the backend of this rank."""

import os
import socket
from collections.abc import Sequence

import torch

from ..errors import UsageError
from .environment import Ranks

# Kinds of GPU, each with the backend of its ranks; AMD's are cuda to torch, and their RCCL is nccl.
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def choose_device(wanted: str, ranks: Ranks) -> torch.device:
    """Return this rank's device, and make it current where it is a GPU.

    Raises:
        UsageError: the device is not there, or this rank has none of its own.
    """
    if wanted == "auto":
        mps = torch.backends.mps.is_available() and ranks.size == 1
        there = (kind for kind in BACKENDS if torch.get_device_module(kind).is_available())
        wanted = next(there, "mps" if mps else "cpu")
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise UsageError("device is mps, but this machine has none: use --device cpu or auto")
        if ranks.size > 1:
            raise UsageError("device mps works for one process: use --device cpu for several ranks")
    if wanted not in BACKENDS:
        return torch.device(wanted)
    gpus = torch.get_device_module(wanted)
    visible = gpus.device_count() if gpus.is_available() else 0
    here = f"rank {ranks.rank} on {socket.gethostname()}"
    if not visible:
        variable = VISIBLE_DEVICES[wanted]
        shown = f"{variable}={os.environ.get(variable, 'unset')}"
        both = ""
        if torch.version.hip and "ROCR_VISIBLE_DEVICES" in os.environ:
            shown += f", ROCR_VISIBLE_DEVICES={os.environ['ROCR_VISIBLE_DEVICES']}"
            both = "unset one of the two, as each chooses among what the other leaves, "
        raise UsageError(
            f"device is {wanted}, but {here} sees no GPU ({shown}, torch {torch.__version__}): "
            f"{both}ask Slurm for GPUs, install a build of torch for them, or use --device cpu"
        )
    if ranks.local_rank >= visible and ranks.launcher != "srun":
        raise UsageError(
            f"{here} has local rank {ranks.local_rank}, but sees {visible} GPU(s): start as many "
            "ranks a node as it has GPUs, and without --gpus-per-task or --gpu-bind, which show a "
            "task of srun a part of them"
        )
    # srun may show each task its own GPU alone, or the closest ones (`--gpu-bind=closest`). Whether
    # two ranks have come to share one is looked at when they meet.
    device = torch.device(wanted, ranks.local_rank % visible)
    gpus.set_device(device)
    return device


def choose_backend(wanted: str, device: torch.device, strategy: str = "ddp") -> str:
    """Return the backend for a device.

    Raises:
        UsageError: the device, or FSDP on it, needs the other one.
    """
    own = BACKENDS.get(device.type, "gloo")
    if wanted not in ("auto", "gloo", own):
        kind = {backend: kind for kind, backend in BACKENDS.items()}[wanted]
        raise UsageError(
            f"backend {wanted} needs GPUs ({kind}), but the device is {device}: use gloo or auto"
        )
    if wanted == "gloo" != own and strategy == "fsdp":
        # torch 2.11 dies of a segmentation fault.
        raise UsageError(f"strategy fsdp on GPUs needs backend {own}: use auto, or --strategy ddp")
    return own if wanted == "auto" else wanted


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked for; nothing else need be waited for."""
    if device.type in BACKENDS:
        torch.get_device_module(device.type).synchronize(device)


def gpu_id(device: torch.device) -> str | None:
    """Return what a GPU is known by on all of its machine, None for another device."""
    if device.type not in BACKENDS:
        return None
    facts = torch.get_device_module(device.type).get_device_properties(device)
    uuid = str(getattr(facts, "uuid", ""))
    return f"GPU-{uuid}" if uuid.strip("0-") else None  # zeros where the driver knows none


def check_shared_gpus(gpus: Sequence[tuple[str, str | None]]) -> None:
    """Look for ranks that have the same GPU, which NCCL refuses without saying why.

    Args:
        gpus: the host and the `gpu_id` of each rank.

    Raises:
        UsageError: there are some.
    """
    owners: dict[tuple[str, str | None], int] = {}
    for rank, (host, gpu) in enumerate(gpus):
        owner = owners.setdefault((host, gpu), rank)
        if gpu and owner != rank:
            raise UsageError(
                f"ranks {owner} and {rank} on {host} have the same GPU ({gpu}), but each needs "
                "one of its own: start as many ranks a node as it has GPUs"
            )


def use_deterministic_algorithms() -> None:
    """Take the same results for the same input from every device, or an error where it has none.

    Source: PyTorch's notes on reproducibility; cuBLAS reads the variable when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the type to add numbers up in: float64, but float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass; bf16 has fp32's range, so needs no gradient scaler."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
