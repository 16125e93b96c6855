"""Old checkpoints are removed by the rules, and a finished run does not start again."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import PACED, Job, Launch, command, srun

# Validations at 10, 20, 30 and 33, of which 33 is the best; checkpoints of keep_every at 12 and 24.
KEPT = ("--max-steps=33", "--validate-every=10", "--checkpoint-every=10", "--keep-every=12")
KEPT += ("--log-every=1", "--keep-checkpoints=2")


@pytest.fixture(scope="module")
def finished(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of one process, with checkpoints of every kind."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return srun(project, folder, 1, *KEPT).wait()


@pytest.fixture
def run(finished: Job, tmp_path: Path) -> Path:
    """A copy of the run, whose best step is 24."""
    folder = shutil.copytree(finished.run_dir, tmp_path / "root" / "mnist" / "run")
    (folder / "checkpoints" / "best").write_text("step-00000024.pt")
    return folder


def prune(project: Path, *arguments: object) -> tuple[int, list[str]]:
    """Return the exit code and the lines of `prune`."""
    done = command(project, "prune", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (done.stdout + done.stderr).splitlines()


def steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return sorted(int(path.stem[5:]) for path in run.glob("checkpoints/step-*.pt"))


def usage(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk, as du counts them."""
    du = subprocess.run(["du", "--block-size=1", "-s", folder], capture_output=True, text=True)
    return int(du.stdout.split()[0])


def test_checkpoints_of_keep_every_stay(finished: Job) -> None:
    assert finished.summary["global_step"] == 33
    assert steps(finished.run_dir) == [12, 24, 30, 33]
    assert set(finished.summary) >= {"validations_since_best"}


@pytest.mark.shows("python -m demo prune *")
@pytest.mark.parametrize(("keep", "left"), [("best", [12, 24]), ("last", [12, 24, 33])])
def test_what_stays_of_a_finished_run(project: Path, run: Path, keep: str, left: list[int]) -> None:
    from demo.engine.checkpoint_files import find

    aside = run / "earlier-1" / "checkpoints"
    aside.mkdir(parents=True)
    shutil.copy(run / "checkpoints/step-00000030.pt", aside)
    (run / "checkpoints/step-00000033.shards").mkdir()
    (run / "checkpoints/step-00000033.shards/part").write_bytes(bytes(2**20))
    (run / "checkpoints/notes.txt").write_text("mine")
    attempts = sorted(os.listdir(run / "attempts"))
    root, before = run.parent.parent, usage(run)

    code, dry = prune(project, root, f"--keep={keep}", "--dry-run")
    assert (code, usage(run), steps(run)) == (0, before, [12, 24, 30, 33])
    code, said = prune(project, root, f"--keep={keep}")
    assert code == 0 and steps(run) == left
    freed = (before - usage(run)) / 2**20
    assert said[-1].startswith(f"{freed:.1f} MiB freed") and freed > 0.1
    assert dry[-1] == said[-1].replace("freed", "would be freed")
    assert dry[0] == said[0].replace("removed", "would remove")
    stays = ", ".join(map(str, left[::-1]))
    assert f"checkpoint(s), {freed:.1f} MiB; kept: step {stays}" in said[0]
    assert prune(project, root, f"--keep={keep}")[1][0].endswith(": nothing to remove")

    assert not list(aside.iterdir()) and (run / "checkpoints/notes.txt").exists()
    assert (run / "checkpoints/latest").read_text() == f"step-{left[-1]:08}.pt"
    assert find(run).stem == "step-00000024"
    assert find(run, "latest").stem == f"step-{left[-1]:08}"
    assert sorted(os.listdir(run / "attempts")) == attempts


def test_the_best_may_go(project: Path, run: Path) -> None:
    from demo.engine.checkpoint_files import find

    (run / "checkpoints/best").write_text("step-00000030.pt")
    assert prune(project, run, "--keep=last")[0] == 0
    assert steps(run) == [12, 24, 33] and find(run).stem == "step-00000033"
    assert not (run / "checkpoints/best").exists()


@pytest.mark.parametrize("name", ["step-00000020.pt", "20", "../step-00000024.pt", ""])
def test_a_best_that_names_no_checkpoint_is_an_error(project: Path, run: Path, name: str) -> None:
    """It may be a mistake of the user, who then wants another checkpoint than the newest."""
    from demo.engine.checkpoint_files import find
    from demo.engine.errors import UsageError

    before = steps(run)
    (run / "checkpoints/best").write_text(name)
    code, said = prune(project, run)
    assert code == 1 and "best names" in said[0] and steps(run) == before, said
    with pytest.raises(UsageError, match="best names"):
        find(run)
    assert find(run, "latest").stem == "step-00000033"


