"""A run's controls as text, with all that a session fixed at its start, so that the run can be made again exactly.

JSON lines: the first holds the start record, each later one the controls of a chunk. Numbers are written so that they
come back bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..camera.controls import Controls
from ..camera.pose import check_poses
from ..encodable import as_text
from ..errors import HistoryError, InputFileError, LingBotError
from ..presets import LabelSteps, Preset, Selection, TableSteps, UniPCSteps
from .history import History, StartRecord
from .noise import SEED_LIMIT
from .start import FIRST_DELTAS, NOISES

FORMAT = "lingbot-world controls"
VERSION = 1
MAX_CHUNKS = 100_000
MAX_LINE = 1 << 20
"""Characters; the controls of the largest chunk take a tenth of it."""

# What a run is called, how it is played, and how its unit was chosen change nothing of what is made.
_NO_MATTER = {"preset": ("name", "overridden"), "start": ("unit_rule", "fps", "chunks")}
# Fields of a preset that records of earlier versions lack.
_LATER = {"still_window": None}


@dataclass(frozen=True, eq=False)
class ControlsRecord:
    """What steered a run. start: what its session fixed. controls: one for each chunk, with the prompts it changed."""

    start: StartRecord
    controls: tuple[Controls, ...]

    def __post_init__(self) -> None:
        if not self.controls:
            raise HistoryError("the run has no chunks yet, so there are no controls to write down; make some first")

    @classmethod
    def of(cls, history: History) -> ControlsRecord:
        """The record of a run. Raises HistoryError for one without chunks, and for noise that came from outside."""
        for chunk in history.chunks:
            if chunk.noise not in NOISES:
                raise HistoryError(
                    f"chunk {chunk.index} was made with noise {chunk.noise!r}, which a record of controls does not "
                    "hold; make the run with noise 'seeded'"
                )
        return cls(history.start, tuple(_recorded(history, index) for index in range(len(history))))

    def require_same(self, start: StartRecord) -> None:
        """Raises HistoryError naming the first field in which another session's start would make another world."""
        skipped = {field for field in _NO_MATTER["start"] if (field, start.noise) != ("chunks", "reference")}
        for name, mine, theirs in _differences(self.start, start, skipped):
            raise HistoryError(
                f"these controls were recorded with {name}={_shown(mine)}, but this world has {name}={_shown(theirs)}; "
                "start the world with the same, or steer it anew"
            )


def dump_controls(record: ControlsRecord) -> str:
    """The record as text."""
    start = {field.name: getattr(record.start, field.name) for field in dataclasses.fields(StartRecord)}
    start["preset"] = _preset_to_json(record.start.preset)
    start["intrinsics"] = list(record.start.intrinsics)
    head = {"format": FORMAT, "version": VERSION, "chunks": len(record.controls), "start": start}
    lines = [_line(head), *(_chunk_line(index, controls) for index, controls in enumerate(record.controls))]
    return as_text("\n".join(lines) + "\n")


def dump_chunk(history: History, index: int) -> str:
    """One chunk's line of the record of a run, for those who write it down while it goes on."""
    return as_text(_chunk_line(index, _recorded(history, index)))


def _recorded(history: History, index: int) -> Controls:
    """A chunk's controls with its prompt, where that is another one than before."""
    chunk = history.chunks[index]
    before = history.chunks[index - 1].prompt if index else history.start.prompt
    change = chunk.prompt if chunk.prompt != before or chunk.controls.prompt is not None else None
    return dataclasses.replace(chunk.controls, prompt=change)


def _chunk_line(index: int, controls: Controls) -> str:
    return _line({"chunk": index, **controls.to_json()})


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def load_controls(text: str, *, name: str = "the record of controls") -> ControlsRecord:
    """Reads what :func:`dump_controls` made. Raises InputFileError naming the line for anything else."""
    if text.strip() and "{" not in text:
        raise InputFileError(
            f"{name} is {_shown(text.strip())}, which is no record; paste the text that was written down, not the name "
            "of its file"
        )
    lines = _objects(text, name)
    head = next(lines, None)
    if head is None:
        raise InputFileError(f"{name} is empty; paste the whole text that was written down")
    if head.get("format") != FORMAT:
        raise InputFileError(f"{name}, line 1 is not the head of a record ('format' must be {FORMAT!r})")
    if head.get("version") != VERSION:
        raise InputFileError(
            f"{name} has version {head.get('version')!r:.40}; this release reads version {VERSION}: update the pack"
        )
    expected = head.get("chunks")
    if isinstance(expected, bool) or not isinstance(expected, int) or not 1 <= expected <= MAX_CHUNKS:
        raise InputFileError(f"{name}, line 1: chunks={expected!r:.40} must be a whole number from 1 to {MAX_CHUNKS}")
    start = _start(head.get("start"), f"{name}, line 1")
    controls: list[Controls] = []
    for line in lines:
        where = f"{name}, chunk {len(controls)}"
        if len(controls) == expected:
            raise InputFileError(f"{name} has more than the {expected} chunks that its first line names")
        controls.append(_chunk(line, len(controls), start.preset.chunk, where))
    if len(controls) < expected:
        raise InputFileError(
            f"{name} is cut off: it has {len(controls)} of {expected} chunks; paste the whole text again"
        )
    return ControlsRecord(start, tuple(controls))


