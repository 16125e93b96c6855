"""From an image as it is stored to pixels: decoded, cut out, resized."""

import io
import math
import random

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .engine import UsageError
from .files import Sample

Part = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of an image's width and height."""


def augment(sample: Sample, size: int, least: float) -> Tensor:
    """Return a random part of an image, mirrored half of the time: uint8 (size, size, 3).

    Args:
        sample: the image.
        size: pixels of an edge.
        least: smallest share of the image's area.
    """
    image = opened(sample)
    pixels = resized(sample, image, random_part(image.width, image.height, least), size)
    return pixels.flip(1) if random.random() < 0.5 else pixels


def random_part(width: int, height: int, least: float) -> Part:
    """Return a part with a random share of an image's area, and sides of about the same length.

    After Szegedy et al. 2015, section 6; a side that would be too long is as long as the image's.
    """
    share = random.uniform(least, 1)
    shape = height / width * random.uniform(3 / 4, 4 / 3)
    across, down = min(1.0, math.sqrt(share * shape)), min(1.0, math.sqrt(share / shape))
    left, top = random.uniform(0, 1 - across), random.uniform(0, 1 - down)
    return left, top, min(1.0, left + across), min(1.0, top + down)


def center(sample: Sample, size: int) -> Tensor:
    """Return the middle of an image, seven eighths of its shorter side: uint8 (size, size, 3)."""
    image = opened(sample)
    side = min(image.size) * 7 / 8
    width, height = side / image.width, side / image.height
    part = ((1 - width) / 2, (1 - height) / 2, (1 + width) / 2, (1 + height) / 2)
    return resized(sample, image, part, size)


def opened(sample: Sample) -> Image.Image:
    """Return an image whose size is known, but which is not decoded yet.

    Raises:
        UsageError: it is none.
    """
    try:
        return Image.open(io.BytesIO(sample.content))
    except (OSError, Image.DecompressionBombError):
        raise UsageError(f"{sample.name} is no image that can be read: leave it out") from None


def resized(sample: Sample, image: Image.Image, part: Part, size: int) -> Tensor:
    """Return the pixels of a part of an image, uint8 (size, size, 3).

    Raises:
        UsageError: the image is damaged.
    """
    left, top, right, bottom = part
    # Of a JPEG far larger than needed, only a half, a quarter or an eighth is decoded.
    image.draft("RGB", (math.ceil(size / (right - left)), math.ceil(size / (bottom - top))))
    width, height = image.size
    box = (left * width, top * height, right * width, bottom * height)
    try:
        square = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
    except (OSError, SyntaxError) as error:
        raise UsageError(f"{sample.name} is damaged ({error}): leave it out") from None
    return torch.from_numpy(np.array(square))
