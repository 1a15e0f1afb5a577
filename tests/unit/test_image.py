"""The start image: reading, sizes, resizing, intrinsics; and frames as bytes."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from lingbot_core.engine import image as image_module
from lingbot_core.engine.image import (
    RESOLUTIONS,
    check_size,
    fit_size,
    frames_to_uint8,
    place,
    prepare_image,
    read_image,
)
from lingbot_core.engine.image_header import read_header
from lingbot_core.errors import CameraError, ImageError, InputFileError, NumericsError

HEIGHT, WIDTH = 40, 60


def smooth_picture(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    noise = np.random.default_rng(5).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 3), None, 0, 255, cv2.NORM_MINMAX)


PICTURE = Image.fromarray(smooth_picture())
ALPHA = Image.fromarray(np.tile(np.linspace(0, 255, WIDTH).astype(np.uint8), (HEIGHT, 1)))


def with_alpha(mode: str) -> Image.Image:
    picture = PICTURE.convert(mode.removesuffix("A"))
    picture.putalpha(ALPHA)
    return picture


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


ENCODED = {
    "png rgb": encoded(PICTURE, "PNG"),
    "png rgba": encoded(with_alpha("RGBA"), "PNG"),
    "png grey": encoded(PICTURE.convert("L"), "PNG"),
    "png grey alpha": encoded(with_alpha("LA"), "PNG"),
    "png palette": encoded(PICTURE.quantize(16), "PNG"),
    "png palette with a transparent colour": encoded(PICTURE.quantize(16), "PNG", transparency=3),
    "png one bit": encoded(PICTURE.convert("1"), "PNG"),
    "jpeg": encoded(PICTURE, "JPEG"),
    "jpeg progressive": encoded(PICTURE, "JPEG", progressive=True),
    "jpeg grey": encoded(PICTURE.convert("L"), "JPEG"),
    "webp lossy": encoded(PICTURE, "WEBP"),
    "webp lossless": encoded(PICTURE, "WEBP", lossless=True),
    "webp rgba": encoded(with_alpha("RGBA"), "WEBP", lossless=True, exact=True),
    "webp extended": encoded(PICTURE, "WEBP", icc_profile=b"\0" * 132),
    "bmp": encoded(PICTURE, "BMP"),
    "bmp palette": encoded(PICTURE.quantize(16), "BMP"),
    "tiff": encoded(PICTURE, "TIFF"),
    "tiff deflate": encoded(PICTURE, "TIFF", compression="tiff_adobe_deflate"),
    "tiff big": encoded(PICTURE, "TIFF", big_tiff=True),
    "tiff grey": encoded(PICTURE.convert("L"), "TIFF"),
    "gif": encoded(PICTURE.quantize(16), "GIF"),
}


def png_of_zeros(width: int, height: int) -> bytes:
    """A one-bit grey PNG, compressed row by row."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    deflate, row = zlib.compressobj(1), bytes(1 + (width + 7) // 8)
    body = b"".join(deflate.compress(row) for _ in range(height)) + deflate.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", ENCODED)
def test_a_picture_is_read_as_pillow_converts_it_to_rgb(name):
    expected = np.asarray(Image.open(io.BytesIO(ENCODED[name])).convert("RGB"))
    pixels = read_image(ENCODED[name])
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    np.testing.assert_allclose(pixels.astype(int), expected, atol=1)


