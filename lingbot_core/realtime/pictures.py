"""The start image of a message, as bytes, as an array, or as text that holds or names one.

What cannot be a picture, or would unpack to too large a one, is refused before anything is decoded. Text is never taken
for the path of a file.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.image import MIN_SIDE, read_image
from ..engine.image_header import read_header
from ..errors import ImageError, InputFileError
from .errors import MessageError
from .limits import DEFAULT_LIMITS, Limits

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
_FORMATS = ("PNG", "JPEG", "WebP")
_DATA_URL = re.compile(r"data:(?P<type>[^;,]{0,100})(?P<parameters>(?:;[^;,]{0,100}){0,4}),", re.IGNORECASE)


def is_web_url(value: Any) -> bool:
    """Whether a message means a picture on a web server (http or https)."""
    return isinstance(value, str) and value[:8].lower().startswith(("http://", "https://"))


def read_picture(value: Any, limits: Limits = DEFAULT_LIMITS, name: str = "image") -> NDArray[np.uint8]:
    """The picture of a message as a new uint8 array [H, W, 3] in RGB.

    value: the bytes of a PNG, JPEG or WebP; a uint8 array [H, W, 3] (or 4, alpha is dropped); or a ``data:`` URL with
    base64 of such bytes. name: what messages call the field. Blocks while it decodes. Raises MessageError for anything
    else, URLs of the web among it (:func:`load_picture`), and for more bytes or pixels than ``limits`` allow.
    """
    if isinstance(value, np.ndarray):
        return _from_array(value, limits, name)
    if is_web_url(value):
        raise MessageError(
            f"{name} is a URL of the web, which this server does not fetch; send the picture's bytes or a data: URL"
        )
    if isinstance(value, str):
        value = _from_data_url(value, limits, name)
    if not isinstance(value, bytes | bytearray | memoryview):
        raise MessageError(
            f"{name} is of the type {type(value).__name__}; send the bytes of a PNG, JPEG or WebP, a uint8 array "
            "[H, W, 3], or a data: URL"
        )
    return _decode(bytes(value), limits, name)


async def load_picture(
    value: Any, limits: Limits = DEFAULT_LIMITS, *, allow_urls: bool = False, name: str = "image"
) -> NDArray[np.uint8]:
    """:func:`read_picture` off the event loop; with ``allow_urls`` also for ``http:`` and ``https:`` URLs.

    Of the web only public addresses are asked, see :func:`.remote_pictures.fetch_picture`. Raises MessageError.
    """
    if allow_urls and is_web_url(value):
        from .remote_pictures import fetch_picture

        value = await fetch_picture(value, MEDIA_TYPES, limits, name)
    return await asyncio.to_thread(read_picture, value, limits, name)


def _from_array(array: NDArray[Any], limits: Limits, name: str) -> NDArray[np.uint8]:
    shape = list(array.shape)
    if array.dtype != np.uint8:
        scale = "; multiply values of 0..1 by 255 first" if array.dtype.kind == "f" else ""
        raise MessageError(f"{name} is an array of {array.dtype.name}; send uint8{scale}")
    if array.ndim != 3 or array.shape[2] not in (3, 4):
        fix = ""
        if array.ndim == 4:
            fix = "; of a batch send one picture"
        elif array.ndim == 3 and array.shape[0] in (1, 3, 4):
            fix = "; its channels come first: transpose it with (1, 2, 0)"
        elif array.ndim == 2 or array.shape[-1:] == (1,):
            fix = "; of a grey picture send three equal channels"
        raise MessageError(f"{name} has the shape {shape} and must be [H, W, 3] or [H, W, 4]{fix}")
    _check_sides(array.shape[0], array.shape[1], limits, name)
    # A copy: torch warns of arrays that it could not write to, and those of a message are read-only.
    return np.array(array[..., :3], order="C")


def _from_data_url(url: str, limits: Limits, name: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise MessageError(
            f"{name} is a string and no data: URL ({url[:40]!r}); send data:image/png;base64,... or the picture's bytes"
        )
    media_type = head["type"].strip().lower()
    if media_type not in (*MEDIA_TYPES, "image/jpg"):
        raise MessageError(f"{name} is a data: URL of {media_type[:40]!r}; use one of {', '.join(MEDIA_TYPES)}")
    if not head["parameters"].lower().endswith(";base64"):
        raise MessageError(f"{name} is a data: URL without ;base64 before its comma; encode the picture in base64")
    if (len(url) - head.end()) // 4 * 3 > limits.picture_bytes + 2:  # up to two of them are padding
        raise _too_many_bytes(limits, name)
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: letters beyond ASCII
        raise MessageError(f"{name} is a data: URL whose base64 is damaged ({error}); encode it again") from error


def _decode(data: bytes, limits: Limits, name: str) -> NDArray[np.uint8]:
    if len(data) > limits.picture_bytes:
        raise _too_many_bytes(limits, name)
    header = read_header(data)
    if header is None or header.format not in _FORMATS:
        found = "in no known format" if header is None else f"a {header.format}"
        raise MessageError(f"{name} is {found}; send a PNG, JPEG or WebP")
    _check_sides(header.height, header.width, limits, name)
    try:
        return read_image(data)
    except (ImageError, InputFileError) as error:
        raise MessageError(f"{name}: {error}") from error


def _check_sides(height: int, width: int, limits: Limits, name: str) -> None:
    if min(height, width) < MIN_SIDE:
        raise MessageError(f"{name} has {height}x{width} pixels; both sides must have at least {MIN_SIDE}")
    if height * width > limits.pixels:
        raise MessageError(
            f"{name} has {height}x{width} pixels; at most {limits.pixels / 1e6:g} megapixels are read: make it smaller"
        )


def _too_many_bytes(limits: Limits, name: str) -> MessageError:
    return MessageError(f"{name} has more than {limits.picture_bytes} bytes; make it smaller, or send it as a JPEG")
