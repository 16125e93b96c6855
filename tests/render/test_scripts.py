"""The batch scripts run, with stand-ins for Slurm's commands that record how they are called."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from renderer import TEMPLATE, Renderer
from variants import SERVERS, TRACKERS

MONITORING = TEMPLATE / "template/slurm/monitoring"
COMMANDS = {
    "srun": (
        'printf "%s\\n" "$@" > srun.args; env > srun.env; sleep "${SRUN_SECONDS:-0}";'
        ' [[ -z ${RANK_FAILS:-} ]] || echo "$RANK_FAILS" > "$FAILURE_FILE";'
        ' exit "${SRUN_EXIT:-0}"'
    ),
    "scontrol": """case $* in
--version) echo "slurm-wlm ${SLURM_VERSION:-22.05.8}" ;;
"show config")
    echo "AuthInfo = ${AUTH_INFO:-(null)}"
    echo "PreemptType = preempt/${PREEMPT_TYPE:-partition_prio}"
    echo "SchedulerParameters = ${SCHEDULER:-(null)}" ;;
"show partition gpu") echo "PartitionName=gpu PreemptMode=${PREEMPT_MODE:-REQUEUE} State=UP" ;;
"show job "*) echo "JobId=$3 ArrayJobId=123450 Restarts=1 SubmitTime=1700000000" ;;
"show hostnames"*) printf "n%s\\n" {1..9} ;;
*) echo "$@" > requeued ;;
esac""",
    "squeue": 'echo "${JOB_STATE:-RUNNING 0 N/A None}"',
    "sinfo": 'printf "n%s\\n" {1..20}',
    "apptainer": 'env > image.env; echo "3.12.1 abc123 $PWD/src/demo"',
    "hostname": "echo n1",
    "tool": 'printf "%s\\n" "${0##*/}" "$@" > tool.args',
}
PYTHON = """#!/bin/bash
case $1 in
--version) [[ -z ${BROKEN:-} ]] && echo "Python 3.12.1" ;;
-c) echo 45678 ;;
*) printf "%s\\n" "$@" > python.args; exit "${SRUN_EXIT:-0}" ;;
esac
"""
# As a login session exports it. It has no exit code for a module that it does not know.
MODULE = """() {
case $1 in
load) [[ $2 == *missing* ]] || LOADEDMODULES+=:$2 ;;
swap) [[ $3 != *missing* ]] || return 1 ;;
-t) printf "%s\\n" /sw/missing: missing/ missing/10.0 "missing/1.0(default)" "missing/2 <L>" gcc
    return ;;
esac
echo "module $*"
}"""
SITE = "echo facts of the site\n"
# What Slurm says to the batch shell of a job of two nodes with four tasks and GPUs each.
JOB = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NAME": "demo",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_SUBMIT_HOST": "login1",
}
ONE_NODE = {
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "4",
}
# torchrun is one task on each node, with all the cores.
AGENTS = {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_CPUS_PER_TASK": "16"}


@dataclass
class Submission:
    """A rendered project on a machine where Slurm's commands are stand-ins."""

    root: Path

    def start(
        self, script: str, *args: str, log: int | IO = subprocess.PIPE, **job: str
    ) -> subprocess.Popen:
        """Start a script as Slurm starts it, in a job that differs from `JOB` as given."""
        facts = {**JOB, "SLURM_SUBMIT_DIR": str(self.root), "BASH_FUNC_module%%": MODULE, **job}
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", self.root / "slurm" / f"{script}.sbatch", *args],
            cwd=self.root,
            env={"PATH": path, "HOME": str(self.root), **{k: v for k, v in facts.items() if v}},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *args: str, **job: str) -> tuple[int, str]:
        """Run a script to its end; return its exit code and its log."""
        log = self.root / "job.out"
        with log.open("wb") as file:
            process = self.start(script, *args, log=file, **job)
            process.wait(timeout=60)
        return process.returncode, log.read_text()

    def noted(self, name: str) -> list[str]:
        """Return the lines that a stand-in noted, none if it never ran."""
        file = self.root / name
        return file.read_text().splitlines() if file.exists() else []


def submission(render: Renderer, root: Path, **answers: Any) -> Submission:  # noqa: ANN401
    """Render a project, and put the stand-ins where its scripts look for commands."""
    files = render({"package_name": "demo", **answers})
    tool = f"#!/bin/bash\n{COMMANDS['tool']}\n"
    files |= {f"bin/{name}": f"#!/bin/bash\n{text}\n" for name, text in COMMANDS.items()}
    files |= {f".venv/bin/{name}": tool for name in TRACKERS}
    files |= {".venv/bin/python": PYTHON, "slurm/site.sh": SITE, "container/image.sif": ""}
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if "bin" in target.parts:
            target.chmod(0o755)
    return Submission(root)


