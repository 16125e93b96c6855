"""What `make test` leaves out, and why: `make test-all` runs it.

Whole files and folders are listed here; a single test has the mark `full`. Tests with the mark
`slow` vary a faster test, and only `make test-nightly` runs them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

# Why it is left out, and the files below tests/.
FULL: Mapping[str, Sequence[str]] = {
    "Jobs on a Slurm cluster, which needs root": ("slurm",),
    "Trackers with their servers, and their searches for settings": (
        "run/test_sweep.py",
        "run/test_trackers.py",
        "run/test_wandb_sweep.py",
        "run/trackers",
    ),
    "The weekly look for a new version of the template": ("update/test_template_job.py",),
    "Commands that check a cluster or watch runs, and messages when a run ends": (
        "run/test_acceptance.py",
        "run/test_check_comm.py",
        "run/test_doctor.py",
        "run/test_notify.py",
        "run/test_runs.py",
    ),
    "Environments that are set up as users do, every command and every tree of modules": (
        "run/test_every_command.py",
        "run/test_pre_commit.py",
        "run/test_setup.py",
        "run/test_tools.py",
        "run/test_variants.py",
    ),
    "Runs of the complete examples and of each recipe": (
        "run/test_docs.py",
        "run/test_examples.py",
        "run/test_recipes.py",
        "run/test_images.py",
        "run/test_large_data.py",
    ),
    "Faults at random moments, shared file systems, damaged and hostile files": (
        "render/test_hostile.py",
        "run/test_bad_input.py",
        "run/test_foreign_files.py",
        "run/test_power_cut.py",
        "run/test_shared_disk.py",
        "run/test_storm.py",
    ),
    "Reports, profiles, figures of costs and of larger models": (
        "run/test_benchmarks.py",
        "run/test_costs.py",
        "run/test_flops.py",
        "run/test_picture.py",
        "run/test_profile.py",
        "run/test_prune.py",
        "run/test_recompute.py",
        "run/test_report.py",
        "run/test_usage.py",
        "run/test_weights.py",
    ),
}


def is_full(test: Path) -> bool:
    """Say whether the file of a test is among those that `make test` leaves out."""
    inside = test.relative_to(Path(__file__).parent)
    return any(inside.is_relative_to(path) for paths in FULL.values() for path in paths)
