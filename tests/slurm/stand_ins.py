"""Rendered batch scripts, with stand-ins for the programs that they start.

The stand-ins print their arguments.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from variants import Answers, complete

from .cluster import Cluster

PYTHON = """\
#!/bin/bash
case "$1 $3" in
    --version*) exec echo Python 3.12.1 ;;
    -c*) exec echo 3.12.1 none /project ;;
    *" sweep")  # starts trials
        while [[ $1 != -- ]]; do shift; done
        shift
        exec "$@" ;;
    *" doctor"*) [[ $* != *--nodes=compare* ]] || exec cat ;;  # reads what the nodes print
esac
echo "sees GPUs ${CUDA_VISIBLE_DEVICES:-none}"
echo "started on $(hostname) of ${SLURM_STEP_NUM_TASKS:-1}: $*"
# The step that reads the reports starts meanwhile.
[[ $* != *--nodes=report* ]] || sleep 1
"""
APPTAINER = """\
#!/bin/bash
if [[ $1 == build ]]; then
    echo "started on $(hostname) of 1: $*"
    exec touch "${@: -2:1}"
fi
while [[ $1 != *python && $1 != sh ]]; do shift; done
case $1 in
    python) exec .venv/bin/"$@" ;;
    *) exec "$@" ;;
esac
"""
# Slurm's own srun. It starts a step while another one has all the memory that this one asks for.
SRUN = """\
#!/bin/bash
[[ $* != *--overlap* ]] || sleep 0.5
PATH=${PATH#*stand-ins:} exec srun "$@"
"""
INSTALL = 'echo "started on $(hostname) of 1: $0 $*"\n'
# In this file of the user, PATH gets the folder of the site's Apptainer.
SITE_SH = "PATH=$PWD/stand-ins:$PATH\n"


@dataclass
class Submitted:
    """A submitted batch script.

    Attributes:
        answers: the answers that the script was rendered with.
        root: folder with the files of the project that a batch script reads.
        path: path of the script in the project.
        id: Slurm's id of the job.
    """

    answers: Answers
    root: Path
    path: str
    id: str = ""

    @property
    def log(self) -> str:
        """The output of the job."""
        return "".join(path.read_text() for path in self.root.glob(f"logs/*-{self.id}.out"))

    def fault(self, state: str) -> str:
        """Return how the job differs from the answers, or "" if it does not."""
        found = Counter(re.findall(r"^(?: *\d+: )?started on \S+ of (\d+): (.*)$", self.log, re.M))
        wanted = self.expected()
        right = all(
            int(size) == wanted.tasks and all(word in said.split() for word in wanted.words)
            for size, said in found
        )
        right = right and "warning: " not in self.log
        if state == "COMPLETED" and right and sum(found.values()) == wanted.tasks:
            return ""
        return f"{state} {self.path} of {self.answers}: {wanted}, not {found}\n{self.log}"

    def expected(self) -> "Expected":
        """Return what the script must start with these answers."""
        a = {"gpus_per_node": 4, "nodes": 2, **complete(self.answers)}
        name = Path(self.path).stem
        gpu = a["launch_modes"] != ["cpu"] and name != "train_cpu"
        several = "multi_node" in a["launch_modes"] and name in ("check_comm", "doctor")
        nodes = a["nodes"] if name == "train_multi_node" else 2 if several else 1
        package = a["package_name"]
        if name == "build_image" and a["container_image"]:
            return Expected(1, ("container/install.sh", "container/env"))
        if name == "build_image":
            return Expected(1, ("build", "container/apptainer.def"))
        if "monitoring" in self.path:
            return Expected(1, ("-m", package, "monitor", "serve", name.replace("_", "-")))
        if name == "doctor":
            return Expected(nodes, ("-m", package, "doctor", "--nodes=report"))
        ranks = a["gpus_per_node"] if gpu else 2
        words = ["-m", package, "check-comm"] if name == "check_comm" else ["-m", package, "train"]
        if name != "check_comm":
            device = "xpu" if a["accelerator"] == "intel" else "cuda"
            words += ["--device", device if gpu else "cpu", "--world-size", str(ranks * nodes)]
        if a["launcher"] == "srun":
            return Expected(ranks * nodes, words)
        launch = (f"{package}.tools.torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks}")
        return Expected(nodes, (*launch, *words))


@dataclass
class Expected:
    """The number of tasks that a script must start, and words in the command of each task."""

    tasks: int
    words: tuple[str, ...] | list[str]


def set_up(root: Path, files: Mapping[str, str]) -> None:
    """Write the files of a project that its batch scripts read, and the stand-ins."""
    kept = {
        path: text
        for path, text in files.items()
        if path.startswith(("slurm/", "configs/", "container/")) or path == "Makefile"
    }
    kept |= {f"{name}/bin/python": PYTHON for name in (".venv", ".conda", "container/env")}
    # The existing image in the sample answers does not exist here.
    finished = "container/install.sh" in files and "container/apptainer.def" not in files
    site_sh = SITE_SH + files["slurm/site.sh"] + "export IMAGE=container/image.sif\n" * finished
    kept |= {"slurm/site.sh": site_sh, "stand-ins/apptainer": APPTAINER, "stand-ins/srun": SRUN}
    kept |= {"container/install.sh": INSTALL, "container/image.sif": "", "logs/.gitkeep": ""}
    for path, text in kept.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)


def states(site: Cluster) -> dict[str, str]:
    """Return the state of each job by its id."""
    shown = site.run("squeue", "--noheader", "--states=all", "--format=%A %T").stdout
    return dict(line.split() for line in shown.splitlines())
