"""`doctor` finds each problem, prints it on one line, and continues with the other checks."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from renderer import render_project

from .conftest import PATIENCE, clean_environment, spawn
from .test_topology import node

QUIET = ("--dataset=synthetic", "--device=cpu", "--trackers=none")
# What sbatch of Slurm 22.05 prints for --test-only.
SLURM = {
    "sbatch": (
        'echo "sbatch: Job 7 to start at 2030-01-02T03:04:05 using 8 processors on nodes n[1-2]'
        ' in partition gpu" >&2'
    ),
}
# Runs before anything else in a process: what makes it a node of its own.
AT_START = "import os\nexec(os.environ.get('AT_START', ''))\n"
NODE = "import socket; socket.gethostname = lambda: 'n2'; "
THIRD = NODE.replace("n2", "n3")

# A stand-in for the library of the NVIDIA driver.
NVML = """
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetCudaDriverVersion_v2(): return {driver}
"""

Files = Mapping[str, str]


class Place:
    """A project that a test may change, on a machine without Slurm's own commands."""

    def __init__(self, project: Path, folder: Path) -> None:
        ignored = shutil.ignore_patterns("runs", "__pycache__")
        self.project = shutil.copytree(project, folder / "own", ignore=ignored)
        (self.project / "stubs").mkdir()
        (self.project / "stubs" / "sitecustomize.py").write_text(AT_START)
        (self.project / ".venv").symlink_to(sys.prefix)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in ("bash", "cat", "sleep"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.env = {"PATH": str(self.bin), "HOME": str(folder)}

    def commands(self, commands: Files) -> None:
        """Put stand-ins for commands on the PATH."""
        for name, text in commands.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.bin / name).chmod(0o755)

    def edit(self, path: str, old: str, new: str) -> None:
        """Change a file as a user would."""
        text = (self.project / path).read_text()
        assert re.search(old, text), text
        (self.project / path).write_text(re.sub(old, new, text))

    def doctor(self, *flags: str, **env: str) -> tuple[int, list[str]]:
        """Run the command on one node; return its exit code and its lines."""
        command = ["demo", "doctor", *flags]
        env = self.with_stubs({**self.env, **env})
        job = spawn(self.project, self.bin.parent / "doctor", [command], [env]).wait()
        assert "Traceback" not in job.log, job.log
        return job.codes[0], job.log.splitlines()

    def nodes(self, *nodes: Mapping[str, str], count: int) -> tuple[int, list[str]]:
        """Run the command as doctor.sbatch does, on nodes whose environments differ as given."""
        job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": str(count), "GLOO_SOCKET_IFNAME": "lo"}
        return in_job([(self.project, self.with_stubs({**self.env, **job, **n})) for n in nodes])

    def with_stubs(self, env: dict[str, str]) -> dict[str, str]:
        """Return an environment in which the stubs are there, if the test uses one."""
        stubs = self.project / "stubs"
        if "AT_START" in env or len(list(stubs.iterdir())) > 1:
            return {"PYTHONPATH": f"{stubs}:{self.project / 'src'}", **env}
        return env

    def elsewhere(self, name: str) -> Path:
        """Return a copy of the project: where a node is whose folder is its own."""
        return shutil.copytree(self.project, self.bin.parent / name, symlinks=True)


def in_job(nodes: list[tuple[Path, Files]], flags: tuple[str, ...] = QUIET) -> tuple:
    """Run a pipe as in doctor.sbatch, the first node reading; return its exit code and lines."""

    def start(node: tuple[Path, Files], part: str, **pipes: object) -> subprocess.Popen:
        command = [sys.executable, "-m", "demo", "doctor", f"--nodes={part}", *flags]
        env = {**clean_environment(node[0]), **node[1]}
        return subprocess.Popen(command, cwd=node[0], env=env, text=True, **pipes)

    reader = start(
        nodes[0], "compare", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    started = [
        start(node, "report", stdout=reader.stdin, stderr=subprocess.STDOUT) for node in nodes
    ]
    said, _ = reader.communicate(timeout=PATIENCE)
    assert "Traceback" not in said, said
    assert [process.wait(PATIENCE) for process in started] == [0] * len(nodes), said
    return reader.returncode, said.splitlines()


@pytest.fixture
def place(project: Path, tmp_path: Path) -> Place:
    """A project of the test's own."""
    return Place(project, tmp_path)


def lines(found: list[str], name: str) -> list[str]:
    """Return the lines about something."""
    return [line for line in found if re.match(rf"\w+ +{re.escape(name)} ", line)]


def troubles(found: list[str]) -> list[str]:
    """Return the lines that are not ok."""
    return [line for line in found if re.match(r"(warning|error) ", line)]


# One process


@pytest.mark.shows("make doctor")
def test_all_is_well_on_a_laptop(place: Place) -> None:
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found), found[-1]) == (0, [], "0 error(s), 0 warning(s)")
    (dataset,) = lines(found, "dataset")
    assert "train 15000, validation 5000, test 1001" in dataset
    assert "sbatch is missing" in lines(found, "scripts")[0]
    assert not list((place.project / "runs").iterdir())