@pytest.fixture
def srun(render: Renderer, tmp_path: Path) -> Submission:
    """A project whose ranks are started by srun."""
    return submission(render, tmp_path / "project")


@pytest.fixture
def torchrun(render: Renderer, tmp_path: Path) -> Submission:
    """A project whose ranks are started by torchrun."""
    return submission(render, tmp_path / "project", launcher="torchrun")


def test_arguments_and_environment_reach_the_ranks(srun: Submission) -> None:
    code, log = srun.run("train_multi_node", "--epochs", "3", "--tags", "a b")
    assert code == 0, log
    *_, first = (i for i, word in enumerate(srun.noted("srun.args")) if word == "-m")
    expected = "-m demo train --device cuda --world-size 8 --epochs 3 --tags 'a b'"
    assert srun.noted("srun.args")[first:] == shlex.split(expected)
    assert "--cpus-per-task=4" in srun.noted("srun.args")
    assert {"MASTER_ADDR=n1", "OMP_NUM_THREADS=4"} <= set(srun.noted("srun.env"))
    # The ranks must not take the batch shell's word for who they are.
    assert not [line for line in srun.noted("srun.env") if line.startswith(("RANK=", "WORLD_SIZE"))]


@pytest.mark.parametrize(
    ("answers", "job", "options"),
    [
        ({}, {"SLURM_MEM_PER_CPU": "100"}, "cpus-per-task mem"),
        ({"memory": "64G"}, {"SLURM_MEM_PER_NODE": "65536"}, "cpus-per-task mem"),
        ({}, {}, "cpus-per-task"),  # Slurm does not count memory here
        ({"memory": "4G", "memory_scope": "cpu"}, {"SLURM_MEM_PER_CPU": "4096"}, "cpus-per-task"),
        ({"task_options": "srun"}, {"SLURM_MEM_PER_CPU": "100"}, None),
    ],
)
def test_the_ranks_know_what_the_next_job_may_change(
    render: Renderer,
    tmp_path: Path,
    answers: dict[str, str],
    job: dict[str, str],
    options: str | None,
) -> None:
    """sbatch refuses --mem for a script with --mem-per-cpu; some sites refuse more."""
    answers = {"setup": "full", "signal_lead_seconds": 77, **answers}
    project = submission(render, tmp_path / "project", **answers)
    job |= {"SLURM_CPUS_ON_NODE": "64"}
    for times, limit in (("1000 4600", "3600"), ("1000 N/A", ""), ("", "")):
        code, log = project.run("train_multi_node", **job, JOB_STATE=times)
        assert code == 0, log
        known = dict(line.split("=", 1) for line in project.noted("srun.env") if "=" in line)
        assert known.get("NEXT_OPTIONS") == options
        assert (known["TIME_LIMIT"], known["SIGNAL_LEAD"]) == (limit, "77")


def test_another_command_than_train_runs_on_the_same_resources(srun: Submission) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "123450", "SLURM_ARRAY_TASK_ID": "7"}
    words = ("evaluate", "runs/a b", "--split", "validation")
    for script in ("train_cpu", "train_multi_node"):
        code, log = srun.run(script, *words, SRUN_EXIT="140", **array)
        assert code == 140, log
        found = srun.noted("srun.args")
        device = ["--device", "cpu" if script == "train_cpu" else "cuda", "--world-size", "8"]
        assert found[found.index("demo") + 1 :] == [words[0], *device, *words[1:]]
        assert not srun.noted("requeued") and "to the queue" not in log
    srun.run("train_cpu", "train", "--epochs=3", **array)
    assert srun.noted("srun.args")[-2:] == ["--seed=7", "--epochs=3"]


def test_the_log_begins_with_the_facts(srun: Submission) -> None:
    _, log = srun.run("train_multi_node", LOADEDMODULES="cuda/12.4", SLURM_RESTART_COUNT="2")
    facts = dict(line.split(maxsplit=1) for line in log.replace("world size", "world").splitlines())
    assert facts["job"] == "123456 (demo), restart 2"
    assert facts["nodes"] == "2 (n[1-2])"
    assert facts["GPUs"] == "4 on each node"
    assert facts["world"].startswith("8, with 4 CPU cores")
    assert facts["master"] == "n1"
    assert facts["modules"] == "cuda/12.4"
    assert facts["interpreter"] == f"{srun.root}/.venv/bin/python (Python 3.12.1)"
    assert facts["commit"] == "none"


