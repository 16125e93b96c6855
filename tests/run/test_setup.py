"""The first minutes of a new user: set up, check and train with the commands of the README.

The tests make real environments and install packages, whatever the user's shell has set before.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import copier
import pytest
from renderer import TEMPLATE, render_project, shrink

from .conftest import PATIENCE, clean_environment
from .trackers import TRACKERS

# The tests' own tools, such as uv, come first.
TOOLS = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
OLD_TQDM = "tqdm==4.66.5"
# Packages that another environment has, too; here none of them must be imported.
SHADOWS = ("pip", "tqdm", "yaml")
QUICK = ("--max-steps=2", "--trackers=none")


def shell(folder: Path) -> dict[str, str]:
    """Return the environment of a shell in which modules and other environments left marks."""
    elsewhere = folder.parent / "elsewhere"
    pip = folder.parent / "config/pip"
    for needed in (elsewhere / "bin", elsewhere / "scripts", pip):
        needed.mkdir(parents=True, exist_ok=True)
    (pip / "pip.conf").write_text(f"[install]\nuser = true\n[global]\ntarget = {elsewhere}\n")
    for name in SHADOWS:
        (elsewhere / f"{name}.py").write_text("raise SystemExit('this is not the environment')\n")
    marks = {
        name: str(elsewhere)
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET", "PIP_PREFIX")
    }
    marks |= {"CDPATH": str(elsewhere), "XDG_CONFIG_HOME": str(pip.parent), "PYTHONHOME": "/usr"}
    marks["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as in a notebook
    env = {**clean_environment(folder), **marks, "PIP_USER": "1", "PATH": TOOLS}
    env["UV_SYSTEM_CERTS"] = "1"  # this machine's own, as pip takes them
    env["PIP_COMPILE"] = "0"  # Python compiles the modules that it imports
    for name in ("MAKEFLAGS", "MAKELEVEL", "OMP_NUM_THREADS", "TORCH"):
        env.pop(name, None)
    return env


def make(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run make in a project; return its output."""
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={**shell(folder), "PYTHON3": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=1800,
    )