def test_what_is_missing_is_an_error_and_the_rest_goes_on(place: Place) -> None:
    place.edit("pyproject.toml", '"numpy>=1.26"', '"numpy>=99", "left-pad[all]>=1"')
    place.edit("configs/train.yaml", r"\[tensorboard\]", "[tensorboard, clay]")
    code, found = place.doctor("--device=cpu")
    assert code == 1 and found[-1] == "3 error(s), 0 warning(s)"
    (packages,) = lines(found, "packages")
    assert re.search("not >=99, left-pad", packages)
    assert "no train-images-idx3-ubyte[.gz]" in lines(found, "dataset")[0]
    assert "unknown tracker 'clay'" in lines(found, "trackers")[0]
    assert lines(found, "torch")[0].startswith("ok ")


@pytest.mark.parametrize("module", ["torch", "yaml", "tyro", "pydantic", "packaging", "numpy"])
def test_a_broken_package_is_named_and_the_rest_goes_on(place: Place, module: str) -> None:
    text = "raise ImportError('libgone.so.1: cannot open shared object file')"
    (place.project / "stubs" / f"{module}.py").write_text(text)
    code, found = place.doctor(*QUIET)
    broken = [line for line in troubles(found) if "ImportError: libgone.so.1" in line]
    assert code == 1 and broken
    assert lines(found, "python")[0].startswith("ok ")
    assert lines(found, "scripts")[0].startswith("ok ")


def test_a_check_that_breaks_is_an_error_of_its_own(place: Place) -> None:
    place.edit("src/demo/data.py", r'    if settings.dataset == "mnist":', "    1 / 0\n\\g<0>")
    code, found = place.doctor(*QUIET)
    assert code == 1
    assert troubles(found) == ["error    dataset      ZeroDivisionError: division by zero"]


def test_settings_that_cannot_be_read_are_an_error(place: Place) -> None:
    place.edit("configs/train.yaml", "epochs:", "epoch:")
    code, found = place.doctor(*QUIET)
    assert code == 1 and len(troubles(found)) == 1
    assert "unknown setting 'epoch'" in lines(found, "settings")[0]


def test_an_unknown_flag_is_refused(place: Place) -> None:
    code, found = place.doctor("--no-such-flag")
    assert code == 2 and "--no-such-flag" in "".join(found)


def test_help_needs_no_package(place: Place) -> None:
    for module in ("torch", "tyro", "yaml", "pydantic"):
        (place.project / "stubs" / f"{module}.py").write_text("raise ImportError('gone')")
    code, found = place.doctor("--help")
    assert code == 0 and found[0].startswith("usage: python -m demo doctor")


def test_a_run_folder_that_cannot_be_written_is_named(place: Place) -> None:
    (place.project / "runs").touch()
    code, found = place.doctor(*QUIET)
    assert code == 1
    assert "can't be written" in lines(found, "run folder")[0]


def test_gpus_that_torch_does_not_see_are_an_error(place: Place) -> None:
    flags = ("--dataset=synthetic", "--trackers=none")
    env = {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}
    code, found = place.doctor(*flags, **env)
    assert code == 1
    assert "torch sees 0" in lines(found, "GPUs")[0]
    assert place.doctor(*flags, "--device=cpu", **env)[0] == 0