def test_torchrun_gets_the_rendezvous(torchrun: Submission) -> None:
    code, log = torchrun.run("train_multi_node", "--epochs", "3", **AGENTS)
    assert code == 0, log
    words = torchrun.noted("srun.args")
    assert "--ntasks-per-node=1" in words and "OMP_NUM_THREADS=4" in torchrun.noted("srun.env")
    expected = (
        "-m demo.tools.torchrun --nnodes=2 --nproc-per-node=4 --rdzv-id=123456 "
        "--rdzv-backend=c10d -m demo train --device cuda --world-size 8 --epochs 3"
    )
    assert words[words.index("-m") :] == expected.split()


def test_the_cpu_script_takes_the_ranks_that_it_is_given(
    srun: Submission, tmp_path: Path, render: Renderer
) -> None:
    code, log = srun.run("train_cpu", SLURM_NTASKS="6", SLURM_GPUS_ON_NODE="")
    assert code == 0 and "GPUs         none" in log
    words = srun.noted("srun.args")
    assert words[words.index("--device") :] == ["--device", "cpu", "--world-size", "6"]
    other = submission(render, tmp_path / "torchrun", launcher="torchrun")
    code, log = other.run("train_cpu", **AGENTS, RANKS_PER_NODE="8", SLURM_GPUS_ON_NODE="")
    assert code == 0 and " 16, with 2 CPU" in log


@pytest.mark.parametrize(
    ("script", "job", "words"),
    [
        ("train_multi_node", {"SLURM_JOB_ID": ""}, "Slurm job.*sbatch slurm/train_multi"),
        ("train_multi_node", {"SLURM_SUBMIT_DIR": "/"}, "project's root"),
        ("train_multi_node", {"SLURM_GPUS_ON_NODE": ""}, "gave no GPU"),
        ("train_multi_node", {"LOCAL_RANK": "0"}, "LOCAL_RANK or WORLD_SIZE is set.*srun"),
        ("train_multi_node", {"SLURM_GPUS_ON_NODE": "2"}, "8 tasks, but 2 GPUs.* 2 nodes"),
        ("train_multi_node", {"SLURM_NTASKS": "7"}, "7 tasks, but 4 GPUs"),
        ("train_multi_node", {"SLURM_TASKS_PER_NODE": "6,2"}, "8 tasks, but 4 GPUs"),
        ("train_single_node", {}, "gave 2 nodes"),
        ("train_multi_node", {"BROKEN": "yes"}, "/python .*start"),
        ("train_multi_node", {"MAX_REQUEUES": "ten"}, "MAX_REQUEUES is 'ten'"),
        ("train_multi_node", {"RESTARTS_IN_JOB": "-1"}, "RESTARTS_IN_JOB is '-1'"),
    ],
)
def test_srun_scripts_refuse_what_does_not_fit(
    srun: Submission, script: str, job: dict[str, str], words: str
) -> None:
    refused(srun, script, job, words)


@pytest.mark.parametrize(
    ("script", "job", "words"),
    [
        ("train_multi_node", {}, r"4\(x2\) tasks.* torchrun"),
        ("train_multi_node", {**AGENTS, "SLURM_CPUS_PER_TASK": "3"}, "3 CPU cores for 4 ranks"),
        ("train_multi_node", {**AGENTS, "SLURM_GPUS_ON_NODE": "0"}, "gave no GPU"),
        ("train_single_node", AGENTS, "gave 2 nodes"),
    ],
)
def test_torchrun_scripts_refuse_what_does_not_fit(
    torchrun: Submission, script: str, job: dict[str, str], words: str
) -> None:
    refused(torchrun, script, job, words)


def refused(project: Submission, script: str, job: Mapping[str, str], words: str) -> None:
    """Check that a job ends at once, on one line that says why."""
    code, log = project.run(script, **job)
    assert code == 1
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(words, errors[0]), errors
    assert not project.noted("srun.args")


def test_other_counts_are_welcome_where_they_fit(srun: Submission) -> None:
    """As with `sbatch --nodes=3` or `--gres=gpu:2 --ntasks-per-node=2`."""
    for nodes, gpus in ((3, 4), (1, 2), (2, 1)):
        per_node = f"{gpus}(x{nodes})" if nodes > 1 else f"{gpus}"
        code, log = srun.run(
            "train_multi_node",
            SLURM_JOB_NUM_NODES=f"{nodes}",
            SLURM_NTASKS=f"{nodes * gpus}",
            SLURM_TASKS_PER_NODE=per_node,
            SLURM_GPUS_ON_NODE=f"{gpus}",
        )
        assert code == 0 and f"world size   {nodes * gpus}," in log


def test_a_missing_environment_is_named_with_its_cure(srun: Submission) -> None:
    (srun.root / ".venv/bin/python").unlink()
    refused(srun, "train_multi_node", {}, "project/.venv/bin/python does not exist.*make setup")


