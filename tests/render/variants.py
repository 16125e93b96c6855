"""The files and packages that a project must have for its answers, listed without the template."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from renderer import QUESTIONS

Answers = dict[str, Any]

MODES = ("cpu", "single_node", "multi_node")
TRACKERS = ("tensorboard", "wandb", "aim", "mlflow", "trackio")
SERVERS = ("tensorboard", "aim", "mlflow", "trackio")
# Existing images: a file for Apptainer, and a name for pyxis.
SIF, PYXIS_IMAGE = "/images/torch.sif", "nvcr.io#nvidia/pytorch:25.01-py3"
CONTAINERS = [("none", ""), ("apptainer", ""), ("apptainer", SIF), ("pyxis", PYXIS_IMAGE)]
# The commands that the answers choose, and their modules.
DOCTOR = ("__init__", "findings", "nodes", "scripts", "software")
CHECK_COMM = ("__init__", "examine", "operations")
PLOT = [f"plot/{name}" for name in ("__init__", "curves")]
REPORT = [f"report/{name}" for name in ("__init__", "page")]
TOOLS = {
    "doctor": [f"doctor/{name}" for name in DOCTOR],
    "check_comm": [f"check_comm/{name}" for name in CHECK_COMM],
    "acceptance": [f"acceptance/{name}" for name in ("__init__", "checks", "jobs")],
    "plot": PLOT,
    "evaluate": ["evaluate", "trained_network"],
    "predict": ["predict", "trained_network"],
    "export": ["export"],
    "show": ["show"],
    "prune": ["prune"],
    "report": [*REPORT, *PLOT, "show"],
    "profile": ["profile"],
    "flops": ["flops", "peaks"],
}

TESTED = ("check_comm", "doctor", "plot", "report")
"""The commands that a project's own tests run."""

# Some values of each question, including unusual ones. A question that is missing fails a test.
SAMPLES: dict[str, list[Any]] = {
    "setup": ["full", "quick"],
    "project_name": ["MNIST DDP", 'Ada\'s "net" – 100 % Ünïcode'],
    "package_name": ["demo", "x2"],
    "description": ["Trains.", "", 'A "quoted" \\ sentence: {with} #signs & más'],
    "author_name": ["Ada Lovelace", 'O\'Neil, "Zoë"', "MNIST DDP contributors"],
    "author_email": ["", "ada@example.org"],
    "license": ["MIT", "BSD-3-Clause", "Apache-2.0", "none"],
    "launch_modes": [list(MODES), ["cpu"], ["single_node"], ["cpu", "multi_node"]],
    "launcher": ["srun", "torchrun"],
    "nodes": [2, 4],
    "gpus_per_node": [4, 1],
    "accelerator": ["nvidia", "amd", "intel"],
    "gpu_type": ["", "a100"],
    "gpu_request": ["gres", "gpus_per_node", "gpus", "gpus_per_task", "none"],
    "task_options": ["script", "srun"],
    "cpus_per_task": [4, 1],
    "memory": ["", "64G"],
    "memory_scope": ["node", "cpu", "gpu"],
    "time_limit": ["01:00:00", "90", "2-12", "UNLIMITED"],
    "partition": ["", "gpu_short"],
    "cpu_partition": ["", "cpu"],
    "account": ["", "proj-0042"],
    "qos": ["", "normal"],
    "constraint": ["", "a100|h100", "[rack1|rack2]"],
    "reservation": ["", "course-2"],
    "exclusive": [False, True],
    "mail_user": ["", "ada@example.org"],
    "mail_type": [["END", "FAIL"], ["ALL"]],
    "requeue": [True, False, "expedited"],
    "signal_lead_seconds": [120, 300],
    "sbatch_options": ["", "--gres-flags=disable-binding\n--exclude=n[7-8]\n--mem-bind=local"],
    "cpu_sbatch_options": ["", "--qos=normal\n--mem=1G\n--exclusive"],
    "srun_options": ["", "--cpu-bind=none\n--gpu-bind=none"],
    "site_script": ["", "export NCCL_SOCKET_IFNAME=ib0 A='it is'  # b\nMASTER_ADDR=$(hostname)-ib"],
    "environment": ["venv", "uv", "conda"],
    "modules": ["", "python/3.12\ncuda/12.4\nnccl", "use /opt/modules\npython/3.12"],
    "module_purge": [True, False],
    "container": ["none", "apptainer", "pyxis"],
    "container_image": ["", SIF, PYXIS_IMAGE],
    "container_base_image": ["python:3.12-slim"],
    "trackers": [["tensorboard"], [], list(TRACKERS), ["wandb", "aim"], ["mlflow"], ["trackio"]],
    "shared_root": ["", "/scratch/ada"],
    "monitoring_servers": [[], ["tensorboard"]],
    "sweep": ["none", "optuna", "wandb"],
    "example": ["digits", "images", "text", "table"],
    "tools": [
        list(TOOLS),
        [],
        ["doctor", "show", "report"],
        ["check_comm", "acceptance", "plot", "evaluate", "export", "flops"],
        ["predict", "prune", "profile"],
    ],
    "ci": ["none", "github", "gitlab"],
    "pre_commit": [False, True],
}


