"""Asks the NVIDIA driver for its version, and for the CUDA version that it supports."""

from contextlib import suppress


def too_old(built: str | None) -> str:
    """Return a text if the driver of this node is too old for torch, else "".

    It is also "" without such a driver. A driver supports all minor versions of its CUDA version.

    Args:
        built: `torch.version.cuda`.
    """
    # The library may be missing, or not find a driver, with any class of exception.
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        major, rest = divmod(pynvml.nvmlSystemGetCudaDriverVersion_v2(), 1000)
        if built and int(built.partition(".")[0]) > major:
            return (
                f"torch is built for CUDA {built}, but the driver of the GPUs supports CUDA "
                f"{major}.{rest // 10}: install a build for CUDA {major}, as docs/setup.md says"
            )
    return ""


def version() -> str | None:
    """Return the version of the NVIDIA driver of this node, None without such a driver."""
    with suppress(Exception):  # as above
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None