def test_a_script_that_was_submitted_before_an_update_works_or_says_so(
    srun: Submission, tmp_path: Path
) -> None:
    """Slurm keeps its own copy of the script, elsewhere."""
    old = tmp_path / "slurm_script"
    (srun.root / "slurm/train_multi_node.sbatch").rename(old)
    os.symlink(old, srun.root / "slurm/old.sbatch")
    assert srun.run("old")[0] == 0
    srun.root.joinpath("srun.args").unlink()
    old.write_text(old.read_text().replace("common.sh 3", "common.sh 0"))
    refused(srun, "old", {}, "has changed since")


@pytest.mark.parametrize("code", [1, 2, 3])
def test_the_exit_code_of_the_ranks_is_that_of_the_job(srun: Submission, code: int) -> None:
    assert srun.run("train_single_node", **ONE_NODE, SRUN_EXIT=f"{code}")[0] == code
    assert not srun.noted("requeued")


@pytest.mark.parametrize("state", ["RUNNING 0 N/A None", "COMPLETING 0 N/A TimeLimit"])
@pytest.mark.parametrize("status", ["75", "137"])
def test_a_stopped_or_killed_job_goes_back_to_the_queue(
    srun: Submission, state: str, status: str
) -> None:
    code, log = srun.run("train_single_node", **ONE_NODE, SRUN_EXIT=status, JOB_STATE=state)
    assert code == int(status) and "to the queue" in log
    assert srun.noted("requeued") == ["requeue 123456"]


@pytest.mark.parametrize(
    ("facts", "seconds"),
    [
        ({}, 120),
        ({"AUTH_INFO": "socket=/run/munge,cred_expire=60"}, 60),
        ({"AUTH_INFO": "cred_expire=60", "SCHEDULER": "bf_interval=9,requeue_delay=5"}, 5),
    ],
)
def test_the_log_says_how_long_a_requeued_job_waits(
    srun: Submission, facts: dict[str, str], seconds: int
) -> None:
    _, log = srun.run("train_single_node", **ONE_NODE, **facts, SRUN_EXIT="75")
    assert f"at least {seconds} seconds\n" in log
    _, log = srun.run("train_single_node", **ONE_NODE, **facts, SRUN_EXIT="75", MAX_REQUEUES="0")
    assert "not requeued" in log and "for at least" not in log


GOOD = "0, GPU-a, 0, No, No, Not Active, Not Active"


@pytest.mark.parametrize(
    ("gpus", "others", "code", "named"),
    [
        ([GOOD], "", 0, []),
        # GPUs without ECC, of an old driver, and in MIG mode.
        (["0, GPU-a, [N/A], [N/A], [N/A], [Not Supported], [Not Supported]"], "", 0, []),
        (["Failed to initialize NVML: Function Not Found"], "", 13, []),
        ([GOOD, "1, GPU-b, 3, No, No, Not Active, Not Active"], "", 0, ["GPU 1 (GPU-b)"]),
        (["0, GPU-a, 0, Yes, No, Not Active, Not Active"], "", 0, ["GPU 0 (GPU-a)"]),
        (["0, GPU-a, 0, No, Yes, Not Active, Not Active"], "", 0, ["GPU 0 (GPU-a)"]),
        (["0, GPU-a, 0, No, No, Active, Active"], "", 0, ["GPU 0 (GPU-a)"] * 2),
        ([GOOD, GOOD.replace("a,", "b,")], "GPU-b, 4321", 0, ["GPU 0 (GPU-b)"]),
        (["Unable to determine the device handle: GPU is lost"], "", 15, ["is lost"]),
    ],
)
def test_faults_of_gpus_are_named(
    tmp_path: Path, gpus: list[str], others: str, code: int, named: list[str]
) -> None:
    """With what NVIDIA's command prints about them, or its exit code."""
    command, shown = tmp_path / "nvidia-smi", "\n".join(gpus)
    asked = f"[[ $1 == --query-gpu=* ]] && echo '{shown}' || echo '{others}'"
    command.write_text(f"#!/bin/bash\n{asked}\nexit {code}\n")
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURMD_NODENAME": "n7"}
    script = TEMPLATE / "template/slurm/preflight.sh"
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=True)
    found = done.stdout.splitlines()
    assert all(line.startswith("n7: ") for line in found)
    assert len(found) == len(named)
    assert all(name in line for name, line in zip(named, found, strict=True))
    assert bool(done.stderr) == (code == 13)


