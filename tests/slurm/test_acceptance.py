"""`make acceptance` on a cluster with faults: the row of a check names each fault."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pexpect
import psutil
import pytest
import torch
from renderer import TEMPLATE, copy_template, render_project, shrink

from scripts import site_record

from . import modules
from .cluster import Cluster, missing, wait_for
from .conftest import set_up

CPU = "--seconds=6 --dataset=synthetic --device=cpu"
NOTHING = "function slurm_job_modify() return slurm.SUCCESS end\n"
ACCEPTS = "function slurm_job_submit(job) return slurm.SUCCESS end\n"
REFUSES = """
function slurm_job_submit(job)
    if job.script == nil then return slurm.SUCCESS end
    slurm.log_user("ask for a project at the desk")
    return slurm.ERROR
end
"""
FORBIDS_REQUEUE = "function slurm_job_submit(job) job.requeue = 0 return slurm.SUCCESS end\n"


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    """Two nodes, and a filter that looks at each job."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(nodes=2, hasty=True, job_submit=ACCEPTS + NOTHING) as running:
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project for CPU cores and for GPUs of two nodes."""
    root = tmp_path_factory.mktemp("acceptance") / "demo"
    shrink(render_project(root, launch_modes=["cpu", "multi_node"], gpus_per_node=1))
    set_up(root)
    return root


def start(
    site: Cluster, root: Path, flags: str, said: IO[str], **env: str
) -> subprocess.Popen[str]:
    """Start `make acceptance` on the login node."""
    return subprocess.Popen(
        [*site.enter, f"--wd={root}", "--", "make", "acceptance", f"ARGS={flags}"],
        env={**site.environment, "STEP_SECONDS": "0.05", **env},
        stdout=said,
        stderr=subprocess.STDOUT,
        text=True,
    )


def accept(
    site: Cluster, root: Path, flags: str, **env: str
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Run `make acceptance`; return its exit code, and result and reason of each check."""
    with (root.parent / "said").open("w+") as said:
        code = start(site, root, flags, said, **env).wait(1200)
        said.seek(0)
        text = said.read()
    rows = re.findall(r"^(\S.*?) +(pass|FAIL) +\d:\d\d:\d\d(?:  (.*))?$", text, re.M)
    assert rows, text
    (report,) = re.findall(r"send (\S+\.txt)", text)
    sent = (root / report).read_text()
    assert all(result in sent for _, result, _ in rows)
    record = json.loads(record_of(root).read_text())
    assert [(each["name"], each["result"]) for each in record["checks"]] == [
        (name, result) for name, result, _ in rows
    ]
    left = [path.name for path in root.glob("logs/*") if not path.name.startswith("acceptance-")]
    assert not list(root.glob("runs/acceptance-*")) and set(left) <= {".gitkeep"}
    assert site.run("squeue", "--noheader").stdout == ""
    return code, {name: (result, why) for name, result, why in rows}


def record_of(root: Path) -> Path:
    """Return the newest record of the site."""
    return max(root.glob("logs/acceptance-test-*.json"))  # of the cluster called test


@pytest.mark.slow
@pytest.mark.shows("make acceptance *")
def test_a_new_site_from_its_module_to_its_acceptance(tmp_path: Path) -> None:
    """As docs/for-support-teams.md says: probe, module, `copier copy`, `make acceptance`."""
    system = "environment-modules"
    if reason := missing() or modules.missing(system):
        pytest.skip(reason)
    template = copy_template(tmp_path / "template")
    probe = f"python3 {TEMPLATE}/hooks/probe_cluster.py"
    made = f"{probe} cluster.yml && {probe} --site site --template {template} cluster.yml"
    use = "module use site/modulefiles && module load slurm-ddp"
    copier = Path(sys.executable).with_name("copier")
    (tmp_path / "system").mkdir()
    with (
        Cluster(nodes=2, hasty=True, gpus=1, cores=4) as cluster,
        modules.installed(cluster, system, tmp_path / "system"),
    ):
        cluster.run(
            "bash",
            "-lc",
            f"{made} && echo '  trackers: [tensorboard]' >> site/settings.yml",
            cwd=tmp_path,
        )
        login = [*cluster.enter, f"--wd={tmp_path}", "--", "bash", "-lc"]
        tools = "--data 'tools=[doctor, check_comm, acceptance]'"
        command = [*login, f"{use} && {copier} copy {tools} $SLURM_DDP_TEMPLATE demo"]
        terminal = pexpect.spawn(
            command[0], command[1:], env=cluster.environment, timeout=60, encoding="utf-8"
        )
        for word, answer in (("title", "Demo"), ("charged", ""), ("replace", "")):
            terminal.expect(word)
            time.sleep(0.5)  # until it reads the keys
            terminal.send(f"{answer}\r")
        said = terminal.read()
        assert "project is ready" in said, said
        root = shrink(tmp_path / "demo")
        set_up(root)
        code, rows = accept(cluster, root, CPU)
        slurm_version = cluster.run("sbatch", "--version").stdout
    assert code == 0 and {result for result, _ in rows.values()} == {"pass"}, rows
    assert "2 ranks on gloo: " in rows["check-comm"][1]
    trained = [name for name in rows if name.startswith("train ")]
    assert trained == ["train cpu", "train single_node", "train multi_node"]
    for name in ("stop and resume", "requeue"):
        assert rows[name][1].endswith("the same parameters")
    record = site_record.read(record_of(root))
    assert {name: record[name] for name in ("launch_modes", "launcher", "backend", "torch")} == {
        "launch_modes": "cpu single_node multi_node",
        "launcher": "srun",
        "backend": "gloo",
        "torch": torch.__version__,
    }
    assert record["slurm"] in slurm_version and "gpu" not in record
    assert socket.gethostname() not in json.dumps(record)