@pytest.mark.parametrize("name", ENCODED)
def test_the_header_alone_tells_the_size(name):
    header = read_header(ENCODED[name])
    assert header is not None
    assert (header.height, header.width, header.complete) == (HEIGHT, WIDTH, True)
    assert header.format.lower() == name.split()[0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(kind, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned"
    path.write_bytes(encoded(PICTURE, kind, exif=exif))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    np.testing.assert_allclose(read_image(path).astype(int), expected, atol=1)


@pytest.mark.parametrize("extension", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_sixteen_bits_become_the_nearest_of_eight(extension, channels):
    values = np.arange(0, 65536, 32, dtype=np.uint16)[:2048].reshape(32, 64) + np.uint16(31)
    expected = np.rint(values / 257.0)
    _, data = cv2.imencode(extension, np.repeat(values[..., None], channels, axis=2))
    pixels = read_image(data.tobytes())
    np.testing.assert_array_equal(pixels, np.repeat(expected[..., None], 3, axis=2))
    assert pixels.max() == 255


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_counts(kind):
    frames = [Image.new("RGB", (WIDTH, HEIGHT), (level, level, level)) for level in (40, 200, 120)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(read_image(data), np.full((HEIGHT, WIDTH, 3), 40))


def test_a_path_that_is_no_readable_file_is_named(tmp_path):
    empty = tmp_path / "empty.png"
    empty.touch()
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for path, reason in [
        (tmp_path / "missing.png", "does not exist"),
        (tmp_path, "is a folder"),
        (empty, "is empty"),
        (pipe, "not a regular file"),
        (empty / "below.png", "cannot be read"),
        ("nul\0.png", "cannot be read"),
    ]:
        with pytest.raises(InputFileError, match=reason) as caught:
            read_image(path)
        assert str(path) in str(caught.value)
    with pytest.raises(InputFileError, match="empty"):
        read_image(b"")


@pytest.mark.parametrize(
    "data", [b"not a picture at all", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a\x01", b"<svg/>"]
)
def test_what_is_no_picture_is_refused(data, tmp_path):
    path = tmp_path / "start.png"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"start\.png is not a picture in a known format; use one of PNG, JPEG"):
        read_image(path)


@pytest.mark.parametrize("size", [(1, 1), (15, 400), (400, 15)])
def test_a_picture_of_a_few_pixels_is_refused(size):
    with pytest.raises(ImageError, match=f"{size[1]}x{size[0]} pixels; both sides must have at least 16"):
        read_image(encoded(Image.new("RGB", size), "PNG"))


def test_a_huge_picture_is_refused_before_it_is_decoded(monkeypatch, tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_of_zeros(20000, 20000))
    assert path.stat().st_size < 1_000_000
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("the picture was decoded"))
    with pytest.raises(ImageError, match=r"bomb\.png has 20000x20000 pixels, 400 megapixels; at most 128"):
        read_image(path)


@pytest.mark.parametrize("name", ENCODED)
def test_the_cap_holds_for_every_format(name, monkeypatch):
    monkeypatch.setattr(image_module, "MAX_PIXELS", HEIGHT * WIDTH - 1)
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("the picture was decoded"))
    with pytest.raises(ImageError, match="megapixels"):
        read_image(ENCODED[name])


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("kept", [0.5, 0.98])
def test_a_picture_that_is_cut_off_is_refused(name, kept):
    data = ENCODED[name]
    with pytest.raises(ImageError):
        read_image(data[: int(len(data) * kept)])


def test_a_cut_off_photo_is_called_cut_off_even_with_a_whole_thumbnail_inside():
    photo = encoded(PICTURE, "JPEG")
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + len(photo)) + photo
    data = photo[:2] + thumbnail + photo[2:-200]
    with pytest.raises(ImageError, match="the image data is cut off"):
        read_image(data)


def test_a_png_chunk_that_claims_gigabytes_is_refused_before_it_is_decoded(monkeypatch):
    data = bytearray(ENCODED["png rgb"])
    data[33:37] = b"\xf0\0\0\0"  # the length of the chunk after the header
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("the picture was decoded"))
    with pytest.raises(ImageError, match="cut off"):
        read_image(bytes(data))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(ENCODED)), st.integers(0, 59), st.binary(min_size=1, max_size=12))
def test_damaged_headers_give_a_picture_or_one_of_our_errors(name, offset, damage):
    data = bytearray(ENCODED[name])
    data[offset : offset + len(damage)] = damage
    header = read_header(bytes(data))
    if header is not None and header.height * header.width > 1_000_000:
        return  # valid, and not worth the time
    try:
        pixels = read_image(bytes(data))
    except ImageError:
        return
    assert header is not None
    assert pixels.shape[2] == 3


