"""What an encoded picture says about itself, read without decoding it.

OpenCV can only tell the size of a picture by decoding it, so a file of a few megabytes that unpacks to gigabytes has
to be recognised here. OpenCV is also silent about missing data in some versions, so the ends of PNG, JPEG and WebP
data are looked for as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

FORMATS = ("PNG", "JPEG", "WebP", "BMP", "TIFF", "GIF")

# Real files stay far below; made-up ones shall not keep us busy.
_MAX_SEGMENTS = 10_000  # of a JPEG
_MAX_CHUNKS = 1_000_000  # of a PNG


@dataclass(frozen=True)
class ImageHeader:
    """Format, size in pixels as stored (before any EXIF rotation), and whether the data reaches its own end.

    ``complete`` is True as well where only the decoder can tell (BMP, TIFF, GIF). process: of a JPEG, the marker that
    says how it is coded (0xC0 baseline, 0xC2 progressive, 0xC9 arithmetic, ...).
    """

    format: str
    height: int
    width: int
    complete: bool = True
    process: int | None = field(default=None, compare=False)


def read_header(data: bytes) -> ImageHeader | None:
    """Reads the header of PNG, JPEG, WebP, BMP, TIFF or GIF data; None for anything else."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _webp(data)
        if data.startswith(b"BM"):
            return _bmp(data)
        if data.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
            return _tiff(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            width, height = struct.unpack_from("<HH", data, 6)
            return ImageHeader("GIF", height, width)
    except (struct.error, OverflowError):  # the data ends inside its own header, or points far beyond itself
        return None
    return None


def jpeg_without_notes(data: bytes) -> bytes:
    """A JPEG without its APP and COM segments (EXIF, thumbnails, profiles), which decide nothing about its data."""
    kept, offset = [data[:2]], 2
    for _ in range(_MAX_SEGMENTS):
        marker = data[offset + 1 : offset + 2]
        if marker == b"\xff":  # a fill byte
            offset += 1
            continue
        if not marker or marker == b"\xda":
            break
        number = marker[0]
        end = (
            offset
            + 2
            + (0 if number == 0x01 or 0xD0 <= number <= 0xD8 else int.from_bytes(data[offset + 2 : offset + 4]))
        )
        if not (0xE0 <= number <= 0xEF or number == 0xFE):
            kept.append(data[offset:end])
        offset = end
    return b"".join((*kept, data[offset:]))


def _png(data: bytes) -> ImageHeader | None:
    if data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    # OpenCV sets memory aside for whatever length a chunk claims, up to 4 GiB, so the chain must hold.
    offset = 8
    for _ in range(_MAX_CHUNKS):
        if offset + 12 > len(data):
            break
        if data[offset + 4 : offset + 8] == b"IEND":
            return ImageHeader("PNG", height, width)
        (length,) = struct.unpack_from(">I", data, offset)
        offset += 12 + length
    return ImageHeader("PNG", height, width, complete=False)


def _jpeg(data: bytes) -> ImageHeader | None:
    height = width = process = None
    offset = 2
    for _ in range(_MAX_SEGMENTS):
        lead, marker = struct.unpack_from(">BB", data, offset)
        if lead != 0xFF:
            return None
        if marker == 0xFF:  # a fill byte
            offset += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without a length
            offset += 2
        elif marker == 0xDA:  # entropy-coded data: 0xFF is followed by 0x00 or a restart there, never by 0xD9
            if height is None or width is None:
                return None
            return ImageHeader("JPEG", height, width, complete=data.find(b"\xff\xd9", offset) >= 0, process=process)
        else:
            (length,) = struct.unpack_from(">H", data, offset + 2)
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                height, width = struct.unpack_from(">HH", data, offset + 5)
                process = marker
            offset += 2 + length
    return None


def _webp(data: bytes) -> ImageHeader | None:
    (riff_length,) = struct.unpack_from("<I", data, 4)
    complete = len(data) >= riff_length + 8
    match data[12:16]:
        case b"VP8X":
            low, high = struct.unpack_from("<IH", data, 24)
            packed = low | high << 32
            return ImageHeader("WebP", (packed >> 24) + 1, (packed & 0xFFFFFF) + 1, complete)
        case b"VP8L":
            (packed,) = struct.unpack_from("<I", data, 21)
            return ImageHeader("WebP", (packed >> 14 & 0x3FFF) + 1, (packed & 0x3FFF) + 1, complete)
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return ImageHeader("WebP", height & 0x3FFF, width & 0x3FFF, complete)
    return None


def _bmp(data: bytes) -> ImageHeader:
    (header_size,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_size == 12 else "<ii", data, 18)
    return ImageHeader("BMP", abs(height), abs(width))  # a negative height means that rows go from top to bottom


def _tiff(data: bytes) -> ImageHeader | None:
    """Reads the first directory of a TIFF or BigTIFF; later pages are never looked at."""
    order = "<" if data.startswith(b"I") else ">"
    big = 43 in data[2:4]
    (directory,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, directory)
    first, entry_size, value_at = (directory + 8, 20, 12) if big else (directory + 2, 12, 8)
    sizes = {}
    for index in range(min(count, 4096)):
        entry = first + index * entry_size
        tag, kind = struct.unpack_from(order + "HH", data, entry)
        letter = {3: "H", 4: "I", 16: "Q"}.get(kind)
        if tag in (256, 257) and letter:
            (sizes[tag],) = struct.unpack_from(order + letter, data, entry + value_at)
    return ImageHeader("TIFF", sizes[257], sizes[256]) if len(sizes) == 2 else None
