"""What nodes did to a MODEL between its loader and ours: what has an effect in a world, what is refused, what is told.

LoRA and other weight patches are ComfyUI's business: they are in the weights once the model is loaded. torch.compile
nodes and attention overrides reach a model through its sampler, which ours does not use, so they are applied here.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
from torch import Tensor

from ...lingbot_core.errors import LingBotError
from ...lingbot_core.models.dit import CausalWanDiT, ChunkContext
from .attention import OVERRIDE, host_attention

_SAMPLING = "model_sampling"


def transformer_for(model: Any) -> CausalWanDiT | PatchedTransformer:
    """The transformer to run for a MODEL: the module itself, or one that applies what nodes ask for around it.

    Raises LingBotError for a changed sampling shift, which a preset decides. Other patches of the sampler have no
    effect in a world; they are named in the log.
    """
    if _SAMPLING in model.object_patches:
        raise LingBotError(
            "a node changed this model's sampling (such as ModelSamplingSD3), which has no effect on a world; remove "
            "it, and set the shift where the world starts"
        )
    options = model.model_options.get("transformer_options", {})
    wrappers = model.get_wrappers(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    if ignored := _ignored(model, options):
        logging.warning(
            "LingBot World: these patches of the model have no effect in a world: %s", ", ".join(sorted(ignored))
        )
    if not wrappers and OVERRIDE not in options:
        return model.model.diffusion_model
    return PatchedTransformer(model.model, wrappers, options)


class PatchedTransformer:
    """The transformer of a MODEL with its torch.compile wrappers and its attention, for as long as a forward runs.

    Clones of a MODEL share one module, so neither may stay on it. Everything else is the module's own.
    """

    def __init__(self, owner: Any, wrappers: list[Any], options: dict[str, Any]) -> None:
        self._owner, self._wrappers = owner, list(wrappers)
        self._attention = host_attention(options) if OVERRIDE in options else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.diffusion_model, name)

    def __call__(self, x: Tensor, t: float, context: ChunkContext) -> Tensor:
        """See CausalWanDiT.forward."""
        return self._run(lambda *call: self._owner.diffusion_model(*call), x, t, context)

    def remember(self, x: Tensor, t: float, context: ChunkContext) -> None:
        """See CausalWanDiT.remember."""
        self._run(lambda *call: self._owner.diffusion_model.remember(*call), x, t, context)

    def _run(self, function: Any, *call: Any) -> Any:
        dit = self._owner.diffusion_model
        own = dit.attention
        try:
            if self._attention is not None:
                dit.attention = self._attention
            return WrapperExecutor.new_class_executor(function, self._owner, self._wrappers).execute(*call)
        finally:
            dit.attention = own


def _ignored(model: Any, options: dict[str, Any]) -> set[str]:
    found = {key for key, value in options.items() if key != OVERRIDE and value}
    samplers = ("sampler_", "model_function_")
    found |= {key for key, value in model.model_options.items() if key.startswith(samplers) and value}
    for kind, keys in model.wrappers.items():
        found |= {f"{kind} wrapper {key}" for key, value in keys.items() if value and key != COMPILE_KEY}
    return found


def patches_mark(model: Any) -> bytes:
    """What of a MODEL's weight patches goes into a world's fingerprint; empty without any.

    The same LoRA at the same strength gives the same mark in every run of ComfyUI. Injected adapters (bypass LoRA) are
    code that cannot be read; they are told apart as long as this process lives.
    """
    digest = hashlib.sha256()
    for key in sorted(model.patches):
        digest.update(key.encode())
        _feed(digest, model.patches[key])
    for key, injected in sorted(model.injections.items()):
        digest.update(f"{key} {[id(part) for part in injected]}".encode())
    return digest.digest() if model.patches or any(model.injections.values()) else b""


def _feed(digest: Any, value: Any) -> None:
    """Tensors by shape, dtype and first values; containers and adapters by what is in them."""
    if isinstance(value, Tensor):
        head = value.detach().reshape(-1)[:16].to("cpu", torch.float32).numpy().tobytes()
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode() + head)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            _feed(digest, part)
    elif isinstance(value, dict):
        _feed(digest, sorted(value.items(), key=lambda item: str(item[0])))
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())
        _feed(digest, getattr(value, "weights", None))
