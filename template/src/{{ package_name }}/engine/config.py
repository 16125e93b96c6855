"""The settings of a run: defaults here and in settings.py < YAML file < flags."""

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

from .errors import UsageError
from .filesystem import full_path, read_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Rate = Annotated[float, Gt(0), Lt(float("inf"))]

DEFAULT_CONFIG = Path("configs/train.yaml")
PATHS = ("run_root", "run_dir", "resume", "data_dir", "init_from")  # besides fields of type Path

T = TypeVar("T")


def with_full_paths(flags: T) -> T:
    """Return flags or settings, which are a dataclass, with all paths expanded.

    Raises:
        UsageError: as `full_path` does.
    """

    def expanded(name: str, value: Any) -> Any:  # noqa: ANN401 - any field's
        if isinstance(value, tuple):
            return tuple(expanded(name, each) for each in value)
        is_path = isinstance(value, Path) or (name in PATHS and isinstance(value, str))
        return type(value)(full_path(name, str(value))) if is_path else value

    changes = {name: expanded(name, value) for name, value in vars(flags).items()}
    return dataclasses.replace(flags, **changes)  # type: ignore[type-var]


def read_flags(flags: type[T], argv: Sequence[str], prog: str) -> T:
    """Return the flags of a command, with all paths expanded; bad flags end it with exit code 2.

    Raises:
        UsageError: as `full_path` does.
    """
    return with_full_paths(tyro.cli(flags, args=list(argv), prog=prog))


class _YamlLoader(yaml.SafeLoader):
    """Takes for null, a boolean or a number only what YAML 1.1 and 1.2 agree on.

    The rest is text, and the type of a setting decides what it means: `010` is the number 10 or the
    name 010, and `1:30` is no number. PyYAML follows YAML 1.1, where they are 8 and 90.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - without those of SafeLoader
    most = 10_000  # values, those that aliases stand for counted again

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self.count, self.counts = 0, dict[yaml.Node | None, int]()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        """Return the next node. Nested aliases expand to any number of values: count them."""
        before, alias = self.count, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self.count += self.counts.get(node, self.most) if alias else 1
        self.counts.setdefault(node, self.count - before)
        if self.count > self.most:
            raise ValueError(f"it has more than {self.most} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the values by name; a name may not come twice."""
        values = super().construct_mapping(node, deep)
        names = [key.value for key, _ in node.value]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"it has '{twice[0]}' twice: leave one of the lines")
        return values


