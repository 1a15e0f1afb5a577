"""Everything in the card's memory, and a part of the weights only."""

from __future__ import annotations

import comfy.model_management
import torch

from .card import GIB, small_card
from .report import Report
from .rig import Rig, difference

TOLERANCE = 1e-3
"""Relative L2 of latents where the same weights take another way to the card: it should be bitwise."""
ROUNDS = 2


def plenty(rig: Rig, report: Report) -> None:
    """All of it fits: the walk that others are compared with, and once more."""
    walk = rig.reference
    model = rig.parts[0]
    report.facts |= {
        "vram_state": comfy.model_management.vram_state.name,
        "parameters": sum(p.numel() for p in model.model.parameters()),
        "dtype": str(model.model.get_dtype()),
        "loaded_gib": model.loaded_size() / GIB,
        "session_gib": rig.need() / GIB,
        "seconds_per_chunk": walk.seconds,
    }
    if not rig.dynamic:
        report.check("all of the weights are loaded", model.loaded_size() >= model.model_size() > 0)
    report.check("latents are finite", bool(torch.isfinite(walk.latents).all()))
    report.check("every frame came out", len(walk.images) == walk.report["made"]["frames"])
    rig.sleep()
    again = difference(rig.walk().latents, walk.latents)
    report.check("the same again, bitwise", again["bitwise"], again=again)


def half(rig: Rig, report: Report) -> None:
    """A card with room for the session, the VAE and half of the transformer."""
    rig.need_gpu(static=True)
    reference, (size, vae) = rig.reference, rig.weights()
    card = int(rig.need() + comfy.model_management.extra_reserved_memory() + 1.05 * vae + size / 2)
    seconds: dict[str, list[float]] = {"full": [], "part": []}
    loaded = 0
    for _ in range(ROUNDS):
        rig.empty()
        rig.walk()
        rig.sleep()
        seconds["full"].append(rig.walk().seconds)
        rig.empty()
        with small_card(card):
            walk = rig.walk()
            loaded = rig.parts[0].loaded_size()
            found = difference(walk.latents, reference.latents)
            rig.sleep()
            seconds["part"].append(rig.walk().seconds)
            rig.empty()
    report.facts |= {"card_gib": card / GIB, "weights_gib": size / GIB, "loaded_gib": loaded / GIB}
    report.facts |= {"seconds": seconds, "slower_by": min(seconds["part"]) / min(seconds["full"])}
    report.check("a part of the weights is loaded", 0 < loaded < size)
    report.check("the same latents", found["relative"] <= TOLERANCE, latents=found)
