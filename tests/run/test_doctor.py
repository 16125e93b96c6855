"""`doctor` finds what is wrong, says so on one line, and looks at the rest all the same."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from .conftest import Job, free_port, spawn, tasks

QUIET = ("--dataset=synthetic", "--device=cpu", "--trackers=none")
# What the commands of Slurm 22.05 print, on a cluster of two nodes with GPUs and one without.
SINFO = """\
gpu*|up|1-00:00:00|idle|gpu:a100:4(S:0-1)
closed|down|infinite|idle|gpu:a100:4(S:0-1)
gpu*|up|1-00:00:00|mixed|gpu:a100:4(S:0-1)
cpu|up|30:00|idle|(null)
"""
SLURM = {
    "sinfo": f"cat <<'END'\n{SINFO}END",
    "scontrol": 'echo "Slurmctld(primary) at head is UP"',
    "sbatch": (
        'echo "sbatch: Job 7 to start at 2030-01-02T03:04:05 using 8 processors on nodes n[1-2]'
        ' in partition gpu" >&2'
    ),
    "sacctmgr": "printf 'physics|normal,long\\nchemistry|normal\\n'",
}
# Runs before anything else in a process: what makes it a node of its own.
AT_START = "import os\nexec(os.environ.get('AT_START', ''))\n"
NODE = "import socket; socket.gethostname = lambda: 'n2'; "

Files = Mapping[str, str]


class Place:
    """A project that a test may change, on a machine without Slurm's commands of its own."""

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
        """Run the command alone; return its exit code and its lines."""
        command = ["demo", "doctor", *flags]
        env = self.with_stubs({**self.env, **env})
        job = spawn(self.project, self.bin.parent / "doctor", [command], [env]).wait()
        assert "Traceback" not in job.log, job.log
        return job.codes[0], job.log.splitlines()

    def nodes(self, *nodes: Mapping[str, str], ranks: int = 2, flags: tuple = ()) -> Job:
        """Run the command as srun would on some nodes, whose environments differ as given."""
        started = tasks(ranks, **self.env, SLURM_STEP_NODELIST="n[1-2]")
        # Fewer nodes than ranks: the others never come.
        envs = [
            self.with_stubs({**task, "SLURM_LOCALID": "0", **node})
            for task, node in zip(started, nodes, strict=False)
        ]
        command = ["demo", "doctor", *QUIET, *flags]
        return spawn(self.project, self.bin.parent / "nodes", [command] * len(envs), envs).wait()

    def with_stubs(self, env: dict[str, str]) -> dict[str, str]:
        """Return an environment in which the stubs are there, if the test uses one."""
        stubs = self.project / "stubs"
        if "AT_START" in env or len(list(stubs.iterdir())) > 1:
            return {"PYTHONPATH": f"{stubs}:{self.project / 'src'}", **env}
        return env

    def elsewhere(self) -> Path:
        """Return a copy of the project: where a node is whose folder is its own."""
        return shutil.copytree(self.project, self.bin.parent / "elsewhere", symlinks=True)


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


def test_all_is_well_on_a_laptop(place: Place) -> None:
    code, found = place.doctor(*QUIET, "--json=found.json")
    assert (code, troubles(found), found[-1]) == (0, [], "0 error(s), 0 warning(s)")
    (dataset,) = lines(found, "dataset")
    assert "synthetic: train 15000, validation 5000, test 1001" in dataset
    assert "not here" in lines(found, "Slurm")[0]
    report = json.loads((place.project / "found.json").read_text())
    assert (report["errors"], report["warnings"]) == (0, 0)
    for finding, line in zip(report["findings"], found[:-2], strict=True):
        assert finding["status"] == "ok" and line.endswith(finding["message"])
    assert not list((place.project / "runs").iterdir())


def test_what_is_missing_is_an_error_and_the_rest_goes_on(place: Place) -> None:
    place.edit("pyproject.toml", '"numpy>=1.26"', '"numpy>=99", "left-pad[all]>=1"')
    place.edit("configs/train.yaml", r"\[tensorboard\]", "[tensorboard, clay]")
    code, found = place.doctor("--device=cpu")
    assert code == 1 and found[-1] == "3 error(s), 0 warning(s)"
    (packages,) = lines(found, "packages")
    assert re.search(r"numpy is [\d.]+, not >=99, left-pad is missing: run 'make setup'", packages)
    assert "no train-images-idx3-ubyte[.gz] in" in lines(found, "dataset")[0]
    assert "unknown tracker 'clay'" in lines(found, "trackers")[0]
    assert lines(found, "torch")[0].startswith("ok ")


