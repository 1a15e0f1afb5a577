"""What our own files say about themselves, in the metadata of their safetensors header (all of it text)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import WeightsError

FORMAT_VERSION = 1
FORMAT = "lingbot_world.format"
PRESET = "lingbot_world.preset"
CONTROL = "lingbot_world.control"
CONFIG = "lingbot_world.config"
SOURCE = "lingbot_world.source"


@dataclass(frozen=True)
class FileMetadata:
    """preset: name of the recipe the weights were made for, where it was known. control: ``cam`` or ``act``, for a
    transformer. config: what tensor shapes do not show (num_heads, text_len). source: where the weights came from."""

    preset: str | None = None
    control: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None


def write_metadata(about: FileMetadata) -> dict[str, str]:
    """The entries for a safetensors header."""
    entries = {
        FORMAT: str(FORMAT_VERSION),
        PRESET: about.preset,
        CONTROL: about.control,
        CONFIG: json.dumps(dict(about.config), sort_keys=True) if about.config else None,
        SOURCE: about.source,
    }
    return {key: value for key, value in entries.items() if value is not None}


def read_metadata(entries: Mapping[str, str], where: str) -> FileMetadata | None:
    """What a header says, or None when it is not one of ours. Raises WeightsError for one that cannot be understood."""
    if FORMAT not in entries:
        return None
    if entries[FORMAT] != str(FORMAT_VERSION):
        raise WeightsError(
            f"{where}: metadata {FORMAT} is {entries[FORMAT]!r}, this version reads {FORMAT_VERSION}; update this "
            "package, or convert the file again"
        )
    try:
        config = json.loads(entries.get(CONFIG, "{}"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where}: metadata {CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{where}: metadata {CONFIG} must hold a JSON object")
    return FileMetadata(entries.get(PRESET), entries.get(CONTROL), config, entries.get(SOURCE))