def subsets(names: tuple[str, ...], least: int = 0) -> list[list[str]]:
    """Return all subsets of some names, in the order of the names."""
    return [
        list(chosen)
        for size in range(least, len(names) + 1)
        for chosen in itertools.combinations(names, size)
    ]


def launch_variants() -> Iterator[Answers]:
    """Yield each combination of launch modes, launcher, container and environment."""
    for modes, launcher, container, environment in itertools.product(
        subsets(MODES, least=1),
        ("srun", "torchrun"),
        ("none", "apptainer", "pyxis"),
        ("venv", "uv", "conda"),
    ):
        if container == "pyxis" and environment != "venv":  # one is enough for an existing image
            continue
        yield {
            "launch_modes": modes,
            "launcher": launcher,
            "container": container,
            "environment": environment,
            "container_image": PYXIS_IMAGE if container == "pyxis" else "",
        }


def tracking_variants() -> Iterator[Answers]:
    """Yield each combination of trackers, with none, each and all of their servers, and sweeps."""
    for trackers in subsets(TRACKERS):
        can = [name for name in SERVERS if name in trackers]
        for servers in [each for each in subsets(tuple(can)) if len(each) in (0, 1, len(can))]:
            yield {"trackers": trackers, "sweep": "none", "monitoring_servers": servers}
        for sweep in ("optuna", "wandb"):
            yield {"trackers": trackers, "sweep": sweep, "monitoring_servers": can}


def settle(answers: Mapping[str, Any]) -> Answers:
    """Return answers that fit each other, without answers to questions that are not asked."""
    kept = dict(answers)
    for name, parent in (
        ("memory_scope", "memory"),
        ("mail_type", "mail_user"),
        ("module_purge", "modules"),
    ):
        if not kept[parent]:
            del kept[name]
    if kept["launch_modes"] == ["cpu"] and kept.get("memory_scope") == "gpu":
        del kept["memory_scope"]
    if kept["container"] == "none":
        del kept["container_image"]
    if kept["container"] != "apptainer" or kept["container_image"]:
        del kept["container_base_image"]
    if kept["launch_modes"] == ["cpu"]:
        del kept["cpu_sbatch_options"]
    if kept["gpu_request"] == "none" and kept.get("memory_scope") == "gpu":
        del kept["memory_scope"]
    if kept["gpu_request"] == "gpus_per_task":
        del kept["task_options"]
    elif kept["task_options"] == "srun":
        kept["exclusive"] = True  # without their number in the script, the job needs all cores
    if kept["exclusive"]:
        kept["gpus_per_node"] = 4  # all GPUs of a node of the test cluster
    kept["monitoring_servers"] = [s for s in kept["monitoring_servers"] if s in kept["trackers"]]
    return kept


def pairwise_variants() -> list[Answers]:
    """Return answers in which each pair of values of two questions occurs at least once."""
    from allpairspy import AllPairs

    # A container and its image are one value, or images that are built would occur with few values.
    samples = {**SAMPLES, "container": CONTAINERS}
    del samples["container_image"]

    variants = []
    numbers = [list(range(len(values))) for values in samples.values()]
    for row in AllPairs(numbers):
        answers = {name: samples[name][at] for name, at in zip(samples, row, strict=True)}
        answers["container"], answers["container_image"] = answers["container"]
        variants.append(settle(answers))
    return variants