@pytest.mark.parametrize(("most", "asked"), [("3", ["requeue 123456"]), ("2", [])])
def test_the_guard_of_a_killed_batch_shell_keeps_to_the_cap(
    srun: Submission, most: str, asked: list[str]
) -> None:
    state = {"JOB_STATE": "COMPLETING 2 JobLaunchFailure", "SLURM_RESTART_COUNT": "2"}
    path = f"{srun.root / 'bin'}:{os.environ['PATH']}"
    guard = subprocess.Popen(
        ["bash", srun.root / "slurm/guard.sh"],
        cwd=srun.root,
        env={**JOB, **state, "MAX_REQUEUES": most, "PATH": path},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.stdout and guard.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 60
    while guard.poll() is None and time.monotonic() < deadline:  # it may not wait yet
        guard.terminate()
        time.sleep(0.1)
    os.killpg(guard.pid, signal.SIGKILL)  # its `sleep`
    assert guard.returncode == 0 and srun.noted("requeued") == asked


@pytest.mark.parametrize("code", [0, 1, 75])
def test_only_an_expedited_job_that_ended_well_is_kept_from_the_queue(
    render: Renderer, tmp_path: Path, code: int
) -> None:
    project = submission(render, tmp_path, requeue="expedited")
    for name in ("single_node", "multi_node", "cpu"):
        script = (project.root / f"slurm/train_{name}.sbatch").read_text()
        assert "\n#SBATCH --requeue=expedite\n" in script
    assert project.run("train_single_node", **ONE_NODE, SRUN_EXIT=f"{code}")[0] == code
    asked = {0: ["update JobId=123456 Requeue=0"], 1: [], 75: ["requeue 123456"]}
    assert project.noted("requeued") == asked[code]


@pytest.mark.parametrize(
    ("facts", "asks"),
    [
        # These requeue it a second time, if they are asked to requeue it, too.
        ({"SLURM_VERSION": "24.05.0"}, False),
        ({"SLURM_VERSION": "25.11.2", "PREEMPT_MODE": "GANG,REQUEUE"}, False),
        # The others would not requeue it, or who knows?
        ({"SLURM_VERSION": "23.11.4"}, True),
        ({"SLURM_VERSION": "24.11.5", "PREEMPT_MODE": "CANCEL"}, True),
        ({"SLURM_VERSION": "24.11.5", "PREEMPT_TYPE": "qos"}, True),
    ],
)
def test_a_preempted_job_is_requeued_once(
    srun: Submission, facts: dict[str, str], asks: bool
) -> None:
    state = "RUNNING 0 2026-01-02T03:04:05 None"
    code, log = srun.run("train_single_node", **ONE_NODE, **facts, SRUN_EXIT="75", JOB_STATE=state)
    assert code == 75 and "checkpoint, and back" in log
    assert srun.noted("requeued") == ["requeue 123456"] * asks


@pytest.mark.parametrize(
    ("left", "job", "words"),
    [
        ("N/A +280", {}, "time ends in 2"),
        ("N/A +400", {"NODE_IS_LOST": "1"}, "its nodes answer"),
        ("N/A N/A", {"NODE_IS_LOST": "1"}, "its nodes answer"),
        ("N/A +90000", {"RESTARTS_IN_JOB": "1"}, "started again 1 times"),
        ("1767323045 +3600", {}, "Slurm is ending"),
        ("N/A +3600", {"SRUN_KILLED": "1"}, "ranks are gone"),
        ("N/A +3600", {"RESTARTS_IN_JOB": "0"}, "exit code 137), and back"),
    ],
)
def test_killed_ranks_start_again_only_where_that_can_help(
    srun: Submission, left: str, job: dict[str, str], words: str
) -> None:
    (srun.root / "bin/srun").write_text(
        """#!/bin/bash
[[ $* == *--gres* ]] && exit 1 # Slurm refuses it in a job that asked for --gpus-per-node
[[ $* != *--overlap*--nodes=1* ]] || exit "${NODE_IS_LOST:-0}"
echo "$RUN_NUMBER $RESTART_IN_JOB" >> starts
[[ -n ${SRUN_KILLED:-} ]] || echo "srun: error: n2: task 0: Exited with exit code 76
srun: error: n1: task 1: Killed" >&2
exit 137
"""
    )
    preempted, _, seconds = left.partition(" +")
    end = f" {int(time.time()) + int(seconds)}" if seconds else ""
    state = f"RUNNING 0 {preempted}{end}"
    code, log = srun.run("train_single_node", **ONE_NODE, **job, JOB_STATE=state)
    assert code == 137 and words in log and "to the queue" in log, log
    restarted = "1" in job.get("RESTARTS_IN_JOB", "")
    assert srun.noted("starts") == ["0 0", "0 1"][: 1 + restarted]
    lost = re.search(r"lost \(exit code 137, on n1\) \d+ seconds", log)
    assert bool(lost) == restarted
    assert ("scontrol update JobId=123456 ExcNodeList=n1," in log) == restarted


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("n3: task 1: Exited with exit code 1\nsrun: error: n2: task 0: Terminated", 1),
        ("n3: task 1: Exited with exit code 127\nsrun: error: n2: tasks 0,2: Killed", 127),
        ("n3: task 1: Exited with exit code 76\nsrun: error: n2: task 0: Terminated", 143),
        ("n3: task 1: Exited with exit code 75\nsrun: error: n2: task 0: Bus error", 75),
    ],
)
def test_a_rank_that_fails_without_a_word_ends_the_job(
    srun: Submission, said: str, code: int
) -> None:
    """Such as where Python does not start: srun returns what became of those that it stopped."""
    text = (
        f'#!/bin/bash\n[[ $* == *--overlap* ]] && exit\necho "srun: error: {said}" >&2; exit 143\n'
    )
    (srun.root / "bin/srun").write_text(text)
    found, log = srun.run("train_single_node", **ONE_NODE)
    assert found == code and "on n2" not in log and "bad nodes" not in log
    assert bool(srun.noted("requeued")) == (code in (75, 143))


