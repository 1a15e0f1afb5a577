"""How much a peer may ask of us with one message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Upper bounds, each of which may be reached and not passed.

    message_bytes: of one binary message.
    depth: of lists and maps inside one another; the message itself is the first, and an array counts as a map that
    holds a list.
    items: entries of all lists and maps of a message together; a key and its value are one entry.
    array_bytes: of the data of one array.
    dimensions: of one array.
    picture_bytes: of one encoded picture (PNG, JPEG, WebP), after base64 is undone or on its way from a URL.
    pixels: of one picture, height times width.
    camera_rows: poses of one message.
    url_seconds: for the download of a picture, redirects included.
    redirects: that are followed for a picture.
    """

    message_bytes: int = 64 << 20
    depth: int = 12
    items: int = 250_000
    array_bytes: int = 64 << 20
    dimensions: int = 8
    picture_bytes: int = 32 << 20
    pixels: int = 40_000_000
    camera_rows: int = 4096
    url_seconds: float = 15.0
    redirects: int = 3


DEFAULT_LIMITS = Limits()
