"""The device and the backend of this rank."""

import os
import socket
from collections.abc import Sequence

import torch

from ..errors import UsageError
from .environment import Ranks

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
"""The kinds of GPU, each with its backend. In torch, an AMD GPU is `cuda`, and RCCL is `nccl`."""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def choose_device(wanted: str, ranks: Ranks) -> torch.device:
    """Return this rank's device; a GPU becomes the current one.

    Raises:
        UsageError: the device is not available, or this rank has no GPU of its own.
    """
    mps = torch.backends.mps.is_available() and ranks.size == 1
    if wanted == "auto":
        found = (kind for kind in BACKENDS if torch.get_device_module(kind).is_available())
        wanted = next(found, "mps" if mps else "cpu")
    if wanted == "mps" and not mps:
        raise UsageError(
            "device is mps, but this machine has none, or there are several ranks: use --device cpu"
        )
    if wanted not in BACKENDS:
        return torch.device(wanted)
    gpus = torch.get_device_module(wanted)
    visible = gpus.device_count() if gpus.is_available() else 0
    here = f"rank {ranks.rank} on {socket.gethostname()}"
    if not visible:
        names = [f"{name}={os.environ[name]}" for name in VISIBLE_DEVICES if name in os.environ]
        raise UsageError(
            f"device is {wanted}, but {here} sees no GPU "
            f"({', '.join([*names, f'torch {torch.__version__}'])}): ask Slurm for GPUs, install a "
            "build of torch for them, or use --device cpu"
        )
    if ranks.local_rank >= visible and ranks.launcher != "srun":
        raise UsageError(
            f"{here} has local rank {ranks.local_rank}, but sees {visible} GPU(s): start as many "
            "ranks a node as it has GPUs, without --gpus-per-task and --gpu-bind"
        )
    # srun may show each task its own GPU only, or the closest ones (`--gpu-bind=closest`).
    # check_shared_gpus finds ranks that share a GPU.
    device = torch.device(wanted, ranks.local_rank % visible)
    gpus.set_device(device)
    return device


def choose_backend(wanted: str, device: torch.device, strategy: str = "ddp") -> str:
    """Return the backend for a device; raise UsageError if `wanted` does not serve it."""
    own = BACKENDS.get(device.type, "gloo")
    if wanted not in ("auto", "gloo", own):
        raise UsageError(
            f"backend {wanted} needs other GPUs, but the device is {device}: use gloo or auto"
        )
    if wanted == "gloo" != own and strategy == "fsdp":
        # torch 2.11 ends with a segmentation fault.
        raise UsageError(f"strategy fsdp on GPUs needs backend {own}: use auto, or --strategy ddp")
    return own if wanted == "auto" else wanted


def gpu_properties(device: torch.device) -> object:
    """Return what torch says of a GPU, None for another device."""
    if device.type not in BACKENDS:
        return None
    return torch.get_device_module(device.type).get_device_properties(device)


def gpu_id(device: torch.device) -> str | None:
    """Return the UUID of a GPU, None for another device or if the driver does not tell."""
    uuid = str(getattr(gpu_properties(device), "uuid", ""))
    return f"GPU-{uuid}" if uuid.strip("0-") else None  # only zeros: unknown


def check_shared_gpus(gpus: Sequence[tuple[str, str | None]]) -> None:
    """Raise UsageError if ranks have the same GPU, by the host and the `gpu_id` of each."""
    for rank, (host, gpu) in enumerate(gpus):
        owner = gpus.index((host, gpu))
        if gpu and owner != rank:
            raise UsageError(
                f"ranks {owner} and {rank} on {host} have the same GPU ({gpu}), but each needs "
                "one of its own: start as many ranks a node as it has GPUs"
            )


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums: float64, but float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass. bf16 has the range of fp32: no scaler is needed."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
