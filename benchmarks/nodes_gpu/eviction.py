"""Other models and worlds in one ComfyUI: each makes room for the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import torch
from comfy.cli_args import args
from torch import nn

from .card import GIB, MIB, small_card
from .report import Report
from .rig import Rig, difference

WIDTH = 4096


def other_model(rig: Rig) -> Any:
    """A patcher of a core model as large as the size says: plain layers of ComfyUI's, on the offload device."""
    width = WIDTH if rig.on_gpu else 64
    count = max(1, rig.size.big // (2 * width * width))
    layers = comfy.ops.disable_weight_init
    model = nn.Sequential(*(layers.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count)))
    for layer in model:
        layer.weight = nn.Parameter(torch.zeros(width, width, dtype=torch.bfloat16), requires_grad=False)
    comfy.model_management.archive_model_dtypes(model)
    return comfy.model_patcher.CoreModelPatcher(
        model, load_device=rig.device, offload_device=comfy.model_management.unet_offload_device()
    )


def worlds_and_others(rig: Rig, report: Report) -> None:
    """A model evicts a living world, which goes on; then worlds begin and go on where a model has all of the card."""
    reference, (size, vae) = rig.reference, rig.weights()
    other = other_model(rig)
    rig.empty()
    reserve = comfy.model_management.extra_reserved_memory()
    card = int(rig.need() + reserve + 1.1 * (size + vae) + GIB / 2)
    report.facts |= {"card_gib": card / GIB, "other_gib": other.model_size() / GIB}
    with _card(rig, card):
        _a_world_is_evicted(rig, report, other, reference, card)
        rig.empty()
        comfy.model_management.load_models_gpu([other])
        report.facts["other_loaded_gib"] = other.loaded_size() / GIB
        found = difference(rig.walk().latents, reference.latents)
        report.check("a world begins where another model was", found["bitwise"], begun=found)
        rig.empty()
    if rig.on_gpu and not rig.dynamic:
        with small_card(card + 2 * GIB):
            _images_on_the_card(rig, report, other, reference)
            rig.empty()


@contextmanager
def _card(rig: Rig, size: int) -> Iterator[None]:
    if not rig.on_gpu:
        yield
        return
    with small_card(size):
        yield


def _a_world_is_evicted(rig: Rig, report: Report, other: Any, reference: Any, card: int) -> None:
    first = rig.advance(rig.start(), rig.size.chunks - 1)
    living = rig.living(first.world)
    held = living.cache_nbytes
    if rig.on_gpu:
        # A sampler asks for its own memory, too; here for all that is left of the card beside its model.
        sampling = max(0, int(card - 1.1 * other.model_size() - 1.5 * GIB))
        comfy.model_management.load_models_gpu([other], memory_required=sampling)
    else:
        # On a CPU ComfyUI frees nothing for a model that it loads.
        comfy.model_management.free_memory(1e30, rig.device)
    report.check("another model evicts a world", held > 0 and living.session is None, held_gib=held / GIB)
    walk = rig.advance(first.world, 1)
    found = difference(walk.latents, reference.latents)
    report.check("an evicted world goes on, bitwise", found["bitwise"], evicted=found)


def _images_on_the_card(rig: Rig, report: Report, other: Any, reference: Any) -> None:
    """With --gpu-only, IMAGE needs room on the card, too, which ComfyUI could make."""
    first = rig.advance(rig.start(), rig.size.chunks - 1)
    comfy.model_management.load_models_gpu([other])
    free = int(comfy.model_management.get_free_memory(rig.device))
    # What another pack holds: ComfyUI can neither see nor move it.
    ballast = torch.empty(max(0, free - 16 * MIB), dtype=torch.uint8, device=rig.device)
    before = args.gpu_only
    args.gpu_only = True
    try:
        walk = rig.advance(first.world, 1)
    finally:
        args.gpu_only = before
        del ballast
    found = difference(walk.latents, reference.latents)
    report.facts["free_mib_before"] = free / MIB
    report.check("IMAGE is on the card", walk.images.device.type == "cuda")
    report.check("IMAGE finds room on a full card", found["bitwise"], image_on_card=found)