def test_each_gpu_is_used(place: Place) -> None:
    """With a stand-in for torch: of two GPUs, one may be broken."""
    stub = """
__version__ = "9.9.9+cu129"
class version: cuda, hip = "12.9", None
class cuda:
    is_available, device_count = lambda: True, lambda: 2
    get_device_name = lambda index: "Model 1"
    get_device_capability = lambda: (7, 5)
    class get_device_properties:
        pci_domain_id, pci_device_id = 0, 0
        def __init__(self, index): self.pci_bus_id = (0x61, 0xC3)[index]
def zeros(size, device):
    if device == os.environ.get("BROKEN"):
        raise RuntimeError("CUDA error: out of service")
"""
    (place.project / "stubs" / "torch.py").write_text(f"import os{stub}")
    _, found = place.doctor("--trackers=none", SLURM_GPUS_ON_NODE="2")
    (line,) = lines(found, "torch")
    assert line.startswith("warning  torch        9.9.9+cu129, built for cuda 12.9, newer than")
    assert lines(found, "GPUs") == [
        "ok       GPUs         2 × Model 1 (compute capability 7.5: fastest with --precision fp16)"
    ]
    assert not lines(found, "cores")
    # On a node with two sockets, the job has cores of the first one alone.
    node(place.project, "0-7")
    at_start = "from pathlib import Path; from demo.engine.ranks import topology; "
    at_start += "topology.SYS, topology.PROC = Path('sys'), Path('proc')"
    (far,) = lines(place.doctor("--trackers=none", AT_START=at_start)[1], "cores")
    assert far.startswith("warning  cores        the GPU at 0000:c3:00.0 is near cores 52-103, but")
    code, found = place.doctor("--trackers=none", BROKEN="cuda:1")
    assert code == 1 and not lines(found, "GPUs")
    assert "out of service" in lines(found, "torch")[1]


# Scripts and Slurm


def test_all_is_well_on_a_login_node(place: Place) -> None:
    place.commands(SLURM)
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    accepted = [line for line in lines(found, "Slurm") if "accepts" in line]
    assert len(accepted) == 3
    assert "train_cpu.sbatch: sbatch: Job 7" in accepted[0]
    started = lines(found, "scripts")
    assert len(started) == 3 and "slurm/train_single_node.sbatch" in started[2]
    assert "/.venv/bin/python Python 3" in started[2]
    code, found = place.doctor(*QUIET, SBATCH_QOS="long", SBATCH_PARTITION="big")
    (said,) = troubles(found)
    assert code == 0 and "SBATCH_PARTITION, SBATCH_QOS" in said


def test_a_build_without_cuda_is_an_error_where_scripts_ask_for_gpus(place: Place) -> None:
    place.commands(SLURM)
    (place.project / "stubs" / "torch.py").write_text(
        "class version: cuda = hip = None\nclass cuda: is_available = lambda: False\n"
        "__version__ = '9.9.9'"
    )
    _, found = place.doctor("--trackers=none")
    assert re.search(r"multi_node.*single_node", lines(found, "torch")[0])


@pytest.mark.parametrize(("driver", "old"), [(12020, True), (13010, False), (12090, True)])
def test_a_driver_that_is_older_than_the_cuda_of_torch_is_named(
    place: Place, driver: int, old: bool
) -> None:
    (place.project / "stubs" / "torch.py").write_text(
        "class version: cuda, hip = '13.0', None\n"
        "class cuda: is_available = lambda: False\n__version__ = '2.14.0+cu130'"
    )
    (place.project / "stubs" / "pynvml.py").write_text(NVML.format(driver=driver))
    code, found = place.doctor("--trackers=none", SLURM_GPUS_ON_NODE="2")
    said = "torch is built for CUDA 13.0, but the driver of the GPUs supports CUDA 12."
    (line,) = lines(found, "GPUs")
    assert code == 1 and line.startswith("error") and (said in line) == old
    assert ("build for CUDA 12" in line) == old


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("sbatch: error: Ask.; allocation failure", "sbatch: error: Ask.\nallocation failure"),
        (r"\x1b[31mDOWN", "\033[31mDOWN"),
        ("(no output)", ""),
    ],
)
def test_what_slurm_says_is_passed_on(place: Place, words: str, answer: str) -> None:
    place.commands({"sbatch": f"[[ $2 != *cpu* ]] || {{ echo '{answer}' >&2; exit 1; }}"})
    code, found = place.doctor(*QUIET)
    assert code == 1
    refused, *accepted = lines(found, "Slurm")
    assert refused.startswith("error ") and len(accepted) == 2
    assert f"train_cpu.sbatch: {words}: " in refused


