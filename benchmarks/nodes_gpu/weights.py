"""Weights that are not what the file holds: LoRA patches, fp8."""

from __future__ import annotations

import comfy.model_management
import torch
from safetensors.torch import save_file

from .card import GIB, allocated, small_card
from .on_demand import ROUNDED
from .report import Report
from .rig import Rig, difference

LORA = "random.safetensors"
LORA_LAYERS = ("blocks.0.self_attn.q", "blocks.1.ffn.0", "blocks.2.cam_scale_layer", "time_embedding.0")
RANK = 8
PATCHED = 0.05
"""Relative L2 of latents between patches put into the weights and patches applied as the weights stream."""


def lora(rig: Rig, report: Report) -> None:
    """Through ComfyUI's own node; whole, in part, and gone again."""
    import folder_paths
    import nodes

    _write_lora(rig)
    folder_paths.filename_list_cache.clear()
    [model] = nodes.LoraLoaderModelOnly().load_lora_model_only(rig.parts[0], LORA, 1.0)
    reference = rig.reference
    rig.empty()
    patched = rig.walk(model)
    changed = difference(patched.latents, reference.latents)
    report.check("the latents change", changed["relative"] > 0.01, changed=changed)
    report.check("they are finite", bool(torch.isfinite(patched.latents).all()))
    rig.sleep()
    again = difference(rig.walk(model).latents, patched.latents)
    if rig.dynamic:
        # DynamicVRAM patches a weight at its first use otherwise than it keeps it.
        report.check("the same again", again["relative"] <= ROUNDED, again=again)
    else:
        report.check("the same again, bitwise", again["bitwise"], again=again)
    rig.sleep()
    bare = difference(rig.walk().latents, reference.latents)
    report.check("without it as before, bitwise", bare["bitwise"], without=bare)
    if not rig.on_gpu or rig.dynamic:
        return
    size, vae = rig.weights()
    card = int(rig.need() + comfy.model_management.extra_reserved_memory() + 1.05 * vae + size / 4)
    rig.empty()
    with small_card(card):
        streamed = difference(rig.walk(model).latents, patched.latents)
        loaded = model.loaded_size()
        rig.empty()
    report.facts |= {"streamed": streamed, "loaded_gib": loaded / GIB}
    report.check("a part of the weights is loaded", 0 < loaded < size)
    report.check("streamed about the same", streamed["relative"] <= min(PATCHED, changed["relative"] / 4))


def _write_lora(rig: Rig) -> None:
    """Large enough to be seen in the latents."""
    folder = rig.folder.parents[1] / "loras"
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    shapes = {name: p.shape for name, p in rig.parts[0].model.diffusion_model.named_parameters()}
    weights = {}
    for name in LORA_LAYERS:
        rows, columns = shapes[f"{name}.weight"]
        weights[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.1
        weights[f"diffusion_model.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1
    save_file(weights, folder / LORA)


def fp8(rig: Rig, report: Report) -> None:
    """The loader's fp8: memory, seconds and how far the latents are off."""
    reference, wide = rig.reference, rig.parts[0]
    model, _, _ = rig.load("fp8_e4m3fn")
    held = {}
    for name, chosen in (("as stored", wide), ("fp8", model)):
        rig.empty()
        rig.start(chosen)
        rig.sleep()
        # DynamicVRAM's weights are not PyTorch's allocations.
        held[name] = allocated() if rig.on_gpu and not rig.dynamic else chosen.loaded_size()
    walk = rig.walk(model)
    rig.sleep()
    seconds = rig.walk(model).seconds
    found = difference(walk.latents, reference.latents)
    report.facts |= {
        "held_gib": {name: size / GIB for name, size in held.items()},
        "model_gib": {"as stored": wide.model_size() / GIB, "fp8": model.model_size() / GIB},
        "latents": found,
        "seconds_per_chunk": {"as stored": reference.seconds, "fp8": seconds},
    }
    report.check("the latents are finite", bool(torch.isfinite(walk.latents).all()))
    report.check("the latents are near", found["relative"] < 0.5)
    report.check("less is held", held["fp8"] < held["as stored"])
    if rig.on_gpu:
        report.check("the model is about half as large", model.model_size() < 0.6 * wide.model_size())
