"""A contact sheet: a few frames of every chunk in one picture, a row per chunk, each with its number and time."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]

COLUMNS = 4
MAX_ROWS = 24
LONG_SIDE = 256  # of a frame on the sheet
MIN_CELL = 232  # room for a caption
MARGIN, LINE = 8, 20
CHARACTER = 8  # width of one, roughly
BACKGROUND, INK, QUIET = 24, 235, 160


class ContactSheet:
    """Keeps small copies of frames as they come, so that a long run takes no more memory than a short one.

    chunks: of the whole run; of more than ``MAX_ROWS`` some are left out evenly.
    """

    def __init__(self, chunks: int, fps: float) -> None:
        rows = min(chunks, MAX_ROWS)
        self._chosen = {round(index) for index in np.linspace(0, chunks - 1, rows).tolist()}
        self._chunks, self._fps, self._frames = chunks, fps, 0
        self._rows: list[list[tuple[str, Picture]]] = []

    def add(self, chunk: int, frames: Picture) -> None:
        """The frames of the next chunk, uint8 [T, H, W, 3]."""
        begun, self._frames = self._frames, self._frames + len(frames)
        if chunk not in self._chosen:
            return
        row = []
        for index in dict.fromkeys(round(at) for at in np.linspace(0, len(frames) - 1, COLUMNS).tolist()):
            number = begun + index
            row.append((f"chunk {chunk}  frame {number}  {number / self._fps:.2f} s", _small(frames[index])))
        self._rows.append(row)

    def draw(self, heading: Sequence[str]) -> Picture:
        """The sheet, uint8 [H, W, 3] RGB. heading: lines above it, of which a font without accents shows ASCII."""
        height, width = self._rows[0][0][1].shape[:2] if self._rows else (0, 0)
        cell = max(width, MIN_CELL)
        across = MARGIN + COLUMNS * (cell + MARGIN)
        lines = [line for text in heading for line in textwrap.wrap(text, (across - 2 * MARGIN) // CHARACTER)]
        if self._chunks > len(self._chosen):
            lines.append(f"{len(self._chosen)} of {self._chunks} chunks are shown")
        top = MARGIN + LINE * len(lines)
        down = LINE + height + MARGIN
        sheet: Picture = np.full((top + down * len(self._rows) + MARGIN, across, 3), BACKGROUND, np.uint8)
        for number, line in enumerate(lines):
            _write(sheet, line, MARGIN, LINE * (number + 1), INK if number == 0 else QUIET)
        for row, frames in enumerate(self._rows):
            for column, (caption, picture) in enumerate(frames):
                x, y = MARGIN + column * (cell + MARGIN), top + row * down
                _write(sheet, caption, x, y + LINE - 6, QUIET)
                sheet[y + LINE : y + LINE + height, x : x + width] = picture
        return sheet


def _small(frame: Picture) -> Picture:
    """A frame with its long side at ``LONG_SIDE``; small ones are enlarged without being smoothed."""
    import cv2

    height, width = frame.shape[:2]
    scale = LONG_SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resized: Picture = cv2.resize(frame, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST)
    return resized


def _write(sheet: Picture, text: str, x: int, y: int, grey: int) -> None:
    import cv2

    shown = text.encode("ascii", "replace").decode("ascii")
    cv2.putText(sheet, shown, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (grey, grey, grey), 1, cv2.LINE_AA)
