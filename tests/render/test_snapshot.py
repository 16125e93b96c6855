"""What a snapshot of the code holds, which one a job runs, and what `make submit` asks of Slurm."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from renderer import TOOLS, Renderer
from test_scripts import ONE_NODE, Submission, refused, submission

SLURM = {
    "sbatch": """[[ $* != *--test-only* ]] || exit 0
echo "$@" >>sbatch.args
((${LIMIT:-9} >= $(wc -l <sbatch.args))) || { echo "sbatch: error: QOSMaxSubmit" >&2; exit 1; }
echo "--> Checked by the site: ok"
echo "$((10 + $(wc -l <sbatch.args)));cluster\"""",
    "scancel": 'echo "$@" >>scancel.args',
    "scontrol": """[[ $1 != show ]] || { echo "JobId=$3 SubmitTime=1700000000"; exit; }
echo "${SLURM_CLUSTERS:-} $@" >>scontrol.args
[[ -z ${BUSY:-} ]]""",
}
WHEN = "1700000000"  # every job was submitted


@pytest.fixture
def project(render: Renderer, tmp_path: Path) -> Submission:
    """A project, with stand-ins for the commands that submit and cancel, too."""
    project = submission(render, tmp_path / "project", tools=[*TOOLS])
    for name in ("sbatch", "scancel"):
        (project.root / "bin" / name).write_text(f"#!/bin/bash\n{SLURM[name]}\n")
        (project.root / "bin" / name).chmod(0o755)
    return project


def code_of(project: Submission, job: str, **env: str) -> Path:
    """Run a job, and return the folder whose code its ranks run."""
    code, log = project.run("train_single_node", **ONE_NODE, SLURM_JOB_ID=job, **env)
    assert code == int(env.get("SRUN_EXIT", 0)), log
    (path,) = (line for line in project.noted("srun.env") if line.startswith("PYTHONPATH="))
    assert f"code         {path.removeprefix('PYTHONPATH=')}\n" in log
    return Path(path.removeprefix("PYTHONPATH=")).parent


def git(project: Submission, *arguments: str) -> str:
    """Run git in a project."""
    own = ("-c", "user.name=demo", "-c", "user.email=demo@example.org", "-C", project.root)
    return subprocess.check_output(["git", *own, *arguments], text=True)


@pytest.mark.parametrize("repository", [True, False])
def test_a_snapshot_has_the_code_and_is_kept_for_the_job(
    project: Submission, tmp_path: Path, repository: bool
) -> None:
    root = project.root
    (root / ".gitignore").write_text((root / ".gitignore").read_text() + "*.bin\n")
    if repository:
        git(project, "init", "--quiet")
        git(project, "add", ".")
        git(project, "commit", "--quiet", "--message=demo")
    (tmp_path / "elsewhere.py").write_text("linked")
    (root / "src/demo/figures.py").unlink()
    (root / "src/demo/linked.py").symlink_to(tmp_path / "elsewhere.py")
    (root / "src/demo/gone.py").symlink_to(tmp_path / "nowhere.py")
    for name in ("a\nb.py", "large.bin", "__pycache__/a.pyc"):
        (root / "src/demo" / name).parent.mkdir(exist_ok=True)
        (root / "src/demo" / name).write_text("new")
    code = code_of(project, "1", SRUN_EXIT="75")
    assert (
        code.parent == root / ".snapshots"
        and (root / f"logs/code-slurm-1-{WHEN}").resolve() == code
    )
    assert (code / "src/demo/a\nb.py").exists() and (code / "slurm/site.sh").exists()
    assert not (code / "src/demo/linked.py").is_symlink()
    absent = ["figures.py", "gone.py", "__pycache__", *(["large.bin"] * repository)]
    assert not [name for name in absent if (code / "src/demo" / name).exists()]
    assert (code / "src/demo/large.bin").exists() is not repository
    assert not (code / "src/demo/model.py").stat().st_mode & 0o222
    assert not {"Makefile", "bin", "logs"} & {*os.listdir(code)}
    if repository:
        assert (code / "git/commit").read_text() == git(project, "rev-parse", "HEAD")
        diff = (code / "git/diff").read_text()
        assert "+linked" not in diff and "facts of the site" not in diff
        assert " D src/demo/figures.py\n" in (code / "git/changes").read_text()
        assert "src/demo/figures.py" in git(project, "ls-files"), "the index has changed"
    # Equal code is the same snapshot. A requeued job does not see other code.
    assert code_of(project, "2") == code
    (root / "src/demo/model.py").write_text("edited")
    (root / "slurm/site.sh").write_text("exit 9\n")
    (root / "slurm/common.sh").write_text(
        (root / "slurm/common.sh").read_text().replace("${1:-} == 3", "${1:-} == 4")
    )
    assert code_of(project, "1", SLURM_RESTART_COUNT="1") == code
    assert not list(root.glob("logs/code-*")), "another job may get the number later"
    assert len(os.listdir(root / ".snapshots")) == 1
    assert project.run("train_single_node", **ONE_NODE, SLURM_JOB_ID="3")[0] == 1