for _tag, _pattern in (
    ("null", r"~|null|Null|NULL|"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+"),
    ("float", r"[-+]?[0-9]+\.[0-9]*([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    _YamlLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), None
    )


def read_yaml(path: Path, links: bool = False) -> Any:  # noqa: ANN401 - whatever it is
    """Return what a YAML file of a user or of a run holds.

    Args:
        path: the file.
        links: whether it may be a link, as no file of a run folder may.

    Raises:
        OSError: it can't be read.
        ValueError: it is not YAML.
    """
    content = read_bytes(path.resolve() if links else path, 2**20)
    try:
        return _YamlLoader(content).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


@dataclasses.dataclass(frozen=True)
class _ConfigFlag:
    """The one flag that must be known before the others."""

    config: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every training has; settings.py adds those of this project.

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
    """auto: go on from the run folder's newest checkpoint if it has one; never: refuse to; or
    the PATH of a checkpoint or run folder to start from"""
    seed: Count = 0
    """fixes initial parameters and the order of samples"""
    tags: tuple[str, ...] = ()
    """words to find the run by in the trackers"""
    dry_run: bool = False
    """set everything up, print what would happen, write nothing"""

    dataset: str = "synthetic"
    """which one of data.py"""
    data_dir: str = "data"
    """folder of the dataset's files"""
    workers: Count | Literal["auto"] = 0
    """processes of a rank that load; auto: its CPUs less one; data in memory needs none"""

    init_from: str | None = None
    """start from the weights of a run folder (its best checkpoint) or of a file"""
    init_partial: bool = False
    """take from INIT_FROM what fits by name and shape, instead of refusing what does not"""
    freeze: tuple[str, ...] = ()
    """parameters that keep their values, by patterns of their names, such as 'backbone.*'"""

    epochs: Positive = 1
    """passes over the training set"""
    max_steps: Positive | None = None
    """end after this many optimizer steps, if that is sooner"""
    batch_size: Positive = 64
    """samples a rank takes at once"""
    global_batch_size: Positive | None = None
    """samples of an optimizer step over all ranks; sets the batch size instead"""
    accumulate: Positive = 1
    """batches a rank takes for an optimizer step"""
    test_batch_size: Positive = 1000
    """samples a rank takes at once in evaluation"""

    validate_every: Count = 0
    """optimizer steps between validations, besides those at the end of epochs; 0: none"""
    validate_epochs: Count = 1
    """epochs between validations at their end; 0: none; there is one at the end of the run"""
    patience: Positive | None = None
    """end the training when so many validations in a row were no better than the best"""
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
    """largest norm of the gradient; null in YAML, None as a flag: any"""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """auto: cuda (AMD's too) or xpu (Intel's) if there, then mps if alone, then cpu"""
    backend: Literal["auto", "gloo", "nccl", "xccl"] = "auto"
    """auto: nccl on cuda, xccl on xpu, else gloo"""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each rank holds the whole network; fsdp: a part, for networks too large for one GPU"""
    find_unused_parameters: bool = False
    """let ddp take steps in which some parameters have no part; takes some time"""
    world_size: Positive | None = None
    """number of ranks expected; any other is an error"""
    timeout: Positive = 600
    """seconds a rank waits for the others before it gives up"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: mixed precision"""
    compile: bool = False
    """compile the network with torch.compile"""
    deterministic: bool = False
    """the same numbers in each run on GPUs too, with slower algorithms; an operation that has no
    such algorithm is an error"""

    checkpoint_every: Positive = 500
    """optimizer steps between checkpoints; there is one at the end of each epoch too"""
    keep_checkpoints: Positive = 3
    """newest checkpoints to keep, besides the best"""
    log_every: Positive = 50
    """optimizer steps between log lines"""
    log_all_ranks: bool = False
    """let every rank log, not only rank 0"""
    trackers: tuple[str, ...] = ()
    """where metrics go besides metrics.jsonl; none: nowhere"""
    track_all_ranks: bool = False
    """give every rank a run of its own in the trackers, for its own numbers, beside rank 0's"""
    histograms_every: Count = 0
    """optimizer steps between histograms of parameters and gradients; 0: none"""
    register_model: str | None = None
    """name under which the best network goes into the model registry of trackers that have one"""

    def for_world(self, size: int) -> "Self":
        """Return the settings with the batch size of each rank worked out.

        Raises:
            UsageError: the global batch can't be shared evenly.
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
        """Return the settings as plain values, in the order of their declaration."""
        values = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }
        return {**values, "config": str(self.config) if self.config else None}

    @classmethod
    def parse(cls, argv: Sequence[str], prog: str = "train") -> "Self":
        """Return the settings that the YAML file and the flags give.

        The file is the one that `--config` names, else configs/train.yaml where it exists. Bad
        flags end the process with exit code 2, as argparse does.

        Raises:
            UsageError: the file can't be read, or has an unknown key; or a value is of the wrong
                type or out of its range.
        """
        flag, rest = tyro.cli(
            _ConfigFlag, args=list(argv), return_unknown_args=True, add_help=False
        )
        path = with_full_paths(flag).config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
        defaults = dataclasses.replace(
            cls.from_yaml(path, links=True) if path else cls(), config=path
        )
        settings = tyro.cli(
            cls,
            args=rest,
            default=defaults,
            prog=f"python -m {__package__.partition('.')[0]} {prog}",
            description="A flag overrides the YAML file of settings, which overrides the default.",
            config=(tyro.conf.AvoidSubcommands,),
        )
        return with_full_paths(cls.from_values(settings.as_dict()))

    @classmethod
    def from_yaml(cls, path: Path, links: bool = False) -> "Self":
        """Return the settings of a YAML file, with defaults for what it leaves out.

        Args:
            path, links: as `read_yaml` takes them.

        Raises:
            UsageError: the file can't be read, or a key or a value in it is wrong.
        """
        try:
            values = read_yaml(path, links) or {}
        except OSError as error:
            raise UsageError(f"can't read the settings in {path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{path} is not YAML: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"{path} must hold lines of 'setting: value', not {values!r}")
        # A run's own config.yaml says which file it came from.
        values.pop("config", None)
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                raise UsageError(
                    f"{path}: unknown setting '{key}'"
                    + (f"; did you mean '{near[0]}'?" if near else "; see train --help for all")
                )
        return cls.from_values(values, f"{path}: ")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "") -> "Self":
        """Return settings from values, each checked against its type and range.

        Raises:
            UsageError: naming the first value that is wrong, and the `source` that it came from.
        """
        # Imported here, where it is needed: --help answers without.
        from pydantic import TypeAdapter, ValidationError

        try:
            settings = TypeAdapter(cls).validate_python(dict(values))
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            # Of a setting that may be of several types, each says why it is not.
            reasons = [each["msg"] for each in error.errors() if each["loc"][0] == name]
            reasons = [each.removeprefix("Input ").removeprefix("String ") for each in reasons]
            reason = ", or ".join(dict.fromkeys(reasons))
            reason = reason.replace("valid tuple", "list, such as [a, b]")
            raise UsageError(f"{source}{name} is {values[name]!r}: it {reason}") from None
        settings._check_names(source)
        return settings

    def _check_names(self, source: str) -> None:
        """Raise UsageError for a name that no file system or tracker takes."""
        if self.experiment in (".", "..") or not re.fullmatch(r"[^/\\]+", self.experiment):
            raise UsageError(
                f"{source}experiment is {self.experiment!r}: it is the name of one folder in "
                "run_root, such as baseline"
            )
        for name in ("experiment", "run_root", "run_dir", "resume", "data_dir"):
            if any(len(os.fsencode(part)) > 255 for part in Path(getattr(self, name) or "").parts):
                raise UsageError(
                    f"{source}{name} holds a name of more than 255 bytes, which file systems "
                    "refuse: choose a shorter one"
                )
        if set(self.register_model or "") & set("/:"):
            raise UsageError(
                f"{source}register_model is {self.register_model!r}: give a name without / or :"
            )
