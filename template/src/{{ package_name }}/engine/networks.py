"""A learner's networks and optimizers on this rank: built, distributed, saved and restored."""

import fnmatch
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from . import weights
from .checkpoint_files import find, load
from .config import Settings
from .errors import UsageError
from .ranks.dtensor import full_tensor, local_part
from .ranks.strategy import Units, distribute
from .ranks.world import World
from .recompute import recompute

log = logging.getLogger(__name__)


class Networks:
    """The networks by name, and their optimizers by name.

    The name of a single network is `network`, and that of a single optimizer `optimizer`.

    Args:
        built: what the learner's `build` returned, on the CPU.
        make_optimizers, units: the learner's `optimizers` and `fsdp_units`.

    Attributes:
        modules: the networks as they were built. Evaluation and checkpoints use these.
        wrapped: what training calls instead, such as DistributedDataParallel.
        averages: by the networks' names, moving averages of them; empty without `ema`.
        evaluated: the averages where there are some, else the modules.
        optimizers: by name.
        not_initialized: why init_from was not loaded. It matters only if there is no checkpoint.

    Raises:
        UsageError: the learner returned something else.
    """

    def __init__(
        self,
        built: nn.Module | dict[str, nn.Module],
        make_optimizers: Callable[[Any], Optimizer | dict[str, Optimizer]],
        units: Units,
        settings: Settings,
        world: World,
    ) -> None:
        self.single = isinstance(built, nn.Module)
        self.modules: dict[str, nn.Module] = _named("build", built, "network", nn.Module)
        self.not_initialized: UsageError | None = None
        if settings.init_from:
            try:
                initialize(self.modules, settings.init_from, settings.init_partial)
            except UsageError as error:
                self.not_initialized = error
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
        made = make_optimizers(self.view(self.modules))
        self.optimizers: dict[str, Optimizer] = _named("optimizers", made, "optimizer", Optimizer)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        self.options = {name: _options(each) for name, each in self.optimizers.items()}

    def view(self, modules: Mapping[str, nn.Module]) -> Any:  # noqa: ANN401 - as `build` returned
        """Return modules as the learner knows its networks: one, or a dictionary of several."""
        return modules["network"] if self.single else dict(modules)

    @torch.no_grad()
    def update_averages(self, step: int) -> None:
        """Take the parameters after a step into the averages, and copy the buffers.

        The past has less weight in the first steps, so that the averages soon forget the initial
        parameters.
        """
        update = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        for name, average in self.averages.items():
            network = self.modules[name]
            ours, theirs = (list(map(local_part, x.parameters())) for x in (average, network))
            if ours:  # a network may have only buffers
                update(ours, theirs, step)
            for mine, buffer in zip(average.buffers(), network.buffers(), strict=True):
                mine.copy_(buffer)

    def set_learning_rates(self, factor: float) -> None:
        """Set the learning rate of each group of parameters: its own, times a factor."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def learning_rates(self) -> dict[str, float]:
        """Return the first learning rate as train/lr, and with their names those that differ."""
        rates: dict[str, float] = {}
        for name, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                if (rate := float(group["lr"])) not in rates.values():
                    rates[f"train/lr/{name}{number}" if rates else "train/lr"] = rate
        return rates

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of them; with FSDP, its tensors are DTensors."""
        return {
            "networks": {name: each.state_dict() for name, each in self.modules.items()},
            "averages": {name: each.state_dict() for name, each in self.averages.items()},
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "optimizer_classes": {n: type(each).__name__ for n, each in self.optimizers.items()},
            "optimizer_options": self.options,
        }

    def like(self, *key_path: Any) -> Tensor | None:  # noqa: ANN401 - names and numbers
        """Return a tensor with the layout over the ranks that one of the `state_dict` has.

        Args:
            key_path: of the tensor. None is returned if the networks have no such tensor.
        """
        match key_path:
            case ("networks" | "averages" as part, name, key):
                modules = self.modules if part == "networks" else self.averages
                return modules[name].state_dict().get(key) if name in modules else None
            case ("optimizers", name, "state", int(number), _) if name in self.optimizers:
                groups = self.optimizers[name].param_groups
                numbered = [each for group in groups for each in group["params"]]
                return numbered[number] if number < len(numbered) else None
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        An optimizer keeps the options that model.py changed since then, such as weight decay.

        Raises:
            RuntimeError, ValueError: it belongs to other networks or optimizers.
            KeyError, TypeError, AttributeError: it is not a state that `state_dict` returns.
        """
        for part, ours in (("networks", self.modules), ("optimizers", self.optimizers)):
            if set(ours) != set(state[part]):
                raise ValueError(f"it has the {part} {', '.join(state[part])}")
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


def _named(method: str, made: Any, name: str, kind: type) -> dict[str, Any]:  # noqa: ANN401
    """Return what a method of the learner made, by name."""
    found = {name: made} if isinstance(made, kind) else made
    if not (isinstance(found, dict) and found and all(isinstance(x, kind) for x in found.values())):
        raise UsageError(
            f"{method} in model.py returned {type(made).__name__}: return one {kind.__name__}, or "
            "a dictionary of them by name"
        )
    return found


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group of parameters, such as weight decay."""
    groups = optimizer.param_groups
    return [{key: each for key, each in group.items() if key != "params"} for group in groups]


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return all parameters by name; of several networks, it begins with the network's."""
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