def test_a_folder_that_git_does_not_trust_is_named(project: Submission) -> None:
    """Without git, a snapshot would have the files that git ignores."""
    git(project, "init", "--quiet")
    os.chown(project.root / ".git", 65534, -1)
    os.chown(project.root, 65534, -1)
    status, said = project.run("train_single_node", **ONE_NODE, SLURM_JOB_ID="1")
    assert status == 1 and "git config --global --add safe.directory" in said


SECRETS = (".env", ".env.local", ".netrc", "tls.pem", "api.key")


@pytest.mark.parametrize("repository", [True, False])
def test_a_snapshot_keeps_modes_and_leaves_secrets_out(
    project: Submission, repository: bool
) -> None:
    root = project.root
    if repository:
        git(project, "init", "--quiet")
        git(project, "add", ".")
        git(project, "commit", "--quiet", "--message=demo")
    for name in ("private.py", *SECRETS):
        (root / "src/demo" / name).write_text(f"PASSPHRASE of {name}")
    open_to_all = code_of(project, "1")
    (root / "src/demo/private.py").chmod(0o600)
    code = code_of(project, "2")
    assert code != open_to_all
    assert (code / "src/demo/private.py").stat().st_mode & 0o777 == 0o400
    with tarfile.open(code / "code.tar.gz") as archive:
        modes = {member.name: member.mode for member in archive.getmembers()}
    assert modes["./src/demo/private.py"] == 0o600
    assert not [name for name in modes if name.endswith(SECRETS)]
    assert not [path for path in code.rglob("*") if path.name in SECRETS]
    diff = (code / "git/diff").read_text() if repository else ""
    assert diff.count("PASSPHRASE") == repository


@pytest.mark.parametrize("committed", [True, False])
def test_a_snapshot_has_repositories_in_the_code_and_no_loop(
    project: Submission, tmp_path: Path, committed: bool
) -> None:
    """Such as a submodule with a submodule, and links to folders."""
    root = project.root
    outer, inner = root / "src/demo/outer", root / "src/demo/outer/deep/inner"
    inner.mkdir(parents=True)
    for folder in (inner, outer, root):
        (folder / "part.py").write_text(f"# of {folder.name}")
        other = Submission(**{**vars(project), "root": folder})
        git(other, "init", "--quiet")
        if committed:
            git(other, "-c", "advice.addEmbeddedRepo=false", "add", ".")
            git(other, "commit", "--quiet", "--message=demo")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.py").touch()
    (tmp_path / "elsewhere/gone.py").symlink_to("nothing")
    (tmp_path / "elsewhere/back").symlink_to(root)
    if committed:  # a submodule that is not checked out
        git(project, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},src/demo/absent")
        (root / "src/demo/absent").mkdir()
    for name, target in (("up", ".."), ("here", "."), ("linked", tmp_path / "elsewhere")):
        (root / "src/demo" / name).symlink_to(target)
    code = code_of(project, "1") / "src/demo"
    assert (code / "outer/part.py").exists() and (code / "outer/deep/inner/part.py").exists()
    assert [path.name for path in (code / "linked").iterdir()] == ["a.py"]
    assert not (code / "up").exists() and not (code / "here").exists()
    assert not list(code.rglob(".git"))