@pytest.mark.parametrize(
    ("source", "area", "expected"),
    [
        ((75, 110), 6144, (64, 80)),  # the golden of the reference
        ((1080, 1920), 480 * 832, (464, 832)),
        ((1920, 1080), 480 * 832, (832, 464)),
        ((1080, 1920), 720 * 1280, (720, 1280)),
        ((1000, 1000), 480 * 832, (624, 624)),
        ((600, 1000), 480 * 832, (480, 800)),
        ((480, 832), 480 * 832, (464, 832)),  # the square root of 480 / 832 * area comes out just below 480
    ],
)
def test_the_size_follows_the_reference_rule(source, area, expected):
    assert fit_size(*source, area) == expected


@given(st.integers(16, 8000), st.floats(0.11, 9.0), st.sampled_from([*RESOLUTIONS.values(), 6144 * 16]))
def test_a_fitted_size_is_valid_and_nearly_of_the_area_and_aspect(height, aspect, area):
    width = max(16, round(height / aspect))
    if not 0.1 <= height / width <= 10:
        return
    fitted = fit_size(height, width, area)
    check_size(*fitted)
    exact = (area * height / width) ** 0.5, (area * width / height) ** 0.5
    for side, wanted in zip(fitted, exact, strict=True):
        assert wanted - 16 - 1e-6 <= side <= wanted + 1e-6


def test_sizes_that_cannot_be_used_are_refused():
    for arguments, reason in [
        ((100, 10000), "too long"),
        ((10000, 100), "too long"),
        ((0, 10), "at least 1"),
        ((480, 832, 100), "larger area"),
        ((480, 832, float("nan")), "positive number"),
    ]:
        with pytest.raises(ImageError, match=reason):
            fit_size(*arguments)
    check_size(464, 832)
    for height, width in [(470, 832), (464, 0), (-16, 16), (464.0, 832), (True, 16)]:
        with pytest.raises(ImageError, match=r"multiple of 16|whole number"):
            check_size(height, width)


@pytest.mark.parametrize("size", [(64, 80), (16, 48), (128, 160)])
def test_resizing_is_plain_bicubic(size):
    picture = smooth_picture(75, 110)
    expected = cv2.resize(picture.astype(np.float32) / 255 * 2 - 1, size[::-1], interpolation=cv2.INTER_CUBIC)
    prepared = prepare_image(picture, size=size)
    assert prepared.pixels.dtype == torch.float32
    np.testing.assert_allclose(prepared.pixels.permute(1, 2, 0).numpy(), expected, atol=2e-5)


def test_overshoot_is_kept():
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:, 32:] = 255
    pixels = prepare_image(picture, size=(96, 96)).pixels
    assert pixels.min() < -1.01
    assert pixels.max() > 1.01


def test_the_same_picture_from_a_file_and_from_floats_is_the_same():
    first = prepare_image(ENCODED["png rgb"], area=6144)
    for other in (
        torch.from_numpy(smooth_picture()).float() / 255,
        np.dstack([smooth_picture(), np.asarray(ALPHA)]),
        smooth_picture().astype(np.uint16) * 257,
        (smooth_picture() / 255.0),
    ):
        prepared = prepare_image(other, area=6144)
        assert prepared.digest == first.digest
        torch.testing.assert_close(prepared.pixels, first.pixels, rtol=0, atol=0)
    assert (first.source_height, first.source_width, first.mode) == (HEIGHT, WIDTH, "area")


def test_floats_finer_than_eight_bits_keep_their_values():
    picture = torch.full((32, 32, 3), 0.3)
    prepared = prepare_image(picture, size=(32, 32))
    torch.testing.assert_close(prepared.pixels, torch.full((3, 32, 32), -0.4))
    assert prepared.digest != prepare_image(picture + 1e-3, size=(32, 32)).digest


def test_the_digest_knows_pixels_size_and_mode():
    picture = smooth_picture()
    changed = picture.copy()
    changed[3, 3, 0] ^= 1
    digests = {
        prepare_image(picture, size=(32, 48), mode="stretch").digest,
        prepare_image(changed, size=(32, 48), mode="stretch").digest,
        prepare_image(picture, size=(48, 32), mode="stretch").digest,
        prepare_image(picture, size=(32, 48), mode="crop").digest,
        prepare_image(picture, size=(32, 48), mode="pad").digest,
    }
    assert len(digests) == 5
    assert prepare_image(picture, size=(32, 48)).digest in digests


