"""What our own files say about themselves, in the metadata of their safetensors header (all of it text)."""

from __future__ import annotations

import json
import re
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
ABOUT = "lingbot_world.about"
# A checksum that changes with the files a converted one was made from.
MADE_FROM = "lingbot_world.made_from"


@dataclass(frozen=True)
class FileMetadata:
    """preset: name of the recipe the weights were made for, where it was known. control: ``cam`` or ``act``, for a
    transformer. config: what tensor shapes do not show (num_heads, text_len). source: where the weights came from.
    about: what the model's world.json says besides the preset, for a transformer."""

    preset: str | None = None
    control: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


def write_metadata(about: FileMetadata) -> dict[str, str]:
    """The entries for a safetensors header."""
    entries = {
        FORMAT: str(FORMAT_VERSION),
        PRESET: about.preset,
        CONTROL: about.control,
        CONFIG: json.dumps(dict(about.config), sort_keys=True) if about.config else None,
        SOURCE: about.source,
        ABOUT: json.dumps(dict(about.about), sort_keys=True) if about.about else None,
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
    return FileMetadata(
        preset=entries.get(PRESET),
        control=entries.get(CONTROL),
        config=_object(entries, CONFIG, where),
        source=entries.get(SOURCE),
        about=_object(entries, ABOUT, where),
    )


def _object(entries: Mapping[str, str], key: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(entries.get(key, "{}"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where}: metadata {key} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{where}: metadata {key} must hold a JSON object")
    return found


def file_name(model: str) -> str:
    """The name of a model as our files have it: small letters, without a dtype at its end."""
    return re.sub(r"([_.-](bf16|fp16|fp32|fp8\w*|scaled))+$", "", re.sub(r"[^a-z0-9.-]+", "_", model.lower()))
