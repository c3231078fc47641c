"""Images as tensors of the size and layout that a model takes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from conch.core.tensor import Array
from conch_tools.infer.signature import TensorRule

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")

_MODES = {1: "L", 3: "RGB", 4: "RGBA", -1: "RGB"}
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


class ImageError(Exception):
    """The image can't be read, or the input takes none."""


def image_array(content: bytes, rule: TensorRule, batched: bool, scaling: str) -> Array:
    """The pixels of an image, resized to the input's height and width.

    Args:
        content: The image file.
        rule: The input.
        batched: True if its first dimension is the batch's.
        scaling: ``none`` for pixels from 0 to 255, ``unit`` for 0 to 1, ``inception`` for -1 to 1, or
            ``imagenet`` for less the mean of ImageNet's and by their deviation.

    Raises:
        ImageError: It is no image, or the input takes none.
    """
    dims = rule.shape[1:] if batched or len(rule.shape) == 4 else rule.shape
    channels_at = _channels_at(rule, dims)
    channels = 1 if channels_at is None else dims[channels_at]
    height, width = (dims[at] for at in range(len(dims)) if at != channels_at)
    if scaling != "none" and not rule.datatype.startswith(("FP", "BF")):
        raise ImageError(f"pixels of {rule.datatype} are 0 to 255: leave --image-scaling out")
    pixels = _pixels(content, _MODES[channels], height, width)
    if scaling == "imagenet" and pixels.shape[2] != 3:
        raise ImageError(f"--image-scaling imagenet is for 3 channels, and the input has {pixels.shape[2]}")
    if scaling != "none":
        pixels = _scaled(pixels.astype(np.float32), scaling)
    if channels_at is None:
        pixels = pixels[:, :, 0]
    elif channels_at == 0:
        pixels = pixels.transpose(2, 0, 1)
    return pixels[np.newaxis] if len(dims) < len(rule.shape) else pixels


def _channels_at(rule: TensorRule, dims: tuple[int, ...]) -> int | None:
    """Place of the dimension of the channels: the first, the last, or none."""
    if len(dims) == 2:
        return None
    if len(dims) == 3:
        if rule.layout:
            found = 0 if rule.layout == "NCHW" else 2
            if dims[found] in _MODES:
                return found
        first, last = (dims[at] in _MODES and dims[at] != -1 for at in (0, 2))
        if first is not last:
            return 0 if first else 2
        if first and last:
            raise ImageError(
                f"shape {list(rule.shape)} has channels first or last: the config's 'format' must say which"
            )
    raise ImageError(
        f"an input of shape {list(rule.shape)} takes no image, which has height, width and 1, 3 or 4 channels"
    )


def _pixels(content: bytes, mode: str, height: int, width: int) -> Array:
    """Height by width by channels, 0 to 255."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise ImageError("images need pillow: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(content)) as opened:
            image: Any = ImageOps.exif_transpose(opened).convert(mode)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ImageError(f"it is no image: {error}") from None
    size = (image.width if width == -1 else width, image.height if height == -1 else height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels


def _scaled(pixels: Array, scaling: str) -> Array:
    if scaling == "unit":
        return pixels / 255
    if scaling == "inception":
        return pixels / 127.5 - 1
    scaled: Array = (pixels / 255 - _MEAN) / _DEVIATION
    return scaled
