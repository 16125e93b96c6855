"""The settings of a run: defaults here and in settings.py < YAML file < flags."""

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
from .filesystem import full_path, moved, read_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

# More than 63 bits fit neither a seed of torch nor a size.
Positive = Annotated[int, Ge(1), Lt(2**63)]
Seconds = Annotated[int, Ge(1), Lt(2**31)]
Count = Annotated[int, Ge(0), Lt(2**63)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Rate = Annotated[float, Gt(0), Lt(float("inf"))]

DEFAULT_CONFIG = Path("configs/train.yaml")
PATHS = ("run_root", "run_dir", "resume", "data_dir", "init_from")
"""Settings of type str that are paths; fields of type Path are, too."""

T = TypeVar("T")


def with_full_paths(flags: T) -> T:
    """Return a dataclass of flags or settings with ~ and $VARIABLES in its paths expanded."""

    def expanded(name: str, value: Any) -> Any:  # noqa: ANN401 - any field's
        if isinstance(value, tuple):
            return tuple(expanded(name, each) for each in value)
        is_path = isinstance(value, Path) or (name in PATHS and isinstance(value, str))
        return type(value)(full_path(name, str(value))) if is_path else value

    changes = {name: expanded(name, value) for name, value in vars(flags).items()}
    return dataclasses.replace(flags, **changes)  # type: ignore[type-var]


def read_flags(flags: type[T], argv: Sequence[str], prog: str) -> T:
    """Return the flags of a command, with all paths expanded; bad flags end it with exit code 2."""
    return with_full_paths(tyro.cli(flags, args=list(argv), prog=prog, console_outputs=is_rank_0()))


def snapshot() -> Path | None:
    """Return the folder of the code as it was submitted, if this process runs that code.

    An image of a release runs the code in it, and a process outside a job the project's.
    """
    folder = Path(os.environ.get("CODE_DIR", ""))
    return folder if folder in Path(__file__).parents else None


def as_submitted(path: Path) -> Path:
    """Return a file's path without links; of a file of the snapshot, that of the copy there."""
    folder = snapshot()
    copy = Path(folder, os.path.relpath(path)) if folder else path
    return (copy if copy.exists() else path).resolve()


class _YamlLoader(yaml.SafeLoader):
    """Reads null, booleans and numbers as both YAML 1.1 and 1.2 do; everything else is text.

    PyYAML takes `010` for 8 and `1:30` for 90. Aliases are refused, since aliases of aliases expand
    to any number of values, and so is a name that comes twice.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - without those of SafeLoader

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        """Return the next node, which may not be an alias."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*name): write the value itself there")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the values by name; no name may come twice."""
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
    """Return the content of a YAML file of at most 64 KiB, which may not be a link.

    Raises:
        UsageError: it can't be read, or is not YAML.
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
    """The settings of every training; settings.py adds those of this project.

    A flag overrides the YAML file, which overrides the default.
    """

    config: Path | None = None
    """YAML file of settings, which flags override; else configs/train.yaml where it exists"""
    experiment: str = "default"
    """runs of one experiment share a folder"""
    run_root: str = "runs"
    """folder of all experiments"""
    run_dir: str | None = None
    """folder of this run; else RUN_ROOT/EXPERIMENT/ and the Slurm job id, or the time"""
    resume: str = "auto"
    """auto: continue from the newest checkpoint of the run folder, if any; never: require a run
    folder without one; or the PATH of a checkpoint or run folder to start from"""
    seed: Count = 0
    """fixes initial parameters and the order of samples"""
    tags: tuple[str, ...] = ()
    """words to find the run by in the trackers"""
    dry_run: bool = False
    """set everything up, print what would happen, write nothing"""

    dataset: str = "synthetic"
    """which dataset of data.py"""
    data_dir: str = "data"
    """folder of the dataset's files"""
    workers: Count | Literal["auto"] = 0
    """loading processes of each rank; auto: its CPUs less one; data in memory needs none"""

    init_from: str | None = None
    """start from the weights of a run folder (its best checkpoint) or of a file"""
    init_partial: bool = False
    """load from INIT_FROM the parameters whose names and shapes fit, instead of requiring all"""
    freeze: tuple[str, ...] = ()
    """patterns of the names of parameters that are not trained, such as 'backbone.*'"""

    epochs: Positive = 1
    """passes over the training set"""
    max_steps: Positive | None = None
    """end after this many optimizer steps, if EPOCHS takes more"""
    batch_size: Positive = 64
    """samples a rank takes at once"""
    global_batch_size: Positive | None = None
    """samples of an optimizer step over all ranks; sets the batch size instead"""
    accumulate: Positive = 1
    """batches a rank takes for an optimizer step"""
    test_batch_size: Positive = 1000
    """samples a rank takes at once in evaluation"""

    validate_every: Count = 0
    """optimizer steps between validations, in addition to those after epochs; 0: none"""
    validate_epochs: Count = 1
    """epochs between validations; 0: none but the one at the end of the run"""
    patience: Positive | None = None
    """end the training after this many validations in a row that are no better than the best"""
    ema: Annotated[float, Gt(0), Lt(1)] | None = None
    """decay of a moving average of the parameters, such as 0.999, which evaluations, the best
    checkpoint and predict then use"""

    lr: Rate = 0.15
    """peak learning rate"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """scale the learning rate with the samples of a step, relative to LR_REFERENCE_BATCH"""
    lr_reference_batch: Positive = 64
    """samples of an optimizer step for which LR was chosen"""
    schedule: Literal["cosine", "linear", "constant"] = "linear"
    """how the learning rate falls after the warm-up"""
    warmup: Fraction = 0.2
    """share of the run in which the learning rate rises"""
    clip_norm: Rate | None = 2.0
    """largest norm of the gradient; no limit: null in YAML, None as a flag"""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """auto: cuda (AMD's too) or xpu (Intel's) if there, then mps if alone, then cpu"""
    backend: Literal["auto", "gloo", "nccl", "xccl"] = "auto"
    """auto: nccl on cuda, xccl on xpu, else gloo"""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each rank holds the whole network; fsdp: a part, for networks too large for one GPU"""
    shard_within: Literal["world", "node"] = "world"
    """for fsdp; world: all ranks share a network; node: those of each node share a copy of it"""
    offload: bool = False
    """for fsdp: parameters, gradients and optimizer in the CPUs' memory; slower"""
    find_unused_parameters: bool = False
    """let ddp take steps that do not use all parameters; slower"""
    world_size: Positive | None = None
    """number of ranks expected; any other is an error"""
    timeout: Seconds = 600
    """seconds a rank waits for the others before it gives up"""
    meet_timeout: Seconds = 300
    """the same at the start, until all ranks have come"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: mixed precision"""
    recompute: bool = False
    """compute the activations of blocks again in the backward pass: less memory, slower"""
    compile: bool = False
    """compile the network with torch.compile"""
    deterministic: bool = False
    """give the same numbers in each run on GPUs, too, with slower algorithms; an operation without
    a deterministic algorithm is an error"""

    checkpoint_every: Positive = 500
    """optimizer steps between checkpoints; there is one at the end of each epoch too"""
    keep_checkpoints: Positive = 3
    """newest checkpoints to keep, in addition to the best"""
    keep_every: Count = 0
    """optimizer steps between checkpoints that are kept forever; 0: none"""
    log_every: Positive = 50
    """optimizer steps between log lines"""
    log_all_ranks: bool = False
    """let every rank log, not only rank 0"""
    trackers: tuple[str, ...] = ()
    """trackers that get the metrics, in addition to metrics.jsonl; none: no tracker"""
    count_flops: bool = False
    """count the floating-point operations of the first step, and log TFLOP/s and MFU; with COMPILE,
    that step runs without it"""
    histograms_every: Count = 0
    """optimizer steps between histograms of parameters and gradients; 0: none"""
    register_model: str | None = None
    """name of the best network in the model registry of trackers that have one"""
    profile: str | None = None
    """steps to profile, at most 100, such as 10:20: from the 10th on, without the 20th"""
    profile_ranks: tuple[Count, ...] = (0,)
    """ranks that are profiled"""

    def for_world(self, size: int) -> "Self":
        """Return the settings with the batch size of each rank, from the global batch size."""
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
        """Return the settings as plain values, as YAML and JSON have them."""
        from pydantic import TypeAdapter

        values: dict[str, Any] = TypeAdapter(type(self)).dump_python(self, mode="json")
        # Each job stages its files in a folder of its own.
        return moved(values, os.environ.get("STAGED") or "$STAGED", "$STAGED")

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str = "train", about: str = "") -> "Self":
        """Return the settings that the YAML file and the flags give.

        The file is the one that `--config` names, else configs/train.yaml if it exists. Bad flags
        end the process with exit code 2, as argparse does. `--help` prints what the command is
        about.

        Raises:
            UsageError: the file can't be read, or a setting in it or in a flag is wrong.
        """
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config.add_argument("--config", type=Path)
        flag, rest = config.parse_known_args(argv)
        path = Path(full_path("config", str(flag.config))) if flag.config else DEFAULT_CONFIG
        defaults, found = cls(), as_submitted(path)
        if flag.config or found.exists():
            # The user chose it, so it may be a link.
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
        """Return the settings of a YAML file, with defaults for those that it leaves out.

        Raises:
            UsageError: the file can't be read or is a link, or a key or a value in it is wrong.
        """
        values = read_yaml(path) or {}
        if not isinstance(values, dict):
            raise UsageError(f"{path} must hold lines of 'setting: value', not {values!r}")
        values.pop("config", None)  # the config.yaml of a run names the file of its settings
        if values.get("track_all_ranks") is False:  # in the config.yaml of earlier versions
            del values["track_all_ranks"]
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [str(key) for key in values if key not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see train --help for all"
            raise UsageError(f"{path}: unknown setting '{unknown[0]}'; {hint}")
        return cls.from_values(values, f"{path}: ")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "") -> "Self":
        """Return settings from values; raise UsageError, with `source` first, if one is wrong."""
        # Imported here, since --help does not need it.
        from pydantic import TypeAdapter, ValidationError

        values = moved(values, "$STAGED", os.environ.get("STAGED") or "$STAGED")
        try:
            settings = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            # A setting of several types has an error for each of them.
            found = [each["msg"] for each in error.errors() if each["loc"][0] == name]
            reasons = [each.removeprefix("Input ").removeprefix("String ") for each in found]
            reason = ", or ".join(dict.fromkeys(reasons))
            reason = reason.replace("valid tuple", "list, such as [a, b]")
            raise UsageError(f"{source}{name} is {values[name]!r}: it {reason}") from None
        for name, value in values.items():
            if value is True and type(getattr(settings, name)) in (int, float):  # pydantic's is 1
                raise UsageError(f"{source}{name} is true: it should be a number")
        if Path(settings.experiment).name in ("", "..") or "/" in settings.experiment:
            raise UsageError(
                f"{source}experiment is {settings.experiment!r}: it must be the name of one folder "
                "in run_root, such as baseline"
            )
        window = re.fullmatch(r"([1-9]\d{0,17}):(\d{1,18})", settings.profile or "1:2", re.ASCII)
        # More steps take minutes to write.
        if not window or not 0 < int(window[2]) - int(window[1]) <= 100:
            raise UsageError(
                f"{source}profile is {settings.profile!r}: it must be the first step, 1 or later, "
                "and the one after the last, such as 10:20, for 100 steps at most"
            )
        if set(settings.register_model or "") & set("/:"):
            raise UsageError(
                f"{source}register_model is {settings.register_model!r}: use a name without / or :"
            )
        return settings
