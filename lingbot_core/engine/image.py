"""The start image: read, checked, brought to the size of the world; and frames on their way out.

Pictures come in as files, as bytes or as arrays, and leave as a float32 tensor in [-1, 1], where 0 is mid-grey.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import CameraError, ImageError, InputFileError, NumericsError
from .image_header import FORMATS, jpeg_without_notes, read_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

RESOLUTIONS = {"480p": 480 * 832, "720p": 720 * 1280}
"""Areas in pixels by the name that the model's publishers use."""

MODES = ("area", "stretch", "crop", "pad")
MIN_SIDE = 16
MAX_PIXELS = 128_000_000
MAX_FILE_BYTES = 1 << 30
MAX_ASPECT = 10.0
MULTIPLE = 16  # 8 by the VAE, 2 by the patches
STRICT_PROCESSES = (0xC0, 0xC1, 0xC2)  # Huffman-coded JPEGs; FFmpeg's decoder calls arithmetic-coded ones damaged

ImageSource = str | os.PathLike[str] | bytes | bytearray | memoryview


@dataclass(frozen=True)
class Placement:
    """Where the whole picture lies in the target: its size after resizing, and its corner (negative = cut off)."""

    height: int
    width: int
    top: int = 0
    left: int = 0


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """A start image at the size of the world.

    pixels: float32 [3, height, width], in [-1, 1] but for the overshoot of the bicubic filter, which is kept.
    digest: SHA-256 over the source pixels, both sizes and the mode; equal digests mean equal pixels.
    """

    pixels: torch.Tensor = field(repr=False)
    height: int
    width: int
    source_height: int
    source_width: int
    mode: str
    digest: str

    @property
    def placement(self) -> Placement:
        """Where the source picture lies in ``pixels``."""
        return place(self.source_height, self.source_width, self.height, self.width, self.mode)

    def intrinsics_for(self, intrinsics: Any, view_height: int, view_width: int) -> NDArray[np.float64]:
        """Brings intrinsics of a view of the whole source image to ``pixels``.

        intrinsics: [..., 4] with fx, fy, cx, cy in pixels of the source image seen at ``view_height`` x ``view_width``
        (480 x 832 in upstream files). Returns float64 of the same shape, in pixels of height x width. Raises
        CameraError.
        """
        values = np.asarray(intrinsics, dtype=np.float64)
        if values.ndim == 0 or values.shape[-1] != 4:
            raise CameraError(f"intrinsics of shape {list(values.shape)} must end in 4 numbers: fx, fy, cx, cy")
        if not np.isfinite(values).all():
            raise CameraError("intrinsics hold NaN or infinity; fx, fy, cx, cy must be finite numbers of pixels")
        if view_height <= 0 or view_width <= 0:
            raise CameraError(f"intrinsics are stated for {view_height}x{view_width} pixels; both must be positive")
        place = self.placement
        across, down = place.width / view_width, place.height / view_height
        return values * (across, down, across, down) + (0.0, 0.0, place.left, place.top)


def read_image(source: ImageSource) -> NDArray[np.uint8]:
    """Reads a picture file, or the bytes of one, as uint8 [H, W, 3] RGB.

    EXIF rotation is applied. Grey and palettes become RGB; alpha is dropped and the colours below it stay as stored
    (in TIFF and GIF they are what the decoder makes of transparent pixels). 16 bits become 8 by the nearest value of
    x / 257. Of an animation or a multi-page file the first frame counts. A picture that is cut off is refused, never
    filled up with grey; so is a JPEG with a hole, unless its data happen to fit together again behind it. Raises
    InputFileError for what is no readable file, ImageError for what is no usable picture.
    """
    import cv2

    name, data = _load(source)
    header = read_header(data)
    if header is None:
        raise ImageError(f"{name} is not a picture in a known format; use one of {', '.join(FORMATS)}")
    _check_dimensions(name, header.height, header.width)
    if not header.complete:
        raise ImageError(
            f"{name} is cut off: its {len(data)} bytes end before the {header.format} data does; copy or download it "
            "again"
        )
    if header.process in STRICT_PROCESSES and _is_damaged(jpeg_without_notes(data)):
        raise ImageError(f"{name} is damaged: its JPEG data ends early or breaks off; copy or download it again")
    try:
        # COLOR turns the picture upright and gives three channels; ANYDEPTH leaves 16 bits for us to round.
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    except cv2.error:
        pixels = None
    if pixels is None:
        raise ImageError(f"{name} is damaged: its {header.format} data cannot be decoded; save it again as PNG or JPEG")
    if pixels.dtype not in (np.uint8, np.uint16):
        raise ImageError(f"{name} holds {pixels.dtype} pixels; save it with 8 or 16 bits per channel")
    return _to_uint8(np.ascontiguousarray(pixels[..., ::-1]))


