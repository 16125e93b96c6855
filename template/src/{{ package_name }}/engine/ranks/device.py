"""The device and the communication backend of this rank."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..errors import UsageError
from . import driver
from .environment import Ranks

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
"""The backend of each type of GPU. In torch, AMD GPUs are also `cuda`, and RCCL is also `nccl`."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def choose_device(wanted: str, ranks: Ranks) -> torch.device:
    """Return this rank's device; if it is a GPU, make it the current device.

    Args:
        wanted: the setting `device`.
        ranks: the rank of this process.

    Raises:
        UsageError: the device is not available, its driver is too old for torch, or the node has
            fewer GPUs than ranks.
    """
    mps = torch.backends.mps.is_available() and ranks.size == 1
    if wanted == "auto":
        found = (kind for kind in BACKENDS if torch.get_device_module(kind).is_available())
        wanted = next(found, "mps" if mps else "cpu")
    if wanted == "mps" and not mps:
        raise UsageError(
            "device is mps, but this machine has no such GPU, or there are several ranks: use "
            "--device cpu"
        )
    if wanted not in BACKENDS:
        return torch.device(wanted)
    gpus = torch.get_device_module(wanted)
    visible = gpus.device_count() if gpus.is_available() else 0
    here = f"rank {ranks.rank} on {socket.gethostname()}"
    if not visible and (old := driver.too_old(torch.version.cuda)):
        raise UsageError(f"{here} can't use a GPU: {old}")
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
    # With srun, a task may see only its own GPU, or only the closest ones (--gpu-bind=closest). So
    # the local rank may be larger than the number of visible GPUs. `check_shared_gpus` finds ranks
    # that have the same GPU.
    device = torch.device(wanted, ranks.local_rank % visible)
    gpus.set_device(device)
    return device


def choose_backend(wanted: str, device: torch.device, strategy: str = "ddp") -> str:
    """Return the backend for a device; raise UsageError if `wanted` does not support it."""
    own = BACKENDS.get(device.type, "gloo")
    if wanted not in ("auto", "gloo", own):
        raise UsageError(
            f"backend {wanted} does not support device {device}: use --backend gloo or auto"
        )
    if wanted == "gloo" != own and strategy == "fsdp":
        # torch 2.11 crashes with a segmentation fault here.
        raise UsageError(
            f"strategy fsdp on GPUs needs backend {own}: use --backend auto, or --strategy ddp"
        )
    return own if wanted == "auto" else wanted


def bound_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the `device_id` for `init_process_group`.

    From PyTorch 2.15 on, NCCL connects there. Without `device_id`, it takes the GPU with the number
    that LOCAL_RANK or the rank suggests, not the current one. In older versions, the option makes
    NCCL connect at once, and hangs with some of them (https://github.com/pytorch/pytorch/issues/153960).
    """
    return device if backend == "nccl" and torch.__version__ >= "2.15" else None


def gpu_properties(device: torch.device) -> object:
    """Return torch's properties of a GPU; None for other devices."""
    if device.type not in BACKENDS:
        return None
    return torch.get_device_module(device.type).get_device_properties(device)


def describe_gpu(device: torch.device) -> dict[str, str | None]:
    """Return a GPU's name and the versions of its software, for JSON; {} for other devices."""
    if device.type not in BACKENDS:
        return {}
    found = {kind: getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")}
    found["name"] = torch.get_device_module(device.type).get_device_name(device)
    found["driver"] = driver.version()
    with suppress(Exception):  # a build without NCCL; for AMD GPUs, this is the version of RCCL
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return found


def gpu_id(device: torch.device) -> str | None:
    """Return the UUID of a GPU; None for other devices, or if the driver does not know it."""
    uuid = str(getattr(gpu_properties(device), "uuid", ""))
    return f"GPU-{uuid}" if uuid.strip("0-") else None  # a UUID of only zeros means unknown


def check_shared_gpus(gpus: Sequence[tuple[str, str | None]]) -> None:
    """Raise UsageError if two ranks have the same GPU.

    Args:
        gpus: the host name and the `gpu_id` of each rank.
    """
    for rank, (host, gpu) in enumerate(gpus):
        owner = gpus.index((host, gpu))
        if gpu and owner != rank:
            raise UsageError(
                f"ranks {owner} and {rank} on {host} have the same GPU ({gpu}), but each needs "
                "one of its own: start as many ranks a node as it has GPUs"
            )


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums: float64; on mps, which lacks it, float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context for a forward pass.

    bf16 has the same range as fp32. The range of fp16 is smaller, so networks.py scales the loss.
    """
    return torch.autocast(device.type, HALF.get(precision), enabled=precision in HALF)