def made(folder: Path, *arguments: str, **env: str) -> str:
    """Run make, which must succeed; return its output."""
    done = make(folder, *arguments, **env)
    assert done.returncode == 0, (arguments, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def refused(folder: Path, *arguments: str, **env: str) -> str:
    """Run make, which must fail; return the script's one line about it."""
    done = make(folder, *arguments, **env)
    assert done.returncode != 0, done.stdout
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return line


def interrupt(folder: Path, arguments: list[str], reached: Callable[[], bool], **env: str) -> None:
    """Kill make and all its processes after it has done some work."""
    process = subprocess.Popen(
        ["make", *arguments],
        cwd=folder,
        env={**shell(folder), "PYTHON3": sys.executable, **env},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE
    try:
        while not reached():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def locked(folder: Path) -> list[str]:
    """Return the versions in a project's constraints."""
    lines = (folder / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def submit(folder: Path, script: str, *arguments: str) -> None:
    """Run a batch script as Slurm does for one task, with the environment of the user's shell."""
    tools = folder.parent / "slurm"
    tools.mkdir()
    for name, text in (
        ("scontrol", "[[ $2 == job ]] && echo SubmitTime=1 || echo n1"),
        ("srun", "while [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=0 SLURM_LOCALID=0 exec $*"),
    ):
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(folder)}
    for name in ("JOB_NUM_NODES", "NTASKS", "TASKS_PER_NODE", "CPUS_PER_TASK", "STEP_NUM_TASKS"):
        job[f"SLURM_{name}"] = "1"
    env = {**shell(folder), **job, "SLURM_JOB_NAME": "demo", "SLURM_STEP_ID": "0"}
    done = subprocess.run(
        ["bash", script, *arguments],
        cwd=folder,
        env={**env, "PATH": f"{tools}:{env['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)


def assert_own_environment(folder: Path, run: str) -> None:
    """Check that a run used the installed packages, and that nothing was written elsewhere."""
    facts = json.loads((folder / run / "provenance.json").read_text())
    assert facts["python"]["executable"] == str(folder / ".venv/bin/python")
    assert facts["packages"]["tqdm"] == OLD_TQDM.partition("==")[2]
    elsewhere = (path.name for path in (folder.parent / "elsewhere").rglob("*") if path.is_file())
    assert set(elsewhere) == {f"{name}.py" for name in SHADOWS}


@pytest.fixture(scope="module")
def torch() -> str:
    """Return the PyTorch that is asked for."""
    return os.environ.get("TORCH", "torch==2.13.0")


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """A project of the default answers, in a folder with a space in its name."""
    folder = render_project(tmp_path / "my work" / "demo", tools=None)
    with (folder / "constraints.txt").open("a") as file:
        file.write(f"{OLD_TQDM}\n")
    return folder


@pytest.mark.shows("make setup TORCH=*", "make test", "make train ARGS=*")
def test_from_make_setup_to_a_trained_model(newcomer: Path, torch: str) -> None:
    assert "run 'make setup'" in make(newcomer, "train").stderr
    made(newcomer, "setup", f"TORCH={torch}")
    made(newcomer, "lint")
    report = made(newcomer, "test")
    assert " passed" in report and "skipped" not in report

    data = os.environ.get("MNIST_DIR")
    dataset = f"--dataset mnist --data-dir '{data}'" if data else "--dataset synthetic"
    made(newcomer, "train", f"ARGS={dataset} --run-dir runs/first --max-steps 80")
    summary = json.loads((newcomer / "runs" / "first" / "summary.json").read_text())
    assert (summary["world_size"], summary["global_step"]) == (2, 80)
    assert list((newcomer / "runs" / "first" / "tensorboard").glob("events.*"))
    assert_own_environment(newcomer, "runs/first")
    script = newcomer / ".venv" / "bin" / "demo"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "train" in done.stdout and "download" in done.stdout


@pytest.mark.shows("make setup test", "make setup", "make lock", "make clean-env setup lock")
@pytest.mark.slow
def test_an_environment_is_whole_or_said_not_to_be(
    newcomer: Path, tmp_path: Path, torch: str
) -> None:
    setup, python = ["setup", f"TORCH={torch}"], newcomer / ".venv/bin/python"
    interrupt(newcomer, setup, python.is_symlink)
    # Its pip comes seconds later.
    assert not list(newcomer.glob(".venv/lib/python*/site-packages/pip/__main__.py"))
    interrupt(newcomer, setup, lambda: any(newcomer.glob(".venv/lib/python*/site-packages/torch")))
    assert "run 'make setup'" in make(newcomer, "train").stderr
    made(newcomer, *setup)
    assert made(newcomer, *setup).endswith("Successfully installed demo-0.1.0\n")

    made(newcomer, "lock")
    assert {OLD_TQDM, torch} <= set(locked(newcomer)) and "+" not in "".join(locked(newcomer))
    names = [line.partition("==")[0] for line in locked(newcomer)]
    assert names == sorted(names) and not {"demo", "pip", "setuptools"} & set(names)
    # The constraints hold for PyTorch too.
    clash = make(newcomer, "setup", "TORCH=torch==2.12.0")
    assert clash.returncode != 0 and "constraint" in clash.stderr + clash.stdout

    # pip alone would take it for complete.
    (package,) = newcomer.glob(".venv/lib/python*/site-packages/yaml")
    package.rename(newcomer / "gone")
    damaged = make(newcomer, *setup).stderr
    assert "PyYAML lacks yaml/__init__.py" in damaged
    assert "with 'make clean-env setup'" in damaged
    train = [python, "-m", "demo", "train"]
    env = clean_environment(newcomer)
    done = subprocess.run(train, cwd=newcomer, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: module yaml") and "setup" in done.stderr
    (newcomer / "gone").rename(package)

    # An environment that was copied along would run the original folder's code.
    other = tmp_path / "other"
    shutil.copytree(newcomer, other, ignore=shutil.ignore_patterns(".venv", "data"))
    (other / ".venv").symlink_to(newcomer / ".venv")
    assert "run 'make setup'" in make(other, "train").stderr

    made(newcomer, "clean-env")
    assert not (newcomer / ".venv").exists()


@pytest.mark.slow
def test_uv_makes_the_same_environment_again(tmp_path: Path, torch: str) -> None:
    """On another file system, as for homes with a small quota."""
    project = render_project(tmp_path / "demo", environment="uv", setup="full", trackers=[])
    # uv takes PyTorch's build from where pip is told to take it.
    index = [f"--index-url={url}"] if (url := os.environ.get("TORCH_INDEX")) else []
    download = ["-m", "pip", "download", "--quiet", "--no-deps", f"--dest={tmp_path}", *index]
    subprocess.run([sys.executable, *download, torch], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("torch-*.whl")
    scratch = tmp_path / "scratch"
    setup = ["setup-cpu", f"TORCH={wheel}", f"ENV_ROOT={scratch}"]

    with (project / "constraints.txt").open("a") as file:
        file.write(f"{OLD_TQDM}\n")
    made(project, *setup, UV_PYTHON=sys.executable)
    (folder,) = scratch.glob("demo-env-*")
    assert (project / ".venv").readlink() == folder
    made(project, "lock")
    first = locked(project)
    assert {OLD_TQDM, f"torch=={wheel.name.split('-')[1].partition('+')[0]}"} <= set(first)

    made(project, "clean-env")
    assert not list(scratch.glob("demo-env-*")) and not (project / ".venv").is_symlink()
    made(project, *setup, UV_PYTHON=sys.executable)
    made(project, "lock")
    assert locked(project) == first
    submit(project, "slurm/train_cpu.sbatch", "--dataset=synthetic", "--run-dir=runs/job", *QUICK)
    assert_own_environment(project, "runs/job")


CONDA = f"""#!{sys.executable}
import pathlib, subprocess, sys

words = sys.argv[1:]
with open("conda.log", "a") as file:
    print(*words, file=file)
prefix = words[words.index("--prefix") + 1]
if words[0] == "create":
    pathlib.Path(prefix, "conda-meta").mkdir(parents=True)
if words[:2] == ["env", "update"] or "--file" in words and not words[0] == "create":
    subprocess.run([{sys.executable!r}, "-m", "venv", "--without-pip", prefix], check=True)
    (packages,) = pathlib.Path(prefix, "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text({sysconfig.get_path("purelib")!r})
if words[0] == "list":
    print("@EXPLICIT")
"""


@pytest.mark.shows("make setup-cpu")
def test_conda_makes_the_base_and_pip_the_rest(tmp_path: Path) -> None:
    """With a stand-in for conda, whose Python borrows the tests' packages."""
    project = render_project(tmp_path / "demo", environment="conda", setup="full", trackers=[])
    assert "no-conda is missing" in refused(project, "setup", "CONDA=no-conda")
    conda = tmp_path / "conda"
    conda.write_text(CONDA)
    conda.chmod(0o755)
    log = project / "conda.log"

    def commands() -> list[str]:
        lines = log.read_text().splitlines()
        log.unlink()
        return [line.replace("--prefix ./.conda ", "") for line in lines]

    made(project, "setup-cpu", f"CONDA={conda}")
    environment, install = "env update --file environment.yml", "install --yes "
    channel = "--override-channels --channel conda-forge"
    create = "create --yes --prefix ./.conda"
    assert commands() == [create, environment, f"{install}{channel} pytorch-cpu<{TESTED}"]

    # What conda installed is not for pip to replace, and in a file of its own.
    (packages,) = (project / ".conda/lib").glob("python*/site-packages")
    for name, installer in (("by-conda", "conda"), ("by-pip", "pip")):
        info = packages / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0+cpu\n")
        (info / "INSTALLER").write_text(f"{installer}\n")
    made(project, "lock", f"CONDA={conda}")
    assert locked(project) == ["by-pip==1.0"]
    (lock,) = project.glob("conda-*.lock")
    assert lock.read_text() == "@EXPLICIT\n"
    commands()

    made(project, "clean-env")
    made(project, "setup", f"CONDA={conda}")
    assert commands() == [create, f"{install}--file {lock.name}"]
    made(project, "setup", "TORCH=pytorch-gpu=2.10", f"CONDA={conda}")
    assert commands() == [environment, f"{install}{channel} pytorch-gpu=2.10"]


@pytest.mark.slow
@pytest.mark.shows("make setup SITE_PACKAGES=1")
def test_a_pytorch_of_the_site_is_taken(tmp_path: Path) -> None:
    """Its module puts it on PYTHONPATH. The environment gets the missing packages."""
    project = shrink(render_project(tmp_path / "demo", setup="full", trackers=[]))
    site = {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_BUILD_ISOLATION": "0"}
    made(project, "setup", "SITE_PACKAGES=1", PYTHON3=sys.executable, **site)
    made(project, "train", "ARGS=--dataset=synthetic --trackers=none --max-steps=2")
    (packages,) = project.glob(".venv/lib/python3*/site-packages")
    installed = {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}
    # A new environment of Python 3.11 has a setuptools of its own, which torch finds too old.
    assert {"demo"} <= installed <= {"demo", "pip", "setuptools"}
    made(project, "setup", "SITE_PACKAGES=1", **site)  # completes it
    settings = project / ".venv/pyvenv.cfg"
    settings.write_text(settings.read_text().replace("= true", "= false"))
    assert "without SITE_PACKAGES" in refused(project, "setup", "SITE_PACKAGES=1")


def test_setup_says_why_it_cannot(tmp_path: Path) -> None:
    project = render_project(tmp_path / "demo")
    old = tmp_path / "python3.9"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'print(3.9); raise SystemExit(1)'\n")
    old.chmod(0o755)
    for python in (str(old), "no-python"):
        line = refused(project, "setup", PYTHON3=python)
        assert f"{python} is too old" in line

    # An environment of another Python, of one that is gone, and one that the file system lost.
    (project / ".venv/bin").mkdir(parents=True)
    python = project / ".venv/bin/python"
    python.write_text("#!/bin/sh\necho 3.99\n")
    python.chmod(0o755)
    assert "not of Python 3.1" in refused(project, "setup")
    python.unlink()
    python.symlink_to("/gone/bin/python")
    assert "does not start" in refused(project, "setup")
    made(project, "clean-env")
    (project / ".venv").symlink_to("/gone")
    assert "points to" in refused(project, "setup")
    made(project, "clean-env")
    assert not (project / ".venv").is_symlink()

    uv = render_project(tmp_path / "uv" / "demo", environment="uv")
    assert "uv is missing" in refused(uv, "setup", PATH="/usr/bin:/bin")


def test_the_constraints_are_their_owners(tmp_path: Path) -> None:
    project = render_project(tmp_path / "demo")
    (project / "constraints.txt").write_text("tqdm==4.66.5\n")
    answers = {"data": {"package_name": "demo"}, "defaults": True, "quiet": True}
    copier.run_copy(str(TEMPLATE), project, vcs_ref="HEAD", overwrite=True, **answers)
    assert (project / "constraints.txt").read_text() == "tqdm==4.66.5\n"


def plain(command: list[str]) -> list[str]:
    """Return the words of a command of PowerShell or bash as the other writes them, too."""
    words = " ".join(command).lower().replace("\\", "/")
    return re.sub(r"\$\{?(\w+)(:-\$\w+\})?", r"\1", words).replace("_", "").split()


@pytest.mark.parametrize("environment", ["venv", "uv", "conda"])
def test_the_script_for_windows_does_the_same(tmp_path: Path, environment: str) -> None:
    """There is no Windows here: PowerShell's grammar accepts it, and it names the same commands."""
    import tree_sitter
    import tree_sitter_powershell

    project = render_project(tmp_path / "demo", environment=environment)
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_powershell.language()))
    text = (project / "scripts/setup.ps1").read_text()
    assert parser.parse(b"if ($a { 1 }").root_node.has_error
    assert not parser.parse(text.encode()).root_node.has_error

    bash = (project / "scripts/setup.sh").read_text().replace("\\\n", "")
    commands = re.findall(
        r'(?:^|\|\|) *("\$(?:python" -m pip install|conda") .*|uv .*)', bash, re.M
    )
    theirs = [shlex.split(each) for each in commands if "$LOCK" not in each]
    called = re.findall(r"Invoke-Step (?!py )(\S+) \(?@\((.*?)\)", text, re.DOTALL)
    ours = [[program, *re.findall(r'[^\s",]+', words)] for program, words in called]
    assert ["$Python", "scripts\\lock.py"] in ours
    assert [plain(each) for each in ours if "scripts\\lock.py" not in each] == [*map(plain, theirs)]
    python = ".conda\\python.exe" if environment == "conda" else ".venv\\Scripts\\python.exe"
    assert f'$Python = "{python}"' in text
    named = re.findall(r"scripts\\(\w+\.\w+)", text)
    assert named and all((project / "scripts" / name).exists() for name in named)


@pytest.mark.slow
def test_a_full_projects_own_tests_are_green(tmp_path: Path) -> None:
    answers = {"setup": "full", "trackers": list(TRACKERS), "sweep": "optuna"}
    folder = render_project(tmp_path / "demo", **answers)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=folder,
        env=clean_environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"= \d+ passed in", done.stdout), done.stdout  # and none was skipped


@pytest.mark.shows("PIP_NO_INDEX=1 *make setup")
@pytest.mark.parametrize("environment", [pytest.param("venv", marks=pytest.mark.slow), "uv"])
def test_a_site_without_internet_has_a_folder_of_wheels(tmp_path: Path, environment: str) -> None:
    """By the command and the module's lines of docs/for-support-teams.md; without PyTorch."""
    answers = {"environment": environment, "setup": "full", "trackers": [], "tools": []}
    project = render_project(tmp_path / "demo", package_name="demo", **answers)
    links = tmp_path / "links"
    tested = torch_wheel(links, TESTED)
    page = (TEMPLATE / "docs/for-support-teams.md").read_text()
    (fill,) = re.findall(r"`(pip download .*?)`", page)
    fill = fill.replace("pip", f"{sys.executable} -m pip", 1)
    unbound = {"XDG_CONFIG_DIRS": str(tmp_path)}  # this machine may bound torch, too
    named = {**os.environ, **unbound, "PIP_FIND_LINKS": str(links)}
    subprocess.run(fill, shell=True, cwd=project, check=True, capture_output=True, env=named)
    newer = torch_wheel(project / "wheels", "99.0")

    lines = dict(re.findall(r'^setenv\("(\w+)", "(.*)"\)$', page, re.MULTILINE))
    assert len(lines) == 4
    env = {name: re.sub("/software/.*/", f"{project}/", value) for name, value in lines.items()}
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy")}
    env |= {**nowhere, **unbound, "UV_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_CACHE_DIR": "1"}
    made(project, "setup", **env)
    (packages,) = project.glob(".venv/lib/python*/site-packages")
    assert (packages / "tyro").exists() and (project / ".venv/bin/demo").exists()

    def torches() -> list[str]:
        return [path.name for path in packages.glob("torch-*.dist-info")]

    # The newest tested one; another if it is asked for, which then stays.
    assert torches() == [f"torch-{tested}.dist-info"]
    made(project, "setup", f"TORCH=torch=={newer}", **env)
    made(project, "setup", **env)
    assert torches() == [f"torch-{newer}.dist-info"]
    made(project, "lock")
    made(project, "clean-env")
    made(project, "setup", **env)
    assert torches() == [f"torch-{newer}.dist-info"]


TESTED = re.findall(r'"torch<(.*)"', (TEMPLATE / "template/pyproject.toml.jinja").read_text())[0]


def torch_wheel(folder: Path, version: str) -> str:
    """Write a wheel of a small torch to a folder; return its version.

    A TESTED version becomes the last one before it, newer than any that there is.
    """
    if version == TESTED:
        major, minor = version.split(".")
        version = f"{major}.{int(minor) - 1}.99"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return version
