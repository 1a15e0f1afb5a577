"""What a sampling recipe is, and the recipes that exist in the wild.

A :class:`Preset` holds everything that decides how a chunk is sampled. Which preset a checkpoint needs cannot be
read from its tensor names, so the name of a preset travels with reports, videos and session files.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .errors import LengthError, PresetError


@dataclass(frozen=True)
class TableSteps:
    """Steps picked by index from the 1000-entry UniPC table; the model sees truncated integer timesteps."""

    indices: tuple[int, ...]


@dataclass(frozen=True)
class LabelSteps:
    """Steps given as labels of 1000; sigma is the shifted label itself and the model sees ``1000 * sigma``."""

    labels: tuple[float, ...]


@dataclass(frozen=True)
class UniPCSteps:
    """``count`` steps of the second-order UniPC solver, its state reset for every chunk."""

    count: int


Selection = TableSteps | LabelSteps | UniPCSteps

# The fixed negative prompt of LingBot-World v2's non-distilled causal model.
V2_NEGATIVE_PROMPT = (
    "画面突变，色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，"
    "静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True)
class Preset:
    """A whole sampling recipe.

    chunk: latent frames per chunk. window: latent frames that attention sees, sink and the current chunk
    included; None keeps all of the past. sink: first latent frames that are never evicted. still_window: the same as
    window for chunks whose camera does not move at all, which then see less and take less time; what they do not see
    stays in memory. None: they see what all others see.
    guidance_scale: 1 means that no negative branch is run. overridden: names of the fields that a user changed.
    """

    name: str
    chunk: int
    selection: Selection
    shift: float
    window: int | None = None
    sink: int = 0
    guidance_scale: float = 1.0
    negative_prompt: str = ""
    reuse_last_step_kv: bool = False
    still_window: int | None = None
    overridden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def guided(self) -> bool:
        """Whether a negative branch runs beside the positive one."""
        return self.guidance_scale != 1.0

    @property
    def steps(self) -> int:
        """Denoising forwards per chunk and branch, the commit not counted."""
        match self.selection:
            case TableSteps(indices):
                return len(indices)
            case LabelSteps(labels):
                return len(labels)
            case UniPCSteps(count):
                return count

    @property
    def label(self) -> str:
        """The name, with every override spelled out: what reports and files show."""
        if not self.overridden:
            return self.name
        changes = ", ".join(f"{field}={_shown(getattr(self, field))}" for field in self.overridden)
        return f"{self.name} ({changes})"

    def with_overrides(self, **changes: Any) -> Preset:
        """Returns a copy with some fields changed and remembered as overridden.

        ``indices``, ``labels`` and ``steps`` change the selection of a preset of that kind; a value of None means
        unchanged. ``window=0`` and ``still_window=0`` stand for none. Raises PresetError for a field that does not
        exist or that this preset cannot honour.
        """
        changes = {field: value for field, value in changes.items() if value is not None}
        changes = _selection_changes(self, changes)
        allowed = {f.name for f in dataclasses.fields(Preset)} - {"name", "overridden"}
        for field in changes:
            if field not in allowed:
                raise PresetError(f"preset {self.name}: there is no field {field!r}; use one of {sorted(allowed)}")
        if "window" in changes and changes["window"] in (0, -1):
            changes["window"] = None
            changes.setdefault("sink", 0)
        if changes.get("still_window") == 0:
            changes["still_window"] = None
        changes = {field: value for field, value in changes.items() if value != getattr(self, field)}
        if not changes:
            return self
        if changes.get("negative_prompt") and changes.get("guidance_scale", self.guidance_scale) == 1.0:
            raise PresetError(
                f"preset {self.name}: a negative prompt has no effect at guidance 1; leave it empty, or use the preset "
                "v2-causal-pretrain"
            )
        overridden = tuple(sorted({*self.overridden, *changes}))
        return dataclasses.replace(self, **changes, overridden=overridden)

    def frames(self, chunks: int) -> int:
        """Video frames of ``chunks`` chunks: ``1 + 4 * (chunk - 1)`` for the first and ``4 * chunk`` for each later."""
        return 0 if chunks == 0 else 4 * self.chunk * chunks - 3

    def chunks_for(self, frames: int, *, snap: str = "down") -> int:
        """Chunks for a wish of ``frames`` video frames.

        snap: 'down' or 'up' when the wish lies between two valid totals. A wish below one chunk raises LengthError
        for 'down'.
        """
        first, step = self.frames(1), 4 * self.chunk
        valid = f"valid totals are {first} + {step}k ({first}, {first + step}, {first + 2 * step}, ...)"
        if frames < 1:
            raise LengthError(f"{frames} frames were asked for; {valid}")
        if frames < first:
            if snap == "up":
                return 1
            raise LengthError(
                f"{frames} frames are less than one chunk of {first} (preset {self.name}, {self.chunk} latent frames a "
                f"chunk); {valid}"
            )
        exact = (frames + 3) / step
        return math.ceil(exact) if snap == "up" else math.floor(exact)


def _shown(value: Any) -> str:
    match value:
        case TableSteps(indices):
            return f"indices {list(indices)}"
        case LabelSteps(labels):
            return f"labels {list(labels)}"
        case UniPCSteps(count):
            return f"{count} UniPC steps"
        case str():
            return repr(value if len(value) <= 24 else value[:21] + "...")
        case None:
            return "none"
    return str(value)


def _selection_changes(preset: Preset, changes: dict[str, Any]) -> dict[str, Any]:
    """Turns ``indices``, ``labels`` and ``steps`` into a selection of the preset's own kind."""
    changes = dict(changes)
    kinds = {"indices": TableSteps, "labels": LabelSteps, "steps": UniPCSteps}
    for field, kind in kinds.items():
        if field not in changes:
            continue
        if not isinstance(preset.selection, kind):
            own = {TableSteps: "indices", LabelSteps: "labels", UniPCSteps: "steps"}[type(preset.selection)]
            raise PresetError(
                f"preset {preset.name} cannot honour {field}={changes[field]}: its steps are set by {own!r} "
                f"({_shown(preset.selection)})"
            )
        value = changes.pop(field)
        changes["selection"] = kind(value) if kind is UniPCSteps else kind(tuple(value))
    return changes


