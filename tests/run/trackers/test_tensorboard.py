"""What only TensorBoard does."""

from pathlib import Path

from ..conftest import PACED, Launch, srun
from .conftest import Past
from .tensorboard import opened

FLAGS = ("--max-steps=100", "--checkpoint-every=1000", "--log-every=5", "--trackers=tensorboard")


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_in_its_place(
    project: Path, launch: Launch, tmp_path: Path
) -> None:
    stopped = srun(project, tmp_path / "run", 1, *FLAGS, **PACED)
    stopped.interrupt(30, "tensorboard", saved=False)
    events = opened(launch(1, *FLAGS).run_dir)
    assert [event.step for event in events.Scalars("train/loss")] == list(range(5, 101, 5))


def test_a_file_in_its_place_is_the_reason(blocked: Past) -> None:
    for said in blocked.said[:2]:
        assert "is off (FileExistsError" in said