@pytest.mark.parametrize("mode", ["area", "stretch", "crop", "pad"])
@pytest.mark.parametrize("source", [(200, 300), (300, 200)])
def test_intrinsics_follow_the_picture(mode, source):
    """A ramp's value at the principal point is the same in the source and in the prepared picture."""
    height, width = source
    rows, columns = np.mgrid[0.5:height, 0.5:width]
    ramp = np.stack([columns / width, rows / height, np.zeros_like(rows)], axis=-1).astype(np.float32)
    prepared = prepare_image(ramp, size=None if mode == "area" else (160, 160), mode=mode)
    assert prepared.pixels.shape == (3, prepared.height, prepared.width)
    # The principal point in an 832 x 480 view of the source.
    fx, fy, cx, cy = prepared.intrinsics_for([500.0, 500.0, 832 * 0.45, 480 * 0.6], 480, 832)
    point = torch.tensor([[[[cx / prepared.width * 2 - 1, cy / prepared.height * 2 - 1]]]], dtype=torch.float32)
    found = torch.nn.functional.grid_sample(prepared.pixels[None], point, align_corners=False).flatten()
    np.testing.assert_allclose((found[:2].numpy() + 1) / 2, [0.45, 0.6], atol=2e-3)
    # One pixel of the source's view covers as much of the picture afterwards.
    where = prepared.placement
    np.testing.assert_allclose([fx / where.width, fy / where.height], [500 / 832, 500 / 480], rtol=1e-12)


def test_crop_and_pad_keep_the_aspect():
    assert place(1000, 2000, 480, 480, "crop") == image_module.Placement(480, 960, 0, -240)
    assert place(1000, 2000, 480, 480, "pad") == image_module.Placement(240, 480, 120, 0)
    white = np.full((50, 100, 3), 255, np.uint8)
    cropped, padded = (prepare_image(white, size=(64, 64), mode=mode).pixels for mode in ("crop", "pad"))
    torch.testing.assert_close(cropped, torch.ones(3, 64, 64))
    expected = torch.zeros(3, 64, 64)
    expected[:, 16:48] = 1.0
    torch.testing.assert_close(padded, expected)


def test_a_crop_keeps_the_middle():
    picture = np.zeros((64, 192, 3), np.uint8)
    picture[:, 64:128] = 255
    pixels = prepare_image(picture, size=(64, 64), mode="crop").pixels
    torch.testing.assert_close(pixels, torch.ones(3, 64, 64))


def test_intrinsics_of_many_frames_and_bad_ones():
    prepared = prepare_image(smooth_picture(), size=(32, 48), mode="crop")
    assert prepared.intrinsics_for(np.ones((5, 4)), 480, 832).shape == (5, 4)
    for values, height, reason in [
        (np.eye(3), 480, "end in 4"),
        ([1, 1, 1, np.nan], 480, "NaN"),
        (np.ones(4), 0, "positive"),
    ]:
        with pytest.raises(CameraError, match=reason):
            prepared.intrinsics_for(values, height, 832)


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        (np.zeros((1, 32, 32, 3), np.uint8), r"batch\[0\]"),
        (np.zeros((32, 32), np.uint8), r"\[H, W, 3\]"),
        (np.zeros((32, 32, 2), np.uint8), r"\[H, W, 3\]"),
        (np.zeros((8, 32, 3), np.uint8), "at least 16"),
        (np.zeros((32, 32, 3), np.int64), "int64"),
        (torch.full((32, 32, 3), float("nan")), "NaN"),
        (torch.full((32, 32, 3), float("inf")), "infinity"),
        (torch.full((32, 32, 3), 200.0), r"0\.\.1"),
        (torch.full((32, 32, 3), -0.1), r"0\.\.1"),
        (3.5, "float"),
    ],
)
def test_arrays_that_are_no_picture_are_refused(picture, reason):
    with pytest.raises(ImageError, match=reason):
        prepare_image(picture)


