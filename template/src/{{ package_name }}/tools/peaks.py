"""Peak throughputs of GPUs: TFLOP/s of dense matrix products, after the data sheets of the makers."""

import os
import re

import torch

# What the name of a device has: its multiprocessors, and TFLOP/s in bf16, TF32 and fp32. Where data
# sheets of NVIDIA have figures "with sparsity", these are half of them. A part of a device, such as
# a MIG slice, a partition or a stack, has a share of the multiprocessors and of the peak.
PEAKS: dict[str, tuple[int, float | None, float | None, float]] = {
    # Volta has no bf16, and computes in fp32 where TF32 is allowed. V100 data sheet, 2020.
    "V100-SXM": (80, None, 15.7, 15.7),
    "V100-PCIE": (80, None, 14.0, 14.0),
    "A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": (108, 312, 156, 19.5),  # A100 data sheet, 2022
    r"A30\b": (56, 165, 82, 10.3),  # A30 data sheet
    r"A40\b": (84, 149.7, 74.8, 37.4),  # A40 data sheet
    r"L40\b": (142, 181.05, 90.5, 90.5),  # L40 data sheet
    r"L40S\b": (142, 362.05, 183, 91.6),  # L40S data sheet
    "RTX 6000 Ada": (142, 364.2, 182.1, 91.1),  # whitepaper of Ada, appendix on RTX 6000
    "H100 80GB HBM3": (132, 989.4, 494.7, 66.9),  # SXM5; whitepaper of Hopper, table of H100
    "H100 PCIe": (114, 756, 378, 51.2),  # the same table
    "H100 NVL": (132, 835.5, 417.5, 60),  # H100 data sheet, 2024
    "H200 NVL": (132, 835.5, 417.5, 60),  # H200 data sheet
    r"H200(?! NVL)": (132, 989.4, 494.7, 66.9),  # H200 data sheet, to the digits of H100's
    "GH200": (132, 989.4, 494.7, 66.9),  # GH200 data sheet, the same
    "NVIDIA B200": (148, 2250, 1100, 75),  # data sheet of HGX B200, an eighth of it
    # AMD: fp32 by the matrix cores. Of a card with two dies, torch has each as a device.
    "MI100": (120, 92.3, None, 46.1),  # data sheet of MI100
    "MI210": (104, 181.0, None, 45.3),  # data sheets of MI200
    "MI250X": (110, 191.5, None, 47.9),
    "MI300A": (228, 980.6, None, 122.6),  # data sheet of MI300A
    "MI300X|MI325X": (304, 1307.4, None, 163.4),  # data sheets of MI300X and MI325X
    # Intel: vector engines at 1.6 and 1.55 GHz, each with 512, 256 and 32 FLOPs a cycle (oneAPI GPU
    # Optimization Guide, "Intel Xe GPU Architecture"). A device is a stack, or a card of two.
    r"GPU Max 1550": (1024, 838.9, 419.4, 52.4),
    r"GPU Max 1100": (448, 355.5, 177.8, 22.2),
}


def device_name(device: torch.device) -> str:
    """Return what torch calls a device, such as "NVIDIA H100 80GB HBM3"."""
    if device.type not in ("cuda", "xpu"):
        return device.type
    return torch.get_device_module(device.type).get_device_name(device)


def peak(device: torch.device, precision: str) -> float | None:
    """Return TFLOP/s of a device at its peak in "bf16", "tf32" or "fp32"; None if not known."""
    name = device_name(device)
    for pattern, (whole, *figures) in PEAKS.items():
        figure = figures[("bf16", "tf32", "fp32").index(precision)]
        if figure and re.search(rf"\b({pattern})", name):
            found = torch.get_device_module(device.type).get_device_properties(device)
            units = found.max_compute_units if device.type == "xpu" else found.multi_processor_count
            return figure * units / whole
    return None


def float32_precision(device: torch.device, convolution: bool) -> str:
    """Return how torch computes with fp32 tensors on a device: "fp32" or "tf32".

    It depends on `torch.set_float32_matmul_precision` and, for convolutions, on torch.backends.
    """
    if torch.version.hip:  # AMD's libraries use TF32 only for products, and only if asked to
        if convolution or os.environ.get("HIPBLASLT_ALLOW_TF32") != "1":
            return "fp32"
    backends = torch.backends
    products, convolutions = backends.cuda.matmul, getattr(backends.cudnn, "conv", backends.cudnn)
    if device.type == "xpu":
        products, convolutions = (getattr(backends.mkldnn, x, None) for x in ("matmul", "conv"))
    used = convolutions if convolution else products
    # torch 2.9 replaced `allow_tf32`.
    new = getattr(used, "fp32_precision", None)
    allowed = new == "tf32" if new else getattr(used, "allow_tf32", False)
    return "tf32" if allowed else "fp32"
