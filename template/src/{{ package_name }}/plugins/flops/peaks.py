"""The peak TFLOP/s of GPUs for dense matrix products, from the data sheets of their makers."""

import re
from typing import Any

import torch

# Pattern of a device's name: its number of multiprocessors, and TFLOP/s in bf16 and fp16, TF32 and
# fp32. If a data sheet has only numbers "with sparsity", half of them is used. A part of a device,
# such as a MIG slice, a partition of an MI300X or a stack of an Intel GPU, has the same share of
# the peak as of the multiprocessors.
PEAKS: dict[str, tuple[int, float | None, float | None, float]] = {
    "V100-SXM2": (80, 125, 15.7, 15.7),  # data sheet of V100
    "V100-PCIE": (80, 112, 14.0, 14.0),
    "T4": (40, 65, 8.1, 8.1),
    "A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": (108, 312, 156, 19.5),  # data sheet of A100
    "A30": (56, 165, 82, 10.3),  # data sheet of A30
    "A40": (84, 149.7, 74.8, 37.4),  # data sheet of A40
    "L40": (142, 181.05, 90.5, 90.5),  # data sheet of L40
    "L40S": (142, 362.05, 183, 91.6),  # data sheet of L40S
    "RTX 6000 Ada Generation": (142, 364.2, 182.1, 91.1),  # whitepaper of Ada's RTX GPUs
    "H100 80GB HBM3|H200|GH200 .*": (132, 989.4, 494.7, 66.9),  # whitepaper of Hopper: SXM5
    "H100 PCIe": (114, 756, 378, 51.2),  # whitepaper of Hopper
    "H100 NVL|H200 NVL": (132, 835.5, 417.5, 60),  # data sheets of H100 and H200
    "B200": (148, 2250, 1100, 75),  # data sheet of HGX B200, an eighth
    # AMD: fp32 is that of the matrix cores. For PyTorch, each die of an MI250X is a device.
    "MI100": (120, 92.3, None, 46.1),  # data sheet of MI100
    "MI210": (104, 181.0, None, 45.3),  # data sheet of MI210
    "MI250X": (110, 191.5, None, 47.9),  # data sheet of MI250X, half
    "MI300A": (228, 980.6, None, 122.6),  # data sheet of MI300A
    "MI300X|MI325X": (304, 1307.4, None, 163.4),  # data sheets of MI300X and MI325X
    # Intel: the number of vector engines. Each has 512, 256 and 32 FLOPs per cycle (oneAPI GPU
    # Optimization Guide, Intel Xe GPU Architecture), at 1.6 and 1.55 GHz (product pages).
    "GPU Max 1550": (1024, 838.9, 419.4, 52.4),
    "GPU Max 1100": (448, 355.5, 177.8, 22.2),
}
NO_BF16 = re.compile(r"V100|T4\b")  # and no TF32: the products are computed in fp32


def peak(gpu: Any, precision: str) -> float | None:  # noqa: ANN401 - as `gpu_properties` returns it
    """Return the peak TFLOP/s of a GPU in bf16, fp16, tf32 or fp32, or None if unknown."""
    for pattern, (whole, *figures) in PEAKS.items() if gpu else ():
        figure = figures[{"tf32": 1, "fp32": 2}.get(precision, 0)]
        if precision == "bf16" and NO_BF16.search(gpu.name):
            return None
        if figure and re.fullmatch(rf"(.* )?({pattern})( MIG .*| VF|-\d+GB|/.*)?", gpu.name):
            units = getattr(gpu, "max_compute_units", 0) or gpu.multi_processor_count
            return figure * units / whole
    return None


def fp32_precision(device: torch.device, convolutions: bool) -> str:
    """Return "tf32" if PyTorch computes fp32 products (or convolutions) in TF32, else "fp32".

    AMD's libraries use TF32 only with HIPBLASLT_ALLOW_TF32=1. This variable is not checked.
    """
    if torch.version.hip or device.type not in ("cuda", "xpu"):
        return "fp32"
    libraries = torch.backends
    backend: Any = libraries.mkldnn if device.type == "xpu" else libraries.cudnn
    products = getattr(backend, "matmul", libraries.cuda.matmul)
    used = getattr(backend, "conv", backend) if convolutions else products
    new = getattr(used, "fp32_precision", None)  # torch 2.9 or newer
    return "tf32" if new == "tf32" or (new is None and used.allow_tf32) else "fp32"