@pytest.mark.parametrize("module", ["torch", "yaml", "tyro", "pydantic", "packaging", "numpy"])
def test_a_broken_package_is_named_and_the_rest_goes_on(place: Place, module: str) -> None:
    text = "raise ImportError('libgone.so.1: cannot open shared object file')"
    (place.project / "stubs" / f"{module}.py").write_text(text)
    code, found = place.doctor(*QUIET)
    broken = [line for line in troubles(found) if "ImportError: libgone.so.1" in line]
    if module == "packaging":  # pip brings its own
        assert not broken or lines(found, "packages") == broken
    else:
        assert code == 1 and broken
    assert lines(found, "python")[0].startswith("ok ")
    assert lines(found, "run folder")[0].startswith("ok ")


def test_a_package_that_lost_files_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a clean-up of old files on a scratch file system; pip takes it for installed."""
    from demo.tools.doctor.software import lost_files

    (tmp_path / "clay").mkdir()
    (tmp_path / "clay/kept.py").touch()
    info = tmp_path / "clay-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: clay\nVersion: 1.0\n")
    (info / "RECORD").write_text("clay/__init__.py,,\nclay/kept.py,,\nclay/deep/down.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert lost_files("clay") == ["clay/__init__.py"]


def test_files_that_git_ignores_are_named(place: Place) -> None:
    (place.bin / "git").symlink_to(shutil.which("git") or "git")
    (place.project / "slurm/site.sh").write_text("export MASTER_PORT=29500\n")
    assert not lines(place.doctor(*QUIET)[1], "git"), "this is no repository"
    subprocess.run(["git", "init", "--quiet", str(place.project)], check=True)
    assert not lines(place.doctor(*QUIET)[1], "git")
    with (place.project / ".gitignore").open("a") as file:
        file.write("core\n/slurm/*.sh\n")
    code, found = place.doctor(*QUIET)
    (line,) = troubles(found)
    assert code == 0 and re.search(r"git +ignores slurm/common.sh and \d+ more: clones", line)
    assert "'git check-ignore -v slurm/common.sh' names the rule" in line


def test_a_check_that_breaks_is_an_error_of_its_own(place: Place) -> None:
    place.edit("src/demo/data.py", r'    if settings.dataset == "mnist":', "    1 / 0\n\\g<0>")
    code, found = place.doctor(*QUIET)
    assert code == 1
    assert troubles(found) == ["error    dataset      ZeroDivisionError: division by zero"]


def test_settings_that_cannot_be_read_are_an_error(place: Place) -> None:
    place.edit("configs/train.yaml", "epochs:", "epoch:")
    code, found = place.doctor(*QUIET)
    assert code == 1 and len(troubles(found)) == 1
    assert "unknown setting 'epoch'; did you mean 'epochs'?" in lines(found, "settings")[0]


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
    assert "runs can't be written" in lines(found, "run folder")[0]


def test_gpus_that_torch_does_not_see_are_an_error(place: Place) -> None:
    flags = ("--dataset=synthetic", "--trackers=none")
    env = {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}
    code, found = place.doctor(*flags, **env)
    assert code == 1
    assert "Slurm gave 2 GPU(s), but torch sees 0" in lines(found, "GPUs")[0]
    assert place.doctor(*flags, "--device=cpu", **env)[0] == 0


def test_each_gpu_is_used(place: Place) -> None:
    """With a stand-in for torch: of two GPUs, one may be broken."""
    stub = """
__version__ = "9.9.9+cu129"
class version: cuda, hip = "12.9", None
class cuda:
    is_available, device_count = lambda: True, lambda: 2
    get_device_name = lambda index: "Model 1"
def zeros(size, device):
    if device == os.environ.get("BROKEN"):
        raise RuntimeError("CUDA error: out of service")