def _validate(p: Preset) -> None:
    def refuse(message: str) -> None:
        raise PresetError(f"preset {p.name}: {message}")

    for field in ("chunk", "sink", "window", "still_window"):
        if field.endswith("window") and getattr(p, field) is None:
            continue
        if isinstance(getattr(p, field), bool) or not isinstance(getattr(p, field), int):
            refuse(f"{field}={getattr(p, field)!r} must be a whole number")
    if not 1 <= p.chunk <= 64:
        refuse(f"chunk={p.chunk} must be between 1 and 64 latent frames")
    if not 0.001 <= p.shift <= 1000:
        refuse(f"shift={p.shift} must be a number between 0.001 and 1000")
    if p.sink < 0:
        refuse(f"sink={p.sink} must not be negative")
    if p.window is None and p.sink:
        refuse(f"sink={p.sink} has no effect without a window; set window, or sink to 0")
    if p.window is not None and p.window < p.sink + p.chunk:
        refuse(
            f"window={p.window} cannot hold its sink ({p.sink}) and the current chunk ({p.chunk}); it must be at least "
            f"{p.sink + p.chunk} latent frames"
        )
    if p.still_window is not None:
        if p.still_window < p.sink + p.chunk:
            refuse(
                f"still_window={p.still_window} cannot hold the sink ({p.sink}) and the current chunk ({p.chunk}); it "
                f"must be at least {p.sink + p.chunk} latent frames"
            )
        if p.window is not None and p.still_window >= p.window:
            refuse(f"still_window={p.still_window} has no effect: the window is {p.window} latent frames anyway")
    if not 1 <= p.guidance_scale <= 1000:
        refuse(f"guidance_scale={p.guidance_scale} must be between 1 (off) and 1000")
    match p.selection:
        case TableSteps(indices):
            if not indices or any(isinstance(i, bool) or not isinstance(i, int) for i in indices):
                refuse(f"indices={list(indices)} must be whole numbers")
            if any(not 0 <= i <= 999 for i in indices) or list(indices) != sorted(set(indices)):
                refuse(f"indices={list(indices)} must rise strictly and lie within 0..999")
        case LabelSteps(labels):
            if (
                not labels
                or any(not 0 < x <= 1000 for x in labels)
                or list(labels) != sorted(set(labels), reverse=True)
            ):
                refuse(f"labels={list(labels)} must fall strictly and lie within (0, 1000]")
        case UniPCSteps(count):
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
                refuse(f"steps={count} must be a whole number between 1 and 1000")
    if not isinstance(p.selection, UniPCSteps) and p.guided:
        refuse(
            f"guidance_scale={p.guidance_scale} cannot be honoured: a distilled model has guidance built in; leave it "
            "at 1, or use the preset v2-causal-pretrain"
        )
    if isinstance(p.selection, UniPCSteps) and p.reuse_last_step_kv:
        refuse("reuse_last_step_kv is for the distilled recipes; the UniPC recipe always commits")


_V1 = TableSteps((0, 179, 358, 679))

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("v1-fast", chunk=3, selection=_V1, shift=10.0),
        Preset("v1-fast-shift5", chunk=3, selection=_V1, shift=5.0),
        Preset("v2-causal-fast", chunk=4, selection=TableSteps((0, 250, 500, 750)), shift=10.0, window=18, sink=6),
        Preset(
            "v2-diffusers", chunk=3, selection=LabelSteps((1000.0, 750.0, 500.0, 250.0)), shift=5.0, window=18, sink=9
        ),
        Preset(
            "v2-causal-pretrain",
            chunk=4,
            selection=UniPCSteps(40),
            shift=10.0,
            guidance_scale=5.0,
            negative_prompt=V2_NEGATIVE_PROMPT,
        ),
        Preset("tiny", chunk=3, selection=_V1, shift=1.5, window=9),
    )
}


def get_preset(name: str) -> Preset:
    """Looks a preset up by name; raises PresetError listing those that exist."""
    try:
        return PRESETS[name]
    except KeyError:
        raise PresetError(f"there is no preset {name!r}; use one of {', '.join(PRESETS)}") from None
