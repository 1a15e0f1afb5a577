"""Pictures on their way to a server: bytes for msgpack, data URLs for JSON."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...engine.image_header import FORMATS, read_header
from ...errors import ImageError, InputFileError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ImageInput: TypeAlias = "str | os.PathLike[str] | bytes | NDArray[np.uint8]"
"""The path of a picture file, the bytes of one, or uint8 [H, W, 3] RGB."""


def image_value(image: ImageInput) -> bytes | NDArray[np.uint8]:
    """A picture as a msgpack message holds it: the bytes of a file, or uint8 [H, W, 3].

    Raises InputFileError for a file that cannot be read, ImageError for an array of another kind.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        try:
            return Path(image).read_bytes()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputFileError(f"the picture {os.fspath(image)} cannot be read: {why}; check its path") from None
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ImageError(f"a picture of {pixels.dtype} {list(pixels.shape)} cannot be sent; uint8 [H, W, 3] is needed")
    return np.ascontiguousarray(pixels)


def image_url(image: ImageInput) -> str:
    """A picture as a data URL, an array as PNG. Raises InputFileError, ImageError."""
    value = image_value(image)
    data = value if isinstance(value, bytes) else _png(value)
    header = read_header(data)
    if header is None:
        raise ImageError(f"the picture's {len(data)} bytes are in no known format; use one of {', '.join(FORMATS)}")
    return f"data:image/{header.format.lower()};base64,{base64.b64encode(data).decode('ascii')}"


def _png(pixels: NDArray[np.uint8]) -> bytes:
    import cv2

    written, data = cv2.imencode(".png", np.ascontiguousarray(pixels[..., ::-1]))
    if not written:
        raise ImageError(f"a picture of {list(pixels.shape)} cannot be written as PNG; send the bytes of a file")
    return bytes(data)
