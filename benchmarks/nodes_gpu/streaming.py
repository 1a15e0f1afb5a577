"""Frames per second that a user of the nodes sees, in the steady window, beside those of a session alone."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

from ..comfy_pack import call, part
from ..nodes import now
from .report import Report
from .rig import SEED, Rig

WINDOW, SINK = 18, 3
WARM, CHUNKS = 2, 4
"""Chunks of a full window before anything counts, and chunks of a run."""
KEYS = "w"


def streaming(rig: Rig, report: Report) -> None:
    """Advance World with IMAGE and VIDEO, ``CHUNKS`` chunks a run, in turn with a session that makes as many.

    ``session``: its frames stay where they were decoded. ``session_written``: they also become uint8 on the host and go
    to the writer that the node uses. ``node``: all that a queue run does in the node. Each goes on in a world of its
    own, whose window is full. Seconds per chunk are medians of the rounds, frames per second those of the medians.
    """
    rig.empty()
    rounds = 3 if rig.on_gpu else 2
    ways, preset = _ways(rig)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begin = now(rig.device)
            run()
            seconds[name].append((now(rig.device) - begin) / CHUNKS)
    report.facts["turns"] = rounds
    counted = getattr(importlib.import_module("av"), "names_only", False)
    report.facts["writer"] = "nobody: PyAV is not installed, frames are counted" if counted else "VideoWriter"
    frames = 4 * preset.chunk
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        report.facts[f"{name}_seconds_per_chunk"] = round(value, 4)
        report.facts[f"{name}_fps"] = round(frames / value, 3)
    report.facts |= {
        "preset": preset.label,
        "chunks": CHUNKS,
        "frames_per_chunk": frames,
        "size": f"{rig.size.height}x{rig.size.width}",
        "node_to_session": round(medians["node"] / medians["session"], 4),
        "node_to_session_written": round(medians["node"] / medians["session_written"], 4),
        "all": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
    }


def _ways(rig: Rig) -> tuple[dict[str, Callable[[], Any]], Any]:
    """What makes the next ``CHUNKS`` chunks, by name; everything is warm and every window full."""
    import comfy.model_management

    model, clip, vae = rig.parts
    picture = rig.picture()
    world = call(
        "nodes.world",
        "LingBotStartWorld",
        model=model,
        vae=vae,
        positive=rig.positive,
        start_image=picture,
        seed=SEED,
        window=WINDOW,
        sink=SINK,
    )[0]
    preset = world.history.start.preset
    host = part("nodes.host.worlds").host_world(model, vae, clip)
    comfy.model_management.load_models_gpu(host.patchers)
    bare, written = (_Session(rig, host.world, picture, preset) for _ in range(2))
    place = [world]

    def node(chunks: int = CHUNKS) -> None:
        place[0] = call("nodes.world", "LingBotAdvanceWorld", world=place[0], chunks=chunks, keys=KEYS)[2]

    def alone() -> None:
        bare.advance(CHUNKS)

    def with_video() -> None:
        video = part("nodes.host.video").RunVideo(
            width=picture.image.width, height=picture.image.height, fps=16.0, tags={}
        )
        to_uint8 = part("lingbot_core.engine.image").frames_to_uint8
        written.advance(CHUNKS, lambda chunk: video.write(to_uint8(chunk.frames)))
        video.finish()

    for walk in (node, bare.advance, written.advance):
        walk(-(-WINDOW // preset.chunk) + WARM)
    return {"session": alone, "session_written": with_video, "node": node}, preset


class _Session:
    """A session without nodes, steered by the same keys."""

    def __init__(self, rig: Rig, world: Any, picture: Any, preset: Any) -> None:
        self._picture = picture
        self._route = part("lingbot_core.engine.route").route_from_keys(KEYS, preset)
        self._session = part("lingbot_core.engine.session").WorldSession.start(
            world,
            picture.condition,
            "a harbour in the morning",
            preset=preset,
            seed=SEED,
            translation_unit=self._route.translation_unit()[0],
        )

    def advance(self, chunks: int, take: Callable[[Any], None] | None = None) -> None:
        session = self._session
        begin = len(session.history)
        for controls in self._route.controls(session, self._picture.image, act=False, begin=begin, chunks=chunks):
            session.advance(controls, on_frames=take)
