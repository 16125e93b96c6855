"""Plug-ins change nothing in a training: without them, it gives the same parameters and metrics."""

import shutil
from pathlib import Path

from metrics import reproducible

from .conftest import Job, srun

FLAGS = ("--max-steps=30", "--log-every=5", "--checkpoint-every=10", "--validate-every=15")


def train(project: Path, run_dir: Path, *flags: str) -> Job:
    """Train on two ranks."""
    return srun(project, run_dir, 2, *FLAGS, *flags).wait()


def test_a_project_without_plug_ins_trains_and_goes_on_as_with_them(
    project: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(project, plain)
    for path in (plain / "src/demo/plugins").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "__init__.py":
            path.unlink()
    with_them, without = train(project, tmp_path / "with"), train(plain, tmp_path / "without")
    assert "cost: " in with_them.log and "cost: " not in without.log
    assert with_them.summary["parameters_sha256"] == without.summary["parameters_sha256"]
    assert reproducible(with_them.metrics()) == reproducible(without.metrics())
    # A run that began with plug-ins goes on without them.
    shutil.copytree(with_them.run_dir, tmp_path / "longer")
    longer = train(plain, tmp_path / "longer", "--max-steps=40")
    assert longer.summary["resumed_from_step"] == 30
