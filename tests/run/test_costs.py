"""What runs cost, added up from their folders and from Slurm's accounts."""

import json
from pathlib import Path

import pytest

from .conftest import Launch

# Of another user's file: each alone, in the usage of a run's only attempt.
FOREIGN = {
    "huge time": {"wall_seconds": 1e299},
    "huge hours": {"gpu_hours": 1e299},
    "huge integer": {"rates": {"samples_per_second": 10**400}},
    "infinite": {"seconds": dict.fromkeys(("steps", "data"), float("inf"))},
    "no number": {"rates": {"samples_per_second": float("nan")}},
}


def write_usage(run: Path, number: int, **values: object) -> None:
    """Write the usage of an attempt, like that of attempt 1 but for some values."""
    usage = json.loads((run / "attempts/1-usage.json").read_text())
    (run / f"attempts/{number}-usage.json").write_text(json.dumps(usage | values))


def test_usage_of_others_neither_hangs_nor_ends_a_command(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo.engine.run import usage
    from demo.tools import show

    run = launch(1, "--max-steps=5").run_dir
    (run / "attempts" / f"{10**15}.json").touch()
    whole = usage.total(run)
    assert whole and whole.attempts == 1
    for values in FOREIGN.values():
        write_usage(run, 2, **values)
        assert usage.total(run) == whole, values
    write_usage(run, 1, seconds=dict.fromkeys(whole.seconds, 0))
    assert show.main([str(run)]) == 0
    assert "usage" in capsys.readouterr().out
