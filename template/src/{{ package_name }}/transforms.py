"""Turns stored images into pixels: decodes, crops and resizes them."""

import io
import random
from contextlib import suppress
from math import ceil, sqrt

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, PngImagePlugin
from torch import Tensor

from .engine import UsageError
from .files import Sample

PngImagePlugin.MAX_TEXT_CHUNK = 2**26  # the default of 1 MiB is too little for some color profiles

Part = tuple[float, float, float, float]
"""Left, top, right and bottom of a crop, as shares of the image's width and height."""

TURNS = dict(zip(range(2, 9), map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), strict=True))
"""How to turn an image upright, by the orientation that a camera has written to its EXIF data."""


def augment(sample: Sample, size: int, least: float) -> Tensor:
    """Return a random crop of an image, mirrored with probability 0.5: uint8 (size, size, 3).

    Args:
        sample: the stored image.
        size: height and width of the result, in pixels.
        least: smallest share of the image's area that the crop has.
    """
    image = opened(sample)
    pixels = resized(sample, image, random_part(image.width, image.height, least), size)
    return pixels.flip(1) if random.random() < 0.5 else pixels


def random_part(width: int, height: int, least: float) -> Part:
    """Return a crop with a random share of an image's area, between `least` and 1.

    The ratio of its sides is between 3/4 and 4/3, as in Szegedy et al. 2015, section 6. A side that
    would be longer than the image's is cut to that length.
    """
    share = random.uniform(least, 1)
    shape = height / width * random.uniform(3 / 4, 4 / 3)
    across, down = min(1.0, sqrt(share * shape)), min(1.0, sqrt(share / shape))
    left, top = random.uniform(0, 1 - across), random.uniform(0, 1 - down)
    return left, top, min(1.0, left + across), min(1.0, top + down)


def center(sample: Sample, size: int) -> Tensor:
    """Return a square crop from the middle of an image: uint8 (size, size, 3).

    Its side is seven eighths of the image's shorter side.
    """
    image = opened(sample)
    side = min(image.size) * 7 / 8
    width, height = side / image.width, side / image.height
    part = ((1 - width) / 2, (1 - height) / 2, (1 + width) / 2, (1 + height) / 2)
    return resized(sample, image, part, size)


def opened(sample: Sample) -> Image.Image:
    """Return an image with its size read; its pixels are decoded later, unless it has to be turned.

    Raises:
        UsageError: the content is not an image, or has too many pixels.
    """
    try:
        image = Image.open(io.BytesIO(sample.content))
        turn = None
        with suppress(Exception):  # Pillow raises many kinds; who can't read EXIF shows it as it is
            turn = TURNS.get(image.getexif().get(274, 1)) if "exif" in image.info else None
        return image if turn is None else image.transpose(turn)
    except Image.DecompressionBombError:
        raise UsageError(
            f"{sample.name} has too many pixels: shrink it, or raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from None
    except (OSError, SyntaxError, ValueError):
        raise UsageError(f"{sample.name} is not a readable image: remove it") from None


def resized(sample: Sample, image: Image.Image, part: Part, size: int) -> Tensor:
    """Return the pixels of a crop of an image, resized: uint8 (size, size, 3).

    Raises:
        UsageError: the image is damaged, or it can't be converted.
    """
    left, top, right, bottom = part
    # A JPEG that is much larger than needed is decoded at a half, a quarter or an eighth of it.
    image.draft("RGB", (ceil(size / (right - left)), ceil(size / (bottom - top))))
    width, height = image.size
    box = int(left * width), int(top * height), ceil(right * width), ceil(bottom * height)
    try:
        pixels = torch.from_numpy(np.array(in_color(image).crop(box)))
    except (OSError, SyntaxError) as error:
        raise UsageError(f"{sample.name} is damaged ({error}): remove it") from None
    except ValueError as error:
        raise UsageError(f"{sample.name}: {error}: store it as RGB or grey, 8 or 16 bits") from None
    # PyTorch resizes twice as fast as Pillow if the colors of a pixel are neighbours in memory.
    planes = pixels[None].permute(0, 3, 1, 2)
    square = F.interpolate(planes, size=(size, size), mode="bilinear", antialias=True)
    return square.permute(0, 2, 3, 1)[0]


def in_color(image: Image.Image) -> Image.Image:
    """Return an image as RGB. Grey values of more than 8 bits are scaled, as Pillow clips them.

    Raises:
        ValueError: the value of white is unknown, or Pillow can't convert the colors.
    """
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise ValueError("it has values of 32 bits, of which none is known to be white")
    if image.mode.startswith("I"):
        tags = getattr(image, "tag_v2", {})
        grey = np.asarray(image) / (4095 if tags.get(258) == (12,) else 65535)
        grey = 1 - grey if tags.get(262) == 0 else grey  # a TIFF in which 0 is white
        image = Image.fromarray((grey * 255).round().astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")
