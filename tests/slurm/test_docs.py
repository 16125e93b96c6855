"""The commands of docs/slurm.md do what the page says, on a real cluster."""

import re

from renderer import TEMPLATE

from .conftest import MakeProject
from .jobs import Job


def test_the_commands_of_the_page_on_slurm(make_project: MakeProject) -> None:
    project = make_project(trackers=[], launch_modes=["cpu"])
    text = (TEMPLATE / "docs/slurm.md").read_text("utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    tested = [line for line in commands if "(not tested: " not in line]
    assert len(tested) > 15
    job, jobs, failed = "", [], {}
    for command in tested:
        line, _, _ = command.partition("  #")
        line = line.replace("<package>", "demo").replace("JOBID", job)
        if "demo runs" in line:
            Job(project, job).wait_for_step(1)
        if line.startswith("tail -f"):
            line = f"timeout 2 {line} || (($? == 124))"
        done = project.cluster.run("bash", "-c", line, cwd=project.root, check=False)
        if done.returncode:
            failed[line] = done.stdout + done.stderr
        if submitted := re.search(r"Submitted batch job (\d+)", done.stdout):
            job = submitted[1]
            jobs.append(Job(project, job))
    assert not failed
    first, array, _, behind, later = jobs
    assert first.wait().state == later.wait().state == "CANCELLED"
    assert array.wait().state == behind.wait().state == "COMPLETED", behind.log
