"""The start image of a world: brought to its size, and encoded as far as a first chunk needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...lingbot_core.engine.condition import ImageCondition
from ...lingbot_core.engine.image import RESOLUTIONS, PreparedImage, fit_size, prepare_image
from ...lingbot_core.engine.memory import GIB, encode_bytes, free_bytes
from ...lingbot_core.errors import ImageError, MemoryPlanError
from .memory import out_of_memory_explained, patcher_of
from .vae import world_vae

SIZES = ("480p", "720p", "model", "custom")
FITS = ("area", "crop", "pad", "stretch")
_SHAPES = {"480p": (480, 832), "720p": (720, 1280)}
_FIRST_LATENTS = 4  # enough for the first chunk of every preset


@dataclass(frozen=True, eq=False)
class StartPicture:
    """What START_IMAGE carries. image: the prepared picture. condition: what the VAE makes of it. vae: the native one.

    notes: what was done to the picture that its owner should know.
    """

    image: PreparedImage
    condition: ImageCondition
    vae: Any
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a latent frame."""
        return (self.image.height // 16) * (self.image.width // 16)

    def for_vae(self, vae: Any) -> StartPicture:
        """This picture for a world with that VAE: itself, or encoded again when it is another one."""
        streaming, patcher = world_vae(vae)
        if self.condition.uses(streaming):
            return self
        return replace(self, condition=ImageCondition(streaming, self.image, device=patcher.load_device), vae=vae)


def prepare_picture(
    image: Tensor,
    vae: Any,
    *,
    fit: str,
    size: str,
    width: int,
    height: int,
    area: int | None = None,
) -> StartPicture:
    """Prepares an IMAGE; nothing is encoded yet.

    image: float [B, H, W, 3] in 0..1 (or 4 channels, alpha is dropped); of a batch frame 0 counts. area: of the model's
    own size, for ``size`` 'model'. width, height: for 'custom'. Raises ImageError.
    """
    pixels, notes = _first_frame(image)
    streaming, patcher = world_vae(vae)
    prepared = prepare_image(pixels, **_target(pixels, fit, size, (height, width), area))
    condition = ImageCondition(streaming, prepared, device=patcher.load_device)
    return StartPicture(prepared, condition, vae, notes)


def encode_picture(picture: StartPicture) -> None:
    """Encodes what the first chunk needs, on ComfyUI's device for the VAE. Raises MemoryPlanError."""
    _, patcher = world_vae(picture.vae)
    image, device = picture.image, patcher.load_device
    needed = encode_bytes(patcher.model.config, image.height, image.width)

    def explain() -> str:
        return (
            f"encoding a picture of {image.width}x{image.height} takes {needed / GIB:.1f} GiB on {device}, which are "
            "not free; choose a smaller size"
        )

    with out_of_memory_explained(explain, picture.condition.release):
        caches = patcher_of(picture.condition, device)
        comfy.model_management.load_models_gpu([patcher, caches], memory_required=needed)
        free = free_bytes(device)
        if free is not None and needed > free:
            raise MemoryPlanError(explain())
        picture.condition.latents(0, _FIRST_LATENTS)


def describe_picture(picture: StartPicture, estimate: Any = None) -> str:
    """Size, tokens and memory for people. estimate: of a session of this size, if the model is known."""
    image = picture.image
    if estimate is None:
        memory = "connect the model to see the memory that a world takes"
    else:
        memory = f"a world takes {estimate.session / GIB:.2f} GiB beside the weights; in all {estimate.describe()}"
    lines = [
        f"{image.width}x{image.height} from {image.source_width}x{image.source_height} ({image.mode})",
        f"{picture.tokens} tokens per latent frame",
        memory,
        *picture.notes,
    ]
    return "\n".join(lines)


def _first_frame(image: Any) -> tuple[Tensor, tuple[str, ...]]:
    if not isinstance(image, Tensor) or image.ndim != 4 or not image.is_floating_point():
        shown = type(image).__name__
        if isinstance(image, Tensor):
            shown = f"{str(image.dtype).removeprefix('torch.')} {list(image.shape)}"
        raise ImageError(f"the image input must be an IMAGE, float [B, H, W, 3], not {shown}; connect LoadImage")
    if not len(image):
        raise ImageError("the image batch is empty; connect one image")
    notes = []
    if len(image) > 1:
        notes.append(f"the batch has {len(image)} images: frame 0 is used")
    pixels = image[0]
    if pixels.shape[-1] == 4:
        notes.append("the alpha channel is dropped")
    pixels = pixels.detach().to("cpu", torch.float32)
    if not bool(torch.isfinite(pixels).all()):
        raise ImageError("the image holds NaN or infinity; check the node that made it")
    # Nodes before this one may overshoot a little, as resizing does.
    return pixels.clamp(0.0, 1.0), tuple(notes)


def _target(pixels: Tensor, fit: str, size: str, custom: tuple[int, int], area: int | None) -> dict[str, Any]:
    """What prepare_image is to be asked for."""
    if fit not in FITS:
        raise ImageError(f"fit={fit!r} is unknown; use one of {', '.join(FITS)}")
    if size == "custom":
        return {"size": custom, "mode": fit}
    if size == "model":
        if area is None:
            raise ImageError("size 'model' needs the model: connect it, or choose 480p, 720p or custom")
    elif size in RESOLUTIONS:
        area = RESOLUTIONS[size]
    else:
        raise ImageError(f"size={size!r} is unknown; use one of {', '.join(SIZES)}")
    if fit == "area":
        return {"area": area, "mode": "area"}
    shape = _SHAPES.get(size) or fit_size(*_SHAPES["480p"], area)
    upright = pixels.shape[0] > pixels.shape[1]
    return {"size": shape[::-1] if upright else shape, "mode": fit}
