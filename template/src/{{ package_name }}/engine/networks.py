"""Builds, distributes, saves and restores a learner's networks and optimizers."""

import fnmatch
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from .compiler import answer_optimizers
from .config import Settings
from .errors import UsageError
from .ranks.strategy import distribute, full_tensor, is_dtensor, local_part
from .ranks.world import World
from .run.record import RECORDER
from .weights import initialize

log = logging.getLogger(__name__)


class Networks:
    """The networks of a learner by name, and their optimizers by name.

    A single network has the name `network`, and a single optimizer the name `optimizer`.

    Args:
        learner: a `Learner` of learner.py, whose `build`, `optimizers` and `fsdp_units` are called.
        resumes: whether a checkpoint replaces the parameters, so that `init_from` is not read.

    Attributes:
        modules: the networks as they were built. Evaluations and checkpoints use them.
        wrapped: the modules that training calls instead, such as DistributedDataParallel.
        averages: the moving averages of the networks, by name; empty without the setting `ema`.
        evaluated: the averages if there are any, otherwise the modules.
        optimizers: the optimizers by name.

    Raises:
        UsageError: the learner did not return networks and optimizers, or a setting does not fit
            the networks.
    """

    def __init__(self, learner: Any, settings: Settings, world: World, resumes: bool) -> None:  # noqa: ANN401
        answer_optimizers()
        built, units = learner.build(), learner.fsdp_units
        self.single = isinstance(built, nn.Module)
        self.modules: dict[str, nn.Module] = _named("build", built, "network", nn.Module)
        if settings.init_from and not resumes:
            initialize(self.modules, settings.init_from, settings.init_partial)
        freeze(self.modules, settings.freeze)
        self.decay = settings.ema or 0.0
        averaged = self.modules if settings.ema else {}
        self.averages = {n: deepcopy(each).requires_grad_(False) for n, each in averaged.items()}
        if settings.recompute:
            for module in self.modules.values():
                recompute(module, units(module))
        self.wrapped = {
            name: distribute(module, units, settings, world)
            for name, module in self.modules.items()
        }
        for module in self.averages.values():
            distribute(module, units, settings, world)
        self.evaluated = self.averages or self.modules
        made = learner.optimizers(self.view(self.modules))
        self.optimizers: dict[str, Optimizer] = _named("optimizers", made, "optimizer", Optimizer)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        self.options = {name: _options(each) for name, each in self.optimizers.items()}
        # If gradients overflow, it skips the step on all ranks and halves the scale.
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")

    def view(self, modules: Mapping[str, nn.Module]) -> Any:  # noqa: ANN401 - as `build` returned
        """Return modules in the form of the learner's `build`: one module, or a dictionary."""
        return modules["network"] if self.single else dict(modules)

    @torch.no_grad()
    def update_averages(self, step: int) -> None:
        """Update the averages with the parameters after a step, and copy the buffers.

        The decay is smaller in the first steps, so that the averages soon forget the initial
        parameters.
        """
        update = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        for name, average in self.averages.items():
            network = self.modules[name]
            ours, theirs = (list(map(local_part, x.parameters())) for x in (average, network))
            if ours:  # a network may have no parameters
                update(ours, theirs, step)
            for mine, buffer in zip(average.buffers(), network.buffers(), strict=True):
                mine.copy_(buffer)

    def set_learning_rates(self, factor: float) -> None:
        """Set the learning rate of each parameter group to its initial one, times a factor."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates by metric name.

        The first one is train/lr. If there are others, each also has the name of its optimizer, or
        the `name` or number of its parameter group: train/lr/adam, train/lr/head, train/lr/adam1.
        """
        rates: dict[str, float] = {}
        for name, optimizer in self.optimizers.items():
            groups = optimizer.param_groups
            for number, group in enumerate(groups):
                own = group.get("name", f"{name}{number}" if len(groups) > 1 else name)
                rates[f"train/lr/{own}"] = float(group["lr"])
        first = {"train/lr": next(iter(rates.values()))}
        return first | (rates if len(set(rates.values())) > 1 else {})

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states for a checkpoint; with FSDP, the tensors are DTensors."""
        return {
            "networks": {name: each.state_dict() for name, each in self.modules.items()},
            "averages": {name: each.state_dict() for name, each in self.averages.items()},
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "optimizer_classes": {n: type(each).__name__ for n, each in self.optimizers.items()},
            "optimizer_options": self.options,
            "scaler": self.scaler.state_dict(),
        }

    def layouts(self) -> dict[tuple[Any, ...], Tensor]:
        """Return the DTensors of the networks by the keys that lead to them in the `state_dict`.

        An optimizer's state of a parameter has the keys of the parameter's number, and one more.
        """
        found: dict[tuple[Any, ...], Any] = {}
        for part, modules in (("networks", self.modules), ("averages", self.averages)):
            for name, module in modules.items():
                found |= {(part, name, key): each for key, each in module.state_dict().items()}
        for name, optimizer in self.optimizers.items():
            numbered = [each for group in optimizer.param_groups for each in group["params"]]
            found |= {("optimizers", name, "state", n): each for n, each in enumerate(numbered)}
        return {keys: each for keys, each in found.items() if is_dtensor(each)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        If model.py has changed an option of an optimizer since then, such as the weight decay, the
        new value counts.

        Raises:
            RuntimeError, ValueError: the state belongs to other networks or optimizers.
            KeyError, TypeError, AttributeError: the state is not one that `state_dict` returns.
        """
        for part, ours in (("networks", self.modules), ("optimizers", self.optimizers)):
            if set(ours) != set(state[part]):
                raise ValueError(
                    f"its {part} are {', '.join(state[part])}, those of model.py {', '.join(ours)}"
                )
        # If the checkpoint has no averages, they start from its networks.
        averages = state["averages"] or state["networks"]
        for name, module in self.modules.items():
            module.load_state_dict(state["networks"][name])
            if self.averages:
                self.averages[name].load_state_dict(averages[name])
        for name, optimizer in self.optimizers.items():
            saved, made = state["optimizer_classes"][name], type(optimizer).__name__
            if saved != made:
                raise ValueError(f"it has the optimizer {saved}, but model.py makes {made}")
            now, earlier = _options(optimizer), state["optimizer_options"][name]
            optimizer.load_state_dict(state["optimizers"][name])
            for group, new, old in zip(optimizer.param_groups, now, earlier, strict=True):
                group.update({key: new[key] for key in new if new[key] != old.get(key)})
        if state["scaler"]:  # empty if the precision was another one
            self.scaler.load_state_dict(state["scaler"])


