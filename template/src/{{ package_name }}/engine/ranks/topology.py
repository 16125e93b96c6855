"""Finds GPUs that are far from the cores of their process, from /sys on Linux."""

from pathlib import Path

SYS, PROC = Path("/sys"), Path("/proc")


def far_from(properties: object) -> str:
    """Return a text with the cores near a GPU and the cores of this process, if none is in both.

    Otherwise, or if the address of the GPU on the PCI bus is unknown, return "".

    Args:
        properties: torch's properties of the GPU.
    """
    try:
        parts = "{0.pci_domain_id:04x}:{0.pci_bus_id:02x}:{0.pci_device_id:02x}.0"
        address = parts.format(properties)
        near = (SYS / "bus/pci/devices" / address / "local_cpulist").read_text().strip()
        status = (PROC / "self/status").read_text()
    except (AttributeError, OSError):  # not on Linux, or a container hides /sys
        return ""
    own = status.partition("Cpus_allowed_list:")[2].split()[0]
    if not near or _cores(near) & _cores(own):
        return ""
    return f"the GPU at {address} is near cores {near}, but this process has {own}"


def _cores(text: str) -> set[int]:
    """Return the core numbers in a list such as 0-3,8."""
    spans = [part.partition("-") for part in text.split(",")]
    return {n for first, _, last in spans for n in range(int(first), int(last or first) + 1)}