JPEGS = {
    f"{mode} {kind}": encoded(Image.fromarray(smooth_picture(120, 180)).convert(mode), "JPEG", **options)
    for mode in ("RGB", "L")
    for kind, options in {
        "4:4:4": {"subsampling": 0},
        "4:2:0": {"subsampling": 2},
        "progressive": {"progressive": True},
        "restarts": {"restart_marker_blocks": 5},
        "notes": {"exif": Image.Exif(), "comment": b"\xff\xd9 no end", "icc_profile": b"p" * 200},
    }.items()
}


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_whose_data_end_early_is_damaged_and_what_follows_its_end_does_not_count(name):
    data = JPEGS[name]
    middle = (data.find(b"\xff\xda") + len(data)) // 2
    for bad in (data[:middle] + b"\xff\xd9", data[:middle] + b"\xff\xd9" + data[middle + 2 :]):
        with pytest.raises(ImageError, match="damaged: its JPEG data ends early"):
            read_image(bad)
    expected = read_image(data)
    noise = np.random.default_rng(3).bytes(3000)
    for more in (b"\0" * 500, b"\n", data, noise):
        np.testing.assert_array_equal(read_image(data + more), expected)


def test_a_jpeg_in_four_colours_is_read():
    data = encoded(PICTURE.convert("CMYK"), "JPEG")
    assert read_image(data).shape == (HEIGHT, WIDTH, 3)


def test_unknown_modes_and_sizes_are_refused():
    with pytest.raises(ImageError, match="'fill'; use one of area, stretch, crop, pad"):
        prepare_image(smooth_picture(), mode="fill")
    with pytest.raises(ImageError, match="multiple of 16"):
        prepare_image(smooth_picture(), size=(30, 48))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": (10**6, 16), "mode": "crop"}, "takes .* megapixels for an image of 40x60; at most 128 are made"),
        ({"size": (16_000, 16_000)}, "takes 256 megapixels"),
        ({"area": 10**12}, "megapixels"),
        ({"size": (48,)}, "must be two whole numbers of pixels"),
        ({"size": 48}, "must be two whole numbers of pixels"),
        ({"size": ("48", 48)}, "height='48' must be a whole number"),
        ({"area": "480p"}, "area='480p' must be a number of pixels"),
        ({"area": True}, "area=True must be a number"),
        ({"area": float("nan")}, "area=nan must be a positive number"),
    ],
)
def test_sizes_that_cannot_be_made_are_refused(options, reason):
    with pytest.raises(ImageError, match=reason):
        prepare_image(smooth_picture(), **options)


def test_frames_are_truncated_to_bytes():
    frames = torch.tensor([-1.0, 1.0, 0.0, 1 / 255, 1.5, -7.0]).expand(3, 2, 4, 6)
    pixels = frames_to_uint8(frames)
    assert pixels.shape == (2, 4, 6, 3)
    assert pixels.flags.c_contiguous
    # 0 is 127.5 and 1/255 is 128 of 255, up to the last bit of float32
    np.testing.assert_allclose(pixels[1, 3, :, 2].astype(int), [0, 255, 127, 128, 255, 0], atol=0)
    moved = torch.rand(3, 2, 4, 6) * 2 - 1
    np.testing.assert_array_equal(
        frames_to_uint8(moved)[1, 2, 3], ((moved[:, 1, 2, 3] + 1) / 2 * 255).numpy().astype(np.uint8)
    )


def test_frames_that_are_not_finite_or_not_frames_are_refused():
    with pytest.raises(NumericsError, match="NaN"):
        frames_to_uint8(torch.full((3, 1, 2, 2), float("nan")))
    with pytest.raises(ImageError, match=r"\[3, T, H, W\]"):
        frames_to_uint8(torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize(("marker", "checked"), [(0xC0, True), (0xC2, True), (0xC9, False), (0xCA, False)])
def test_only_jpegs_that_the_strict_decoder_knows_are_judged_by_it(marker, checked, monkeypatch):
    """Arithmetic-coded JPEGs are whole files that it would call damaged."""
    _, encoded = cv2.imencode(".jpg", np.full((32, 32, 3), 90, np.uint8))
    data = encoded.tobytes()
    start = data.index(b"\xff\xc0")
    judged = []
    monkeypatch.setattr(image_module, "_is_damaged", lambda jpeg: judged.append(jpeg) or True)
    with contextlib.suppress(ImageError):
        image_module.read_image(data[:start] + bytes([0xFF, marker]) + data[start + 2 :])
    assert bool(judged) is checked
