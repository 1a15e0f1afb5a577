"""Caches of worlds under ComfyUI's memory management: asked for, counted, and given back when room is needed.

ComfyUI counts and frees ModelPatchers. So each living session, and each encoded start image, has a small one of its own
whose size is what its caches take; unloading it puts the session to sleep, from where its history brings it back.
``comfy.model_management`` belongs to the prompt worker: nothing here may be called from another thread.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from ...lingbot_core.engine.condition import ImageCondition
from ...lingbot_core.engine.living import Living
from ...lingbot_core.engine.world import World
from ...lingbot_core.errors import MemoryPlanError


class WorldCaches(nn.Module):
    """What ComfyUI takes for a model, and names in its log; it has no weights."""


class CachePatcher(comfy.model_patcher.ModelPatcher):
    """Caches as ComfyUI sees them: a model that is as large as they are and can only be unloaded whole.

    owner: whose caches; may be set later, until then there are none. It is not kept alive.
    """

    def __init__(self, device: torch.device, owner: Living | ImageCondition | None = None) -> None:
        model = WorldCaches()
        model.device = device  # they are made where they are used, and never moved
        super().__init__(model, load_device=device, offload_device=device)
        self._owner: Callable[[], Any] = lambda: None
        if owner is not None:
            self.bind(owner)

    def bind(self, owner: Living | ImageCondition) -> None:
        """From now on these are the caches of ``owner``."""
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> Living | ImageCondition | None:
        """Whose caches these are, while it exists."""
        return self._owner()

    def model_size(self) -> int:
        """Bytes held now."""
        owner = self.owner
        if owner is None:
            return 0
        return owner.nbytes if isinstance(owner, ImageCondition) else owner.cache_nbytes

    def loaded_size(self) -> int:
        """Bytes held now: what there is, is where it is used."""
        return self.model_size()

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """There is nothing to move."""
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Nothing goes by parts: what asks for some is answered by `detach`, which ComfyUI calls next."""
        return 0

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Called to unload it (unpatch_all), and to forget it, which frees nothing; nothing while the session runs."""
        if unpatch_all:
            self._free()
        return self.model

    def patch_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        """There are no weights."""
        return self.model

    def unpatch_model(self, *args: Any, **kwargs: Any) -> None:
        """There are no weights."""

    def _free(self) -> None:
        owner = self.owner
        if isinstance(owner, ImageCondition):
            owner.release()
        elif owner is not None:
            self._keep_until_unloaded(owner.world)
            owner.sleep()

    def _keep_until_unloaded(self, world: World | None) -> None:
        """Keeps a model alive that maybe only this session referred to, until ComfyUI has finished unloading.

        It walks by number through the list of loaded models, which a dying model leaves at once: the walk would meet
        wrong models, or fail and end ComfyUI's prompt worker. What is on this list's own entry goes when the walk is
        over and the entry is dropped.
        """
        for entry in comfy.model_management.current_loaded_models:
            if entry.model is self:
                entry.lingbot_world = world


_patchers: dict[int, CachePatcher] = {}


def patcher_of(owner: Living | ImageCondition, device: torch.device) -> CachePatcher:
    """The owner's patcher; the same as long as it lives."""
    # Patchers die here and not with their owner, which any thread may let go of.
    for key in [key for key, patcher in _patchers.items() if patcher.owner is None]:
        del _patchers[key]
    patcher = _patchers.get(id(owner))
    if patcher is None or patcher.owner is not owner:
        patcher = _patchers[id(owner)] = CachePatcher(device, owner)
    return patcher


def adopt_patcher(patcher: CachePatcher, owner: Living) -> None:
    """Makes a patcher that room was asked with before its session existed the session's own."""
    known = _patchers.get(id(owner))
    if known is None or known.owner is not owner:
        patcher.bind(owner)
        _patchers[id(owner)] = patcher


def make_room(needed: int, device: torch.device, keep: Sequence[Any]) -> None:
    """Has ComfyUI unload other models until ``needed`` bytes are free on a GPU.

    keep: patchers that stay loaded. Main memory is where models are unloaded to, so nothing is done for it.
    """
    management = comfy.model_management
    if management.is_device_cpu(device):
        return
    kept = [loaded for loaded in management.current_loaded_models if any(loaded.model is one for one in keep)]
    management.free_memory(needed + management.extra_reserved_memory(), device, keep_loaded=kept)


@contextmanager
def out_of_memory_explained(explain: Callable[[], str], give_back: Callable[[], object]) -> Iterator[None]:
    """Turns ComfyUI's out-of-memory errors into a MemoryPlanError after freeing what the body took.

    explain: the message. give_back: puts to sleep what the body drove.
    """
    try:
        yield
    except Exception as error:
        if not comfy.model_management.is_oom(error):
            raise
        # What failed is still referred to by the frames of its calls.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        give_back()
        comfy.model_management.soft_empty_cache(True)
        message = explain()
    else:
        return
    raise MemoryPlanError(message)