@pytest.mark.parametrize(
    "answer",
    [  # of Slurm 22.05, 26.05, and 25.11 where the site does not allow it
        "sbatch: option '--requeue' doesn't allow an argument\nTry \"sbatch --help\" for more",
        "sbatch: error: Invalid --requeue specification",
        "allocation failure: Requested operation not supported on this system",
    ],
)
def test_an_expedited_requeue_that_slurm_refuses_is_named(place: Place, answer: str) -> None:
    script = place.project / "slurm/train_cpu.sbatch"
    text = script.read_text()
    script.write_text(text.replace("--requeue\n", "--requeue=expedite\n"))
    place.commands({"sbatch": f"cat >&2 <<'END'\n{answer}\nEND\nexit 1"})
    code, found = place.doctor(*QUIET)
    assert code == 1
    refused, *others = lines(found, "Slurm")
    assert f"{answer.splitlines()[0]}: --requeue=expedite needs Slurm 25.11" in refused
    assert all("#SBATCH lines" in line for line in others)


@pytest.mark.parametrize(
    ("mode", "took", "trouble"),
    [("REQUEUE", 79, False), ("REQUEUE", 81, True), ("CANCEL", 61, True), ("OFF", 99, None)],
)
def test_a_save_that_takes_longer_than_a_preempted_job_has_is_named(
    place: Place, mode: str, took: int, trouble: bool | None
) -> None:
    partitions = f"""\
PartitionName=gpu GraceTime=60 PriorityTier=1 PreemptMode={mode} State=UP
PartitionName=urgent GraceTime=0 PriorityTier=9 PreemptMode=OFF State=UP"""
    config = "KillWait                = 20 sec\nPreemptType             = preempt/partition_prio"
    shows = f"cat <<END\n$([[ $* == *config ]] && echo '{config}' || echo '{partitions}')\nEND"
    place.commands({**SLURM, "scontrol": shows})
    for run, seconds in (("1", 500), ("2", took)):
        folder = place.project / f"runs/demo/{run}/checkpoints"
        folder.mkdir(parents=True)
        (folder / "save_seconds").write_text(f"{seconds}.0\n")
        os.utime(folder / "save_seconds", (int(run), int(run)))
    code, found = place.doctor(*QUIET)
    assert code == 0
    if trouble is None:
        assert not lines(found, "preemption")
    else:
        (line,) = lines(found, "preemption")
        assert line.startswith("warning" if trouble else "ok") and "GraceTime 60" in line


def test_in_a_job_nothing_is_submitted(place: Place) -> None:
    place.commands({"sbatch": "exit 1"})
    code, found = place.doctor(*QUIET, SLURM_JOB_ID="77")
    assert (code, troubles(found), lines(found, "Slurm")) == (0, [], [])


MODULE = """
module() { [[ $* != *missing* ]] && LOADEDMODULES+=${LOADEDMODULES:+:}$2; }
"""


def modules(place: Place, *names: str) -> None:
    """Let a script load modules."""
    text = "".join(f"module load {name} || fail 'no {name}'\n" for name in names)
    place.edit("slurm/train_cpu.sbatch", r"\nset -euo", f"\n{text}\\g<0>")


def test_modules_are_loaded_as_the_script_does(place: Place) -> None:
    place.commands(SLURM)
    (place.project / "slurm" / "site.sh").write_text(MODULE)
    modules(place, "python/3.12", "gcc")
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    assert "modules python/3.12:gcc" in lines(found, "scripts")[0]
    place.edit("slurm/train_cpu.sbatch", "load gcc", "load missing/1.0")
    place.edit("slurm/train_cpu.sbatch", "no gcc", "no missing/1.0")
    code, found = place.doctor(*QUIET)
    assert code == 1 and len(troubles(found)) == 1
    line = lines(found, "scripts")[0]
    assert "no missing/1.0" in line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cd nowhere", "site.sh: line 1: cd: nowhere: No such file or directory"),
        ("export A='b", "unexpected EOF while looking for matching"),
        ("false", "last command"),
        ("exit 0", "not use exit"),
    ],
)
def test_facts_of_the_site_that_fail_are_named(place: Place, line: str, said: str) -> None:
    """The finding has bash's own message."""
    place.commands(SLURM)
    (place.project / "slurm" / "site.sh").write_text(f"{line}\n")
    code, found = place.doctor(*QUIET)
    assert code == 1 and troubles(found) == lines(found, "scripts")
    assert re.search("slurm/site.sh", lines(found, "scripts")[0])
    assert said in lines(found, "scripts")[0]