def complete(answers: Mapping[str, Any]) -> Answers:
    """Return the answers with the defaults that the expectations below depend on."""
    defaults = {
        "launch_modes": list(MODES),
        "launcher": "srun",
        "license": "MIT",
        "container": "none",
        "container_image": "",
        "accelerator": "nvidia",
        "environment": "venv",
        "trackers": ["tensorboard"],
        "monitoring_servers": [],
        "sweep": "none",
        "tools": list(TOOLS),
        "requeue": True,
        "ci": "none",
        "example": "digits",
        "pre_commit": False,
        "project_name": "MNIST DDP",
        "author_name": "MNIST DDP contributors",
        "package_name": "mnist_ddp",
    }
    return {**defaults, **answers}


ALWAYS = (
    ".copier-answers.yml",
    ".editorconfig",
    ".env.example",
    ".gitattributes",
    ".gitignore",
    "AGENTS.md",
    "Makefile",
    "README.md",
    "configs/train.yaml",
    "docs/examples.md",
    "docs/hooks.md",
    "docs/large-data.md",
    "docs/metrics.md",
    "docs/optimizers.md",
    "docs/own-model.md",
    "docs/recipes.md",
    "docs/results.md",
    "docs/settings.md",
    "docs/setup.md",
    "docs/site.md",
    "docs/slurm.md",
    "docs/speed-and-memory.md",
    "docs/updates.md",
    "logs/.gitkeep",
    "pyproject.toml",
    "scripts/pack.sh",
    "scripts/setup.ps1",
    "scripts/setup.sh",
    "scripts/update.sh",
    "scripts/with_words.py",
    "slurm/common.sh",
    "slurm/resume.sh",
    "slurm/site.sh",
    "slurm/snapshot.sh",
    "slurm/stage.sh",
    "slurm/submit.sh",
    "tests/conftest.py",
    "tests/test_learns.py",
    "tests/test_train.py",
    "tests/test_yours.py",
)
# The folders of src/<package>/, and the modules in them that each project has.
ROOMS = {
    "": "__init__ __main__ data figures learner model settings train",
    "engine/": "__init__ checkpoint checkpoint_files checks config errors evaluate filesystem "
    "foreign hooks inference nested networks position recompute schedule shards torch_private "
    "torchrun updater weights",
    "engine/data/": "__init__ batches seeds steps stream workers",
    "engine/ranks/": "__init__ device driver dtensor environment meeting process_group "
    "signals slurm_commands step_totals strategy topology world",
    "engine/run/": "__init__ description folder logger logging_setup media messages meters notify "
    "provenance record run_lock slow_ranks status usage clock machine",
    "trackers/": "__init__ dispatch",
    "tools/": "__init__ costs runs text",
}


def expected_files(given: Mapping[str, Any]) -> set[str]:
    """Return the paths of all files of a project with these answers."""
    a = complete(given)
    package = f"src/{a['package_name']}"
    files = {
        *ALWAYS,
        *(f"{package}/{room}{name}.py" for room, names in ROOMS.items() for name in names.split()),
        *(f"{package}/trackers/{name}.py" for name in a["trackers"]),
        *(f"slurm/train_{mode}.sbatch" for mode in a["launch_modes"]),
        *(f"slurm/monitoring/{name}.sbatch" for name in a["monitoring_servers"]),
    }
    if a["example"] == "digits":
        files |= {f"{package}/mnist.py"}
    if a["example"] == "images":
        files |= {f"{package}/files.py", f"{package}/transforms.py"}
    if "multi_node" in a["launch_modes"]:
        files |= {"docs/multi-node.md"}
    if a["requeue"]:
        files |= {"slurm/guard.sh"}
    for tool in a["tools"]:
        files |= {f"{package}/tools/{name}.py" for name in TOOLS[tool]}
        files |= {f"tests/test_{tool}.py"} if tool in TESTED else set()
        files |= {"docs/report.png"} if tool == "report" else set()
        files |= {f"slurm/{tool}.sbatch"} if tool in ("check_comm", "doctor") else set()
    if a["sweep"] != "none":
        files |= {"docs/sweep.md", "slurm/sweep.sbatch", "configs/sweep.yaml"}
        files |= {f"{package}/tools/sweep/{name}.py" for name in ("__init__", "trial")}
    if a["sweep"] == "wandb":
        files |= {f"{package}/tools/sweep/wandb.py", f"{package}/trackers/wandb.py"}
    if a["sweep"] == "optuna":
        files |= {
            f"{package}/tools/sweep/{name}.py"
            for name in ("optuna", "space", "trial_locks", "results")
        }
        files |= {"tests/test_sweep.py"}
    if a["trackers"] or a["sweep"] == "wandb":
        files |= {f"{package}/tools/sync.py", f"{package}/tools/check_trackers.py"}
        files |= {"docs/trackers.md", "tests/test_trackers.py"}
    if servers := a["monitoring_servers"]:
        parts = (
            "__init__",
            "actions",
            "jobs",
            "endpoint",
            "flags",
            "records",
            "serve",
            "servers",
            "submission",
        )
        files |= {f"{package}/tools/monitor/{name}.py" for name in (*parts, *servers)}
    if {"aim", "trackio"} & set(a["monitoring_servers"]):
        files |= {f"{package}/tools/monitor/guard.py"}
    if "aim" in a["monitoring_servers"]:
        files |= {f"{package}/tools/monitor/aim_server.py", "slurm/monitoring/aim_server.sbatch"}
    if a["environment"] == "conda":
        files |= {"environment.yml"}
    if a["container"] != "none":
        files |= {"container/install.sh", "slurm/build_image.sbatch"}
    if a["container"] == "apptainer" and not a["container_image"]:
        files |= {"container/apptainer.def", "container/release.def"}
    if a["license"] != "none":
        files |= {"LICENSE"}
    if a["ci"] == "github":
        files |= {".github/workflows/ci.yml", ".github/workflows/template.yml"}
    if a["ci"] == "gitlab":
        files |= {".gitlab-ci.yml"}
    if a["ci"] != "none":
        files |= {"scripts/template.sh"}
    if a["pre_commit"]:
        files |= {".pre-commit-config.yaml"}
    if not a["author_name"].endswith(" contributors"):
        files |= {"CITATION.cff"}
    return files