"""
    (place.project / "stubs" / "torch.py").write_text(f"import os{stub}")
    _, found = place.doctor("--trackers=none", SLURM_GPUS_ON_NODE="2")
    assert lines(found, "torch") == ["ok       torch        9.9.9+cu129, built for cuda 12.9"]
    assert lines(found, "GPUs") == ["ok       GPUs         2 × Model 1"]
    code, found = place.doctor("--trackers=none", BROKEN="cuda:1")
    assert code == 1 and not lines(found, "GPUs")
    assert "RuntimeError: CUDA error: out of service" in lines(found, "torch")[1]


# Scripts and Slurm


def test_all_is_well_on_a_login_node(place: Place) -> None:
    place.commands(SLURM)
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    accepted = [line for line in lines(found, "Slurm") if "accepts" in line]
    assert len(accepted) == 3
    assert "train_cpu.sbatch, which would start at 2030-01-02T03:04:05 on n[1-2]" in accepted[0]
    assert ".venv/bin/python of slurm/train_cpu.sbatch" in lines(found, "interpreter")[0]


def test_a_build_without_cuda_is_an_error_where_scripts_ask_for_gpus(place: Place) -> None:
    place.commands(SLURM)
    (place.project / "stubs" / "torch.py").write_text(
        "class version: cuda = hip = None\nclass cuda: is_available = lambda: False\n"
        "__version__ = '9.9.9'"
    )
    _, found = place.doctor("--trackers=none")
    assert re.search(
        r"9\.9\.9, built without GPUs.*multi_node.*single_node", lines(found, "torch")[0]
    )


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (
            {"scontrol": r'printf "Slurmctld(primary) at head is \033[31mDOWN"; exit 1'},
            r"head is \x1b[31mDOWN",
        ),
        ({"scontrol": 'echo "scontrol: fatal: no configuration" >&2; exit 1'}, "no configuration"),
        ({"sinfo": 'echo "sinfo: error: timed out" >&2; exit 1'}, "timed out"),
        (
            {"sbatch": 'echo "allocation failure: Invalid qos specification" >&2; exit 1'},
            "refuses slurm/train_cpu.sbatch: allocation failure: Invalid qos specification",
        ),
    ],
)
def test_what_slurm_says_is_passed_on(place: Place, commands: Files, words: str) -> None:
    place.commands({**SLURM, **commands})
    code, found = place.doctor(*QUIET)
    assert code == 1
    assert words in lines([line for line in found if line.startswith("error")], "Slurm")[0]


# A line after those of train_single_node.sbatch, which asks for an hour and four GPUs; the finding.
MISFITS = {
    "--partition=nope": ("error", "partition", "no 'nope', .*: choose of closed, cpu, gpu with"),
    "--partition closed": ("error", "partition", "closed is down"),
    "-t 1-00:00:01": ("error", "time limit", "1-00:00:01 is more than the 24 hours"),
    "--time=1441": ("error", "time limit", "1441 is more than the 24 hours"),
    "--time=1440": None,
    "--nodes=3": ("error", "nodes", "3 are more than the 2 of gpu"),
    "-N2-4": None,
    "--gres=gpu:5": ("error", "GPUs", r"5 a node .* gpu has \(its nodes have a100:4\)"),
    "--gpus-per-node=h100:1": ("error", "GPUs", "1 of type h100 a node"),
    "--gres=gpu:a100:4,tmp:1G": None,
    "--gpus-per-task=h100:2": ("error", "GPUs", "2 of type h100 a node"),
    "--gpus=5": ("error", "GPUs", "5 a node"),
    "--nodes=2 --gpus=a100:8": None,
    "-p cpu -t 5": ("error", "GPUs", r"4 a node .* cpu has \(its nodes have none\)"),
    "-p cpu,gpu": None,
    "-p nope,gpu": None,
    "-A physics --qos=long": None,
    "-A biology": ("warning", "account", "'biology' .* yours: chemistry, physics"),
    "-A chemistry -q long": ("warning", "QOS", "'long' .* among yours: normal"),
}


@pytest.mark.parametrize("asked", MISFITS)
def test_what_a_script_asks_for_is_compared_with_the_cluster(
    place: Place, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    place.commands(SLURM)
    place.edit("slurm/train_single_node.sbatch", r"\ncd ", f"\n#SBATCH {asked}\\g<0>")
    amiss = troubles(slurms_answers(place, monkeypatch))
    if MISFITS[asked] is None:
        assert not amiss
    else:
        status, name, words = MISFITS[asked]
        assert len(amiss) == 1
        assert re.match(rf"{status} +{name} .*{words}", amiss[0]), amiss


def slurms_answers(place: Place, monkeypatch: pytest.MonkeyPatch, **env: str) -> list[str]:
    """Return what is found of the scripts, in this process."""
    from demo.tools.doctor import cluster, scripts

    monkeypatch.chdir(place.project)
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PATH": str(place.bin), **env}.items():
        monkeypatch.setenv(name, value)
    jobs, wrong = scripts.read(Path("slurm"))
    return [str(finding) for finding in (*wrong, *cluster.check(jobs))]


def test_variables_of_sbatch_go_before_the_script(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.commands(SLURM)
    amiss = troubles(slurms_answers(place, monkeypatch, SBATCH_PARTITION="nope"))
    assert len(amiss) == 3 and all("there is no 'nope'" in line for line in amiss)


def test_without_a_default_partition_one_must_be_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.commands({**SLURM, "sinfo": SLURM["sinfo"].replace("*", "")})
    amiss = troubles(slurms_answers(place, monkeypatch))
    assert len(amiss) == 3 and all("names no partition" in line for line in amiss)


def test_nodes_out_of_service_are_a_warning(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.commands({**SLURM, "sinfo": SLURM["sinfo"].replace("idle", "down*")})
    assert not troubles(slurms_answers(place, monkeypatch))  # n2 is left
    place.commands({"sinfo": SLURM["sinfo"].replace("idle", "down*").replace("mixed", "drained")})
    amiss = troubles(slurms_answers(place, monkeypatch))
    assert amiss and all("no node of gpu is in service now" in line for line in amiss)


def test_without_accounting_accounts_are_not_checked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.commands(SLURM)
    said = "You are not running a supported accounting_storage plugin"
    place.commands({"sacctmgr": f'echo "{said}" >&2; exit 1'})
    place.edit("slurm/train_cpu.sbatch", r"\ncd ", "\n#SBATCH -A physics\\g<0>")
    found = slurms_answers(place, monkeypatch)
    assert not troubles(found)
    assert said in lines(found, "account")[0]


def test_in_a_job_nothing_is_submitted(place: Place) -> None:
    place.commands({**SLURM, "sbatch": "exit 1"})
    asked = {"SLURM_GPUS": "1", "SLURM_MEM_PER_NODE": "200"}
    code, found = place.doctor(*QUIET, SLURM_JOB_ID="77", MASTER_PORT=free_port(), **asked)
    assert (code, troubles(found)) == (0, [])
    assert "do not inherit its SLURM_GPUS, SLURM_MEM_PER_NODE" in lines(found, "this job")[0]


MODULE = """
module() { [[ $* != *missing* ]] && LOADEDMODULES=$2; }
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
    (line,) = lines(found, "modules")
    assert "python/3.12, gcc of slurm/train_cpu" in line
    place.edit("slurm/train_cpu.sbatch", "load gcc", "load missing/1.0")
    place.edit("slurm/train_cpu.sbatch", "no gcc", "no missing/1.0")
    code, found = place.doctor(*QUIET)
    assert code == 1 and len(troubles(found)) == 1
    (line,) = lines(found, "scripts")
    assert "slurm/train_cpu.sbatch would end at once: no missing/1.0" in line