def fit_size(image_height: int, image_width: int, area: float = RESOLUTIONS["480p"]) -> tuple[int, int]:
    """Returns the (height, width) of about ``area`` pixels that keeps the image's aspect, in multiples of 16.

    The reference's rule: both sides are floored, so 16:9 at 480 * 832 is 464 x 832. Raises ImageError.
    """
    if image_height < 1 or image_width < 1:
        raise ImageError(f"an image of {image_height}x{image_width} pixels has no size; both sides must be at least 1")
    if isinstance(area, bool) or not isinstance(area, (int, float, np.number)):
        raise ImageError(f"area={area!r} must be a number of pixels, such as 480 * 832")
    if not 0 < area < math.inf:
        raise ImageError(f"area={area} must be a positive number of pixels, such as 480 * 832")
    aspect = image_height / image_width
    if not 1 / MAX_ASPECT <= aspect <= MAX_ASPECT:
        raise ImageError(
            f"an image of {image_height}x{image_width} pixels is too long: one side may be at most {MAX_ASPECT:g} "
            "times the other; crop it, or use the mode 'crop' or 'pad' with a size"
        )
    height = int(np.sqrt(area * aspect) // MULTIPLE) * MULTIPLE
    width = int(np.sqrt(area / aspect) // MULTIPLE) * MULTIPLE
    if min(height, width) < MULTIPLE:
        raise ImageError(
            f"area={area:g} leaves no {MULTIPLE} pixels on both sides of an image of {image_height}x{image_width}; use "
            "a larger area"
        )
    return height, width


def check_size(height: int, width: int) -> None:
    """Raises ImageError unless both sides are positive multiples of 16."""
    for side, value in (("height", height), ("width", width)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ImageError(f"{side}={value!r} must be a whole number of pixels")
        if value < MULTIPLE or value % MULTIPLE:
            lower = max(MULTIPLE, int(value) // MULTIPLE * MULTIPLE)
            raise ImageError(
                f"{side}={value} must be a positive multiple of {MULTIPLE}; the nearest are {lower} and "
                f"{lower + MULTIPLE}"
            )


def place(source_height: int, source_width: int, height: int, width: int, mode: str) -> Placement:
    """Where a source of the one size lies in a target of the other: 'area' and 'stretch' fill it exactly, 'crop'
    covers it and cuts off both ends, 'pad' fits inside and leaves bars on both sides.
    """
    if mode in ("area", "stretch"):
        return Placement(height, width)
    ratios = height / source_height, width / source_width
    if mode == "crop":
        scale = max(ratios)
        covered = max(height, round(source_height * scale)), max(width, round(source_width * scale))
        return Placement(*covered, top=-((covered[0] - height) // 2), left=-((covered[1] - width) // 2))
    scale = min(ratios)
    inner = (
        min(height, max(1, round(source_height * scale))),
        min(width, max(1, round(source_width * scale))),
    )
    return Placement(*inner, top=(height - inner[0]) // 2, left=(width - inner[1]) // 2)


def prepare_image(
    image: ImageSource | NDArray[Any] | torch.Tensor,
    *,
    size: tuple[int, int] | None = None,
    area: float = RESOLUTIONS["480p"],
    mode: str = "area",
) -> PreparedImage:
    """Brings a picture to the size of the world.

    image: a file, the bytes of one, or an array or tensor [H, W, 3] (or 4, alpha is dropped) of uint8, uint16, or
    floats in 0..1. size: (height, width); None takes the size of about ``area`` pixels by :func:`fit_size`.
    mode: 'area' and 'stretch' go straight to the size ('area' with a size is 'stretch'); 'crop' and 'pad' keep the
    aspect, the bars being mid-grey, the model's zero. Resizing is bicubic without antialiasing, as in the reference.
    Raises ImageError and InputFileError.
    """
    if mode not in MODES:
        raise ImageError(f"there is no image mode {mode!r}; use one of {', '.join(MODES)}")
    source = _source_pixels(image)
    source_height, source_width = source.shape[:2]
    if size is None:
        height, width = fit_size(source_height, source_width, area)
    else:
        if not isinstance(size, (tuple, list)) or len(size) != 2:
            raise ImageError(f"size={size!r} must be two whole numbers of pixels: (height, width)")
        height, width = size
        check_size(height, width)
        mode = "stretch" if mode == "area" else mode
    where = place(source_height, source_width, height, width, mode)
    largest = max(where.height * where.width, height * width)
    if largest > MAX_PIXELS:
        raise ImageError(
            f"a size of {height}x{width} in the mode {mode!r} takes {largest / 1e6:.0f} megapixels for an image of "
            f"{source_height}x{source_width}; at most {MAX_PIXELS / 1e6:.0f} are made: use a smaller size or area"
        )
    pixels = torch.from_numpy(source).permute(2, 0, 1).float()
    if source.dtype == np.uint8:
        pixels = pixels.div_(255.0)
    pixels = pixels.mul(2.0).sub_(1.0)
    pixels = F.interpolate(pixels[None], size=(where.height, where.width), mode="bicubic", align_corners=False)[0]
    if mode == "crop":
        pixels = pixels[:, -where.top :, -where.left :][:, :height, :width].contiguous()
    elif mode == "pad":
        inner, pixels = pixels, pixels.new_zeros(3, height, width)
        pixels[:, where.top : where.top + where.height, where.left : where.left + where.width] = inner
    digest = hashlib.sha256(f"{source.dtype} {source_height}x{source_width} {height}x{width} {mode}\n".encode())
    digest.update(np.ascontiguousarray(source).data)
    return PreparedImage(pixels, height, width, source_height, source_width, mode, digest.hexdigest())


def frames_to_uint8(frames: torch.Tensor) -> NDArray[np.uint8]:
    """Turns frames [3, T, H, W] in [-1, 1] into contiguous uint8 [T, H, W, 3].

    (x + 1) / 2 * 255, truncated as in the reference's video writer. Values outside are clamped. Raises NumericsError
    for NaN or infinity.
    """
    if frames.ndim != 4 or frames.shape[0] != 3:
        raise ImageError(f"frames of shape {list(frames.shape)} must be [3, T, H, W]")
    values = frames.detach().float()
    if not bool(torch.isfinite(values).all()):
        raise NumericsError("decoded frames hold NaN or infinity; nothing was written")
    values = values.clamp(-1.0, 1.0).add_(1.0).div_(2.0).mul_(255.0)
    return values.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu().numpy()


def _load(source: ImageSource) -> tuple[str, bytes]:
    """Returns a name for messages, and the encoded bytes."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        if not len(source):
            raise InputFileError("the image data is empty; send the bytes of a picture file")
        return "the image data", bytes(source)
    path = os.fspath(source)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise InputFileError(f"{path} is a folder; name a picture file in it")
        if not stat.S_ISREG(status.st_mode):
            raise InputFileError(f"{path} is not a regular file; name a picture file")
        if status.st_size > MAX_FILE_BYTES:
            raise ImageError(f"{path} has {status.st_size} bytes; a picture file may have {MAX_FILE_BYTES} at most")
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise InputFileError(f"{path} does not exist; check the path of the image") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputFileError(f"{path} cannot be read: {reason}; check the path and its permissions") from error
    if not data:
        raise InputFileError(f"{path} is empty; copy or download the picture again")
    return path, data


def _is_damaged(jpeg: bytes) -> bool:
    """Whether a strict decoder stops at a JPEG of STRICT_PROCESSES; OpenCV's fills up with grey."""
    import av

    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"err_detect": "explode"}
    try:
        decoder.decode(av.Packet(jpeg))
    except av.InvalidDataError:
        return True
    except av.FFmpegError:
        return False
    return False


def _check_dimensions(name: str, height: int, width: int) -> None:
    if height < MIN_SIDE or width < MIN_SIDE:
        raise ImageError(f"{name} has {height}x{width} pixels; both sides must have at least {MIN_SIDE}")
    if height * width > MAX_PIXELS:
        raise ImageError(
            f"{name} has {height}x{width} pixels, {height * width / 1e6:.0f} megapixels; at most "
            f"{MAX_PIXELS / 1e6:.0f} are read; make it smaller first"
        )


def _to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _source_pixels(image: Any) -> NDArray[Any]:
    """Returns contiguous [H, W, 3], uint8, or float32 in 0..1 where the values are finer than 8 bits."""
    if isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview)):
        return read_image(image)
    if isinstance(image, torch.Tensor):
        tensor = image.detach().cpu()
        image = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if not isinstance(image, np.ndarray):
        raise ImageError(f"an image cannot be made of {type(image).__name__}; give a path, bytes, an array or a tensor")
    if image.ndim != 3 or image.shape[2] not in (3, 4):
        one = "; of a batch give one image, batch[0]" if image.ndim == 4 else ""
        raise ImageError(f"an image of shape {list(image.shape)} must be [H, W, 3] or [H, W, 4]{one}")
    _check_dimensions("the image", *image.shape[:2])
    image = np.ascontiguousarray(image[..., :3])
    if image.dtype in (np.uint8, np.uint16):
        return _to_uint8(image)
    if not np.issubdtype(image.dtype, np.floating):
        raise ImageError(f"an image of {image.dtype} cannot be used; give uint8, uint16, or floats in 0..1")
    low, high = image.min(), image.max()
    if not (np.isfinite(low) and np.isfinite(high)):  # min and max pass NaN on
        raise ImageError("the image holds NaN or infinity; all values must lie in 0..1")
    if low < 0.0 or high > 1.0:
        raise ImageError(
            f"the image's values reach from {low:g} to {high:g}; floats must lie in 0..1, clamp or divide them"
        )
    image = image.astype(np.float32, copy=False)
    # A picture from a file that went through floats is the same picture again, with the same digest.
    levels = np.rint(image * np.float32(255.0))
    if np.abs(levels - image * np.float32(255.0)).max() < 1e-4:
        return levels.astype(np.uint8)
    return image
