"""The network, its optimizer, loss and metrics. This file is yours: replace it with your own."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import decode, encode
from .engine import UsageError
from .learner import Learner
from .settings import Settings


class Attention(nn.Module):
    """Causal self-attention: each token attends to itself and to earlier tokens.

    `forward` takes features of shape (batch, tokens, width) and returns the same shape.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        parts = self.inputs(features).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A block of the transformer: attention, then a feed-forward network on each token.

    `forward` takes features of shape (batch, tokens, width) and returns the same shape.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), Attention(width, heads, dropout), nn.Dropout(dropout)
        )
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, features: Tensor) -> Tensor:
        features = features + self.attention(features)
        return features + self.feed_forward(features)


class GPT(nn.Module):
    """A transformer that predicts the next token (Radford et al. 2019).

    `forward` takes tokens, int64, of shape (batch, up to `context`), and returns the logits of the
    token that follows each of them: (batch, tokens, vocabulary).
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.tokens = nn.Embedding(settings.vocabulary, width)
        self.positions = nn.Embedding(settings.context, width)
        self.dropout = nn.Dropout(settings.dropout)
        # With --strategy fsdp, the ranks gather the parameters of one block at a time.
        self.blocks = nn.Sequential(
            *(Block(width, settings.heads, settings.dropout) for _ in range(settings.layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, settings.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            # The outputs of all blocks are added up, so with more blocks each starts smaller.
            if name.endswith(("output.weight", "feed_forward.3.weight")):
                parameter.data /= (2 * settings.layers) ** 0.5

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.dropout(self.tokens(tokens) + self.positions(places))
        return self.head(self.norm(self.blocks(features)))


Batch = tuple[Tensor, Tensor]  # tokens and following tokens, both int64 (batch, context)


class Model(Learner):
    """A GPT. learner.py describes these methods and all that you can override."""

    best = ("validation/loss", "min")
    unit = "tokens"

    def build(self) -> nn.Module:
        width, heads = self.settings.width, self.settings.heads
        if width % heads:
            raise UsageError(f"width is {width}: it must be a multiple of heads, {heads}")
        return GPT(self.settings)

    def optimizers(self, network: nn.Module) -> torch.optim.Optimizer:
        matrices = {m.weight for m in network.modules() if isinstance(m, nn.Linear)}
        others = [each for each in network.parameters() if each not in matrices]
        groups: list[dict[str, Any]] = [
            {"params": [each for each in network.parameters() if each in matrices]},
            {"params": others, "weight_decay": 0.0},  # embeddings and layer norms
        ]
        decay = self.settings.weight_decay
        return torch.optim.AdamW(groups, self.settings.lr, betas=(0.9, 0.95), weight_decay=decay)

    def batch_weight(self, batch: Batch) -> int:
        return batch[1].numel()

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        tokens, following = batch
        return token_losses(network(tokens), following).mean()

    def measure(self, network: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        tokens, following = batch
        losses = token_losses(network(tokens), following)
        return {"loss": losses.sum(), "loss_at_position": losses.sum(dim=0)}

    def compute_metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        loss = sums["loss"] / sums["weight"]
        return {"loss": loss, "perplexity": loss.exp()}

    def predict(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        tokens, following = batch
        logits = network(tokens)
        losses = token_losses(logits, following)
        return {"perplexity": losses.mean(dim=1).exp(), "next": logits[:, -1].argmax(dim=1)}

    def describe(self, prediction: dict[str, Tensor]) -> dict[str, float | int | str]:
        following = prediction["next"]
        shown = int(following) if self.settings.dataset == "tokens" else decode(following[None])
        return {"perplexity": float(prediction["perplexity"]), "next": shown}

    @torch.no_grad()
    def generate(self, network: nn.Module, tokens: Tensor, length: int = 200) -> Tensor:
        """Return tokens, int64, followed by `length` more that are sampled one by one."""
        for _ in range(length):
            logits = network(tokens[None, -self.settings.context :])[0, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(0), 1)])
        return tokens

    def write(self, network: nn.Module, begin: str, length: int = 200) -> str:
        """Return the text `begin`, followed by `length` more bytes."""
        return decode(self.generate(network, encode(begin).long(), length))


def token_losses(logits: Tensor, following: Tensor) -> Tensor:
    """Return the loss of each token, with the shape of `following`."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="none")
    return losses.view_as(following)
