"""All files of a checkpoint are on the disk before its name: a power cut loses no checkpoint."""

import shutil
from pathlib import Path

import compiler
import pytest

from .conftest import QUICK, spawn, tasks
from .storm import SOURCE


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is missing: run scripts/install-slurm.sh")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_files_and_names_are_synced_in_order(project: Path, tmp_path: Path, strategy: str) -> None:
    run = tmp_path / "runs/new/run"
    flags = ("--max-steps=20", "--log-every=5", "--checkpoint-every=10", f"--strategy={strategy}")
    command = ["demo", "train", f"--run-dir={run}", *QUICK, *flags]
    shim = {"LD_PRELOAD": str(compiler.build(SOURCE, tmp_path)), "TRACE": str(tmp_path / "trace")}
    job = spawn(project, tmp_path / "log", [command] * 2, tasks(2, **shim))
    job.run_dir = run
    job.wait()
    assert job.summary["global_step"] == 20
    lines = (tmp_path / "trace").read_text().splitlines()
    calls = [(call, Path(name)) for call, _, name in (line.partition(" ") for line in lines)]
    saved = [i for i, (call, path) in enumerate(calls) if call == "rename" and path.suffix == ".pt"]
    assert len(saved) == 3, "two, and the last one again after its validation"
    for start, end in zip([0, *saved], saved, strict=False):
        since, (_, path) = calls[start:end], calls[end]
        synced = [each.name for call, each in since if call == "fsync"]
        # The metrics by then, its own content, the folders that are new, and the shards.
        assert "metrics.jsonl" in synced, since
        assert any(name.startswith(f"{path.name}.") for name in synced), since
        for i, (call, each) in enumerate(since):
            if call == "mkdir" and tmp_path in each.parents and each.suffix != ".tmp":
                assert ("fsync", each.parent) in since[i:], since
        if shards := [each for each in since if each == ("rename", path.with_suffix(".shards"))]:
            where = since.index(shards[0])
            parts = ("__0_0.distcp", "__1_0.distcp", f"{path.stem}.shards.tmp")
            assert {("fsync", name) for name in parts} <= {(c, e.name) for c, e in since[:where]}
        assert bool(shards) == (strategy == "fsdp" and start != saved[1]), since
        # And then its name, before `latest` names it.
        assert calls[end + 1 :].index(("fsync", path.parent)) < calls[end + 1 :].index(
            ("rename", path.with_name("latest"))
        )