def test_tasks_of_an_array_run_the_same_code(project: Submission) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "123450"}
    code = code_of(project, "123456", SLURM_ARRAY_TASK_ID="0", **task)
    (project.root / "src/demo/model.py").write_text("edited")
    assert code_of(project, "123456", SLURM_ARRAY_TASK_ID="1", **task) == code


def test_without_snapshots_a_job_runs_the_folder(project: Submission) -> None:
    assert code_of(project, "1", CODE_SNAPSHOT="0", CODE_DIR="/of/another/job") == project.root
    assert not [line for line in project.noted("srun.env") if line.startswith("CODE_DIR=")]
    (project.root / "slurm/site.sh").write_text("true\nexport CODE_SNAPSHOT=0 # ours\n")
    assert code_of(project, "2") == project.root
    assert not (project.root / ".snapshots").exists()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("size", "60 MiB, and 50 .*src/.*CODE_SNAPSHOT=0"),
        ("gone", "snapshots/0123.* is gone"),
        ("disk", "can't keep .*snapshots: .*CODE_SNAPSHOT=0"),
        ("value", "CODE_SNAPSHOT is 'yes'"),
    ],
)
def test_code_that_cannot_be_kept_is_named(project: Submission, trouble: str, words: str) -> None:
    root = project.root
    if trouble == "size":
        with (root / "src/demo/weights.pt").open("wb") as file:
            file.truncate(60 * 2**20)
    elif trouble == "gone":
        (root / f"logs/code-slurm-123456-{WHEN}").symlink_to("../.snapshots/0123")
    elif trouble == "disk":
        (root / ".snapshots").write_text("no folder")
    env = {"CODE_SNAPSHOT": "yes"} if trouble == "value" else {}
    refused(project, "train_single_node", {**ONE_NODE, **env}, words)
    assert trouble == "disk" or not list(root.glob(".snapshots/*"))