@pytest.mark.parametrize(("status", "code"), [("137", 1), ("1", 1), ("75", 75)])
def test_a_rank_that_fails_ends_the_job(srun: Submission, status: str, code: int) -> None:
    """Those that wait for it are killed. Slurm may lose what it says, but the log has its error."""
    error = "ValueError: a *fault*"
    found, log = srun.run("train_single_node", **ONE_NODE, SRUN_EXIT=status, RANK_FAILS=error)
    assert found == code and f"failed said: {error}" in log
    assert bool(srun.noted("requeued")) == (code == 75)
    assert not list((srun.root / "logs").glob("failed-*"))


def test_a_queue_that_refuses_the_job_is_named(srun: Submission) -> None:
    scontrol = srun.root / "bin/scontrol"
    scontrol.write_text("#!/bin/bash\n[[ $1 == show ]] && echo n1 SubmitTime=1\n")
    code, log = srun.run("train_single_node", **ONE_NODE, SRUN_EXIT="75")
    assert code == 75 and "not confirm" in log


def test_the_task_of_an_array_goes_back_alone(srun: Submission) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "123450", "SLURM_ARRAY_TASK_ID": "7"}
    code, log = srun.run("train_single_node", **ONE_NODE, **task, SRUN_EXIT="75")
    assert code == 75 and "task 7 of" in log
    assert srun.noted("requeued") == ["requeue 123450_7"]
    assert srun.noted("srun.args")[-1] == "--seed=7"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"JOB_STATE": "COMPLETING 0 N/A None"}, "job was cancelled"),
        ({"JOB_STATE": "COMPLETING 1 N/A job requeued in held state"}, "checkpoint, and back"),
        ({"SLURM_RESTART_COUNT": "10"}, "that was done 10 times"),
        ({"SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "2"}, "that was done 2 times"),
    ],
)
def test_it_stays_away_when_cancelled_or_too_often_there(
    srun: Submission, job: dict[str, str], words: str
) -> None:
    code, log = srun.run("train_single_node", **ONE_NODE, SRUN_EXIT="75", **job)
    assert code == 75 and words in log
    assert not srun.noted("requeued")


def test_without_requeue_the_log_says_how_to_go_on(render: Renderer, tmp_path: Path) -> None:
    project = submission(render, tmp_path, requeue=False)
    code, log = project.run("train_single_node", **ONE_NODE, SRUN_EXIT="75")
    assert code == 75 and "submit again with --run-dir" in log
    assert not project.noted("requeued")