def test_an_interpreter_that_jobs_cannot_use_is_named(place: Place) -> None:
    place.commands(SLURM)
    venv = place.project / ".venv"
    venv.unlink()
    assert "'make setup' first" in lines(place.doctor(*QUIET)[1], "scripts")[0]
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("#!/bin/bash\nexit 127\n")
    (venv / "bin" / "python").chmod(0o755)
    code, found = place.doctor(*QUIET)
    assert code == 1 and "'make setup' again" in lines(found, "scripts")[0]
    (venv / "bin" / "python").unlink()
    site = place.project / "slurm/site.sh"
    site.write_text(f"PROJECT_PYTHON={sys.executable}\n")
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    site.write_text("PROJECT_PYTHON=/no/such/python\n")
    code, found = place.doctor(*QUIET)
    assert code == 1 and "/no/such/python" in lines(found, "scripts")[0]


def test_the_image_is_started(tmp_path: Path) -> None:
    place = Place(render_project(tmp_path / "demo", container="apptainer"), tmp_path)
    place.commands(SLURM)
    code, found = place.doctor(*QUIET)
    assert code == 1 and "'make image' first" in lines(found, "scripts")[0]
    (place.project / "container/image.sif").touch()
    site = place.project / "slurm/site.sh"
    site.write_text(
        'command() { [[ $2 != *ain* && $2 != sing* ]] || return; builtin command "$@"; }'
    )
    code, found = place.doctor(*QUIET)
    assert code == 0, found
    assert re.match("warning .*neither apptainer", lines(found, "scripts")[0])
    place.commands({"apptainer": "echo Python 3.12.1"})
    site.write_text(f"PATH={place.bin}:$PATH")
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    image = "slurm/train_single_node.sbatch: container/image.sif Python 3.12.1"
    assert image in lines(found, "scripts")[2]
    place.commands({"apptainer": "exit 255"})
    code, found = place.doctor(*QUIET)
    assert code == 1 and "'make image' again" in lines(found, "scripts")[0]


def test_pyxis_has_no_interpreter_to_start_here(tmp_path: Path) -> None:
    image = "nvcr.io#nvidia/pytorch:25.01-py3"
    project = render_project(tmp_path / "demo", container="pyxis", container_image=image)
    place = Place(project, tmp_path)
    place.commands(SLURM)
    code, found = place.doctor(*QUIET)
    assert code == 1 and "container/env" in lines(found, "scripts")[0]
    (place.project / "container/env").mkdir(parents=True)
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    assert f"slurm/train_single_node.sbatch: {image}" in lines(found, "scripts")[2]


def test_trackers_are_named(place: Place) -> None:
    (place.project / ".env").touch(0o644)
    code, found = place.doctor("--dataset=synthetic", "--device=cpu", "--trackers=tensorboard")
    (line,) = lines(found, "trackers")
    assert "tensorboard: 'python -m demo check-trackers'" in line
    assert code == 0 and "chmod 600 .env" in lines(found, ".env")[0]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Aim has no builds for this Python")
def test_the_state_of_aim_is_named_and_a_package_that_breaks_it(
    full_project: Path, tmp_path: Path
) -> None:
    place = Place(full_project, tmp_path)
    flags = ("--dataset=synthetic", "--device=cpu", "--trackers", "aim", "tensorboard")
    code, found = place.doctor(*flags)
    (named, state) = lines(found, "trackers")
    assert code == 0 and "aim, tensorboard: " in named
    assert state.startswith("warning") and "CVE-2025-51464" in state
    # As SQLAlchemy will be one day, without a name that Aim imports.
    moved = place.project / "stubs/sqlalchemy/ext"
    moved.mkdir(parents=True)
    (moved / "__init__.py").touch()
    (moved.parent / "__init__.py").write_text("from sqlalchemy_of_tomorrow import *\n")
    code, found = place.doctor(*flags)
    (named, broken) = lines(found, "trackers")
    assert code == 1 and broken.startswith("error")
    assert re.search("aim can't be", broken)


# Several nodes


