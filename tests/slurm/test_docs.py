"""The commands in the pages about Slurm work on a real cluster, and a run is drawn."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from PIL import Image
from renderer import TEMPLATE
from terminal import ENTER

from scripts.record import PROMPT, Recorder, draw

from .cluster import wait_for
from .conftest import MakeProject
from .jobs import Job

# README.md shows these runs:
#     PICTURE=docs/run pytest tests/slurm -k picture
#     PICTURE=docs/job.svg pytest tests/slurm -k recording
PICTURE = os.environ.get("PICTURE")
LONG = ("--dataset=synthetic", "--epochs=1000")


@pytest.mark.shows("srun --nodes=2 --ntasks=2 --label ip -br address")
def test_the_commands_of_the_page_on_slurm(make_project: MakeProject) -> None:
    project = make_project(trackers=[])
    commands = [
        command.line
        for name in ("slurm.md", "stops.md", "multi-node.md")
        for command in pages.commands((project.root / "docs" / name).read_text("utf-8"))
        if not command.needs
    ]
    # What needs GPUs, or takes long, is in other tests.
    commands = [line for line in commands if not re.search(r"slurm/(doctor|check_comm)\b", line)]
    assert len(commands) > 15
    spy = project.root / ".venv/bin/py-spy"
    spy.write_text('#!/bin/sh\nexec ps --no-headers --format args --pid "$3"\n')
    spy.chmod(0o755)

    job, jobs, said, failed = "", [], {}, {}
    for line in commands:
        if "py-spy dump" in line:
            job = project.sbatch("slurm/train_cpu.sbatch", *LONG).id
        if " runs" in line or "--overlap" in line:
            Job(project, job).wait_for_step(1)
        shown = line.replace("JOBID", job)
        if line.startswith("tail -f"):
            shown = f"timeout 2 {shown} || (($? == 124))"
        done = project.cluster.run("bash", "-c", shown, cwd=project.root, check=False, USER="root")
        said[line] = done.stdout
        if done.returncode:
            failed[shown] = done.stdout + done.stderr
        if "py-spy dump" in line or "--dependency" in line:
            project.cluster.run("scancel", job)  # enough of what it was for
        if submitted := re.search(r"Submitted batch job (\d+)", done.stdout):
            job = submitted[1]
            jobs.append(Job(project, job))
    assert not failed
    first, array, _, behind, later = jobs
    assert first.wait().state == later.wait().state == "CANCELLED"
    assert array.wait().state == behind.wait().state == "COMPLETED", behind.log
    # The ranks of that job, not of another.
    (ranks,) = (text.splitlines() for line, text in said.items() if "py-spy dump" in line)
    assert len(ranks) == 2 and all("demo train" in rank and LONG[1] in rank for rank in ranks)
    (addresses,) = (text for line, text in said.items() if "ip -br address" in line)
    found = set(re.findall(r"^\d: eth0\S* +UP +(\S+)", addresses, re.M))
    assert len(found) == 2 and all(each.startswith("10.77.0.") for each in found), addresses


@pytest.mark.shows("python -m demo report * --output *")
@pytest.mark.slow
def test_the_picture_of_a_run(make_project: MakeProject, digits: list[str], tmp_path: Path) -> None:
    """A job is preempted, resumes and is drawn beside another, as README.md shows it."""
    project = make_project(trackers=[])
    length, before = ("--epochs=5", 600) if PICTURE else ("--max-steps=400", 50)
    if PICTURE:  # of the network as it is rendered
        shutil.copy(TEMPLATE / "examples/digits/model.py", project.root / "src/demo/model.py")
    for name in ("uninterrupted", "preempted"):
        flags = (*digits, length, "--batch-size=64", "--log-every=10")
        job = project.sbatch("slurm/train_cpu.sbatch", *flags)
        if name == "preempted":
            job.wait_for_step(before)
            project.sbatch("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 1")
        assert job.wait().state == "COMPLETED", job.log
        job.run_dir.rename(project.root / "runs/demo" / name)
    drawn = Path(PICTURE or tmp_path / "run").absolute()
    script = TEMPLATE / "scripts/draw_run.py"
    subprocess.run([sys.executable, script, project.root / "runs/demo", drawn], check=True)
    for theme in ("light", "dark"):
        assert drawn.with_name(f"{drawn.name}-{theme}.svg").read_text().count("<path") > 20
    command = (
        ".venv/bin/python -m demo report runs/demo --x=time --metrics validation/accuracy train/lr"
    )
    picture = tmp_path / "run.png"
    project.cluster.run(*command.split(), f"--output={picture}", cwd=project.root)
    with Image.open(picture) as image:
        assert min(image.size) > 200


@pytest.mark.slow
def test_the_recording_of_a_job(make_project: MakeProject, tmp_path: Path) -> None:
    """A job is submitted, preempted and resumed, as the user's terminal shows it."""
    project = make_project(trackers=[])
    cluster = project.cluster
    # The default format of squeue is wider than the recording.
    columns = {"SQUEUE_FORMAT": "%.6i %.9P %.9j %.3t %.6M %R"}
    user = {**cluster.environment, **columns, "TERM": "linux", "PS1": PROMPT, "USER": "root"}
    variables = [f"{name}={value}" for name, value in user.items()]
    shell = ("env", "--ignore-environment", *variables, "bash", "--norc", "--noprofile")
    terminal = Recorder(*cluster.enter, f"--wd={project.root}", "--", *shell)
    terminal.wait_for(PROMPT)
    terminal.settle(0.5)
    terminal.run("sbatch slurm/train_cpu.sbatch --dataset synthetic --epochs 5")
    submitted = re.search(r"Submitted batch job (\d+)", "\n".join(terminal.screen.display))
    assert submitted
    job = Job(project, submitted[1])
    job.wait_for_step(50)
    terminal.run("squeue --me", 1.5)
    project.sbatch("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 15")
    wait_for(lambda: job.restarts == 1, lambda: job.log)
    terminal.type("# a job of higher priority comes", ENTER)
    terminal.read()
    terminal.settle(1)
    terminal.run("squeue --me", 1.5)
    terminal.run("grep stopped logs/*.out", 2.5)
    job.wait_for_step(200)
    terminal.run("squeue --me", 1.5)
    terminal.run("grep resuming logs/*.out", 2)
    assert job.wait().state == "COMPLETED", job.log
    terminal.run("tail -n 1 logs/*.out", 0)
    terminal.child.close()
    shown = "\n".join(terminal.screen.display)
    states = re.findall(rf"^ +{job.id} .* (R|PD) +\d", shown, re.M)
    assert states == ["R", "PD", "R"], shown
    assert "resuming" in shown and "accuracy" in shown, shown
    Path(PICTURE or tmp_path / "job.svg").write_text(draw(terminal.screens))