def test_facts_of_the_site_that_fail_are_named(place: Place) -> None:
    place.commands(SLURM)
    (place.project / "slurm" / "site.sh").write_text("cd nowhere\n")
    code, found = place.doctor(*QUIET)
    assert code == 1 and len(troubles(found)) == 1
    assert "slurm/site.sh ends with exit code 1" in lines(found, "scripts")[0]


def test_an_interpreter_that_jobs_cannot_use_is_named(place: Place) -> None:
    place.commands(SLURM)
    venv = place.project / ".venv"
    venv.unlink()
    assert "run 'make setup' first" in lines(place.doctor(*QUIET)[1], "interpreter")[0]
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("#!/bin/bash\nexit 127\n")
    (venv / "bin" / "python").chmod(0o755)
    code, found = place.doctor(*QUIET)
    assert code == 1 and "does not start" in lines(found, "interpreter")[0]
    (venv / "bin" / "python").write_text("#!/bin/bash\necho Python 3.12.1\n")
    code, found = place.doctor(*QUIET)
    assert code == 0 and "3.12.1" in lines(found, "interpreter")[0]
    assert "jobs use .venv/bin/python: run that" in lines(found, "interpreter")[1]
    (venv / "bin" / "python").unlink()
    site = place.project / "slurm/site.sh"
    site.write_text(f"PROJECT_PYTHON={sys.executable}\n")
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    site.write_text("PROJECT_PYTHON=/no/such/python\n")
    code, found = place.doctor(*QUIET)
    assert code == 1 and "PROJECT_PYTHON of slurm" in lines(found, "interpreter")[0]


