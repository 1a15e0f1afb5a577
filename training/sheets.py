"""Contact sheets of a judged walk: the rendered truth above, the model below, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Picture = NDArray[np.uint8]
COLUMNS = 6
SCALE, GAP, LINE = 2, 4, 18
BACKGROUND, INK = 24, 225
NAMES = {"w": "W: forward", "s": "S: back", "a": "A: left", "d": "D: right", "j": "J: look left", "l": "L: look right",
         "ik": "I, K: look up, down", "ki": "K, I: look down, up"}  # fmt: skip


def columns(frames: int) -> list[int]:
    """Which frames a sheet shows: the first and then evenly to the last."""
    return [round(at) for at in np.linspace(0, frames - 1, COLUMNS).tolist()]


def pick(frames: Tensor) -> Tensor:
    """The shown frames uint8 [COLUMNS, 3, H, W] of floats in 0..1 or uint8 [F, 3, H, W]."""
    chosen = frames[columns(len(frames))].cpu()
    return chosen if chosen.dtype == torch.uint8 else (chosen.clamp(0, 1) * 255 + 0.5).to(torch.uint8)


def sheet(title: str, frames: int, pairs: Sequence[tuple[Tensor, Tensor]], fps: float = 16.0) -> Picture:
    """uint8 RGB. pairs: (truth, model) as :func:`pick` gives them, one pair of rows each. frames: of the walk."""
    height, width = (side * SCALE for side in pairs[0][0].shape[-2:])
    across = GAP + COLUMNS * (width + GAP)
    down = 2 * LINE + len(pairs) * (2 * height + 3 * GAP)
    out: Picture = np.full((down, across, 3), BACKGROUND, np.uint8)
    _write(out, f"{title}.  Above: rendered truth; below: the model", GAP, LINE - 4)
    for column, frame in enumerate(columns(frames)):
        x = GAP + column * (width + GAP)
        _write(out, f"{frame / fps:.1f} s", x, 2 * LINE - 4)
        for row, pair in enumerate(pairs):
            for line, part in enumerate(pair):
                y = 2 * LINE + row * (2 * height + 3 * GAP) + line * (height + GAP // 2)
                out[y : y + height, x : x + width] = _enlarged(part[column])
    return out


def save(path: Path, picture: Picture) -> None:
    """Writes a PNG."""
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    done, data = cv2.imencode(".png", picture[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 9])
    if not done:
        raise OSError(f"{path}: the picture could not be encoded")
    path.write_bytes(data.tobytes())


def _enlarged(frame: Tensor) -> Picture:
    return frame.permute(1, 2, 0).numpy().repeat(SCALE, axis=0).repeat(SCALE, axis=1)


def _write(picture: Picture, text: str, x: int, y: int) -> None:
    import cv2

    cv2.putText(picture, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (INK,) * 3, 1, cv2.LINE_AA)
