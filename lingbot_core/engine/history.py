"""What happened in a world. The history is the truth; every cache can be rebuilt from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ..camera.controls import CameraCarry, Controls, FirstDelta
from ..camera.units import check_unit
from ..errors import HistoryError
from ..presets import Preset


@dataclass(frozen=True)
class StartRecord:
    """What a session fixes once. Two runs are promised to be equal only when all of this is.

    image: digest of the prepared start image. intrinsics: fx, fy, cx, cy in pixels of width x height.
    translation_unit: length of one unit of the controls' translations; unit_rule: how it was chosen.
    chunks: the declared length, needed by noise 'reference' only. model: fingerprint of the weights.
    """

    preset: Preset
    prompt: str
    negative_prompt: str
    seed: int
    noise: str
    image: str
    height: int
    width: int
    intrinsics: tuple[float, float, float, float]
    translation_unit: float
    unit_rule: str
    first_delta: FirstDelta
    fps: float
    chunks: int | None
    model: str

    def require_same(self, other: StartRecord) -> None:
        """Raises HistoryError naming the first field in which two starts differ."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                shown = (mine.label, theirs.label) if isinstance(mine, Preset) else (mine, theirs)
                raise HistoryError(
                    f"this history was recorded with {field.name}={shown[0]!r}, but here it is {shown[1]!r}"
                )


@dataclass(frozen=True, eq=False)
class ChunkRecord:
    """One finished chunk. latents: float32 [16, frames, h, w] on the CPU; prompt: the one in force.

    last_input: float32 input of the last step, held only with reuse_last_step_kv. timings: seconds per stage.
    """

    index: int
    controls: Controls
    prompt: str
    noise: str
    latents: Tensor
    last_input: Tensor | None
    timings: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class History:
    """A frozen list of finished chunks behind a start record; ``append`` and ``first`` return new ones."""

    start: StartRecord
    chunks: tuple[ChunkRecord, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks)

    def append(self, record: ChunkRecord) -> History:
        """This history and one more chunk."""
        if record.index != len(self.chunks):
            raise HistoryError(f"chunk {record.index} cannot follow {len(self.chunks)} chunks")
        return replace(self, chunks=(*self.chunks, record))

    def first(self, chunks: int) -> History:
        """The first ``chunks`` chunks."""
        if isinstance(chunks, bool) or not isinstance(chunks, int):
            raise HistoryError(f"a number of chunks must be a whole number, not {chunks!r}")
        if not 0 <= chunks <= len(self.chunks):
            raise HistoryError(f"{chunks} chunks were asked for; this history has {len(self.chunks)}")
        return replace(self, chunks=self.chunks[:chunks])

    def with_timings(self, timings: Mapping[str, float]) -> History:
        """The same history with the timings of its last chunk set."""
        return replace(self, chunks=(*self.chunks[:-1], replace(self.chunks[-1], timings=dict(timings))))

    def with_unit(self, unit: float, rule: str) -> History:
        """The same history with another translation unit, as long as nothing has moved: then it means the same.

        Raises HistoryError once a chunk has moved.
        """
        if moved := [c.index for c in self.chunks if c.controls.relative[:, :3, 3].any()]:
            raise HistoryError(
                f"the translation unit is {self.start.translation_unit:g} ({self.start.unit_rule}) since chunk "
                f"{moved[0]} moved by it; start a new world for another one"
            )
        return replace(self, start=replace(self.start, translation_unit=check_unit(unit), unit_rule=rule))

    @property
    def carry(self) -> CameraCarry:
        """The camera pose that the next chunk goes on from."""
        if not self.chunks:
            return CameraCarry.start()
        pose: np.ndarray = self.chunks[-1].controls.pose_after
        return CameraCarry(pose, len(self.chunks) * self.start.preset.chunk)

    @property
    def prompt(self) -> str:
        """The prompt in force at the end."""
        return self.chunks[-1].prompt if self.chunks else self.start.prompt

    @property
    def frames(self) -> int:
        """Video frames so far."""
        return self.start.preset.frames(len(self.chunks))

    @property
    def nbytes(self) -> int:
        """Bytes of all latents."""
        kept = [t for c in self.chunks for t in (c.latents, c.last_input) if t is not None]
        return sum(t.nbytes for t in kept)

    def summary(self) -> dict[str, Any]:
        """What a report says of a run: JSON types only."""
        s = self.start
        return {
            "preset": s.preset.label,
            "seed": s.seed,
            "noise": s.noise,
            "prompt": s.prompt,
            "negative_prompt": s.negative_prompt,
            "height": s.height,
            "width": s.width,
            "fps": s.fps,
            "translation_unit": s.translation_unit,
            "translation_unit_rule": s.unit_rule,
            "first_delta": s.first_delta,
            "intrinsics": list(s.intrinsics),
            "image_digest": s.image,
            "model_fingerprint": s.model,
            "chunks": len(self.chunks),
            "frames": self.frames,
            "prompt_changes": self._prompt_changes(),
        }

    def _prompt_changes(self) -> list[dict[str, Any]]:
        prompts = [self.start.prompt, *(c.prompt for c in self.chunks)]
        return [{"chunk": i, "prompt": new} for i, (old, new) in enumerate(pairwise(prompts)) if new != old]
