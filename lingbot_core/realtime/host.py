"""The model that a server has loaded, as realtime sessions see it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine.condition import Condition, ImageCondition
from ..engine.drive import Drive
from ..engine.handle import WorldHandle
from ..engine.image import PreparedImage, fit_size
from ..engine.living import Living
from ..engine.registry import Registry
from ..engine.session import WorldSession
from ..engine.world import World
from ..presets import Preset


@dataclass(frozen=True)
class Beginning:
    """What a session is started with. settings: more arguments of WorldSession.start."""

    picture: PreparedImage
    prompt: str
    preset: Preset
    settings: Mapping[str, Any] = field(default_factory=dict)


class Host(Protocol):
    """Where sessions run. Methods are called by the worker only, properties by anyone."""

    @property
    def name(self) -> str: ...

    @property
    def preset(self) -> Preset:
        """The recipe that the weights were made for."""
        ...

    @property
    def area(self) -> int:
        """Pixels of a picture at the model's own size."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that a picture of no particular shape gets."""
        ...

    @property
    def control(self) -> str:
        """'cam' or 'act'."""
        ...

    def check(self) -> None:
        """Called before every denoising step; raises to end what runs."""
        ...

    def begin(self, beginning: Beginning) -> WorldHandle:
        """Starts a session."""
        ...

    def encode(self, prompts: tuple[str, ...]) -> Mapping[str, Tensor]:
        """Text states of prompts that a session is to change to; {} where sessions encode for themselves."""
        ...

    def drive(self, handle: WorldHandle) -> AbstractContextManager[Drive]:
        """See Registry.drive."""
        ...

    def sleep(self, handle: WorldHandle) -> None:
        """Gives back what a session's caches take, those of its picture included; it comes back from its history."""
        ...

    def close(self, handle: WorldHandle) -> None:
        """Ends a session."""
        ...

    def nbytes(self, handle: WorldHandle) -> int:
        """Bytes that `sleep` would give back. Also callable from the event loop."""
        ...


@dataclass(frozen=True, eq=False)
class _Room:
    """All of it is loaded already."""

    world: World
    condition: Condition

    @property
    def device(self) -> torch.device:
        return self.world.device

    def ready(self, living: Living | None) -> tuple[World, Condition]:
        return self.world, self.condition


class OfWorld:
    """What of a Host is read off its world."""

    world: World

    @property
    def name(self) -> str:
        return self.world.name

    @property
    def preset(self) -> Preset:
        return self.world.preset

    @property
    def area(self) -> int:
        return int(self.world.area)

    @property
    def size(self) -> tuple[int, int]:
        """Of the pictures that the model was made from, where it says so; else of upstream's files at its area."""
        lens = self.world.lens
        return fit_size(480, 832, self.world.area) if lens is None else (lens.height, lens.width)

    @property
    def control(self) -> str:
        return self.world.dit.config.control


class LoadedHost(OfWorld):
    """A World of the library, for a server of its own; see Host."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Who is put to sleep, and when, is decided by residents.py, which also knows the pictures.
        self.registry = Registry(sessions=10**6, known=10**6, idle_seconds=None)

    def check(self) -> None:
        return None

    def begin(self, beginning: Beginning) -> WorldHandle:
        condition = ImageCondition(self.world.vae, beginning.picture, device=self.world.device)
        with self.registry.lease(self.world.device):
            session = WorldSession.start(
                self.world, condition, beginning.prompt, preset=beginning.preset, **beginning.settings
            )
        return self.registry.add(session, source=condition)

    def encode(self, prompts: tuple[str, ...]) -> Mapping[str, Tensor]:
        return {}

    def drive(self, handle: WorldHandle) -> AbstractContextManager[Drive]:
        return self.registry.drive(handle, _Room(self.world, handle.source))

    def sleep(self, handle: WorldHandle) -> None:
        living = self.registry.living(handle)
        if living is not None:
            living.sleep()
        handle.source.release()

    def close(self, handle: WorldHandle) -> None:
        self.registry.close(handle)
        handle.source.release()

    def nbytes(self, handle: WorldHandle) -> int:
        living = self.registry.living(handle)
        return (0 if living is None else living.cache_nbytes) + int(handle.source.nbytes)