def test_the_image_is_started(place: Place) -> None:
    place.commands(SLURM)
    for script in (place.project / "slurm").glob("train_*"):
        place.edit(f"slurm/{script.name}", "use_python .*", "use_image container/image.sif")
    code, found = place.doctor(*QUIET)
    assert code == 1 and "run 'make image' first" in lines(found, "interpreter")[0]
    (place.project / "container").mkdir()
    (place.project / "container" / "image.sif").touch()
    code, found = place.doctor(*QUIET)
    assert code == 1 and "container/env of slurm/train_cpu" in lines(found, "interpreter")[0]
    (place.project / "container" / "apptainer.def").touch()
    code, found = place.doctor(*QUIET)
    assert code == 0 and lines(found, "apptainer")[0].startswith("warning ")
    place.commands({"apptainer": "echo Python 3.12.1"})
    (place.project / "slurm" / "site.sh").write_text(f"PATH=$PATH:{place.bin}")
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    assert "container/image.sif of slurm/train_cpu" in lines(found, "interpreter")[0]
    place.commands({"apptainer": "exit 255"})
    code, found = place.doctor(*QUIET)
    assert code == 1 and "run 'make image' again" in lines(found, "interpreter")[0]


def test_pyxis_is_asked_for(place: Place) -> None:
    place.commands(SLURM)
    for script in (place.project / "slurm").glob("train_*"):
        place.edit(f"slurm/{script.name}", "use_python .*", "use_image nvcr.io#nvidia/pytorch")
        place.edit(f"slurm/{script.name}", r'"\$\{python\[@\]\}"', '"${in_image[@]}" python')
    (place.project / "container/env").mkdir(parents=True)
    place.commands({"srun": "echo --help"})
    code, found = place.doctor(*QUIET)
    assert code == 0 and "srun has no --container-image here" in lines(found, "pyxis")[0]
    place.commands({"srun": "echo --container-image=IMAGE"})
    (place.project / "slurm" / "site.sh").write_text(f"PATH={place.bin}:$PATH")
    code, found = place.doctor(*QUIET)
    assert (code, troubles(found)) == (0, [])
    assert "nvcr.io#nvidia/pytorch of slurm/train_cpu" in lines(found, "interpreter")[0]


# Trackers


class Server(HTTPServer):
    """A server that gives one answer, and notes the pages that it was asked for."""

    def __init__(self, answer: int) -> None:
        self.pages: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.pages.append(handler.path)
                assert not handler.headers["Authorization"]
                handler.send_response(answer)
                handler.end_headers()

            def log_message(handler, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Callable[[int], Server]]:
    """Return what starts a server that gives one answer."""
    started: list[Server] = []

    def start(answer: int) -> Server:
        started.append(Server(answer))
        return started[-1]

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


def tracked(place: Place, name: str, **env: str) -> tuple[int, str]:
    """Return the exit code, and the line about a tracker that is installed as far as one can see.

    What is tested is the way to its server, so its own package need not be there.
    """
    (place.project / "src" / "demo" / "tracking" / f"{name}.py").touch()
    package = place.project / "stubs" / f"{name}-9.9.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    code, found = place.doctor("--dataset=synthetic", "--device=cpu", f"--trackers={name}", **env)
    (line,) = lines(found, name)
    assert "sekret" not in "".join(found)
    assert "version 9.9" in line or line.startswith("error ")
    return code, line


