"""Every distinct batch script, under every answer, is submitted, and starts what it is to start.

What it starts are stand-ins for Python and Apptainer, which say what they were given.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from renderer import Renderer, copy_template
from variants import Answers, all_variants, complete

from . import modules
from .cluster import Cluster, missing, wait_for
from .jobs import ENDED

NODES = 8  # in two racks: a sample answer asks for 4 in one
PYTHON = """\
#!/bin/bash
case "$1 $3" in
    --version*) exec echo Python 3.12.1 ;;
    -c*) exec echo 3.12.1 none /project ;;
    *" sweep")  # starts trials
        while [[ $1 != -- ]]; do shift; done
        shift
        exec "$@" ;;
esac
echo "started on $(hostname) of ${SLURM_STEP_NUM_TASKS:-1}: $*"
"""
APPTAINER = """\
#!/bin/bash
if [[ $1 == build ]]; then
    echo "started on $(hostname) of 1: $*"
    exec touch "${@: -2:1}"
fi
while [[ $1 != python ]]; do shift; done
exec .venv/bin/"$@"
"""
# Modules of sample answers, beside those that all tests have.
MODULES = {"cuda/12.4": "setenv CUDA_HOME /no/cuda", "nccl/2.21": "prereq cuda"}
# A file that users have: it says where the site's Apptainer is.
SITE_SH = "PATH=$PWD/stand-ins:$PATH\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A site that has what the sample answers name."""
    if reason := missing() or modules.missing("environment-modules"):
        pytest.skip(reason)
    partitions = "\n".join(
        f"PartitionName={name} Nodes=ALL MaxTime=INFINITE" for name in ("gpu_short", "cpu")
    )
    settings = f"Licenses=course:1\n{partitions}"
    folder = tmp_path_factory.mktemp("site")
    modules.write(folder / "etc/environment-modules/modules", MODULES)
    with (
        Cluster(nodes=NODES, memory=20_000_000, settings=settings) as running,
        modules.installed(running, "environment-modules", folder),
    ):
        control = ("scontrol", "update")
        running.run(*control, "PartitionName=main", "MaxTime=INFINITE")
        features = [f"{which}Features=h100,rack2" for which in ("Available", "Active")]
        running.run(*control, f"NodeName=n[5-{NODES}]", *features)
        running.run(
            *("scontrol", "create", "reservation", "ReservationName=course-2", "Users=root"),
            # Without nodes of its own: those would be closed to the other jobs.
            *("StartTime=now", "Duration=UNLIMITED", "Flags=ANY_NODES", "Licenses=course:1"),
        )
        yield running


@dataclass
class Submitted:
    """A script with what it sources, and the job that it became.

    Attributes:
        root: the rendered project, as far as a batch script sees it.
        path: of the script in the project.
    """

    answers: Answers
    root: Path
    path: str
    id: str = ""

    @property
    def log(self) -> str:
        """What the job said."""
        return "".join(path.read_text() for path in self.root.glob(f"logs/*-{self.id}.out"))

    def fault(self, state: str) -> str:
        """Return what differs from what the answers ask for; nothing if nothing does."""
        found = Counter(re.findall(r"^(?: *\d+: )?started on \S+ of (\d+): (.*)$", self.log, re.M))
        wanted = self.expected()
        right = all(
            int(size) == wanted.tasks and all(word in said.split() for word in wanted.words)
            for size, said in found
        )
        if state == "COMPLETED" and right and sum(found.values()) == wanted.tasks:
            return ""
        return f"{state} {self.path} of {self.answers}: {wanted}, not {found}\n{self.log}"

    def expected(self) -> "Expected":
        """Return what the answers ask for."""
        a = {"gpus_per_node": 4, "nodes": 2, **complete(self.answers)}
        name = Path(self.path).stem
        gpu = a["launch_modes"] != ["cpu"] and name != "train_cpu"
        several = "multi_node" in a["launch_modes"] and name in ("check_comm", "doctor")
        nodes = a["nodes"] if name == "train_multi_node" else 2 if several else 1
        package = a["package_name"]
        if name == "build_image":
            return Expected(1, ("build", "container/apptainer.def"))
        if "monitoring" in self.path:
            return Expected(1, ("-m", package, "monitor", "serve", name.replace("_", "-")))
        if name == "doctor":
            return Expected(nodes, ("-m", package, "doctor"))
        ranks = a["gpus_per_node"] if gpu else 2
        words = ["-m", package, "check-comm"] if name == "check_comm" else ["-m", package, "train"]
        if name != "check_comm":
            words += ["--device", "cuda" if gpu else "cpu", "--world-size", str(ranks * nodes)]
        if a["launcher"] == "srun":
            return Expected(ranks * nodes, words)
        launch = (f"{package}.torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks}")
        return Expected(nodes, (*launch, *words))


