"""From what hangs on a node's sockets to a world that is ready to run, any number of times."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...lingbot_core.engine.condition import Condition
from ...lingbot_core.engine.living import Living
from ...lingbot_core.engine.memory import MemoryEstimate
from ...lingbot_core.engine.world import World
from ...lingbot_core.errors import PromptError
from ...lingbot_core.presets import Preset
from .memory import CachePatcher, adopt_patcher, patcher_of
from .start_image import StartPicture
from .text import ClipText
from .worlds import HostWorld, host_world

_hosts: weakref.WeakKeyDictionary[Any, list[weakref.ref[World]]] = weakref.WeakKeyDictionary()


def shared_host(model: Any, vae: Any, clip: Any = None) -> HostWorld:
    """The same World for the same MODEL, VAE and CLIP as long as a session runs on it.

    Sessions tell by the world's networks whether they can go on, and some are made anew for every HostWorld.
    """
    made = host_world(model, vae, clip)
    known = _hosts.setdefault(model, [])
    known[:] = [world for world in known if world() is not None]
    for reference in known:
        world = reference()
        if world is not None and _same(world, made.world):
            return HostWorld(world, made.patchers)
    known.append(weakref.ref(made.world))
    return made


def _same(one: World, other: World) -> bool:
    clips = [None if world.text is None else world.text.clip for world in (one, other)]
    return (
        one.vae is other.vae
        and clips[0] is clips[1]
        and one.fingerprint == other.fingerprint
        and one.cache_dtype == other.cache_dtype
        and one.device == other.device
    )


@dataclass(frozen=True, eq=False)
class WorldSource:
    """How to make a world's model and condition again: the opaque part of a WORLD's handle.

    clip: for prompts in words; None: prompts cannot be changed.
    """

    model: Any
    vae: Any
    clip: Any
    picture: StartPicture
    host: HostWorld = field(repr=False)

    @classmethod
    def of(cls, model: Any, vae: Any, clip: Any, picture: StartPicture) -> WorldSource:
        """Raises WeightsError or PromptError for a model, VAE or CLIP that is none of a world."""
        return cls(model, vae, clip, picture.for_vae(vae), shared_host(model, vae, clip))

    def estimate(self, preset: Preset, *, chunks: int, rewind_depth: int = 0, noise: str = "seeded") -> MemoryEstimate:
        """Of a session of this picture that is to reach ``chunks`` chunks."""
        image = self.picture.image
        return self.host.world.estimate(
            preset,
            image.height,
            image.width,
            chunks=chunks,
            rewind_depth=rewind_depth,
            whole_noise=noise == "reference",
        )

    def encode(self, prompts: tuple[str, ...]) -> Mapping[str, Tensor]:
        """Text states by prompt. To be called before the world is made ready: encoding may unload it.

        Raises PromptError without a CLIP, and for the CLIP of another model.
        """
        if not prompts:
            return {}
        if self.clip is None:
            raise PromptError(
                "changing the prompt needs the text encoder: connect clip on the node that starts the world "
                "(LingBotStartWorld or LingBotWorldSession)"
            )
        text = ClipText(self.clip, dim=self.host.world.dit.config.text_dim)
        return {prompt: text.encode(prompt).states for prompt in prompts}


class HostRoom:
    """Room in ComfyUI's memory for one run; see engine.drive.Room. chunks: that the session is to reach in it."""

    def __init__(self, source: WorldSource, preset: Preset, *, chunks: int, rewind_depth: int, noise: str) -> None:
        self.source = source
        self.estimate = source.estimate(preset, chunks=chunks, rewind_depth=rewind_depth, noise=noise)
        self._spare: CachePatcher | None = None

    @property
    def device(self) -> torch.device:
        """Where the world runs."""
        return self.source.host.world.device

    def patchers(self, living: Living | None) -> list[Any]:
        """Of the models, of the start image and, where there is one, of the session."""
        sessions = [] if living is None else [patcher_of(living, self.device)]
        return [*self.source.host.patchers, patcher_of(self.source.picture.condition, self.device), *sessions]

    def ready(self, living: Living | None) -> tuple[World, Condition]:
        """Has ComfyUI load the models, and free what is needed for the session's caches beside them."""
        source, device = self.source, self.device
        condition = source.picture.condition
        held = condition.nbytes  # the estimate counts the encoder's state, which is there already
        if living is None:
            caches = self._spare = CachePatcher(device)
        else:
            caches = patcher_of(living, device)
            held += living.cache_nbytes
        comfy.model_management.load_models_gpu(
            [*source.host.patchers, patcher_of(condition, device), caches],
            memory_required=max(self.estimate.session - held, self.estimate.workspace),
        )
        return source.host.world, condition

    def settle(self, living: Living) -> None:
        """After the run: a session that is new in it takes over the patcher that made room for it."""
        if self._spare is not None:
            adopt_patcher(self._spare, living)
            self._spare = None
