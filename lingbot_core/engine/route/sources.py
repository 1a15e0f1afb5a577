"""Routes from what a node or a program holds: a camera path, a text of keys, an event script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...camera.controls import KeyMotion
from ...camera.key_text import key_lines, key_segments
from ...camera.keys import PER_LATENT, KeySteps, format_keys, frames_of
from ...camera.pose import Array
from ...camera.trajectory import CameraTrajectory, SnapMode
from ...errors import LengthError
from ...presets import Preset
from ..events import ChunkEvent, parse_events
from ..plan import Snap, check_num_frames, plan_length
from ..start import check_whole
from .keys import VideoKeysRoute
from .path import PathRoute
from .script import ScriptRoute


def route_from_camera(
    trajectory: CameraTrajectory,
    preset: Preset,
    *,
    num_frames: int | None = None,
    chunks: int | None = None,
    snap: Snap | None = None,
    length: SnapMode = "compress",
    actions: Callable[[], Array] | None = None,
    source: str = "camera path",
) -> PathRoute:
    """The route of a camera path, planned to whole chunks as ``engine.plan.plan_length`` says.

    num_frames: the wish in video frames, or chunks: the same in chunks; None for both uses every pose. actions: gives
    w a s d rows [N, 4] per video frame, for models that are steered by them; None takes the trajectory's. Raises
    LengthError.
    """
    path = trajectory.to_video()
    if chunks is not None:
        num_frames = preset.frames(_wanted(preset, num_frames, chunks, snap) or 0)
    plan = plan_length(len(path), preset, num_frames=num_frames, snap=snap, length=length)
    if actions is None and (rows := path.actions) is not None:
        return PathRoute(source, path, plan, preset.chunk, lambda: rows)
    return PathRoute(source, path, plan, preset.chunk, actions)


def route_from_keys(
    text: str,
    preset: Preset,
    *,
    steps: KeySteps = PER_LATENT,
    num_frames: int | None = None,
    chunks: int | None = None,
    snap: Snap | None = None,
    stands_still: bool = False,
    source: str = "keys",
) -> ScriptRoute | VideoKeysRoute:
    """The route of a text of keys.

    text: segments of keys and steps such as ``w-12, wj-8, none-4``, or one line for each chunk with the keys of the
    whole chunk or of each of its latent frames (``camera.key_text``). The keys of a single line are held for good,
    however many chunks are made. steps: segments count latent frames, or video frames where a latent frame has
    several steps; the last chunk is filled up with no keys. num_frames or chunks: the wish; what is longer is cut
    off. stands_still: keep still where it is shorter, and beyond the end. Raises CameraError and LengthError.
    """
    wanted = _wanted(preset, num_frames, chunks, snap)
    segments = key_segments(text)
    if segments is not None and steps.steps_per_latent > 1:
        frames = frames_of(segments)
        total = preset.chunks_for(len(frames) + 1, snap="up")  # the first frame comes before any key
        total = _length(source, preset, total, wanted, stands_still)
        keys = VideoKeysRoute(source, frames, total, chunk=preset.chunk, steps=steps)
        return keys.with_choices(stands_still=stands_still)
    if segments is None:
        rows = key_lines(text, chunk=preset.chunk)
        if len(rows) == 1:
            events = [ChunkEvent(index, None, KeyMotion(rows[0], steps)) for index in range(wanted or 1)]
            return ScriptRoute(source, events, len(events), chunk=preset.chunk, steps=steps, held=rows[0])
    else:
        held = [format_keys(keys) for keys in frames_of(segments)]
        held += [""] * (-len(held) % preset.chunk)
        rows = [tuple(held[i : i + preset.chunk]) for i in range(0, len(held), preset.chunk)]
    events = [ChunkEvent(index, None, KeyMotion(keys, steps)) for index, keys in enumerate(rows)]
    return _script(source, events, preset, steps, wanted, stands_still)


def route_from_events(
    script: str | Path | Sequence[ChunkEvent],
    preset: Preset,
    *,
    steps: KeySteps = PER_LATENT,
    num_frames: int | None = None,
    chunks: int | None = None,
    snap: Snap | None = None,
    stands_still: bool = False,
    source: str = "event script",
) -> ScriptRoute:
    """The route of an event script, one line for each chunk.

    script: the text of JSON lines, a file of them (``engine.events``), or the events themselves. steps: what a held key
    does. num_frames or chunks: the wish; lines beyond it are left over. stands_still: keep still where there are fewer
    lines, and beyond the end. Raises InputFileError, PromptError or CameraError naming the line, and LengthError.
    """
    wanted = _wanted(preset, num_frames, chunks, snap)
    if isinstance(script, str | Path):
        # The line break makes sure that a text is not taken for the name of a file.
        found = parse_events(script + "\n" if isinstance(script, str) else script, chunk=preset.chunk, steps=steps)
    else:
        found = list(script)
    return _script(source, found, preset, steps, wanted, stands_still)


def _script(
    source: str, events: list[ChunkEvent], preset: Preset, steps: KeySteps, wanted: int | None, stands_still: bool
) -> ScriptRoute:
    chunks = _length(source, preset, len(events), wanted, stands_still)
    route = ScriptRoute(source, events, chunks, chunk=preset.chunk, steps=steps)
    return route.with_choices(stands_still=stands_still)


def _wanted(preset: Preset, num_frames: int | None, chunks: int | None, snap: Snap | None) -> int | None:
    """The wish in chunks; None without one."""
    if num_frames is not None and chunks is not None:
        raise LengthError("a number of frames and a number of chunks were both asked for; give one of them")
    if chunks is not None:
        check_whole("chunks", chunks, 1)
        check_num_frames(preset.frames(chunks))
        return chunks
    check_num_frames(num_frames)
    return None if num_frames is None else preset.chunks_for(num_frames, snap=snap or "down")


def _length(source: str, preset: Preset, own: int, wanted: int | None, stands_still: bool) -> int:
    """Chunks of a route whose own length is ``own``."""
    if wanted is not None and wanted > own and not stands_still:
        raise LengthError(
            f"{wanted} chunks were asked for, but the controls ({source}) have {own}: ask for {own} or less, make them "
            "longer, or choose to stand still at the end"
        )
    chunks = own if wanted is None else wanted
    check_num_frames(preset.frames(chunks))
    return chunks
