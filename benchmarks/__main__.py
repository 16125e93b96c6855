"""Runs benchmarks: `python -m benchmarks [WHAT...]`, or `make benchmarks` for all of them."""

import argparse
import importlib
import os
from pathlib import Path

from . import compare, report
from .ranks import Setting

SECTIONS = (
    "steps",
    "defaults",
    "loading",
    "resuming",
    "accuracy",
    "startup",
    "packing",
    "checkpoints",
    "rendering",
    "growth",
)


def main() -> int:
    """Run the chosen benchmarks; write results/<name>.json and the report, and print tables."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each contestant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--ranks", type=int, help="number of ranks; default: two on CPU, one for each GPU"
    )
    parser.add_argument(
        "--data-dir", default=os.environ.get("MNIST_DIR"), help="folder of MNIST's files"
    )
    parser.add_argument("--name", help="name of the file of results; default: the device")
    arguments = parser.parse_args()
    gpu = arguments.device == "cuda"
    setting = Setting(
        device=arguments.device,
        ranks=arguments.ranks or (torch.cuda.device_count() if gpu else 2),
        threads=1,
        data_dir=Path(arguments.data_dir) if arguments.data_dir else None,
    )
    path = report.RESULTS / f"{arguments.name or arguments.device}.json"
    for section in arguments.what or SECTIONS:
        print(section, flush=True)
        module = importlib.import_module(f".{section}", __package__)
        for comparison in module.measure(setting, arguments.repeats):
            compare.save(path, comparison)
            print(comparison.as_markdown(), flush=True)
    report.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