def nodes(place: Place, *envs: Mapping[str, str], code: int, count: int = 2) -> list[str]:
    """Return the lines of a job whose nodes differ as given, except those about their speed."""
    returned, found = place.nodes(*envs, count=count)
    assert returned == code, found
    assert not list(place.project.glob("runs/.doctor*")), found
    # Here they share a machine that may be busy with something else.
    return [line for line in found if line not in lines(found, "speed")]


def test_nodes_that_agree_have_one_line_for_each_finding(place: Place) -> None:
    found = nodes(place, {}, {"AT_START": f"{NODE}print('hello')"}, code=0)
    assert not troubles(found)
    assert len(lines(found, "torch")) == 1 and "n2" not in lines(found, "torch")[0]
    assert "same on 2 node(s)" in lines(found, "shared folder")[0]
    assert found[0] == "hello"  # what else a node prints is passed on


def test_a_folder_that_is_not_shared_or_not_writable_is_found(place: Place) -> None:
    there, full = place.elsewhere("there"), place.elsewhere("full")
    (full / "runs").touch()
    others = (f"{NODE}os.chdir('{there}')", f"{THIRD}os.chdir('{full}')")
    found = nodes(place, {}, *({"AT_START": each} for each in others), code=1, count=3)
    not_written, not_shared = sorted(troubles(found))
    assert re.search("shared folder n2", not_shared)
    assert re.search("n3: runs can't", not_written)


def test_a_node_that_never_comes_is_an_error(place: Place) -> None:
    found = nodes(place, {}, code=1)
    (line,) = troubles(found)
    assert re.match(r"error +nodes +1 of 2", line)


def test_clocks_that_are_off_are_found(place: Place) -> None:
    at_start = "import time; now = time.time; time.time = lambda: now() + "
    others = ({"AT_START": f"{NODE}{at_start}-90"}, {"AT_START": f"{THIRD}{at_start}40"})
    found = nodes(place, {}, *others, code=0, count=3)
    behind, ahead = sorted(troubles(found))
    for line, node_is, seconds in (
        (behind, r"n2: is (\d+) s behind", 90),
        (ahead, r"n3: is (\d+) s ahead of", 40),
    ):
        said = re.match(f"warning +clock +{node_is} the file server of runs", line)
        # A slow machine can't tell to the second.
        assert said and abs(seconds - int(said[1])) <= 10, found


def test_nodes_that_do_not_agree_are_named(place: Place) -> None:
    at_start = "import platform; platform.python_version = lambda: '3.9.1'"
    found = nodes(place, {}, {"AT_START": f"{NODE}{at_start}"}, code=1)
    assert lines(found, "python") == troubles(found) and len(troubles(found)) == 2
    (line,) = [line for line in troubles(found) if re.match(r"error +python +n2: 3\.9\.1, ", line)]
    assert line.endswith("choose others")


def test_a_slow_node_is_named(place: Place) -> None:
    at_start = "import time; from torch import mm; import torch; "
    at_start += "torch.mm = lambda *both: time.sleep(0.02) or mm(*both)"
    code, found = place.nodes({}, {"AT_START": f"{NODE}{at_start}"}, count=2)
    (line,) = lines(found, "speed")
    assert code == 0 and line.endswith(" sbatch --exclude=n2")
    assert re.match(r"warning +speed +n2: cpu", line)


def test_a_broken_node_does_not_keep_the_others_from_speaking(place: Place) -> None:
    """Even if it does not know the run root, since it can't read the settings."""
    at_start = "import sys; sys.modules['torch'] = None"
    found = nodes(place, {}, {"AT_START": f"{NODE}{at_start}"}, code=1)
    assert lines(found, "settings")[0].startswith("error    settings     n2: ")
    assert "same on 1 node(s)" in lines(found, "shared folder")[0]
    broken, well = sorted(lines(found, "torch"))
    assert re.match(r"error +torch +n2: can't", broken)
    assert well.startswith("ok ")


def test_a_node_that_knows_itself_by_the_loopback_address_is_found(place: Place) -> None:
    at_start = "socket.getaddrinfo = lambda *a, **k: [(2, 1, 6, '', ('127.0.1.1', 0))]"
    env = {"AT_START": f"{NODE}{at_start}", "SLURM_JOB_NUM_NODES": "2"}
    code, found = place.doctor(*QUIET, **env)
    assert code == 1
    assert "n2 resolves to 127.0.1.1" in lines(found, "network")[0]
    assert place.doctor(*QUIET, **env, GLOO_SOCKET_IFNAME="ib0")[0] == 0