def test_a_best_that_an_editor_wrote_is_used(project: Path, run: Path) -> None:
    (run / "checkpoints/best").write_text("step-00000012.pt\n")
    assert prune(project, run)[0] == 0
    assert steps(run) == [12, 24]
    (run / "checkpoints/best").write_text("step-00000024.pt\r\n")
    assert prune(project, run)[0] == 0 and steps(run) == [12, 24]


def test_a_damaged_checkpoint_is_not_the_one_that_stays(project: Path, run: Path) -> None:
    os.truncate(run / "checkpoints/step-00000024.pt", 100)
    code, said = prune(project, run)
    assert code == 1 and "left alone: " in said[0] and "is damaged" in said[0]
    assert steps(run) == [12, 24, 30, 33]
    os.truncate(run / "checkpoints/step-00000033.pt", 100)
    assert prune(project, run, "--keep=last")[0] == 0
    assert steps(run) == [12, 24, 30]


def test_a_run_that_lives_or_may_go_on_is_left_alone(
    project: Path, tmp_path: Path, run: Path
) -> None:
    flags = ("--max-steps=100000", "--checkpoint-every=1", "--log-every=1")
    job = srun(project, tmp_path / "root/mnist/lives", 1, *flags, **PACED)
    job.wait_for_step(5)
    # It says that it has finished, and its process lives.
    state = json.loads((job.run_dir / "status.json").read_text())
    copy = shutil.copytree(run, tmp_path / "root/mnist/busy")
    newest = max(copy.glob("attempts/?.json"))
    shutil.copy(job.run_dir / "attempts/1.json", newest)
    code, said = prune(project, tmp_path / "root")
    assert code == 0, said
    assert any("mnist/lives: left alone: process" in line for line in said), said
    assert any(f"mnist/busy: left alone: process {state['pid']}" in line for line in said)
    assert steps(copy) == [12, 24, 30, 33] and steps(run) == [12, 24]
    job.stop(5)
    there = steps(job.run_dir)
    assert prune(project, job.run_dir)[1][0].endswith("left alone: preempted")
    for status, shown in (("running", ""), ("failed", "failed"), ("odd\x1b", "")):
        (job.run_dir / "status.json").write_text(json.dumps({**state, "status": status}))
        said = prune(project, job.run_dir)[1]
        assert f"left alone: {shown}" in said[0] and "\x1b" not in said[0]
    assert steps(job.run_dir) == there


def test_only_runs_that_were_silent_for_long(project: Path, run: Path) -> None:
    state = json.loads((run / "status.json").read_text())
    assert prune(project, run, "--older=1h")[1][0].startswith("0.0 MiB freed")
    old = {**state, "updated": state["updated"] - 2 * 86400}
    (run / "status.json").write_text(json.dumps(old))
    assert prune(project, run, "--older=3d")[1][0].startswith("0.0 MiB freed")
    code, said = prune(project, run, "--older=3")
    assert code == 1 and said[0].startswith("error: --older is 3")
    assert steps(run) == [12, 24, 30, 33]
    prune(project, run, "--older=2d")
    assert steps(run) == [12, 24]


@pytest.mark.parametrize("linked", ["mnist", "mnist/run", "mnist/run/checkpoints"])
def test_no_link_is_followed(project: Path, run: Path, tmp_path: Path, linked: str) -> None:
    path, mine = tmp_path / "root" / linked, tmp_path / "mine"
    path.rename(mine)
    path.symlink_to(mine)
    code, said = prune(project, tmp_path / "root")
    assert code == (linked == "mnist/run/checkpoints"), said
    assert len(list(mine.rglob("step-*.pt"))) == 4
    if code:
        assert said[0].endswith("/checkpoints is a link")


