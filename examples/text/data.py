"""The datasets for training, validation and test. This file is yours: replace it with your own.

A training set is either a map-style dataset (`__len__` and `__getitem__`) or a `ShardStream`;
engine/data/steps.py compares the two. Validation and test sets are map-style. The dataset's method
`collate` makes a batch from a list of samples; the default is PyTorch's `default_collate`.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .engine import UsageError
from .settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """One dataset for training, one to choose the best checkpoint, one for the final test."""

    train: Dataset
    validation: Dataset
    test: Dataset


class Windows(Dataset):
    """Pieces of a text that do not overlap. The target of a token is the token after it.

    Args:
        text: tokens, unsigned integers.
        context: number of tokens in a piece.
        vocabulary: number of different tokens.
    """

    def __init__(self, text: np.ndarray, context: int, vocabulary: int) -> None:
        self.text, self.context, self.vocabulary = text, context, vocabulary

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, following = self.__getitems__([index])
        return tokens[0], following[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a whole batch at once: tokens and following tokens, both (batch, context)."""
        first = np.asarray(indices)[:, None] * self.context
        pieces = torch.from_numpy(self.text[first + np.arange(self.context + 1)].astype(np.int64))
        if pieces.max() >= self.vocabulary:
            raise UsageError(
                f"the text has a token {pieces.max()}, but vocabulary is {self.vocabulary}: write "
                "to configs/train.yaml how many tokens your tokenizer has"
            )
        return pieces[:, :-1], pieces[:, 1:]

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch unchanged: `__getitems__` has already made it."""
        return batch


class MappedWindows(Windows):
    """Pieces of a file of tokens that is mapped into memory.

    Only the parts of the file that are used are read. The processes of a node share the memory.

    Args:
        path: tokens as uint16, or as uint32 if the vocabulary has more than 65,536 tokens.
        context: number of tokens in a piece.
        vocabulary: number of different tokens.

    Raises:
        UsageError: the file does not exist, can't be read, or is too short.
    """

    def __init__(self, path: Path, context: int, vocabulary: int) -> None:
        kind = np.uint16 if vocabulary <= 2**16 else np.uint32
        try:
            super().__init__(np.memmap(path, kind, "r"), context, vocabulary)
        except FileNotFoundError:
            raise UsageError(
                f"no {path.name} in {path.parent.resolve()}: put your tokens there, point "
                "--data-dir at them, or use --dataset synthetic"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"can't read the tokens in {path}: {error}") from None
        if not len(self):
            raise UsageError(
                f"{path} has {len(self.text)} tokens, too few for a context of {context}: change "
                "--context or the file"
            )
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[Path, int, int]]:
        return type(self), (self.path, self.context, self.vocabulary)


def load(settings: Settings) -> Datasets:
    """Return the datasets that the settings choose. Every rank calls this function.

    Raises:
        UsageError: the dataset is unknown, or the text is missing or too short.
    """
    context, vocabulary = settings.context, settings.vocabulary
    if settings.dataset == "tokens":
        return Datasets(*(MappedWindows(path, context, vocabulary) for path in files(settings)))
    if settings.dataset == "text":
        text = read(Path(settings.data_dir))
    elif settings.dataset == "synthetic":
        text = encode(synthesize(1_000_000, seed=1)).numpy()
    else:
        raise UsageError(f"dataset is '{settings.dataset}': it must be text, tokens or synthetic")
    held_out = int(len(text) * settings.held_out)
    if held_out <= settings.context or len(text) <= 3 * held_out:
        raise UsageError(
            f"the text has {len(text)} bytes, too few for a context of {settings.context} and two "
            f"times {settings.held_out} of it held out: change --context, --held-out or the text"
        )
    parts = np.split(text, [len(text) - 2 * held_out, len(text) - held_out])
    return Datasets(*(Windows(part, context, vocabulary) for part in parts))


def new_data(path: Path, settings: Settings) -> Windows:
    """Return the pieces of a text to predict: a file, or all .txt files of a folder.

    The command `predict --input` calls this. With `dataset` tokens, the file has tokens.

    Raises:
        UsageError: the text can't be read, or is shorter than one piece.
    """
    if settings.dataset == "tokens":
        return MappedWindows(path, settings.context, settings.vocabulary)
    text = read(path) if path.is_dir() else np.fromfile(path, np.uint8)
    if len(text) <= settings.context:
        raise UsageError(f"{path} has {len(text)} bytes: it needs more than {settings.context}")
    return Windows(text, settings.context, settings.vocabulary)


def download(settings: Settings) -> None:
    """Log where to put your text, or check that it can be read. Nothing is downloaded.

    The command `download` calls this, never a rank.

    Raises:
        UsageError: the settings ask for a text that is missing or can't be read.
    """
    if settings.dataset == "text":
        text = read(Path(settings.data_dir))
        log.info("the text in %s has %d bytes", settings.data_dir, len(text))
    elif settings.dataset == "tokens":
        for path in files(settings):
            windows = MappedWindows(path, settings.context, settings.vocabulary)
            log.info("%s has %d tokens", path, len(windows.text))
    else:
        log.info(
            "the synthetic text needs no file; for your own, put it into %s as .txt files, and "
            "train with --dataset text",
            settings.data_dir,
        )


def files(settings: Settings) -> list[Path]:
    """Return the files of tokens for training, validation and test.

    If there is no test.bin, validation.bin is used for the test too.
    """
    folder = Path(settings.data_dir)
    test = "test" if (folder / "test.bin").exists() else "validation"
    return [folder / f"{part}.bin" for part in ("train", "validation", test)]


def read(folder: Path) -> np.ndarray:
    """Return the bytes of all .txt files in a folder, uint8, in the order of their names.

    Hidden files, such as those that macOS adds, are left out. What is not taken is logged.

    Raises:
        UsageError: there is no such file, all are empty, or one can't be read.
    """
    found = sorted(folder.glob("*"))
    paths = [path for path in found if path.match("[!.]*.txt")]
    if others := [path for path in found if path not in paths and path.suffix != ".bin"]:
        log.info("%d not taken, such as %s", len(others), others[0])
    try:
        texts = [np.fromfile(path, np.uint8) for path in paths]
    except OSError as error:
        raise UsageError(f"can't read {error.filename}: {error.strerror}") from None
    if not sum(map(len, texts)):
        raise UsageError(
            f"no text in .txt files in {folder.resolve()}: put yours there, point --data-dir at "
            "it, or use --dataset synthetic"
        )
    return np.concatenate(texts)


def encode(text: str) -> Tensor:
    """Return the tokens of a text, which are its UTF-8 bytes: uint8."""
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """Return the text of tokens that are UTF-8 bytes."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


