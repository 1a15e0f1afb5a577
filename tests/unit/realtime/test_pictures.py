"""The start image of a message: bytes, arrays and data: URLs; and what is refused before it is decoded."""

from __future__ import annotations

import asyncio
import base64
import random
import struct
import tracemalloc
import zlib

import cv2
import numpy as np
import pytest

from lingbot_core.realtime.codec import Limits, pack, unpack
from lingbot_core.realtime.errors import MessageError
from lingbot_core.realtime.pictures import is_web_url, load_picture, read_picture

PICTURE = np.random.default_rng(3).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def encoded(suffix: str, *options: int) -> bytes:
    return cv2.imencode(suffix, PICTURE[..., ::-1], options)[1].tobytes()


PNG, JPEG = encoded(".png"), encoded(".jpg")
WEBP = encoded(".webp", cv2.IMWRITE_WEBP_QUALITY, 101)  # beyond 100: without loss


def data_url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


def refusal(value: object, limits: Limits | None = None) -> str:
    with pytest.raises(MessageError) as caught:
        read_picture(value) if limits is None else read_picture(value, limits)
    assert caught.value.code == "malformed_payload"
    return str(caught.value)


def png_header(height: int, width: int) -> bytes:
    """A whole PNG as far as its chunks go, of a size that its few bytes could never fill."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        bytearray(PNG),
        WEBP,
        PICTURE,
        np.dstack([PICTURE, np.full((24, 40), 9, np.uint8)]),
        np.asfortranarray(PICTURE),
        PICTURE[::-1][::-1],
        unpack(pack({"image": PICTURE}))["image"],
        data_url(PNG),
        data_url(PNG, "DATA:image/PNG;BASE64,"),
        data_url(WEBP, "data:image/webp;base64,"),
        data_url(PNG, "data:image/png;name=a.png;base64,"),
    ],
)  # fmt: skip
def test_bytes_arrays_and_data_urls_are_the_same_picture(value):
    got = read_picture(value)
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, PICTURE)


@pytest.mark.parametrize(
    "value", [JPEG, data_url(JPEG, "data:image/jpeg;base64,"), data_url(JPEG, "data:image/jpg;base64,")]
)
def test_jpegs_are_read_as_opencv_reads_them(value):
    expected = cv2.imdecode(np.frombuffer(JPEG, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    np.testing.assert_array_equal(read_picture(value), expected)


def test_the_array_of_a_message_is_copied_so_that_it_can_be_written_to():
    sent = unpack(pack({"image": PICTURE}))["image"]
    got = read_picture(sent)
    assert got.flags.writeable
    assert not np.shares_memory(got, sent)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (PICTURE.transpose(2, 0, 1), r"has the shape \[3, 24, 40\] .*channels come first: transpose it"),
        (PICTURE[None], r"has the shape \[1, 24, 40, 3\] .*of a batch send one picture"),
        (PICTURE[..., 0], r"has the shape \[24, 40\] .*of a grey picture send three equal channels"),
        (PICTURE[..., :1], "of a grey picture send three equal channels"),
        (PICTURE[..., :2], r"has the shape \[24, 40, 2\] and must be"),
        (PICTURE[0, 0], r"has the shape \[3\] and must be"),
        (np.array(np.uint8(3)), r"has the shape \[\] and must be"),
        (PICTURE / 255, "is an array of float64; send uint8; multiply values of 0..1 by 255 first"),
        (PICTURE.astype(np.int64), "is an array of int64; send uint8$"),
        (PICTURE[:15], "has 15x40 pixels; both sides must have at least 16"),
        (np.zeros((0, 40, 3), np.uint8), "has 0x40 pixels"),
        (PICTURE.tolist(), "is of the type list; send the bytes of a PNG"),
        (None, "is of the type NoneType"),
        (7, "is of the type int"),
        ({"url": "x"}, "is of the type dict"),
        (b"", "in no known format; send a PNG, JPEG or WebP"),
        (b"hello", "in no known format"),
        (encoded(".bmp"), "is a BMP; send a PNG, JPEG or WebP"),
        (encoded(".tiff"), "is a TIFF; send a PNG"),
        (PNG[:-20], "is cut off"),
        (JPEG[:-20], "is cut off"),
        (PNG[:60] + bytes(40) + PNG[100:], "damaged"),
        ("", "is a string and no data: URL"),
        ("examples/03/image.jpg", "is a string and no data: URL .'examples/03/image.jpg'"),
        ("/etc/hostname", "is a string and no data: URL"),
        ("file:///etc/hostname", "is a string and no data: URL"),
        ("ftp://example.com/a.png", "is a string and no data: URL"),
        ("http://example.com/a.png", "is a URL of the web, which this server does not fetch"),
        ("HTTPS://example.com/a.png", "is a URL of the web"),
        (data_url(PNG, "data:text/html;base64,"), "is a data: URL of 'text/html'; use one of image/png"),
        (data_url(PNG, "data:;base64,"), "is a data: URL of ''"),
        (data_url(PNG, "data:image/svg+xml;base64,"), "is a data: URL of 'image/svg"),
        (data_url(PNG, "data:image/png,"), "without ;base64 before its comma"),
        ("data:image/png;base64", "is a string and no data: URL"),
        ("data:image/png;base64,", "in no known format"),
        ("data:image/png;base64,****", "base64 is damaged"),
        ("data:image/png;base64,abc", "base64 is damaged"),
        ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "base64 is damaged"),
        (data_url(b"hello"), "in no known format"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_with_the_fix(value, reason):
    with pytest.raises(MessageError, match="^image.*" + reason) as caught:
        read_picture(value)
    assert caught.value.code == "malformed_payload"


def test_limits_may_be_reached_and_not_passed():
    assert read_picture(PNG, Limits(picture_bytes=len(PNG), pixels=24 * 40)).shape == PICTURE.shape
    assert read_picture(data_url(PNG), Limits(picture_bytes=len(PNG))).shape == PICTURE.shape
    for value in (PNG, data_url(PNG)):
        assert f"has more than {len(PNG) - 1} bytes" in refusal(value, Limits(picture_bytes=len(PNG) - 1))
    for value in (PNG, PICTURE, JPEG, WEBP):
        assert "has 24x40 pixels; at most 0.000959 megapixels" in refusal(value, Limits(pixels=24 * 40 - 1))


BOMBS = {
    "a PNG": png_header(60_000, 60_000),
    "a PNG of one long row": png_header(16, 2**31 - 1),
    "a PNG in a data: URL": data_url(png_header(60_000, 60_000)),
    "a JPEG": JPEG.replace(struct.pack(">HH", 24, 40), struct.pack(">HH", 65_000, 65_000), 1),
    "an array that repeats one row": np.broadcast_to(np.zeros(3, np.uint8), (8000, 8000, 3)),
    "a long data: URL": "data:image/png;base64," + "A" * (64 << 20),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_unpack_to_too_much_is_refused_before_it_is_decoded(name):
    tracemalloc.start()
    try:
        assert "at most 40 megapixels" in (text := refusal(BOMBS[name])) or "has more than 33554432 bytes" in text
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_pictures_with_something_wrong_are_read_or_refused():
    pick = random.Random(5)
    read = 0
    for _ in range(600):
        data = bytearray(pick.choice((PNG, JPEG, WEBP)))
        for _ in range(pick.randint(1, 4)):
            data[pick.randrange(len(data))] = pick.randrange(256)
        try:
            value = bytes(data) if pick.random() < 0.5 else data_url(bytes(data))
            assert read_picture(value).shape[2] == 3
        except MessageError:
            continue
        read += 1
    assert 20 < read < 580


def test_only_http_and_https_are_urls_of_the_web():
    assert is_web_url("http://a")
    assert is_web_url("HTTPS://a")
    for value in ("httpx://a", "data:image/png;base64,", " http://a", b"http://a", None, 3):
        assert not is_web_url(value)


def test_pictures_are_loaded_off_the_event_loop_and_urls_are_not_without_the_flag():
    async def load() -> np.ndarray:
        with pytest.raises(MessageError, match="reference is a URL of the web, which this server does not fetch"):
            await load_picture("http://127.0.0.1:1/a.png", name="reference")
        with pytest.raises(MessageError, match="reference is a string and no data: URL"):
            await load_picture("file:///etc/hostname", allow_urls=True, name="reference")
        return await load_picture(data_url(PNG))

    np.testing.assert_array_equal(asyncio.run(load()), PICTURE)