def _named(method: str, made: Any, name: str, kind: type) -> dict[str, Any]:  # noqa: ANN401
    """Return the objects that a method of the learner made, by name.

    Raises:
        UsageError: they are not of this kind.
    """
    found = {name: made} if isinstance(made, kind) else made
    if not (isinstance(found, dict) and found and all(isinstance(x, kind) for x in found.values())):
        raise UsageError(
            f"{method} in model.py returned {type(made).__name__}: return one {kind.__name__}, or "
            "a dictionary of them by name"
        )
    return found


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, such as weight decay."""
    groups = optimizer.param_groups
    return [{key: each for key, each in group.items() if key != "params"} for group in groups]


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return all parameters by name; with several networks, names begin with the network's name."""
    several = len(modules) > 1
    return {
        f"{name}.{key}" if several else key: parameter
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }


def freeze(modules: Mapping[str, nn.Module], patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match patterns such as `backbone.*`.

    Raises:
        UsageError: a pattern matches no parameter.
    """
    names = named_parameters(modules)
    for pattern in patterns:
        chosen = fnmatch.filter(names, pattern)
        if not chosen:
            raise UsageError(
                f"freeze '{pattern}' matches no parameter: use names like {next(iter(names), '')}"
            )
        log.info("%d parameters are frozen by '%s'", len(chosen), pattern)
        for name in chosen:
            names[name].requires_grad_(False)


def digest(modules: Mapping[str, nn.Module]) -> str:
    """Return the SHA-256 of all values of the state_dicts, as hex; every rank calls this."""
    found = hashlib.sha256()
    for name, module in sorted(modules.items()):
        for key, tensor in sorted(module.state_dict().items()):
            found.update(f"{name}.{key}".encode())
            if not isinstance(tensor, Tensor):  # of get_extra_state
                found.update(repr(tensor).encode())
                continue
            # Viewed as bytes, since NumPy has no bf16.
            content = full_tensor(tensor.detach()).cpu().reshape(-1)
            found.update(content.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def recompute(network: nn.Module, units: Iterable[nn.Module]) -> None:
    """Let parts of a network keep only their inputs, as the setting `recompute` says.

    The backward pass computes the activations again, so that they need not be kept in memory. The
    names of modules, the parameters and the results do not change.
    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arxiv.org/abs/1604.06174).

    Args:
        network: not yet distributed, so that FSDP gathers a part for both of its forward passes.
        units: the parts. If a part contains other parts, only those are recomputed.
    """
    chosen = set(units)
    parts = [unit for unit in chosen if chosen.isdisjoint([*unit.modules()][1:])]
    for part in parts:
        part.forward = partial(_forward, part, part.forward)  # type: ignore[method-assign]
    log.info("recompute: %d modules of %s", len(parts), type(network).__name__)


def _forward(part: nn.Module, forward: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
    first: list[list[tuple[nn.Module, str, Tensor]]] = []

    def run(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the part's own
        if torch.compiler.is_compiling():  # a compiled graph updates buffers only once
            return forward(*arguments, **named)
        if first:
            with _as_before(first[0]), RECORDER.apart():
                return forward(*arguments, **named)
        modules = part.modules()
        buffers = (
            (x, name, each) for x in modules for name, each in x.named_buffers(recurse=False)
        )
        first.append([(module, name, each.clone()) for module, name, each in buffers])
        return forward(*arguments, **named)

    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(run, *arguments, use_reentrant=False, **named)


@contextmanager
def _as_before(buffers: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Replace buffers, such as running statistics, by earlier values inside the context."""
    now = [(module, name, getattr(module, name)) for module, name, _ in buffers]
    for module, name, value in buffers:
        setattr(module, name, value.clone())  # `value` must not change: another pass may need it
    try:
        yield
    finally:
        for module, name, value in now:
            setattr(module, name, value)
