"""What model.py returned, checked."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import UsageError

if TYPE_CHECKING:
    from ...learner import Learner


def checked_loss(value: Any) -> Tensor:  # noqa: ANN401 - whatever `loss` returned
    """Return what `loss` returned.

    Raises:
        UsageError: it is no scalar.
    """
    if not isinstance(value, Tensor) or value.dim():
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise UsageError(
            f"the loss in model.py returned {what!s:.80}: it must be the mean over the batch, "
            "a tensor of shape ()"
        )
    return value


def checked_weight(learner: "Learner", batch: Any) -> int:  # noqa: ANN401 - what data.py makes
    """Return how much a batch counts.

    Raises:
        UsageError: `weigh` returned no whole number.
    """
    weight = learner.weigh(batch)
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if not isinstance(weight, int | float) or weight % 1 or weight < 0:
        raise UsageError(
            f"weigh in model.py returned {weight!s:.80}: it must be a whole number, such as of "
            "tokens"
        )
    return int(weight)
