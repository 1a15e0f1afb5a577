"""A random world behind ComfyUI's nodes: loaded, started, walked, compared."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ..comfy_pack import ROOT, call, part
from ..nodes import now
from ..world_folder import write_world
from .report import NotHereError
from .sizes import TEXT_DIM, Size

SEED = 3


@dataclass(frozen=True, eq=False)
class Walk:
    """world: the handle at its end. latents: float32 [chunks, C, T, h, w]. images: IMAGE of all frames.

    seconds: per chunk. report: of the last node.
    """

    world: Any
    latents: Tensor
    images: Tensor
    seconds: float
    report: dict[str, Any] = field(repr=False)


class Rig:
    """base: ComfyUI's base folder, where the model's files are written unless they are there.

    dynamic: ComfyUI was started with DynamicVRAM.
    """

    def __init__(self, size: Size, base: Path, *, dynamic: bool = False) -> None:
        self.size, self.dynamic = size, dynamic
        self.device = comfy.model_management.get_torch_device()
        self.folder = base / "models" / "lingbot_world" / f"random-{size.name}"
        if not self.folder.exists():
            self._write()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def need_gpu(self, *, static: bool = False) -> None:
        """Raises NotHereError without a GPU. static: also where DynamicVRAM takes the place of what is looked at."""
        if not self.on_gpu:
            raise NotHereError("needs a CUDA GPU")
        if static and self.dynamic:
            raise NotHereError("DynamicVRAM does it otherwise")

    def _write(self) -> None:
        size = self.size
        models, vaes = part("lingbot_core.models.dit"), part("lingbot_core.models.vae")
        config = models.DiTConfig(
            dim=size.dim,
            ffn_dim=size.ffn_dim,
            num_layers=size.layers,
            num_heads=size.heads,
            text_dim=TEXT_DIM,
        )
        # Under its name only when it is whole: a run that was stopped meanwhile leaves nothing that the next one takes.
        unfinished = self.folder.with_name(f".{self.folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_world(
            unfinished,
            models.CausalWanDiT(config, device=self.device, dtype=torch.bfloat16),
            vaes.WanVAE(vaes.VAEConfig(dim=size.vae_dim, num_res_blocks=size.vae_blocks), device=self.device),
            tiny=ROOT / "lingbot_core" / "assets" / "tiny",
            preset=size.preset,
            area=size.width * size.height,
        )
        unfinished.rename(self.folder)
        self.empty()

    # Nodes

    def load(self, weight_dtype: str = "as stored") -> Any:
        """MODEL, CLIP and VAE."""
        return call(
            "nodes.loading",
            "LingBotLoadWorldFolder",
            folder=f"{self.folder.name}/",
            weight_dtype=weight_dtype,
            preset="auto",
        )

    @cached_property
    def parts(self) -> Any:
        """MODEL, CLIP and VAE with weights as stored, bf16 on a GPU; loaded once."""
        return self.load()

    @cached_property
    def positive(self) -> Any:
        clip = self.parts[1]
        return clip.encode_from_tokens_scheduled(clip.tokenize("a harbour in the morning"))

    @cached_property
    def image(self) -> Tensor:
        """IMAGE of smooth colours at the model's own size."""
        small = torch.rand(1, 3, 6, 10, generator=torch.Generator().manual_seed(1))
        shape = (self.size.height, self.size.width)
        return torch.nn.functional.interpolate(small, shape, mode="bilinear").movedim(1, -1)

    def picture(self) -> Any:
        """START_IMAGE, encoded."""
        model, _, vae = self.parts
        return call("nodes.world", "LingBotStartImage", image=self.image, vae=vae, size="model", model=model)[0]

    def condition(self) -> Tensor:
        """What the encoder makes of the picture for a whole walk, [C, T, h, w] on the CPU."""
        picture, preset = self.picture(), self.reference.world.history.start.preset
        return picture.condition.latents(0, self.size.chunks * preset.chunk).cpu()

    def start(self, model: Any = None, picture: Any = None) -> Any:
        """WORLD. model: another MODEL."""
        own, _, vae = self.parts
        return call(
            "nodes.world",
            "LingBotStartWorld",
            model=own if model is None else model,
            vae=vae,
            positive=self.positive,
            start_image=self.picture() if picture is None else picture,
            seed=SEED,
        )[0]

    def advance(self, world: Any, chunks: int | None = None) -> Walk:
        """Goes on along the one route that all walks here take."""
        count = self.size.chunks if chunks is None else chunks
        begin = now(self.device)
        images, _, after, report = call(
            "nodes.world",
            "LingBotAdvanceWorld",
            world=world,
            chunks=count,
            keys=f"w-{4 * self.size.chunks},wj-{4 * self.size.chunks}",
            controls_from="continue",
        )
        seconds = (now(self.device) - begin) / count
        latents = torch.stack([record.latents for record in after.history.chunks])
        return Walk(after, latents, images, seconds, json.loads(report))

    def walk(self, model: Any = None) -> Walk:
        """A whole walk, from the picture on."""
        return self.advance(self.start(model))

    @cached_property
    def reference(self) -> Walk:
        """The walk with all the memory there is; the second one, for its seconds."""
        self.walk()
        self.sleep()
        return self.walk()

    # Memory

    def living(self, world: Any) -> Any:
        """The session behind a WORLD."""
        return part("nodes.host.run").WORLDS.living(world)

    def sleep(self) -> None:
        """Frees the caches of all worlds."""
        part("nodes.host.run").WORLDS.free()

    def empty(self) -> None:
        """Frees all that ComfyUI and worlds hold on the card."""
        self.sleep()
        comfy.model_management.unload_all_models()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def need(self, chunks: int | None = None) -> int:
        """Bytes that a session of so many chunks needs beside the weights, as the nodes reckon."""
        source, preset = self.reference.world.source, self.reference.world.history.start.preset
        return int(source.estimate(preset, chunks=self.size.chunks if chunks is None else chunks).session)

    def weights(self) -> tuple[int, int]:
        """Bytes of the transformer and of the streaming VAE."""
        model, _, vae = self.parts
        return int(model.model_size()), int(part("nodes.host.vae").world_vae(vae)[1].model_size())


def difference(found: Tensor, expected: Tensor) -> dict[str, Any]:
    """bitwise, the largest absolute and the relative L2 difference, and the latter of the last chunk."""
    error = found.double() - expected.double()
    relative = float(error.norm() / expected.double().norm())
    last = float(error[-1].norm() / expected[-1].double().norm())
    return {
        "bitwise": torch.equal(found, expected),
        "max_abs": float(error.abs().max()),
        "relative": relative,
        "relative_last": last,
    }


def error_of(function: Callable[[], Any]) -> Exception | None:
    """What a call raises; its frames, and the tensors in them, are let go."""
    try:
        function()
    except Exception as error:
        error.__traceback__ = None
        error.__context__ = error.__cause__ = None
        return error
    return None
