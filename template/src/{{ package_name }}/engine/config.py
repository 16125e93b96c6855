"""The settings of a run: flags override the YAML file, which overrides the defaults.

The defaults are here and in settings.py.
"""

import argparse
import dataclasses
import difflib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
import yaml
from annotated_types import Ge, Gt, Lt

from .errors import UsageError, is_rank_0
from .foreign import read_bytes

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from typing_extensions import Self

# torch takes no larger integers as seeds or sizes.
Positive = Annotated[int, Ge(1), Lt(2**63)]
Seconds = Annotated[int, Ge(1), Lt(2**31)]
Count = Annotated[int, Ge(0), Lt(2**63)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Rate = Annotated[float, Gt(0), Lt(float("inf"))]

DEFAULT_CONFIG = Path("configs/train.yaml")
PATHS = ("run_root", "run_dir", "resume", "data_dir", "init_from")
"""Settings of type str that hold paths. Settings of type Path need no entry."""

T = TypeVar("T")


_ADAPTERS: "dict[type, TypeAdapter[Any]]" = {}


def _adapter(settings: type) -> "TypeAdapter[Any]":
    """Return what checks and dumps settings of a class, which takes pydantic 0.04 s to make."""
    from pydantic import TypeAdapter  # --help does not need it

    if settings not in _ADAPTERS:
        _ADAPTERS[settings] = TypeAdapter(settings)
    return _ADAPTERS[settings]


def full_path(name: str, path: str) -> str:
    """Return the path in a flag or setting with ~ and $VARIABLES expanded.

    Args:
        name: of the flag or setting, for error messages.
        path: its value.

    Raises:
        UsageError: a user or a variable does not exist.
    """
    full = os.path.expanduser(os.path.expandvars(path))
    if unknown := re.search(r"\$\{?\w+\}?|^~[^/]*", full):
        raise UsageError(
            f"{name} is {path}, but {unknown[0]} is unknown: set it, or change the path"
        )
    return full


def moved(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return settings in which paths that begin with the folder `old` begin with `new` instead.

    For example, `old` is "$STAGED" and `new` is the folder of this job's staged files.
    """
    inside = [k for k, v in values.items() if isinstance(v, str) and f"{v}/".startswith(f"{old}/")]
    return {**values, **{name: new + values[name][len(old) :] for name in inside}}


def with_full_paths(flags: T) -> T:
    """Return a dataclass of flags or settings with ~ and $VARIABLES in its paths expanded."""

    def expanded(name: str, value: Any) -> Any:  # noqa: ANN401 - the value of any field
        if isinstance(value, tuple):
            return tuple(expanded(name, each) for each in value)
        is_path = isinstance(value, Path) or (name in PATHS and isinstance(value, str))
        return type(value)(full_path(name, str(value))) if is_path else value

    changes = {name: expanded(name, value) for name, value in vars(flags).items()}
    return dataclasses.replace(flags, **changes)  # type: ignore[type-var]


def read_flags(flags: type[T], argv: Sequence[str], prog: str) -> T:
    """Return the flags of a command, with all paths expanded.

    Wrong flags end the process with exit code 2.
    """
    return with_full_paths(tyro.cli(flags, args=list(argv), prog=prog, console_outputs=is_rank_0()))


def snapshot() -> Path | None:
    """Return the folder with the snapshot of the job's code, if this process runs from it.

    A container image of a release runs its own code instead. A process outside a job runs the code
    of the project folder.
    """
    folder = Path(os.environ.get("CODE_DIR", ""))
    return folder if folder in Path(__file__).parents else None


def as_submitted(path: Path) -> Path:
    """Return the resolved path of a file, or of its copy in the snapshot if there is one."""
    folder = snapshot()
    copy = Path(folder, os.path.relpath(path)) if folder else path
    return (copy if copy.exists() else path).resolve()


class _YamlLoader(yaml.SafeLoader):
    """Reads null, booleans and numbers on which YAML 1.1 and 1.2 agree; everything else is text.

    PyYAML itself would read `010` as 8 and `1:30` as 90. The loader refuses aliases, since nested
    aliases can expand to a huge number of values. It also refuses a name that appears twice.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - without those of SafeLoader

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        """Return the next node; raise ValueError if it is an alias."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*name): write the value itself there")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the values by name; raise ValueError if a name appears twice."""
        values = super().construct_mapping(node, deep)
        names = Counter(key.value for key, _ in node.value)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"it has '{twice[0]}' twice: delete one of the lines")
        return values


for _tag, _pattern in (
    ("null", r"~|null|Null|NULL|"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+"),
    ("float", r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    _match = re.compile(f"(?:{_pattern})$")
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _match, None)


def read_yaml(path: Path) -> Any:  # noqa: ANN401 - any YAML
    """Return the content of a YAML file.

    Raises:
        UsageError: the file can't be read, is a link, has more than 64 KiB, or is not YAML.
    """
    try:
        return _YamlLoader(read_bytes(path, 2**16)).get_single_data()
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).replace(' in "<byte string>",', " at").split())
        raise UsageError(f"{path} is not YAML: {reason}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every training; settings.py adds those of this project."""

    config: Path | None = None
    """YAML file with settings, which flags override; default: configs/train.yaml if it exists"""
    experiment: str = "default"
    """name of the experiment; the runs of an experiment share a folder"""
    run_root: str = "runs"
    """folder of all experiments"""
    run_dir: str | None = None
    """folder of this run; default: RUN_ROOT/EXPERIMENT/ and the Slurm job id, or the time"""
    resume: str = "auto"
    """auto: resume from the newest checkpoint in the run folder, if it has any;
    never: refuse a run folder that has checkpoints;
    PATH: the same as auto, but a new run starts from this checkpoint or run folder"""
    seed: Count = 0
    """seed of all random numbers: initial parameters, order of samples, augmentation"""
    tags: tuple[str, ...] = ()
    """words by which you can find the run in the trackers"""
    dry_run: bool = False
    """set everything up and print what would happen, but write nothing"""

    dataset: str = "synthetic"
    """name of a dataset in data.py"""
    data_dir: str = "data"
    """folder with the files of the dataset"""
    workers: Count | Literal["auto"] = 0
    """data loading processes of each rank; auto: its CPUs minus 1; data in memory needs none"""

    init_from: str | None = None
    """start with the weights of a run folder (its best checkpoint) or of a file"""
    init_partial: bool = False
    """load only the parameters of INIT_FROM whose names and shapes fit; otherwise all must fit"""
    freeze: tuple[str, ...] = ()
    """do not train the parameters whose names match these patterns, such as 'backbone.*'"""

    epochs: Positive = 1
    """passes over the training set"""
    max_steps: Positive | None = None
    """end after this many optimizer steps, even if EPOCHS are not complete"""
    batch_size: Positive = 64
    """samples in a batch of one rank"""
    global_batch_size: Positive | None = None
    """samples in an optimizer step, over all ranks; BATCH_SIZE is then computed from it"""
    accumulate: Positive = 1
    """gradient accumulation: batches of each rank in an optimizer step"""
    test_batch_size: Positive = 1000
    """samples in a batch of one rank in evaluation"""

    validate_every: Count = 0
    """optimizer steps between validations, in addition to those after epochs; 0: none"""
    validate_epochs: Count = 1
    """epochs between validations; 0: only one at the end of the run"""
    patience: Positive | None = None
    """early stopping: end after this many validations in a row without a new best score"""
    ema: Annotated[float, Gt(0), Lt(1)] | None = None
    """decay of a moving average of the parameters, such as 0.999;
    evaluations, the best checkpoint and predictions then use the average"""

    lr: Rate = 0.15
    """peak learning rate"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """scale the learning rate by the samples of a step, relative to LR_REFERENCE_BATCH"""
    lr_reference_batch: Positive = 64
    """samples in an optimizer step for which LR was chosen"""
    schedule: Literal["cosine", "linear", "constant"] = "linear"
    """how the learning rate falls after the warm-up"""
    warmup: Fraction = 0.2
    """share of the run in which the learning rate rises"""
    clip_norm: Rate | None = 2.0
    """largest norm of the gradient; for no limit, write null in YAML, or None as a flag"""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """auto: the first one available of cuda (NVIDIA, AMD), xpu (Intel), mps (if one rank), cpu"""
    backend: Literal["auto", "gloo", "nccl", "xccl"] = "auto"
    """auto: nccl on cuda, xccl on xpu, otherwise gloo"""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each rank has a copy of the network;
    fsdp: each rank has a part of it, for networks that are too large for one GPU"""
    shard_within: Literal["world", "node"] = "world"
    """for fsdp; world: shard the network over all ranks;
    node: shard a copy of it over the ranks of each node"""
    offload: bool = False
    """for fsdp: keep parameters, gradients and optimizer states in CPU memory; slower"""
    find_unused_parameters: bool = False
    """for ddp: allow steps that do not use all parameters; slower"""
    world_size: Positive | None = None
    """expected number of ranks; another number is an error"""
    timeout: Seconds = 600
    """seconds that a rank waits for other ranks before it gives up"""
    meet_timeout: Seconds = 300
    """seconds that a rank waits at the start, until all ranks have connected"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16: mixed precision; fp16: for GPUs without bf16, such as V100 and T4, with loss scaling"""
    recompute: bool = False
    """activation checkpointing: recompute activations in the backward pass; less memory, slower"""
    compile: bool = False
    """compile the network with torch.compile"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """for compile; reduce-overhead: CUDA graphs, for small networks on a GPU; max-autotune: slow
    start"""
    deterministic: bool = False
    """use only deterministic algorithms, so that repeated runs give the same numbers; slower;
    an operation without such an algorithm is an error"""

    checkpoint_every: Positive = 500
    """optimizer steps between checkpoints, in addition to those at the ends of epochs"""
    keep_checkpoints: Positive = 3
    """number of newest checkpoints to keep, in addition to the best one"""
    keep_every: Count = 0
    """optimizer steps between checkpoints that are never deleted; 0: none"""
    log_every: Positive = 50
    """optimizer steps between log lines"""
    log_all_ranks: bool = False
    """let all ranks log; otherwise ranks other than 0 log only warnings"""
    trackers: tuple[str, ...] = ()
    """trackers that get the metrics, in addition to metrics.jsonl; none: no tracker"""

    def for_world(self, size: int) -> "Self":
        """Return the settings with the batch size of a rank, computed from the global batch size.

        Raises:
            UsageError: `size` ranks can't share the global batch size evenly.
        """
        if not self.global_batch_size:
            return self
        shares = size * self.accumulate
        batch_size, left = divmod(self.global_batch_size, shares)
        if left:
            raise UsageError(
                f"global_batch_size is {self.global_batch_size}, which {size} rank(s) with "
                f"accumulate {self.accumulate} can't share evenly: use a multiple of {shares}, "
                f"such as {max(batch_size, 1) * shares}"
            )
        return dataclasses.replace(self, batch_size=batch_size)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that YAML and JSON can hold."""
        values: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        # Each job has another folder for staged files, so the paths begin with $STAGED instead.
        return moved(values, os.environ.get("STAGED") or "$STAGED", "$STAGED")

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str = "train", about: str = "") -> "Self":
        """Return the settings that the YAML file and the flags give.

        `--config` names the YAML file; the default is configs/train.yaml, if it exists. Wrong flags
        end the process with exit code 2. `--help` prints `about` first.

        Raises:
            UsageError: the file can't be read, or a setting in it or in a flag is wrong.
        """
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config.add_argument("--config", type=Path)
        flag, rest = config.parse_known_args(argv)
        path = Path(full_path("config", str(flag.config))) if flag.config else DEFAULT_CONFIG
        defaults, found = cls(), as_submitted(path)
        if flag.config or found.exists():
            # The user chose this path, so it may be a link. `found` is the target of the link.
            defaults = dataclasses.replace(cls.from_yaml(found), config=path)
        settings = tyro.cli(
            cls,
            args=rest,
            default=defaults,
            prog=f"python -m {__package__.partition('.')[0]} {prog}",
            description=f"{about}A flag overrides the YAML file of settings, which overrides the "
            "default.",
            config=(tyro.conf.AvoidSubcommands,),
            console_outputs=is_rank_0(),
        )
        return with_full_paths(cls.from_values(vars(settings)))

    @classmethod
    def from_yaml(cls, path: Path) -> "Self":
        """Return the settings of a YAML file, with defaults for missing ones.

        Raises:
            UsageError: the file can't be read or is a link, or a name or a value in it is wrong.
        """
        values = read_yaml(path) or {}
        if not isinstance(values, dict):
            raise UsageError(f"{path} must hold lines of 'setting: value', not {values!r}")
        values.pop("config", None)  # the config.yaml of a run contains it
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [str(key) for key in values if key not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see train --help for all"
            raise UsageError(f"{path}: unknown setting '{unknown[0]}'; {hint}")
        return cls.from_values(values, f"{path}: ")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "") -> "Self":
        """Return settings from values by name.

        Raises:
            UsageError: a value is wrong. The message begins with `source`.
        """
        from pydantic import ValidationError

        values = moved(values, "$STAGED", os.environ.get("STAGED") or "$STAGED")
        try:
            settings = _adapter(cls).validate_python(values)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            # pydantic reports an error for each type that the setting may have.
            found = [each["msg"] for each in error.errors() if each["loc"][0] == name]
            reasons = [each.removeprefix("Input ").removeprefix("String ") for each in found]
            reason = ", or ".join(dict.fromkeys(reasons))
            reason = reason.replace("valid tuple", "list, such as [a, b]").replace("should", "must")
            raise UsageError(f"{source}{name} is {values[name]!r}: it {reason}") from None
        for name, value in values.items():
            # pydantic accepts true as 1.
            if value is True and type(getattr(settings, name)) in (int, float):
                raise UsageError(f"{source}{name} is true: it must be a number")
        name = settings.experiment
        if Path(name).name in ("", "..") or "/" in name or not name.isprintable():
            raise UsageError(
                f"{source}experiment is {settings.experiment!r}: it must be the name of one folder "
                "in run_root, such as baseline"
            )
        return settings
