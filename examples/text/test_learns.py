"""The network learns from the synthetic text, and predicts each token from those before it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch


def test_it_learns(start: Callable[..., list[subprocess.Popen]], tmp_path: Path) -> None:
    (training,) = start(1, "--max-steps=60", "--validate-every=0")
    assert training.wait(timeout=5 * 60) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # From the frequencies of letters alone: 18. A network that is given the next letter: 1.
    assert 2 < summary["test_perplexity"] < 14


def test_no_token_sees_a_later_one(package: Callable[[str], ModuleType]) -> None:
    settings = package("settings").Settings()
    network = package("model").Model(settings).build().eval()
    tokens = torch.randint(settings.vocabulary, (2, 16))
    others = tokens.clone()
    others[:, 9:] = (others[:, 9:] + 1) % settings.vocabulary
    with torch.no_grad():
        before, after = network(tokens), network(others)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
