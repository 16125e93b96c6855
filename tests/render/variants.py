"""The variants that the tests render: answers that reach each choice, and each pair of values."""

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from renderer import QUESTIONS

Answers = dict[str, Any]


def choices(name: str) -> tuple[Any, ...]:
    """Return the values that a question can have, in its order."""
    given = QUESTIONS[name]["choices"]
    values = given.values() if isinstance(given, dict) else given
    return tuple(value["value"] if isinstance(value, dict) else value for value in values)


MODES, TRACKERS = choices("launch_modes"), choices("trackers")
SERVERS, TOOLS = choices("monitoring_servers"), choices("tools")
# Trackers that can run here: Aim has no builds for newer Pythons.
INSTALLED = tuple(name for name in TRACKERS if name != "aim" or sys.version_info < (3, 13))
# Existing images: a file for Apptainer, and a name for pyxis.
SIF, PYXIS_IMAGE = "/images/torch.sif", "nvcr.io#nvidia/pytorch:25.01-py3"
CONTAINERS = [("none", ""), ("apptainer", ""), ("apptainer", SIF), ("pyxis", PYXIS_IMAGE)]
# Some values of each question, including unusual ones. A question that is missing fails a test.
SAMPLES: dict[str, list[Any]] = {
    **{name: list(choices(name)) for name, each in QUESTIONS.items() if "choices" in each},
    "setup": ["full", "quick"],
    "project_name": ["MNIST DDP", 'Ada\'s "net" – 100 % Ünïcode'],
    "package_name": ["demo", "x2"],
    "description": ["Trains.", "", 'A "quoted" \\ sentence: {with} #signs & más'],
    "author_name": ["Ada Lovelace", 'O\'Neil, "Zoë"', "MNIST DDP contributors"],
    "author_email": ["", "ada@example.org"],
    "launch_modes": [list(MODES), ["cpu"], ["single_node"], ["cpu", "multi_node"]],
    "nodes": [2, 4],
    "gpus_per_node": [4, 1],
    "gpu_type": ["", "a100"],
    "cpus_per_task": [4, 1],
    "memory": ["", "64G"],
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
    "signal_lead_seconds": [120, 300],
    "sbatch_options": ["", "--gres-flags=disable-binding\n--exclude=n[7-8]\n--mem-bind=local"],
    "cpu_sbatch_options": ["", "--qos=normal\n--mem=1G\n--exclusive"],
    "srun_options": ["", "--cpu-bind=none\n--gpu-bind=none"],
    "site_script": ["", "export NCCL_SOCKET_IFNAME=ib0 A='it is'  # b\nMASTER_ADDR=$(hostname)-ib"],
    "modules": ["", "python/3.12\ncuda/12.4\nnccl", "use /opt/modules\npython/3.12"],
    "module_purge": [True, False],
    "container_image": ["", SIF, PYXIS_IMAGE],
    "container_base_image": ["python:3.12-slim"],
    "trackers": [["tensorboard"], [], list(TRACKERS), *([each] for each in TRACKERS[1:])],
    "shared_root": ["", "/scratch/ada"],
    "monitoring_servers": [[], ["tensorboard"]],
    "tools": [
        list(TOOLS),
        [],
        ["doctor", "report"],
        ["check_comm", "acceptance", "evaluate", "export", "flops", "usage", "notify"],
        ["predict", "prune", "profile", "costs", "slow_ranks", "histograms", "registry"],
    ],
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
    """Return the answers, with the defaults of the others."""
    named = {"package_name": "mnist_ddp", "author_name": "MNIST DDP contributors"}
    plain = {
        name: question["default"]
        for name, question in QUESTIONS.items()
        if "{" not in str(question.get("default", "{"))
    }
    defaults = {**plain, **named}
    modes = answers.get("launch_modes", defaults["launch_modes"])
    network = ["check_comm"] if "multi_node" in modes else []
    defaults["tools"] = ["doctor", *network, "evaluate", "predict", "usage"]
    return {**defaults, **answers}


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