def test_a_filter_that_refuses_jobs(site: Cluster, root: Path) -> None:
    filter = site.folder / "job_submit.lua"
    try:
        filter.write_text(REFUSES + NOTHING)
        code, rows = accept(site, root, CPU)
    finally:
        filter.write_text(ACCEPTS + NOTHING)
    assert code
    assert rows["train cpu"][0] == rows["check-comm"][0] == rows["trackers"][0] == "FAIL"
    assert "sbatch refuses slurm/train_cpu.sbatch: " in rows["train cpu"][1]
    assert "ask for a project at the desk" in rows["train cpu"][1]
    assert rows["requeue"] == ("FAIL", "not run, because 'train multi_node' failed")


@pytest.mark.slow
def test_a_site_that_forbids_requeues(site: Cluster, root: Path) -> None:
    filter = site.folder / "job_submit.lua"
    try:
        filter.write_text(FORBIDS_REQUEUE + NOTHING)
        code, rows = accept(site, root, f"{CPU} --only 'stop and resume' requeue")
    finally:
        filter.write_text(ACCEPTS + NOTHING)
    assert code
    assert rows["stop and resume"][0] == "pass", rows
    assert rows["requeue"][0] == "FAIL"
    assert "not confirm" in rows["requeue"][1]


def test_the_file_to_send_has_no_secrets(site: Cluster, root: Path) -> None:
    """Also not those that only slurm/site.sh sets. A user's own log does not change."""
    own, mine = root / "slurm/site.sh", root / "mine.log"
    text = own.read_text()
    mine.write_text("mine\n")
    try:
        own.write_text(f"{text}export A_KEY='very-secret'\nfail \"boom $A_KEY \\e[31m\"\n")
        code, rows = accept(site, root, f"{CPU} --only 'train cpu'", SBATCH_OUTPUT=str(mine))
    finally:
        own.write_text(text)
    assert code and rows["train cpu"][1].startswith("error: boom ")
    sent = max(root.glob("logs/acceptance-*.txt")).read_text()
    assert "error: boom <A_KEY>" in sent and "very-secret" not in sent
    assert "boom" not in record_of(root).read_text()
    assert mine.read_text() == "mine\n"


def test_an_interface_that_other_nodes_do_not_reach(site: Cluster, root: Path) -> None:
    own = root / "slurm/site.sh"
    text = own.read_text()
    try:
        own.write_text(f"{text}export GLOO_SOCKET_IFNAME=lo\n")
        code, rows = accept(site, root, f"{CPU} --only check-comm 'train cpu'")
    finally:
        own.write_text(text)
    assert code
    assert rows["train cpu"] == ("pass", "100 steps")
    assert rows["check-comm"][0] == "FAIL" and "meet the others" in rows["check-comm"][1]
    record = site_record.read(record_of(root))
    assert record["torch"] == torch.__version__ and record["launch_modes"] == "cpu multi_node"
    assert record["checks"][1] | {"seconds": ""} == {
        "name": "train cpu",
        "result": "pass",
        "seconds": "",
    }


def test_a_node_without_the_gpu_that_slurm_gives(site: Cluster, root: Path) -> None:
    """PyTorch can't use the GPUs of this cluster."""
    flags = "--seconds=6 --dataset=synthetic --only"
    flags += " 'doctor on nodes' check-comm 'train multi_node' requeue"
    code, rows = accept(site, root, flags)
    assert code
    assert [result for result, _ in rows.values()] == ["FAIL"] * 4
    for name in ("doctor on nodes", "check-comm", "train multi_node"):
        assert "GPU" in rows[name][1] or "cuda" in rows[name][1], rows


def test_a_job_that_never_starts(site: Cluster, root: Path) -> None:
    """Slurm gives the reason why it waits."""
    site.run("scontrol", "update", "PartitionName=main", "MaxTime=1")
    try:
        code, rows = accept(site, root, f"{CPU} --only 'train cpu'")
    finally:
        site.run("scontrol", "update", "PartitionName=main", "MaxTime=1-00:00:00")
    assert code and rows["train cpu"][0] == "FAIL"
    assert re.search(r"\(Partition\w+\), and will never", rows["train cpu"][1]), rows


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGINT, "doctor"), (signal.SIGINT, "job"), (signal.SIGHUP, "job")],
)
def test_ctrl_c_cancels_the_jobs_of_the_checks_alone(
    site: Cluster, root: Path, tmp_path: Path, number: signal.Signals, when: str
) -> None:
    """Or the end of the terminal: as a terminal does, to make and to what it started."""
    other = site.run("sbatch", "--parsable", "--wrap=sleep 1000", cwd=tmp_path).stdout.strip()
    queue = ("squeue", "--noheader", "--format=%A")
    try:
        with (tmp_path / "said").open("w+") as said:
            running = start(site, root, CPU, said)
            started = psutil.Process(running.pid)

            def processes() -> list[psutil.Process]:
                found = started.children(recursive=True)
                return [each for each in found if each.name() in ("make", "python")]

            def is_time() -> bool:
                if when == "job":
                    return len(site.run(*queue).stdout.split()) > 1
                return len(processes()) == 3 and "doctor" in processes()[-1].cmdline()

            wait_for(is_time, lambda: said.name, 0.2)
            for process in processes():
                process.send_signal(number)
            running.wait(300)
            said.seek(0)
            text = said.read()
        assert running.returncode, text
        assert site.run(*queue).stdout.split() == [other], text
        cancelled = "no job" if when == "doctor" else r"\d+"
        assert re.search(f"interrupted: cancelling {cancelled}\n", text)
        assert not list(root.glob("runs/acceptance-*")) and "FAIL" not in text
    finally:
        site.run("scancel", other)