def initialize(modules: Mapping[str, nn.Module], source: str, partial: bool) -> None:
    """Load weights into networks, before they are distributed.

    Args:
        modules: the networks.
        source: a run folder, whose best checkpoint is taken; a checkpoint; a state_dict, in a file
            of torch.save or of safetensors; or a folder with such a model.safetensors.
        partial: whether to take only the tensors that fit by name, shape and kind of dtype.

    Raises:
        UsageError: there is no such file, or it does not fit.
    """
    if not os.path.exists(source):
        raise UsageError(
            f"init_from is {source}, but there is no such file or folder: give a run folder, a "
            "step-*.pt file, or a state_dict in a .pt or .safetensors file"
        )
    inside = Path(source) / "model.safetensors"  # as save_pretrained of transformers names it
    path = find(inside if os.path.exists(inside) else Path(source))
    state = load(path)
    states = state["averages"] or state["networks"]
    if len(states) == len(modules) == 1:
        states = dict(zip(modules, states.values(), strict=True))
    elif len(states) == 1:  # of a state_dict
        states = weights.by_network(next(iter(states.values())), modules) or states
    taken = 0
    for name, module in modules.items():
        mine = module.state_dict()
        theirs = weights.with_tied(states.get(name, {}), mine)
        fitting = {k: v for k, v in theirs.items() if k in mine and _fits(mine[k], v)}
        misfits = ", ".join(key for key in {**mine, **theirs} if key not in fitting)
        if misfits and not partial:
            raise UsageError(
                f"init_from {path} does not fit {name} at {misfits:.200}: --init-partial takes "
                "what fits"
            )
        module.load_state_dict(fitting, strict=False)
        taken += len(fitting)
        found = f"{len(fitting)} of {len(mine)} tensors{misfits and f', without {misfits}'}"
        log.info("%s starts from %s: %s", name, path, found)
    if not taken:
        raise UsageError(f"nothing in init_from {path} fits model.py: is it of another model?")


def _fits(mine: Any, theirs: Any) -> bool:  # noqa: ANN401 - values of a state_dict
    """Return whether a value can replace another: tensors need one shape and one kind of dtype."""
    if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
        return type(mine) is type(theirs)
    same_kind = (
        mine.is_complex() == theirs.is_complex()
        and mine.is_floating_point() == theirs.is_floating_point()
        and mine.is_quantized == theirs.is_quantized
    )
    return same_kind and mine.shape == theirs.shape


def digest(modules: Mapping[str, nn.Module]) -> str:
    """Return the SHA-256 of all parameters and buffers; every rank must call this."""
    found = hashlib.sha256()
    for name, module in sorted(modules.items()):
        for key, tensor in sorted(module.state_dict().items()):
            found.update(f"{name}.{key}".encode())
            # As bytes: NumPy does not know bf16.
            content = full_tensor(tensor.detach()).cpu().reshape(-1)
            found.update(content.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