@pytest.fixture
def another_user(project: Path, run: Path) -> Iterator[Path]:
    """A folder with a run that this process can read but not change, and one of its own."""
    from demo.tools import prune  # noqa: F401 - others may not read the project

    folder = Path(tempfile.mkdtemp())
    other = shutil.copytree(run, folder / "run")
    mine = shutil.copytree(run, folder / "mine")
    folder.chmod(0o755)
    for path in (other, *other.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    nobody = 65534
    if os.geteuid() == 0:
        for path in (mine, *mine.rglob("*")):
            os.chown(path, nobody, nobody)
        os.setresuid(nobody, nobody, 0)
    else:
        for path in (other, *other.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    os.setresuid(*[os.getresuid()[2]] * 3)
    for path in folder.rglob("*/"):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=str)
def test_what_is_not_permitted_is_said_of_that_run_alone(
    project: Path,
    another_user: Path,
    more: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from demo.tools import prune

    assert prune.main([str(another_user), *more]) == 1
    said = capsys.readouterr().out.splitlines()
    (other,) = (line for line in said if "/run: " in line)
    assert other.endswith("not write there")
    (mine,) = (line for line in said if "/mine: " in line)
    assert f"{'would remove' if more else 'removed'} 2 checkpoint(s)" in mine
    assert steps(another_user / "run") == [12, 24, 30, 33]


def test_a_kill_at_any_moment_leaves_a_checkpoint(
    project: Path, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from demo.engine.checkpoint_files import find
    from demo.tools import prune as module

    class Killed(BaseException):
        pass

    for keep, best in (("best", "24"), ("last", "30")):
        for moment in range(20):
            copy = shutil.copytree(run, tmp_path / f"{keep}-{moment}")
            (copy / "checkpoints/best").write_text(f"step-000000{best}.pt")
            calls = iter(range(100))

            def kill(name: str, at: int = moment, calls: Iterator[int] = calls) -> None:
                if name in ("os.rename", "os.remove", "shutil.rmtree") and next(calls) == at:
                    raise Killed

            audit.append(kill)
            try:
                module.main([str(copy), f"--keep={keep}"])
                done = True
            except Killed:
                done = False
            audit.clear()
            assert find(copy) and find(copy, "latest"), (keep, moment)
            assert module.main([str(copy), f"--keep={keep}"]) == 0
            assert steps(copy) == ([12, 24] if keep == "best" else [12, 24, 33])
            assert not list(copy.glob("checkpoints/*30*")), "its digests stayed"
            if done:
                break
        assert done and moment > 5


audit: list = []
sys.addaudithook(lambda name, _: [each(name) for each in audit] and None)


def test_a_finished_run_does_not_begin_again(
    project: Path, run: Path, tmp_path: Path, launch: Launch
) -> None:
    name = str(run.relative_to(tmp_path))
    before = (run / "summary.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    assert prune(project, run)[0] == 0
    again = launch(2, *KEPT, name=name)
    assert again.codes == [0, 0], again.log
    assert "finished at step 33" in again.log
    shutil.rmtree(run / "checkpoints")
    for flags in ((), ("--max-steps=20",), ("--epochs=2",)):
        again = launch(1, *KEPT, *flags, name=name)
        assert "nothing is left" in again.log and again.codes == [0]
    assert before == ((run / "summary.json").read_bytes(), (run / "metrics.jsonl").read_bytes())
    longer = launch(1, *KEPT, "--max-steps=50", name=name)
    assert longer.codes == [1]
    assert "33, and no checkpoint" in longer.log
    # It can be started again, and what was there is kept.
    again = launch(1, *KEPT, "--resume=never", name=name)
    assert again.summary["resumed_from_step"] is None
    assert again.summary["parameters_sha256"] == json.loads(before[0])["parameters_sha256"]
    assert (run / "earlier-1/summary.json").read_bytes() == before[0]


def test_a_longer_run_goes_on_from_what_is_left(
    project: Path, run: Path, tmp_path: Path, launch: Launch
) -> None:
    flags = (*KEPT, "--schedule=constant", "--warmup=0")
    whole = launch(1, *flags, "--max-steps=40", name="whole")
    short = launch(1, *flags, name="short")
    (short.run_dir / "checkpoints/best").write_text("step-00000024.pt")
    assert prune(project, short.run_dir)[0] == 0
    longer = launch(1, *flags, "--max-steps=40", name="short")
    assert "step-00000024.pt: step 24, epoch 1" in longer.log
    assert longer.summary["resumed_from_step"] == 24
    assert longer.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert [line["step"] for line in longer.metrics()] == [line["step"] for line in whole.metrics()]


def test_a_run_that_patience_ended_does_not_begin_again(
    project: Path, tmp_path: Path, launch: Launch
) -> None:
    flags = ("--validate-every=2", "--patience=2", "--lr=1e-30", "--max-steps=100")
    first = launch(1, *flags)
    best, end = first.summary["best_step"], first.summary["global_step"]
    assert (end, first.summary["validations_since_best"]) == (best + 4, 2) and end < 100
    assert prune(project, first.run_dir)[0] == 0
    assert steps(first.run_dir) == [best]
    assert f"finished at step {end}" in launch(1, *flags).log
    onward = launch(1, *flags, "--patience=4")
    assert onward.summary["resumed_from_step"] == best
    assert onward.summary["global_step"] > end


def test_a_command_line_without_runs(project: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, said = prune(project, tmp_path / "empty")
    assert code == 0 and said[0].startswith("0.0 MiB freed")
    code, said = prune(project, tmp_path / "nowhere")
    assert code == 1 and said[0].startswith(f"error: {tmp_path}/nowhere is not")
