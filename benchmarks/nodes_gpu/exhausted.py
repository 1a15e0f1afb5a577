"""A card that gives nothing more: in every stage of a walk, and while the picture is encoded."""

from __future__ import annotations

from ..comfy_pack import part
from .card import MIB, allocated, allow_all, allow_no_more, out_of_memory_at
from .report import Report
from .rig import Rig, difference, error_of

SLACK = 64 * MIB
"""What may stay beyond what was there before: latents of the start image for later chunks."""


def stages(rig: Rig, report: Report) -> None:
    """Memory ends in the second chunk's denoising, in its decoding, in the first commit, and wherever it will."""
    steps = rig.reference.world.history.start.preset.steps
    for stage, module, method, number, kept in (
        ("denoise", "dit", "forward", steps + 2, 1),
        ("decode", "vae", "decode", 2, 2),
        ("commit", "dit", "remember", 1, 1),
    ):
        world = rig.start()
        owner = getattr(world.source.host.world, module)
        # The decoder of a sleeping world is brought up by decoding; so the walk begins awake.
        with out_of_memory_at(owner, method, number, on_gpu=rig.on_gpu):
            _fails_and_recovers(rig, report, stage, world)
        made = len(rig.living(world).history)
        report.check(f"{stage}: chunks with latents are kept", made == kept, **{f"{stage}_kept": made})
        _goes_on(rig, report, stage, world, kept)
    if rig.on_gpu:
        world = rig.start()
        allow_no_more(256 * MIB)
        try:
            _fails_and_recovers(rig, report, "anywhere", world)
        finally:
            allow_all()
        _goes_on(rig, report, "anywhere", world, len(rig.living(world).history))


def _fails_and_recovers(rig: Rig, report: Report, stage: str, world: object) -> None:
    held = rig.living(world).cache_nbytes
    before = allocated() if rig.on_gpu else 0
    error = error_of(lambda: rig.advance(world))
    _check_error(report, stage, error, "GiB beside the weights")
    report.check(f"{stage}: the world sleeps", rig.living(world).session is None)
    if rig.on_gpu:
        left = allocated() - (before - held)
        report.check(f"{stage}: what it took is free", left <= SLACK, **{f"{stage}_left_mib": left / MIB})


def _goes_on(rig: Rig, report: Report, stage: str, world: object, kept: int) -> None:
    walk = rig.advance(world)
    found = difference(walk.latents, rig.reference.latents)
    reused = walk.report["made"]["chunks_reused"]
    report.check(f"{stage}: then the same, bitwise", found["bitwise"], **{stage: found})
    report.check(f"{stage}: nothing is denoised twice", reused == kept, **{f"{stage}_reused": reused})
    rig.sleep()


def encoding(rig: Rig, report: Report) -> None:
    """Memory ends in the encoder."""
    rig.picture()
    vae, _ = part("nodes.host.vae").world_vae(rig.parts[2])
    rig.empty()
    kept = rig.picture()
    before = allocated() if rig.on_gpu else 0
    with out_of_memory_at(vae, "encode", 2, on_gpu=rig.on_gpu):
        _check_error(report, "encode", error_of(rig.picture), "choose a smaller size")
    if rig.on_gpu:
        left = allocated() - before
        report.check("encode: what it took is free", left <= SLACK, encode_left_mib=left / MIB)
    found = difference(rig.advance(rig.start(picture=kept)).latents, rig.reference.latents)
    report.check("encode: an encoded picture is as before", found["bitwise"], encode=found)


def _check_error(report: Report, stage: str, error: Exception | None, text: str) -> None:
    name = type(error).__name__
    report.check(f"{stage}: a clear error", name == "MemoryPlanError" and text in str(error))
    report.facts[f"{stage}_error"] = f"{name}: {error}"[:300]