def test_wandb_is_offline_or_within_reach(
    place: Place, server: Callable[[int], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)
    code, line = tracked(place, "wandb")
    assert code == 0 and line.startswith("warning ") and "WANDB_API_KEY is not set" in line
    code, line = tracked(place, "wandb", WANDB_MODE="offline")
    assert code == 0 and line.startswith("ok ")
    key = {"WANDB_API_KEY": "sekret"}
    there = server(404)  # a page that is not there is an answer
    url = f"http://127.0.0.1:{there.server_port}"
    code, line = tracked(place, "wandb", WANDB_BASE_URL=url, **key)
    assert line.startswith("ok ") and url in line and there.pages
    gone = f"http://ada:sekret@127.0.0.1:{free_port()}"
    code, line = tracked(place, "wandb", WANDB_BASE_URL=gone, **key)
    assert code == 0 and line.startswith("warning ") and "can't be reached" in line


def test_mlflows_server_answers_or_not(place: Place, server: Callable[[int], Server]) -> None:
    code, line = tracked(place, "mlflow")
    assert code == 0 and "writes files" in line
    there = server(200)
    uri = f"http://ada:sekret@127.0.0.1:{there.server_port}/prefix/"
    code, line = tracked(place, "mlflow", MLFLOW_TRACKING_URI=uri)
    assert line.startswith("ok ") and there.pages == ["/prefix/health"]
    for uri in (f"http://127.0.0.1:{server(502).server_port}", f"http://127.0.0.1:{free_port()}"):
        code, line = tracked(place, "mlflow", MLFLOW_TRACKING_URI=uri)
        assert code == 1 and line.startswith("error ") and uri in line


def test_aims_server_is_connected_to(place: Place, server: Callable[[int], Server]) -> None:
    assert "writes files" in tracked(place, "aim")[1]
    port = server(200).server_port
    code, line = tracked(place, "aim", AIM_REPO=f"aim://127.0.0.1:{port}")
    assert code == 0 and "answers" in line
    code, line = tracked(place, "aim", AIM_REPO=f"aim://127.0.0.1:{free_port()}")
    assert code == 1 and "can't be reached" in line


def test_a_tracker_that_cannot_be_imported_is_an_error(place: Place) -> None:
    (place.project / "src" / "demo" / "tracking" / "mlflow.py").write_text("import no_such_thing")
    code, found = place.doctor("--dataset=synthetic", "--device=cpu", "--trackers=mlflow")
    assert code == 1
    assert "No module named 'no_such_thing'" in lines(found, "mlflow")[0]


# Several nodes


def nodes(place: Place, *envs: Mapping[str, str], code: int, flags: tuple[str, ...] = ()) -> list:
    """Return the lines of a job whose nodes differ as given; only the first may say anything."""
    job = place.nodes(*envs, flags=flags)
    assert job.codes == [code] + [0] * (len(envs) - 1), job.log
    first, *others = (log.read_text() for log in job.logs)
    assert not any(others), others
    assert not list(place.project.glob("runs/.doctor*"))
    return first.splitlines()


SECOND = {"AT_START": NODE}


def test_nodes_that_agree_have_one_line_for_each_finding(place: Place) -> None:
    found = nodes(place, {}, SECOND, code=0)
    assert not troubles(found)
    assert len(lines(found, "torch")) == 1 and "n2" not in lines(found, "torch")[0]
    assert "what 2 processes wrote came" in lines(found, "shared folder")[0]
    assert re.search(r"n2: 127.0.0.1:\d+ can be reached", lines(found, "first node")[0])


@pytest.mark.skipif(os.geteuid(), reason="the folder must be of another user")
def test_a_folder_of_another_user_is_refused(place: Place) -> None:
    """It could hold pipes, and links to files that would be written to."""
    mine = place.project / "mine"
    mine.write_text("mine")
    folder = place.project / "runs/.doctor-77-0-0"
    folder.mkdir(parents=True)
    (folder / "locked").symlink_to(mine)
    os.chown(folder, 65534, 65534)
    job = place.nodes({}, SECOND)
    assert job.codes == [1, 1] and job.log.count("is another user's") == 2, job.log
    assert "Traceback" not in job.log and mine.read_text() == "mine"


def test_a_folder_that_is_not_shared_is_found(place: Place) -> None:
    there = place.elsewhere()
    at_start = f"{NODE}os.chdir('{there}')"
    found = nodes(place, {}, {"AT_START": at_start}, code=1, flags=("--timeout=200",))
    (line,) = troubles(found)
    assert not list((there / "runs").iterdir())
    assert re.search(r"shared folder n2: what this node wrote in runs did not come", line)


def test_a_folder_that_one_node_cannot_write_is_found(place: Place) -> None:
    there = place.elsewhere()
    (there / "runs").touch()
    found = nodes(place, {}, {"AT_START": f"{NODE}os.chdir('{there}')"}, code=1)
    (line,) = troubles(found)
    assert re.search(r"run folder +n2: runs can't be written \(Not a directory\)", line)
    assert not lines(found, "shared folder")


def test_a_node_that_never_comes_is_an_error(place: Place) -> None:
    found = nodes(place, {}, code=1, flags=("--timeout=2",))
    (line,) = troubles(found)
    assert "rank 1 of n[1-2] neither connected nor left a file in runs within 2 s" in line


def test_a_port_out_of_reach_is_an_error(place: Place) -> None:
    """As behind a firewall: the file comes, but no connection."""
    found = nodes(
        place, {}, {**SECOND, "MASTER_PORT": free_port()}, code=1, flags=("--timeout=30",)
    )
    (line,) = troubles(found)
    assert re.search(r"first node +n2: 127.0.0.1:\d+ can't be reached", line)
    assert lines(found, "shared folder")[0].startswith("ok ")


def test_a_name_that_does_not_resolve_is_an_error(place: Place) -> None:
    found = nodes(place, {}, {**SECOND, "MASTER_ADDR": "n1.invalid"}, code=1)
    assert "n2: its name n1.invalid does not resolve" in lines(found, "first node")[0]


def test_a_taken_port_is_an_error(place: Place) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, found = place.doctor(*QUIET, SLURM_JOB_ID="77", MASTER_PORT=port)
    assert code == 1
    assert f"port {port}, on which ranks meet, can't be had" in lines(found, "port")[0]


@pytest.mark.parametrize(
    ("seconds", "status", "way"), [(-90, "error", "behind"), (20, "warning", "ahead of")]
)
def test_a_clock_that_is_off_is_found(place: Place, seconds: int, status: str, way: str) -> None:
    at_start = f"import time; now = time.time; time.time = lambda: now() + {seconds}"
    code = 1 if status == "error" else 0
    found = nodes(place, {}, {"AT_START": f"{NODE}{at_start}"}, code=code)
    for line, whose in zip(troubles(found), ("first node", "file server of runs"), strict=True):
        said = re.match(rf"{status} +clock +n2: is (\d+) s {way} the {whose}", line)
        # A slow machine can't tell to the second.
        assert said and abs(seconds) - 10 <= int(said[1]) <= abs(seconds), found


def test_nodes_that_do_not_agree_are_named(place: Place) -> None:
    at_start = "import platform; platform.python_version = lambda: '3.9.1'"
    found = nodes(place, {}, {"AT_START": f"{NODE}{at_start}"}, code=1)
    (line,) = troubles(found)
    assert re.search(r"nodes must agree, but this is 3\.\d.* on .*; 3\.9\.1, .* on n2", line)


def test_a_broken_node_does_not_keep_the_others_from_speaking(place: Place) -> None:
    """Even if it does not know the run root, since it can't read the settings."""
    at_start = "import sys; sys.modules['torch'] = None"
    found = nodes(place, {}, {"AT_START": f"{NODE}{at_start}"}, code=1)
    assert lines(found, "settings")[0].startswith("error    settings     n2: ")
    assert lines(found, "shared folder")[0].startswith("ok ")
    assert re.match(r"error +torch +n2: can't be imported", troubles(found)[0])
    assert lines(found, "torch")[0].startswith("ok ")


def test_a_node_that_knows_itself_by_the_loopback_address_is_found(place: Place) -> None:
    at_start = "socket.getaddrinfo = lambda *a, **k: [(2, 1, 6, '', ('127.0.1.1', 0))]"
    env = {"AT_START": f"{NODE}{at_start}", "SLURM_JOB_NUM_NODES": "2"}
    code, found = place.doctor(*QUIET, **env)
    assert code == 1
    assert "n2 resolves to 127.0.1.1 on itself" in lines(found, "network")[0]
    assert place.doctor(*QUIET, **env, GLOO_SOCKET_IFNAME="ib0")[0] == 0


def test_without_srun_one_process_is_checked(place: Place) -> None:
    code, found = place.doctor(*QUIET, SLURM_NTASKS="4")
    assert code == 0
    assert "put srun in front" in lines(found, "launcher")[0]
