"""`runs` knows the state of a job from its run and from Slurm."""

import json

from .jobs import Job, Project
from .trainings import FILTERS


def told(project: Project, job: Job, later: int) -> dict[str, str]:
    """Return what `runs` will print on the login node some seconds from now."""
    code = (
        "import json, pathlib, sys, time; from demo.tools.survey import survey\n"
        "(run,) = survey([pathlib.Path(sys.argv[1])], time.time() + int(sys.argv[2]))\n"
        "print(json.dumps({'status': run.status, 'note': run.note, 'job': run.state['job']}))"
    )
    python = project.root / ".venv" / "bin" / "python"
    command = (str(python), "-c", code, str(job.run_dir), str(later))
    done = project.cluster.run(*command, **FILTERS)
    assert not done.stderr
    return json.loads(done.stdout)


def test_a_job_is_seen_to_run_to_wait_and_to_be_lost(projects: dict[str, Project]) -> None:
    project = projects["srun"]
    training = ("--dataset=synthetic", "--epochs=1000", "--log-every=1", "--checkpoint-every=20")
    job = project.sbatch("slurm/train_cpu.sbatch", *training).wait_for_step(5)
    run = told(project, job, later=60)
    assert (run["status"], run["job"]) == ("running", job.id), run
    assert told(project, job, later=86400)["note"].endswith("Slurm: RUNNING (None)")

    project.cluster.run("scontrol", "requeue", job.id)
    job.wait_for_restart().wait_until("PENDING")
    run = told(project, job, later=86400)
    assert run["status"] == "queued" and "PENDING" in run["note"], run

    project.cluster.run("scancel", job.id)
    job.wait()
    run = told(project, job, later=60)
    assert "not in the queue" in run["note"] and run["status"] == "preempted", run

    killed = project.sbatch(
        "--no-requeue", "slurm/train_cpu.sbatch", *training, RESTARTS_IN_JOB="0"
    )
    killed.wait_for_step(5)
    killed.ranks()[0].kill()
    killed.wait()
    run = told(project, killed, later=60)
    assert run["status"] == "lost", f"{run}\n{killed.facts}\n{killed.log}"