NOUNS = ("bird", "boat", "cat", "child", "dog", "farmer", "king", "river", "teacher", "train")
VERBS = ("follow", "hear", "like", "pass", "remember", "see")
ADJECTIVES = ("bright", "fast", "happy", "little", "old", "quiet", "wild")


def synthesize(length: int, seed: int) -> str:
    """Return a text of sentences such as "the old kings that a dog sees like the river."

    Such a text takes long to learn completely: letters make words, words have an order, and a verb
    agrees with its noun, even if a clause separates them. The same seed gives the same text on
    every rank.
    """
    draw = random.Random(seed)
    parts: list[str] = []
    missing = length
    while missing > 0:
        parts.append(f"{_clause(draw)}.\n")
        missing -= len(parts[-1])
    return "".join(parts)[:length]


def _clause(draw: random.Random) -> str:
    subject, verb = _noun_and_verb(draw)
    if draw.random() < 0.4:
        other, does = _noun_and_verb(draw)
        subject += f" that {other} {does}"
    return f"{subject} {verb} {_noun_and_verb(draw)[0]}"


def _noun_and_verb(draw: random.Random) -> tuple[str, str]:
    """Return a noun with its article, and a verb that agrees with it."""
    several = draw.random() < 0.5
    noun = draw.choice(NOUNS)
    plural = "children" if noun == "child" else f"{noun}s"
    words = [draw.choice(("the", "some" if several else "one"))]
    words += [draw.choice(ADJECTIVES)] if draw.random() < 0.5 else []
    verb = draw.choice(VERBS)
    singular = f"{verb}es" if verb == "pass" else f"{verb}s"
    return " ".join([*words, plural if several else noun]), verb if several else singular
