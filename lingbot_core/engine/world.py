"""A loaded model: everything that sessions share and none of them changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..camera.intrinsics import Lens, intrinsics_for
from ..errors import CameraError, PromptError, WeightsError
from ..models.dit import CausalWanDiT
from ..models.float8 import Linear8
from ..models.graphs import can_be_recorded
from ..models.text import Encoded, TextEncoder
from ..models.vae import WanVAE
from ..presets import Preset, get_preset
from ..weights.draft import load_draft
from ..weights.layout import TINY, Layout, find_layout
from ..weights.load import Progress, fingerprint, load_dit, load_text, load_vae, stored_bytes
from .condition import Condition, ImageCondition
from .image import RESOLUTIONS, PreparedImage, prepare_image
from .memory import GIB, MemoryEstimate, estimate, free_bytes, require_free

ROOM_TO_OVERLAP = 12 * GIB
"""Free bytes from which on chunks are decoded beside their commit: what a decode takes at 720p, and some."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT8 = "float8"
DTYPE_NAMES = ("auto", *DTYPES, FLOAT8)


@dataclass(frozen=True, eq=False)
class World:
    """Transformer, VAE and text encoder on a device.

    preset: the recipe that the weights were made for. area: pixels of a picture at the model's own size. lens: the
    camera of the pictures it was made from, None where the model does not say. cache_dtype: of keys and values. text:
    None when prompts come as text states only. records: sessions record CUDA graphs once their window is full, which
    needs weights that stay where they are.
    """

    dit: CausalWanDiT
    vae: WanVAE
    text: TextEncoder | None
    preset: Preset
    device: torch.device
    cache_dtype: torch.dtype
    name: str = "world"
    area: int = RESOLUTIONS["480p"]
    lens: Lens | None = None
    preset_reason: str = "given"
    records: bool = False
    fingerprint: str = field(default="")

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint({"dit": self.dit, "vae": self.vae}))

    @classmethod
    def load(
        cls,
        model: str | Path = TINY,
        *,
        vae: str | Path | None = None,
        text_encoder: str | Path | None = None,
        tokenizer: str | Path | None = None,
        preset: str | Preset | None = None,
        control: str | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        vae_dtype: str | torch.dtype = "auto",
        decoder: str | Path | None = None,
        attention: str = "auto",
        cuda_graphs: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> World:
        """Loads a folder, a single file, or the embedded model for ``tiny``.

        vae, text_encoder, tokenizer: paths of parts that do not lie beside the model, or that are to be used instead.
        Without a text encoder the world takes text states only. control: 'cam' or 'act', to refuse the other. progress:
        called with bytes read so far and in all.

        preset: a name, or None for the one the files point to. device: 'auto' takes a CUDA GPU if there is one.
        dtype: of the transformer; 'auto' is bfloat16 on a GPU and float32 on a CPU; 'float8' is auto with the blocks'
        large matrices in float8 (models/float8.py). vae_dtype: of the VAE's decoder; its encoder stays float32, so
        conditions, and with them latents, do not depend on it. cuda_graphs: record them on a GPU once a window is full.
        decoder: a file of tiny weights (taew2_1 or lighttaew2_1) that decodes instead: drafts, many times faster.
        Raises InputFileError, WeightsError, PresetError, AttentionError.
        """
        layout = find_layout(model, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
        layout.require("VAE", *(["tokenizer"] if layout.text else []))
        if isinstance(preset, str):
            preset = get_preset(preset)
        chosen = preset or layout.require_preset()
        where = _device(device)
        kind, decoding = _dtype(dtype, where, DTYPE_NAMES), _dtype(vae_dtype, where)
        # Before what takes minutes.
        draft = None if decoder is None else load_draft(decoder, device=where, dtype=decoding)
        bar = Progress(progress, stored_bytes(layout))
        dit = load_dit(
            layout,
            device=where,
            dtype=kind,
            attention=attention,
            control=control,
            float8=str(dtype) == FLOAT8,
            progress=bar,
        )
        if where.type == "cuda":
            dit.join()
        wan_vae = load_vae(layout, device=where, dtype=torch.float32, progress=bar)
        # Frames are made of a world's latents and are no part of what it is: a saved one goes on in any vae_dtype.
        mark = fingerprint({"dit": dit, "vae": wan_vae})
        wan_vae.decode_in(decoding)
        wan_vae.draft = draft
        text = load_text(layout, max_tokens=dit.config.text_len, device=where, dtype=kind, progress=bar)
        if text is not None and text.dim != dit.config.text_dim:
            raise WeightsError(
                f"{layout.name}: the text encoder gives {text.dim} features, the transformer takes "
                f"{dit.config.text_dim}"
            )
        return cls(
            dit=dit,
            vae=wan_vae,
            text=text,
            preset=chosen,
            device=where,
            cache_dtype=kind,
            name=layout.name,
            area=layout.native_area or RESOLUTIONS["480p"],
            lens=lens_of(layout),
            preset_reason="chosen by the user" if preset is not None else layout.preset_reason,
            records=cuda_graphs and can_be_recorded(dit),
            fingerprint=mark,
        )

    @property
    def precision(self) -> str:
        """The dtype that the transformer computes in, for reports: such as bfloat16, or float8 (bfloat16 around it)."""
        wide = str(self.cache_dtype).removeprefix("torch.")
        rounded = any(isinstance(layer, Linear8) for layer in self.dit.modules())
        return f"{FLOAT8} ({wide} around it)" if rounded else wide

    @property
    def overlaps(self) -> bool:
        """Whether the next chunk is decoded on a stream beside its commit.

        PyTorch keeps the memory of a stream apart from all other, which a card without much to spare cannot afford.
        """
        return self.device.type == "cuda" and (free_bytes(self.device) or 0) >= ROOM_TO_OVERLAP

    def default_intrinsics(self, width: int, height: int) -> tuple[float, float, float, float]:
        """fx, fy, cx, cy in pixels of a picture whose camera nobody names."""
        return intrinsics_for(self.lens, width, height)

    def condition(self, image: Any) -> Condition:
        """What sessions need of a start image; share it between sessions to encode it once.

        image: a path, encoded bytes, an array or tensor [H, W, 3] (see image.prepare_image; the picture's shape is kept
        at this world's own area), a PreparedImage, or a Condition, which is returned as it is.
        """
        if hasattr(image, "latents"):
            return image
        if not isinstance(image, PreparedImage):
            image = prepare_image(image, area=self.area)
        return ImageCondition(self.vae, image, device=self.device)

    def estimate(
        self,
        preset: Preset,
        height: int,
        width: int,
        *,
        chunks: int = 1,
        rewind_depth: int = 0,
        whole_noise: bool = False,
    ) -> MemoryEstimate:
        """Bytes that the weights and one session of this size need; see memory.estimate."""
        needed = estimate(
            self.dit.config,
            self.vae.config,
            preset,
            height=height,
            width=width,
            chunks=chunks,
            dtype=self.dit.compute_dtype,
            cache_dtype=self.cache_dtype,
            vae_dtype=self.vae.decoder_dtype,
            rewind_depth=rewind_depth,
            whole_noise=whole_noise,
            records=self.records and preset.window is not None,
            text_encoder=0 if self.text is None else sum(p.nbytes for p in self.text.model.parameters()),
        )
        return replace(needed, transformer=sum(p.nbytes for p in self.dit.parameters()))

    def require_memory(self, preset: Preset, height: int, width: int, *, held: int = 0, **session: Any) -> None:
        """Raises MemoryPlanError when a session of this size does not fit beside the weights.

        held: bytes of it that are there already, such as an encoded picture. session: as estimate.
        """
        require_free(self.estimate(preset, height, width, **session), self.device, held)

    def encode_prompt(self, prompt: str) -> Encoded:
        """Text states of a prompt, its tokens, and whether it was too long. Raises PromptError without an encoder."""
        if self.text is None:
            raise PromptError(f"world {self.name} was loaded without a text encoder; give prompt_states")
        return self.text.encode(prompt)

    def encode_text(self, prompt: str) -> Tensor:
        """Text states [L, text_dim] of a prompt."""
        return self.encode_prompt(prompt).states


def lens_of(layout: Layout) -> Lens | None:
    """The camera that a model says its pictures have; WeightsError where it cannot be understood."""
    try:
        return Lens.from_mapping(layout.about["lens"]) if "lens" in layout.about else None
    except CameraError as error:
        raise WeightsError(f"{layout.name}: {error}") from None


def _device(device: str | torch.device) -> torch.device:
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _dtype(dtype: str | torch.dtype, device: torch.device, known: Sequence[str] = ("auto", *DTYPES)) -> torch.dtype:
    """What is computed in; with float8, what surrounds it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in known:
        raise WeightsError(f"dtype {dtype!r} is unknown; use {', '.join(known)}")
    if dtype in ("auto", FLOAT8):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[dtype]