def expected_dependencies(given: Mapping[str, Any]) -> set[str]:
    """Return the names of the packages that a project with these answers needs."""
    a = complete(given)
    names = {"torch", "annotated-types", "matplotlib", "numpy", "psutil", "pydantic"}
    names |= {"python-dotenv", "pyyaml", "safetensors", "tqdm", "tyro"}
    names |= {"pillow", "pyarrow"} if a["example"] == "images" else set()
    if a["launch_modes"] != ["cpu"]:
        names |= {{"nvidia": "nvidia-ml-py", "intel": "pyzes"}.get(a["accelerator"], "torch")}
    names |= set(a["trackers"])
    if "aim" in a["trackers"]:
        names |= {"setuptools", "sqlalchemy", "websockets"}
    if a["sweep"] != "none":
        names |= {a["sweep"]}
    return names


@dataclass(frozen=True, order=True)
class Tree:
    """The answers that src/ and configs/ depend on, except names and paths in the settings."""

    example: str
    tools: tuple[str, ...]
    trackers: tuple[str, ...]
    servers: tuple[str, ...]
    sweep: str
    environment: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Tree":
        """Return the tree for some answers."""
        a = complete(given)
        # For W&B, sweep.yaml names the interpreter.
        environment = a["environment"] if a["sweep"] == "wandb" else "venv"
        tools, trackers, servers = (
            tuple(a[name]) for name in ("tools", "trackers", "monitoring_servers")
        )
        return cls(a["example"], tools, trackers, servers, a["sweep"], environment)

    @property
    def trained(self) -> "Tree":
        """Return a tree with the same modules, without those that a training does not import."""
        return Tree(self.example, (), self.trackers, (), "none", "venv")

    def answers(self) -> Answers:
        """Return answers with this tree."""
        return {
            "setup": "full",
            "example": self.example,
            "tools": list(self.tools),
            "trackers": list(self.trackers),
            "monitoring_servers": list(self.servers),
            "sweep": self.sweep,
            "environment": self.environment,
        }

    def __str__(self) -> str:
        parts = (self.tools, self.trackers, self.servers)
        named = ("+".join(part) or "none" for part in parts)
        return "-".join((self.example, *named, self.sweep, self.environment))


MATRICES = {
    "launch": launch_variants,
    "tracking": tracking_variants,
    "pairwise": pairwise_variants,
}
TREES = sorted({Tree.of(answers) for matrix in MATRICES.values() for answers in matrix()})


def unsampled() -> set[str]:
    """Return the questions without sample values, except computed ones."""
    asked = {name for name, question in QUESTIONS.items() if question.get("when") is not False}
    return asked ^ set(SAMPLES)