@dataclass
class Expected:
    """How many tasks a script is to start, and words that the command of each must have."""

    tasks: int
    words: tuple[str, ...] | list[str]


def set_up(root: Path, files: Mapping[str, str], answers: Mapping[str, Any]) -> None:
    """Write of a project what its batch scripts see, and the stand-ins."""
    kept = {
        path: text
        for path, text in files.items()
        if path.startswith(("slurm/", "configs/", "container/")) or path == "Makefile"
    }
    kept |= {f"{name}/bin/python": PYTHON for name in (".venv", ".conda")}
    kept |= {"slurm/site.sh": SITE_SH, "stand-ins/apptainer": APPTAINER}
    kept |= {"container/image.sif": "", "logs/.gitkeep": ""}
    for path, text in kept.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (root / "src" / complete(answers)["package_name"]).mkdir(parents=True)


def distinct(render: Renderer, folder: Path) -> Iterator[Submitted]:
    """Write each pair of a script and a common.sh once, in the first project that has it."""
    known = set()
    for number, answers in enumerate(all_variants()):
        files = render(answers)
        new = {
            (text, files["slurm/common.sh"]): path
            for path, text in files.items()
            if path.endswith(".sbatch") and (text, files["slurm/common.sh"]) not in known
        }
        known.update(new)
        root = folder / str(number)
        if new:
            set_up(root, files, answers)
        for path in new.values():
            yield Submitted(answers, root, path)


def states(site: Cluster) -> dict[str, str]:
    """Return the state of each job, by its number."""
    shown = site.run("squeue", "--noheader", "--states=all", "--format=%A %T").stdout
    return dict(line.split() for line in shown.splitlines())


def test_every_distinct_script_starts_what_it_is_to_start(site: Cluster, tmp_path: Path) -> None:
    jobs = list(distinct(Renderer(copy_template(tmp_path / "template")), tmp_path))
    for job in jobs:
        sweep = ["ada/digits/1"] if "sweep" in job.path else []
        done = site.run("sbatch", "--parsable", job.path, *sweep, cwd=job.root, check=False)
        assert done.returncode == 0, f"{job.path} of {job.answers}: {done.stderr}"
        job.id = done.stdout.strip()
    wait_for(lambda: set(states(site).values()) <= ENDED, lambda: f"{states(site)}\n{site.logs}", 1)
    ended = states(site)
    faults = [fault for job in jobs if (fault := job.fault(ended[job.id]))]
    assert not faults, f"{len(faults)} of {len(jobs)}:\n" + "\n\n".join(faults[:3])
    assert len(jobs) > 180


def test_a_script_that_asks_for_too_much_is_refused(site: Cluster, tmp_path: Path) -> None:
    """So that the test above means something."""
    for line in ("--partition=nowhere", "--gres=gpu:h100:1", "--nodes=50", "--constraint=none"):
        script = tmp_path / "script"
        script.write_text(f"#!/bin/bash\n#SBATCH {line}\n")
        with pytest.raises(subprocess.CalledProcessError):
            site.run("sbatch", "--test-only", str(script))
