"""The same command works with each launcher, and logs which ranks it found."""

import json
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from .conftest import QUICK, Job, edited, fork_server, spawn, srun, tasks, torchrun


def test_every_launcher_trains_the_same_parameters(project: Path, tmp_path: Path) -> None:
    """srun's tasks, torchrun on one node, and srun's torchruns on two nodes: two ranks each."""
    jobs = [
        srun(project, tmp_path / "srun", 2).wait(),
        torchrun(project, tmp_path / "torchrun", 1, 2).wait(),
        nodes(project, tmp_path / "torchrun-nodes").wait(),
    ]
    summaries = [job.summary for job in jobs]
    for summary in summaries:
        assert (summary["world_size"], summary["backend"], summary["device"]) == (2, "gloo", "cpu")
        assert (summary["global_step"], len(summary["hostnames"])) == (30, 2)
    assert len({summary["parameters_sha256"] for summary in summaries}) == 1


def test_a_low_limit_of_open_files_is_raised(project: Path, tmp_path: Path) -> None:
    # From their first moment on: a rank raises its limit once.
    starter = fork_server().process.pid
    limits = resource.prlimit(starter, resource.RLIMIT_NOFILE)
    # Eight ranks need about 50 each.
    resource.prlimit(starter, resource.RLIMIT_NOFILE, (44, limits[1]))
    try:
        job = srun(project, tmp_path / "run", 8, "--max-steps=1", "--batch-size=8")
    finally:
        resource.prlimit(starter, resource.RLIMIT_NOFILE, limits)
    assert job.wait().summary["world_size"] == 8


def test_one_process_without_a_launcher(project: Path, tmp_path: Path) -> None:
    command = ["demo", "train", f"--run-dir={tmp_path / 'run'}", *QUICK]
    summary = spawn(project, tmp_path / "run", [command], [{}]).wait().summary
    assert (summary["world_size"], summary["backend"]) == (1, None)


@pytest.mark.parametrize("signalled", [None, 1], ids=["all", "first"])
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_torchrun_outlives_a_signal_and_passes_on_the_exit_code(
    project: Path, tmp_path: Path, number: signal.Signals, signalled: int | None
) -> None:
    """Slurm signals all processes of a step (torchrun and the ranks), or only torchrun."""
    job = torchrun(project, tmp_path / "run", 1, 2, "--max-steps=2000", "--log-every=1")
    job.wait_for_step(5)
    for process in job.family()[:signalled]:
        process.send_signal(number)
    assert job.wait().codes == [75], job.log
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.pt"))


def test_torchrun_binds_ranks_where_the_job_has_gpus(project: Path, tmp_path: Path) -> None:
    command = ["demo.tools.torchrun", "--help"]
    env = {"NUMA_BINDING": "wrong", "SLURM_GPUS_ON_NODE": "2", "PATH": str(tmp_path)}
    job = spawn(project, tmp_path / "run", [command], [env]).wait()
    assert job.codes == [1] and job.log.startswith("error: NUMA_BINDING needs numactl")
    (tmp_path / "numactl").touch(0o755)
    job = spawn(project, tmp_path / "run", [command], [env]).wait()
    assert job.codes == [2] and "numa_binding: invalid" in job.log
    job = spawn(project, tmp_path / "run", [command], [env | {"SLURM_GPUS_ON_NODE": "0"}]).wait()
    assert job.codes == [0], job.log