def test_the_batch_shell_outlives_the_signal_that_slurm_sends_to_all(srun: Submission) -> None:
    process = srun.start("train_single_node", **ONE_NODE, SRUN_SECONDS="2", SRUN_EXIT="75")
    while not srun.noted("srun.env"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    log, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "to the queue" in log


def modules_and_site(log: str) -> list[str]:
    """Return what a log says of modules, and of the site's facts."""
    return [line for line in log.splitlines() if line.startswith(("module ", "facts"))]


def test_modules_are_loaded_in_order_and_none_for_gpus_on_the_cpu(
    render: Renderer, tmp_path: Path
) -> None:
    project = submission(render, tmp_path, modules="python/3.12\nCUDA/12.4\nnccl")
    _, log = project.run("train_multi_node")
    expected = ["module purge", "facts of the site", "module load python/3.12"]
    assert modules_and_site(log) == [*expected, "module load CUDA/12.4", "module load nccl"]
    _, log = project.run("train_cpu", SLURM_GPUS_ON_NODE="")
    assert modules_and_site(log) == expected
    script = render({"modules": "rocm/6.4\ncudnn/9\npython/3.12"})["slurm/train_cpu.sbatch"]
    assert "python/3.12" in script and "rocm" not in script and "cudnn" not in script


def test_other_commands_of_modules_run_in_order_or_end_the_job(
    render: Renderer, tmp_path: Path
) -> None:
    lines = "use /opt/cuda/modules\n--force purge\ngcc/13\nswap gcc/13 gcc/14"
    project = submission(render, tmp_path / "good", modules=lines)
    _, log = project.run("train_cpu", **ONE_NODE)
    expected = ["use /opt/cuda/modules", "--force purge", "load gcc/13", "swap gcc/13 gcc/14"]
    assert modules_and_site(log)[2:] == [f"module {line}" for line in expected]
    bad = submission(render, tmp_path / "bad", modules="gcc/13\nswap gcc/13 missing/1")
    refused(bad, "train_cpu", ONE_NODE, "module swap gcc/13 missing/1 failed")


def test_tasks_by_srun_alone_are_not_those_of_the_shell_at_hand(
    render: Renderer, tmp_path: Path
) -> None:
    """Such as a shell in another allocation."""
    project = submission(render, tmp_path, task_options="srun")
    job = {
        **ONE_NODE,
        "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_ON_NODE": "16",
    }
    code, log = project.run("train_single_node", **job)
    assert code == 0 and " 4, with 4 CPU" in log
    few = {**job, "SLURM_CPUS_ON_NODE": "15"}
    other = submission(render, tmp_path / "other", task_options="srun")
    refused(other, "train_single_node", few, "gave 15 CPU cores on n1")


def test_every_script_loads_the_modules(render: Renderer, tmp_path: Path) -> None:
    answers = {"trackers": list(SERVERS), "sweep": "optuna"}
    servers = {"monitoring_servers": list(SERVERS), "container": "apptainer"}
    project = submission(render, tmp_path, modules="gcc/13", **answers, **servers)
    scripts = sorted((tmp_path / "slurm").rglob("*.sbatch"))
    assert len(scripts) == len([*(TEMPLATE / "template/slurm").rglob("*.sbatch.jinja")])
    for script in scripts:
        name = str(script.relative_to(tmp_path / "slurm").with_suffix(""))
        _, log = project.run(name, **ONE_NODE, PYTHONPATH="/modules", SLURM_EXPORT_ENV="NONE")
        assert modules_and_site(log) == ["module purge", "facts of the site", "module load gcc/13"]
        if name != "build_image":
            assert not [
                line for line in project.noted("image.env") if line.startswith("PYTHONPATH")
            ]


def test_the_login_sessions_modules_are_kept_if_so_answered(
    render: Renderer, tmp_path: Path
) -> None:
    project = submission(render, tmp_path, modules="gcc/13", module_purge=False)
    _, log = project.run("train_multi_node")
    assert modules_and_site(log) == ["module reload", "facts of the site", "module load gcc/13"]
    # It is in the list already, so the list does not change.
    project.root.joinpath("slurm/site.sh").write_text("module() { :; }")
    assert project.run("train_multi_node", LOADEDMODULES="zlib/1:gcc/13.2")[0] == 0


def test_a_module_that_cannot_be_loaded_ends_the_job(render: Renderer, tmp_path: Path) -> None:
    project = submission(render, tmp_path, modules="missing/1.0\npython/3.12", module_purge=False)
    words = "missing/1.0 can't be loaded.* missing/1.0 missing/2 missing/10.0$"
    refused(project, "train_multi_node", {}, words)
    facts = {"BASH_FUNC_module%%": ""}
    refused(project, "train_multi_node", facts, "module command .*n1")


@pytest.mark.parametrize(
    ("text", "code"), [("false\n", 1), ("return 3\n", 3), ("if true; then\n", r"\d")]
)
def test_facts_of_the_site_that_fail_end_the_job(
    srun: Submission, text: str, code: int | str
) -> None:
    (srun.root / "slurm/site.sh").write_text(text)
    refused(srun, "train_multi_node", {}, f"slurm/site.sh .*exit code {code}")


def test_the_ranks_have_the_environment_of_the_script(srun: Submission) -> None:
    (srun.root / "slurm/site.sh").write_text("export GLOO_SOCKET_IFNAME=ib0\n")
    given = {"PYTHONPATH": "/modules", "SLURM_EXPORT_ENV": "NONE"}
    assert srun.run("train_multi_node", **given)[0] == 0
    env = srun.noted("srun.env")
    assert "GLOO_SOCKET_IFNAME=ib0" in env
    (snapshot,) = (srun.root / ".snapshots").iterdir()
    assert {f"PYTHONPATH={snapshot}/src", f"CODE_DIR={snapshot}", "PYTHONNOUSERSITE=1"} <= {*env}
    assert not [line for line in env if line.startswith("SLURM_EXPORT_ENV")]


@pytest.mark.parametrize(
    ("script", "job", "accelerator", "flag"),
    [
        ("train_single_node", ONE_NODE, "nvidia", {"--nv"}),
        ("train_single_node", ONE_NODE, "amd", {"--rocm"}),
        ("train_single_node", ONE_NODE, "intel", set()),
        ("train_cpu", {"SLURM_GPUS_ON_NODE": ""}, "nvidia", set()),
    ],
)
def test_the_image_runs_the_ranks(
    render: Renderer,
    tmp_path: Path,
    script: str,
    job: dict[str, str],
    accelerator: str,
    flag: set[str],
) -> None:
    root, shared, named = tmp_path / "demo", tmp_path / "shared", tmp_path / "named"
    project = submission(
        render, root, container="apptainer", accelerator=accelerator, shared_root=str(shared)
    )
    named.mkdir()
    arguments = (f"--data-dir={named}", "--run-dir", str(root / "runs/a"), "--lr", "0.1", "--tags=")
    code, log = project.run(script, *arguments, **job)
    assert code == 0, log
    assert f"interpreter  {root}/container/image.sif (Python 3.12.1)" in log
    assert f"code         {root}/src/demo\ncommit       abc123\n" in log
    words = project.noted("srun.args")
    assert "--mpi=none" in project.noted("srun.args")
    assert {"--nv", "--rocm"} & set(words) == flag
    device = {"train_cpu": "cpu"}.get(script, "xpu" if accelerator == "intel" else "cuda")
    assert words[words.index("--device") + 1] == device
    bound = [following for word, following in itertools.pairwise(words) if word == "--bind"]
    assert bound == [str(root), str(shared), str(named)] and shared.is_dir()
    image = words.index("container/image.sif")
    assert words[image + 1 : image + 4] == ["python", "-m", "demo"]
    (root / "container/image.sif").unlink()
    project.root.joinpath("srun.args").unlink()
    refused(project, script, job, "image.sif does not exist")


def test_a_sweep_gets_the_line_that_starts_a_trial(render: Renderer, tmp_path: Path) -> None:
    project = submission(render, tmp_path, sweep="optuna")
    code, log = project.run("sweep", "--trials", "7", **ONE_NODE, SRUN_EXIT="75")
    assert code == 75 and "to the queue" in log
    words = project.noted("python.args")
    assert words[:6] == ["-m", "demo", "sweep", "--trials", "7", "--"]
    python = f"{project.root}/.venv/bin/python"
    expected = f"{python} -m demo train --device cuda --world-size 4"
    assert words[6] == "srun" and words[-8:] == expected.split()


def test_a_sweep_of_wandb_wants_a_name(render: Renderer, tmp_path: Path) -> None:
    project = submission(render, tmp_path, sweep="wandb")
    refused(project, "sweep", ONE_NODE, "name the sweep")
    assert project.run("sweep", "ada/net/x1", **ONE_NODE)[0] == 0
    assert project.noted("python.args")[:5] == ["-m", "demo", "sweep", "ada/net/x1", "--"]


def test_the_check_of_communication_starts_all_ranks(srun: Submission) -> None:
    assert srun.run("check_comm", "--timeout", "9", SRUN_EXIT="3")[0] == 3
    assert srun.noted("srun.args")[-5:] == ["-m", "demo", "check-comm", "--timeout", "9"]


@pytest.mark.parametrize(
    "name", sorted(path.name.partition(".")[0] for path in MONITORING.glob("*.sbatch.jinja"))
)
def test_the_script_of_a_server_starts_it(render: Renderer, tmp_path: Path, name: str) -> None:
    tracker = name.removesuffix("_server")
    project = submission(render, tmp_path, trackers=[tracker], monitoring_servers=[tracker])
    code, log = project.run(f"monitoring/{name}", "--experiment", "a b", **ONE_NODE)
    assert code == 0, log
    expected = ["-m", "demo", "monitor", "serve", name.replace("_", "-"), "--experiment", "a b"]
    assert project.noted("python.args") == expected


def test_what_would_limit_or_bind_the_ranks_is_left_out(srun: Submission) -> None:
    given = {"SLURM_TIMELIMIT": "1", "OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0"}
    given["PYTHONINSPECT"] = "1"
    assert srun.run("train_single_node", **ONE_NODE, **given)[0] == 0
    assert not {line.partition("=")[0] for line in srun.noted("srun.env")} & {*given}


def test_options_that_srun_refuses_are_a_fault(srun: Submission) -> None:
    assert srun.run("train_single_node", **ONE_NODE, SRUN_EXIT="255")[0] == 1
    assert not srun.noted("requeued")