def make(project: Submission, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run make, with the stand-ins and no environment of its own."""
    scontrol = project.root / "bin/scontrol"
    scontrol.write_text(f"#!/bin/bash\n{SLURM['scontrol']}\n")
    path = f"{project.root / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=project.root,
        env={"PATH": path, "HOME": str(project.root), **env},
        capture_output=True,
        text=True,
    )


def test_a_chain_is_jobs_that_wait_for_each_other(project: Submission) -> None:
    words = ("SBATCH=--time=1:00:00 --qos=a", "ARGS=--epochs 3 --tags 'a b' '$STAGED/c'")
    done = make(project, "chain", "N=3", "SCRIPT=slurm/train_cpu.sbatch", *words)
    (snapshot,) = (project.root / ".snapshots").iterdir()
    flags = "--epochs 3 --tags a b $STAGED/c"
    assert "submitted 11 12 13" in done.stdout and snapshot.name in done.stdout, done.stderr
    assert project.noted("sbatch.args") == [
        f"--parsable --time=1:00:00 --qos=a {wait} slurm/train_cpu.sbatch {flags}"
        for wait in (
            "--hold",
            "--clusters=cluster --dependency=afterany:11",
            "--clusters=cluster --clusters=cluster --dependency=afterany:11:12",
        )
    ]
    assert project.noted("scontrol.args") == ["cluster release 11"]
    for job in ("11", "12", "13"):
        assert (project.root / f"logs/code-cluster-{job}-{WHEN}").resolve() == snapshot
        chain = (project.root / f"logs/chain-cluster-{job}-{WHEN}").read_text()
        assert chain == f"cluster-11-{WHEN} 11 12 13\n"
    done = make(project, "submit", "SCRIPT=slurm/train_cpu.sbatch", CODE_SNAPSHOT="0")
    assert done.stdout == "submitted 14\n"
    assert (project.root / f"logs/code-cluster-14-{WHEN}").resolve() == project.root


LINES = "ARGS=--epochs 3 # >x;\n--lr 0.1 \\\n--tags 'a b' \"c,d\" $HOME * $(A)\n"
FLAGS = ["--epochs", "3", "#", ">x;", "--lr", "0.1", "--tags", "a b", "c,d", "$HOME", "*", "$(A)"]


@pytest.mark.parametrize("target", ["submit", "chain"])
def test_flags_reach_the_job_as_they_are(project: Submission, target: str) -> None:
    """Make would run each line as a command of its own; a shell would cut off what follows #."""
    words = ("N=1", "SCRIPT=slurm/train_cpu.sbatch", "SBATCH=--qos=a\n--time=1")
    done = make(project, target, *words, LINES)
    assert done.returncode == 0, done.stderr
    (line,) = project.noted("sbatch.args")
    wanted = ["--parsable", "--qos=a", "--time=1", "--hold", "slurm/train_cpu.sbatch", *FLAGS]
    assert line == " ".join(wanted)


@pytest.mark.parametrize("target", ["train", "data", "doctor", "acceptance"])
def test_flags_reach_the_program_as_they_are(project: Submission, target: str) -> None:
    python = project.root / "bin/python"
    python.write_text(
        '#!/bin/bash\n[[ $1 != -c ]] || exec echo src/demo\nprintf "%s\\n" "$@" >python.args\n'
    )
    python.chmod(0o755)
    done = make(project, target, f"PYTHON={python}", LINES)
    assert done.returncode == 0, done.stderr
    assert project.noted("python.args")[-len(FLAGS) :] == FLAGS


@pytest.mark.parametrize(
    ("status", "ends"), [("0", True), ("1", True), ("75", False), ("137", False)]
)
def test_a_chain_ends_with_its_run_or_a_fault(project: Submission, status: str, ends: bool) -> None:
    logs, jobs = project.root / "logs", ("123455", "123456", "123457")
    for job in jobs:
        (logs / f"chain-slurm-{job}-{WHEN}").write_text(f"slurm-123455-1 {' '.join(jobs)}\n")
    code, log = project.run("train_single_node", **ONE_NODE, SRUN_EXIT=status)
    assert code == int(status) and "CHAIN_JOB_ID=123455" in project.noted("srun.env"), log
    cancelled = project.noted("scancel.args")
    assert ("cancelled 123457" in log) == ends
    assert cancelled == ["--quiet --state=PENDING 123457"] * ends
    assert "RUN_ORIGIN=slurm-123455-1" in project.noted("srun.env")
    assert (not list(logs.glob("chain-*"))) == ends


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("N=0",), "N is '0'"),
        (("N=two",), "N is 'two'"),
        (("SCRIPT=",), "SCRIPT=slurm/train_"),
        (("SCRIPT=slurm/none.sbatch",), "slurm/none.sbatch is not"),
        (("SCRIPT=Makefile",), "Makefile is not"),
        (("LIMIT=1",), "submits no slurm/train_cpu.sbatch"),
        (("BUSY=yes",), "let job 11 start"),
        (("N=",), "N is ''"),
    ],
)
def test_what_cannot_be_submitted_is_named(
    project: Submission, words: tuple[str, ...], error: str
) -> None:
    done = make(project, "chain", "N=2", "SCRIPT=slurm/train_cpu.sbatch", *words)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode and len(errors) == 1 and error in errors[0]
    left = {"LIMIT=1": ["11"], "BUSY=yes": ["11 12"]}
    assert project.noted("scancel.args") == left.get(words[0], [])
    assert "submitted" not in done.stdout