def test_torchrun_does_not_claim_a_checkpoint_that_was_not_written(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    job = torchrun(project, tmp_path / "run", 1, 2, "--max-steps=2000", "--log-every=1")
    job.wait_for_step(5)
    job.processes[0].terminate()
    assert job.wait().codes == [1], job.log
    assert "checkpoint could not" in job.log


def test_torchrun_on_a_node_whose_ranks_end_last_passes_on_their_exit_code(
    project: Path, tmp_path: Path
) -> None:
    """The other node's torchrun has left by then, and with it the store of all."""
    late = f"__import__('time').sleep(5 * os.path.exists('{tmp_path}/' + os.environ['RANK']))"
    copy = edited(
        project, tmp_path, "__main__.py", "sys.exit(code)", f"{late}\n        sys.exit(code)"
    )
    job = torchrun(copy, tmp_path / "run", 2, 1, "--max-steps=2000", "--log-every=1")
    job.wait_for_step(5)
    for process in map(psutil.Process, (each.pid for each in job.processes)):
        (endpoint,) = (word for word in process.cmdline() if word.startswith("--rdzv-endpoint"))
        serves = (psutil.CONN_LISTEN, int(endpoint.rpartition(":")[2]))
        if serves not in [
            (each.status, each.laddr.port) for each in process.net_connections() if each.laddr
        ]:
            (rank,) = process.children()
    (tmp_path / rank.environ()["RANK"]).touch()
    rank.send_signal(signal.SIGUSR2)
    assert job.wait().codes == [75, 75], job.log
    assert "shutdown the rendezvous" in job.log and "Traceback" not in job.log


# Five ranks on three nodes; a rank of n2 never starts, and none of n3.
NODES = ("n1", "n1", "n2", "n2", "n3")
MISSING = ("3 seconds, 2 of 5", "rank 3, 4 (n2 has 1); none came from n3: ", "sbatch --exclude=n3")


@pytest.mark.parametrize("absent", [{3, 4}, {1, 3, 4}])
def test_ranks_that_never_come_are_named(project: Path, tmp_path: Path, absent: set[int]) -> None:
    failed, bad = tmp_path / "failed", tmp_path / "bad"
    shared = {"JOB_NODES": "n1,n2,n3", "SLURM_STEP_NUM_NODES": "3"}
    shared |= {"FAILURE_FILE": str(failed), "BAD_NODES_FILE": str(bad)}
    envs = [
        {**env, "SLURMD_NODENAME": NODES[rank]}
        for rank, env in enumerate(tasks(len(NODES), **shared))
        if rank not in absent
    ]
    command = ["demo", "train", f"--run-dir={tmp_path}/run", *QUICK, "--meet-timeout=3"]
    job = spawn(project, tmp_path / "run", [command] * len(envs), envs).wait()
    assert job.codes == [1] * len(envs), job.log
    lines = {line for line in job.log.splitlines() if line.startswith("error: ")}
    if absent == {3, 4}:
        (line,) = lines
        assert all(each in line for each in MISSING), line
    else:
        assert "1, 3, 4; none came from n3" in lines.pop()
    assert failed.exists(), "the job would be requeued, and end there again"
    assert bad.read_text() == "n3\n" and not (tmp_path / "run").exists()


def nodes(
    project: Path, run_dir: Path, *flags: str, come: tuple[int, ...] = (0, 1), **env: str
) -> Job:
    """Start torchrun as srun does on two nodes, or on one of them."""
    command = ["demo.tools.torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    command += ["-m", "demo", "train", f"--run-dir={run_dir}", *QUICK, *flags]
    shared = {"JOB_NODES": "n1,n2", "SLURM_STEP_NUM_NODES": "2", **env}
    envs = [
        {**task, "SLURM_LOCALID": "0", "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{node + 1}"}
        for node, task in enumerate(tasks(2, **shared))
    ]
    return spawn(project, run_dir, [command] * len(come), [envs[node] for node in come])


@pytest.mark.parametrize("place", ["flag", "file"])
def test_a_torchrun_that_never_comes_is_named(project: Path, tmp_path: Path, place: str) -> None:
    failed, bad, config = (tmp_path / name for name in ("failed", "bad", "train.yaml"))
    config.write_text("meet_timeout: 3\n")
    flag = {"flag": "--meet-timeout=3", "file": f"--config={config}"}[place]
    files = {"FAILURE_FILE": str(failed), "BAD_NODES_FILE": str(bad)}
    job = nodes(project, tmp_path / "run", flag, come=(0,), **files).wait()
    assert job.codes == [1]
    (line,) = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert "1 of 2 torchruns" in line
    assert failed.exists() and bad.read_text() == "n2\n" and "Traceback" not in job.log


@pytest.mark.parametrize("host", ["n9.invalid", "127.0.0.1"])
def test_a_torchrun_names_the_first_node_that_it_cant_reach(
    project: Path, tmp_path: Path, host: str
) -> None:
    job = nodes(project, tmp_path / "run", "--meet-timeout=3", come=(1,), MASTER_ADDR=host)
    assert job.wait().codes == [1]
    (line,) = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert "others at " + host in line and "Traceback" not in job.log


def test_ranks_wait_longer_for_work_than_for_the_start(project: Path, tmp_path: Path) -> None:
    """Before PyTorch 2.15, NCCL starts late, and its ranks then wait for rank 0 at the store."""
    old = '    if settings.dataset == "mnist":\n'
    work = """\
    import os, time, torch
    store = torch.distributed.distributed_c10d._get_default_store()
    if os.environ["SLURM_PROCID"] == "0":
        time.sleep(9)
        store.set("mine", "")
    store.get("mine")
"""
    copy = edited(project, tmp_path, "data.py", old, work + old)
    job = srun(copy, tmp_path / "run", 2, "--max-steps=1", "--meet-timeout=6").wait()
    assert job.summary["world_size"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_rank_whose_peers_never_come_leaves_at_a_signal(
    project: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """As the launcher sends it when another rank failed before it met this one."""
    command = ["demo", "train", f"--run-dir={tmp_path}/run", *QUICK]
    env = tasks(2)[0]
    job = spawn(project, tmp_path / "run", [command], [env])
    while not _listens(int(env["MASTER_PORT"])):
        assert job.processes[0].poll() is None, job.log
        time.sleep(0.1)
    job.processes[0].send_signal(number)
    assert job.wait().codes == [-number]
    assert not (tmp_path / "run").exists()


def test_an_interrupted_import_leaves_no_traceback(project: Path, tmp_path: Path) -> None:
    slow = "import time\n\nprint('here', flush=True)\ntime.sleep(99)\nfrom . import plugins\n"
    copy = edited(project, tmp_path, "settings.py", "from . import plugins\n", slow)
    command = ["demo", "train", f"--run-dir={tmp_path}/run", *QUICK]
    job = spawn(copy, tmp_path / "run", [command], [{}])
    while "here" not in job.log:
        assert job.processes[0].poll() is None, job.log
        time.sleep(0.05)
    job.processes[0].send_signal(signal.SIGINT)
    assert job.wait().codes == [128 + signal.SIGINT]
    assert job.log == "here\n"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("launcher", "visible", "devices"),
    [
        ("srun", 4, [0, 1, 2, 3]),
        ("srun", 1, [0, 0, 0, 0]),  # each task sees its own alone
        ("srun", 2, [0, 1, 0, 1]),  # or the closest ones: --gpu-bind=closest
        ("torchrun", 4, [0, 1, 2, 3]),
        ("torchrun", 2, [0, 1, None, None]),
        ("torchrun", 1, [0, None, None, None]),
    ],
)
def test_each_rank_takes_a_gpu_that_it_sees(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    visible: int,
    devices: list[int | None],
    kind: str,
) -> None:
    import torch
    from demo.engine.errors import UsageError
    from demo.engine.ranks.device import check_shared_gpus, choose_device
    from demo.engine.ranks.environment import Ranks

    gpus = getattr(torch, kind)
    monkeypatch.setattr(gpus, "is_available", lambda: True)
    monkeypatch.setattr(gpus, "device_count", lambda: visible)
    monkeypatch.setattr(gpus, "set_device", lambda device: None)
    for rank, index in enumerate(devices):
        ranks = Ranks(launcher, rank, 4, rank)
        if index is None:
            with pytest.raises(UsageError, match=f"local rank {rank}, but sees {visible} GPU"):
                choose_device("auto", ranks)
        else:
            assert choose_device("auto", ranks) == torch.device(kind, index)
    check_shared_gpus([("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-a"), ("n2", None)])
    with pytest.raises(UsageError, match="ranks 0 and 2 on n1"):
        check_shared_gpus([("n1", "GPU-a"), ("n1", "GPU-b"), ("n1", "GPU-a")])


@pytest.mark.parametrize(("built", "old"), [("13.0", True), ("12.8", False), (None, False)])
def test_a_driver_that_is_too_old_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, built: str | None, old: bool
) -> None:
    import torch
    from demo.engine.errors import UsageError
    from demo.engine.ranks.device import choose_device
    from demo.engine.ranks.environment import Ranks

    library = SimpleNamespace(
        nvmlInit=lambda: None, nvmlSystemGetCudaDriverVersion_v2=lambda: 12020
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.version, "cuda", built)
    said = "supports CUDA 12.2"
    with pytest.raises(UsageError, match=said if old else "ask Slurm"):
        choose_device("cuda", Ranks("srun", 0, 1, 0))


def test_a_gpu_is_described_with_its_software(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/gpu compares the description of a real one. A build without NCCL has no version."""
    import torch
    from demo.engine.ranks.device import describe_gpu

    library = SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "550.54.15")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA L40S of {device}")
    monkeypatch.setattr(torch.cuda.nccl, "version", None)
    gpu, known = torch.device("cuda", 1), {"cuda": "12.8", "hip": None, "xpu": None}
    known |= {"name": "NVIDIA L40S of cuda:1", "driver": "550.54.15"}
    assert describe_gpu(gpu) == known
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3, "suffix"))
    assert describe_gpu(gpu) == {**known, "nccl": "2.27.3"}
    assert describe_gpu(torch.device("cpu")) == {}


CONNECT = """
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from demo.__main__ import _run
from demo.engine.config import Settings
from demo.engine.ranks.process_group import joined

rank = os.environ["SLURM_PROCID"]
init = dist.init_process_group


def started(kind, device_id=None, **options):
    print(f"rank {rank} starts {kind} with {device_id}", flush=True)
    if failure := os.environ.get("FAILURE"):
        raise dist.DistBackendError(failure)
    init("gloo", **options)


def join(_argv):
    with joined(Settings(device="cuda")) as world:
        print(f"rank {rank} is on {world.device}", flush=True)
    return 0


gpu = SimpleNamespace(uuid="1" if "SHARED" in os.environ else rank + "1")
with (
    mock.patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda _: None,
        get_device_properties=lambda _: gpu,
    ),
    mock.patch.object(dist, "init_process_group", started),
    mock.patch.object(torch, "__version__", torch.torch_version.TorchVersion(os.environ["TORCH"])),
    mock.patch("demo.__main__.find_command", lambda _: join),
):
    _run("join", [])
"""
DUPLICATE = """NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000
"""


def connect(project: Path, folder: Path, **env: str) -> Job:
    """Let two ranks meet on a node with two GPUs; their placement is not that of torch's guess."""
    (folder / "connect.py").write_text(CONNECT)
    path = f"{project / 'src'}:{folder}"
    envs = [
        {**each, "SLURM_LOCALID": str(1 - rank), "PYTHONPATH": path, "LOCAL_RANK": "0"}
        for rank, each in enumerate(tasks(2, **env))
    ]
    return spawn(project, folder / "run", [["connect"]] * 2, envs).wait()


@pytest.mark.parametrize(
    ("torch", "bound"), [("2.9.0", False), ("2.14.1", False), ("2.15.0+cu130", True)]
)
def test_nccl_is_told_the_gpu_of_a_rank_where_it_does_not_ask(
    project: Path, tmp_path: Path, torch: str, bound: bool
) -> None:
    job = connect(project, tmp_path, TORCH=torch)
    assert job.codes == [0, 0], job.log
    for rank, gpu in enumerate(("cuda:1", "cuda:0")):
        assert f"rank {rank} starts nccl with {gpu if bound else None}" in job.log
        assert f"rank {rank} is on {gpu}" in job.log


def test_a_shared_gpu_is_named_before_nccl_connects(project: Path, tmp_path: Path) -> None:
    job = connect(project, tmp_path, TORCH="2.15.0", SHARED="yes")
    assert job.codes == [1, 1] and "starts nccl" not in job.log
    assert "same GPU (GPU-1)" in job.log


def test_an_error_of_nccl_keeps_its_reason(project: Path, tmp_path: Path) -> None:
    job = connect(project, tmp_path, TORCH="2.15.0", FAILURE=DUPLICATE)
    assert job.codes == [1, 1], "it would fail again, so the job must not be requeued"
    errors = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert errors and all("Duplicate GPU detected" in x for x in errors)
    assert "MASTER_ADDR" not in job.log and "lost another rank" not in job.log
    gone = DUPLICATE.replace("InvalidUsage", "RemoteError")
    lost = connect(project, tmp_path, TORCH="2.15.0", FAILURE=gone)
    assert lost.codes == [76, 76] and "lost another rank (" in lost.log


def test_the_choices_of_amds_gpus_are_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sets both, and the second selects among the GPUs of the first."""
    from demo.engine.errors import UsageError
    from demo.engine.ranks.device import choose_device
    from demo.engine.ranks.environment import Ranks

    for name in ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "3")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=3, ROCR_VISIBLE_DEVICES=3"):
        choose_device("cuda", Ranks("srun", 0, 1, 0))


def test_gloo_does_not_serve_fsdp_on_gpus(project: Path) -> None:
    import torch
    from demo.engine.errors import UsageError
    from demo.engine.ranks.device import choose_backend

    gpu = torch.device("cuda", 0)
    assert choose_backend("auto", gpu, "fsdp") == "nccl"
    assert choose_backend("gloo", gpu, "ddp") == "gloo"
    assert choose_backend("gloo", torch.device("cpu"), "fsdp") == "gloo"
    with pytest.raises(UsageError, match="needs backend nccl"):
        choose_backend("gloo", gpu, "fsdp")
    intel = torch.device("xpu", 0)
    assert choose_backend("auto", intel) == "xccl"
    with pytest.raises(UsageError, match="support device xpu"):
        choose_backend("nccl", intel)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, ("none", 0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("torchrun", 3, 4, 1)),
        # Under srun and torchrun together, Slurm counts nodes.
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
            | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            ("torchrun", 3, 4, 1),
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"},
            ("srun", 5, 8, 1),
        ),
        # In an image that sets torch's variables to what Slurm's say.
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
            | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
            | {"SLURM_STEP_NUM_TASKS": "4"},
            ("srun", 3, 4, 1),
        ),
        # torchrun with one rank on each node.
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "7"}
            | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "0"}
            | {"SLURM_STEP_NUM_TASKS": "4"},
            ("torchrun", 3, 4, 0),
        ),
        # A step of fewer tasks than the allocation.
        (
            {"SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
            | {"SLURM_STEP_NUM_TASKS": "2"},
            ("srun", 1, 2, 1),
        ),
        # The batch shell of a job with one task.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ("none", 0, 1, 0)),
        # As from Slurm 26.05 on.
        ({"SLURM_STEP_ID": "-5", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ("none", 0, 1, 0)),
    ],
)
def test_ranks_are_read_from_the_environment(
    project: Path, env: dict[str, str], found: tuple[str, int, int, int]
) -> None:
    from demo.engine.ranks.environment import Ranks

    ranks = Ranks.from_environment(env)
    assert (ranks.launcher, ranks.rank, ranks.size, ranks.local_rank) == found
    assert ranks.cpus(env) >= 1  # also where nobody says how many ranks a node has


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "put srun"),
        # An interactive shell that salloc started is a step, but not one of srun's tasks.
        ({"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"}, "put srun"),
        ({"SLURM_STEP_ID": "-6", "SLURM_NTASKS": "4"}, "put srun"),
        # The batch shell is not a rank either. Since Slurm 26.05, it is a step.
        ({"SLURM_STEP_ID": "-5", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "put srun"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is not"),
    ],
)
def test_misuse_of_a_launcher_is_answered_with_a_hint(
    project: Path, env: dict[str, str], hint: str
) -> None:
    from demo.engine.errors import UsageError
    from demo.engine.ranks.environment import Ranks

    with pytest.raises(UsageError, match=hint):
        Ranks.from_environment(env)


def test_each_step_has_a_port_of_its_own(project: Path) -> None:
    """On a node that the next jobs share, too."""
    from demo.engine.ranks.environment import PORTS, rendezvous_address

    steps = [(job, step) for job in range(5998, 6018) for step in range(50)]
    ports = set()
    for job, step in steps:
        env = {"MASTER_ADDR": "n1", "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        ports.add(int(rendezvous_address(env).removeprefix("n1:")))
    assert len(ports) == len(steps)
    assert ports <= set(PORTS)
    # A batch shell's, which is no step of srun's, and one that the site has chosen.
    job = {"MASTER_ADDR": "n1", "SLURM_JOB_ID": "12007"}
    assert rendezvous_address({**job, "SLURM_STEP_ID": "4294967291"}) == "n1:20007"
    assert rendezvous_address({**job, "SLURM_STEP_ID": "3", "MASTER_PORT": "7"}) == "n1:7"


def test_a_jobs_run_folder_is_found_again(project: Path, tmp_path: Path) -> None:
    """A requeued job keeps its id. A task of a job array has its own folder."""
    names = {
        "7": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "-5"},
        "7_3": {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"},
    }
    for name, env in names.items():
        flags = [f"--run-root={tmp_path}", "--experiment=e", *QUICK, "--max-steps=1"]
        job = spawn(project, tmp_path / "log", [["demo", "train", *flags]], [env]).wait()
        assert job.codes == [0], job.log
        assert json.loads((tmp_path / "e" / name / "summary.json").read_text())["global_step"] == 1


def test_dry_run_says_what_would_happen_and_writes_nothing(project: Path, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 2, "--dry-run").wait()
    assert job.codes == [0, 0], job.log
    assert "2 rank(s) by srun" in job.log and "128 samples a step" in job.log
    assert "leaves out 24" in job.log
    whole = srun(project, tmp_path / "run", 1, "--dry-run", "--batch-size=75").wait()
    stream = srun(project, tmp_path / "run", 1, "--dry-run", "--streaming").wait()
    assert whole.codes == stream.codes == [0], whole.log + stream.log
    assert "leaves out" not in whole.log + stream.log
    assert "settings from configs/train.yaml" in job.log
    assert job.log.count("predicted and drawn") == 1
    assert not (tmp_path / "run").exists()