def _objects(text: str, name: str) -> Iterator[dict[str, Any]]:
    number = 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        number += 1
        where = f"{name}, line {number}"
        if number > MAX_CHUNKS + 1:
            raise InputFileError(f"{name} has more than {MAX_CHUNKS} chunks; it is no record of one run")
        if len(line) > MAX_LINE:
            raise InputFileError(f"{where} is longer than {MAX_LINE} characters; a line holds one chunk")
        try:
            value = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InputFileError(f"{where} is damaged ({error}); copy the record again") from None
        if not isinstance(value, dict):
            raise InputFileError(f"{where} is damaged: it must be a JSON object; copy the record again")
        yield value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _chunk(line: dict[str, Any], index: int, latents: int, where: str) -> Controls:
    line = dict(line)
    if line.pop("chunk", None) != index:
        raise InputFileError(f"{where} is missing or out of order; copy the record again")
    try:
        controls = Controls.from_json(line)
        check_poses(controls.relative, name="relative")
        check_poses(controls.pose_after[None], name="pose_after")
    except LingBotError as error:
        raise InputFileError(f"{where}: {error}") from None
    if controls.latents != latents:
        raise InputFileError(f"{where} has {controls.latents} latent frames; its preset has {latents}")
    return controls


def _preset_to_json(preset: Preset) -> dict[str, Any]:
    fields = {field.name: getattr(preset, field.name) for field in dataclasses.fields(Preset)}
    fields["selection"] = dataclasses.asdict(preset.selection)
    return fields


def _start(value: Any, where: str) -> StartRecord:
    fields = _fields_of(StartRecord, value, f"{where}: start")
    recorded = fields["preset"]
    if isinstance(recorded, dict):
        recorded = {**_LATER, **recorded}
    preset = _fields_of(Preset, recorded, f"{where}: preset")
    for name, allowed in _CHECKS.items():
        if not allowed(fields[name]):
            raise InputFileError(f"{where}: start: {name}={fields[name]!r:.60} is not a value that a session can have")
    try:
        made = Preset(**{**preset, "selection": _selection(preset["selection"]), "overridden": _texts(preset)})
    except (LingBotError, TypeError, ValueError) as error:
        raise InputFileError(f"{where}: {error}") from None
    return StartRecord(**{**fields, "preset": made, "intrinsics": tuple(fields["intrinsics"])})


def _fields_of(kind: type[StartRecord] | type[Preset], value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputFileError(f"{where} must be a JSON object; copy the record again")
    known = [field.name for field in dataclasses.fields(kind)]
    if missing := [name for name in known if name not in value]:
        raise InputFileError(f"{where} lacks the field {missing[0]!r}; copy the record again")
    if unknown := [name for name in value if name not in known]:
        raise InputFileError(f"{where} has an unknown field {unknown[0]!r:.60}; update the pack, or copy it again")
    return value


def _selection(value: Any) -> Selection:
    match value:
        case {"indices": [*indices], **rest} if not rest:
            return TableSteps(tuple(indices))
        case {"labels": [*labels], **rest} if not rest:
            return LabelSteps(tuple(labels))
        case {"count": int(count), **rest} if not rest:
            return UniPCSteps(count)
    raise ValueError(f"the preset's selection {value!r:.60} is unknown")


def _texts(preset: Mapping[str, Any]) -> tuple[str, ...]:
    for name in ("name", "negative_prompt"):
        if not _is_text(preset[name]):
            raise ValueError(f"the preset's {name} {preset[name]!r:.60} must be text")
    overridden = preset["overridden"]
    if not isinstance(overridden, list) or not all(map(_is_text, overridden)):
        raise ValueError(f"the preset's overridden {overridden!r:.60} must be a list of texts")
    return tuple(overridden)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "prompt": _is_text,
    "negative_prompt": _is_text,
    "seed": _is_whole(0, SEED_LIMIT),
    "noise": lambda value: value in NOISES,
    "image": _is_text,
    "height": _is_whole(1, 1 << 16),
    "width": _is_whole(1, 1 << 16),
    "intrinsics": lambda value: isinstance(value, list) and len(value) == 4 and all(map(_is_number, value)),
    "translation_unit": _is_positive,
    "unit_rule": _is_text,
    "first_delta": lambda value: value in FIRST_DELTAS,
    "fps": _is_positive,
    "chunks": lambda value: value is None or _is_whole(1, MAX_CHUNKS)(value),
    "model": _is_text,
}


def _differences(one: StartRecord, other: StartRecord, skipped: set[str]) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(Preset):
        mine, theirs = getattr(one.preset, field.name), getattr(other.preset, field.name)
        if field.name not in _NO_MATTER["preset"] and mine != theirs:
            yield f"preset.{field.name}", mine, theirs
    # Another size is another picture, too; the size says more than the picture's digest.
    names = [field.name for field in dataclasses.fields(StartRecord)]
    for name in sorted(names, key=lambda name: name not in ("height", "width")):
        mine, theirs = getattr(one, name), getattr(other, name)
        if name != "preset" and name not in skipped and mine != theirs:
            yield name, mine, theirs


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
