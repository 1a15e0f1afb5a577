"""Event scripts as people type them: rows "chunk: prompt | keys", and JSON lines.

A row says what changes when its chunk begins::

    0: A meadow at noon | w
    2: | w w wj
    4: Night falls | none

Chunks count from 0 and rise from row to row. What a row leaves out stays as it is: a prompt holds until the next one,
and keys stay down until a row with a ``|`` says otherwise. Keys are those of the whole chunk, or one entry for each
latent frame, of which the last stays down. Empty rows and those that begin with ``#`` are skipped.
"""

from __future__ import annotations

import re

from ..camera.controls import KeyMotion
from ..camera.key_text import keys_of_chunk
from ..camera.keys import KeySteps
from ..errors import InputFileError, LingBotError
from .events import MAX_LINES, ChunkEvent, parse_events

MAX_TEXT = 1 << 26
"""Characters of a whole script."""

_ROW = re.compile(r"\s*(\d{1,9})\s*[:\uff1a](.*)", re.DOTALL)


def parse_script(text: str, *, chunk: int, steps: KeySteps, chunks: int | None = None) -> list[ChunkEvent]:
    """One event for each chunk, from JSON lines (``engine.events``) if the text begins with ``{``, else from rows.

    chunk: latent frames of a chunk. steps: what a held key does. chunks: how many are wanted; the last row then holds
    up to there. Raises InputFileError, PromptError or CameraError naming the line.
    """
    if len(text) > MAX_TEXT:
        raise InputFileError(f"the event script is {len(text)} characters long; at most {MAX_TEXT} are accepted")
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        return parse_events(text, chunk=chunk, steps=steps)
    return parse_rows(text, chunk=chunk, steps=steps, chunks=chunks)


def parse_rows(text: str, *, chunk: int, steps: KeySteps, chunks: int | None = None) -> list[ChunkEvent]:
    """As :func:`parse_script`, for rows only."""
    rows: dict[int, tuple[str | None, tuple[str, ...] | None]] = {}
    for number, line in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"events, line {number}"
        match = _ROW.fullmatch(line)
        if match is None:
            raise InputFileError(
                f'{where}: {line.strip()[:40]!r} does not begin with a chunk; write "0: prompt | keys"'
            )
        index = int(match[1])
        if index >= MAX_LINES:
            raise InputFileError(f"{where}: chunk {index} is beyond the {MAX_LINES} chunks that a script may have")
        if rows and index <= (last := max(rows)):
            raise InputFileError(f"{where}: chunk {index} follows chunk {last}; chunks must rise from row to row")
        rows[index] = _row(match[2], chunk, where)
    if not rows:
        raise InputFileError('there are no events; write rows such as "0: A meadow at noon | w", or JSON lines')
    return _events(rows, max(max(rows) + 1, min(chunks or 0, MAX_LINES)), chunk, steps)


def _row(text: str, chunk: int, where: str) -> tuple[str | None, tuple[str, ...] | None]:
    """The prompt and the keys per latent frame that a row gives, None for what it leaves out."""
    prompt, bar, keys = text.replace("\uff5c", "|").rpartition("|")
    if not bar:
        return keys.strip() or None, None
    try:
        held = keys_of_chunk(keys, chunk=chunk) if keys.strip() else ("",) * chunk
    except LingBotError as error:
        raise type(error)(f"{where}: {error} (what stands behind the last | are keys)") from None
    return prompt.strip() or None, held


def _events(
    rows: dict[int, tuple[str | None, tuple[str, ...] | None]], chunks: int, chunk: int, steps: KeySteps
) -> list[ChunkEvent]:
    events, held = [], ("",) * chunk
    for index in range(chunks):
        prompt, keys = rows.get(index, (None, None))
        held = (held[-1],) * chunk if keys is None else keys
        events.append(ChunkEvent(index, prompt, KeyMotion(held, steps)))
    return events
