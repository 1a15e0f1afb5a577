"""Which sampling recipe a checkpoint was made for, and its licence.

Neither can be read from tensor names: models of different recipes have the same names and shapes. So the evidence is,
in this order, the metadata of our own files, the names of folder or file, config.json, and model_index.json with the
scheduler beside it. Guessing would give a video that looks nearly right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WeightsError
from ..presets import PRESETS, Preset, get_preset
from .metadata import FileMetadata

REFUSED_NAMES = ("low_noise", "high_noise")

# The names of the published repositories, of their folders, and of files made from them.
_NAMES = (
    (r"lingbot[-_]?world[-_]?v2.*causal[-_]?fast[-_]diffusers\b", "v2-diffusers"),
    (r"lingbot[-_]?world[-_]?v2.*causal[-_]?fast(?![a-z])", "v2-causal-fast"),
    (r"lingbot[-_]?world[-_]?v2.*causal[-_]?pretrain(?![a-z])", "v2-causal-pretrain"),
    (r"lingbot[-_]?world[-_]?fast(?![a-z])", "v1-fast"),
    (r"transformers", "v2-causal-fast"),
    (r"transformer_causal", "v2-causal-pretrain"),
)
_DIFFUSERS_CLASS = "CausalLingBotWorldTransformer3DModel"
_DIFFUSERS_CONFIG = {"sink_size": 9, "num_frames_per_block": 3, "sliding_window_num_frames": 18}

APACHE = "Apache-2.0 (LingBot-World v1, as published)"
NON_COMMERCIAL = "CC BY-NC-SA 4.0: not for commercial use (LingBot-World v2, as published)"
OWN = "Apache-2.0 (part of this pack)"
UNKNOWN = (
    "unknown: the files do not say which release they are; v1 is Apache-2.0, v2 is CC BY-NC-SA 4.0 (not for commercial "
    "use)"
)


@dataclass(frozen=True)
class Evidence:
    """preset: None when nothing points to one; reason: what points to it, or that nothing does."""

    preset: Preset | None
    reason: str

    @property
    def licence(self) -> str:
        """Of the weights, after the release that the evidence points to."""
        if self.preset is None:
            return UNKNOWN
        if self.preset.name == "tiny":
            return OWN
        return NON_COMMERCIAL if self.preset.name.startswith("v2") else APACHE


def find_preset(
    *,
    about: Mapping[str, Any],
    metadata: FileMetadata | None,
    names: Sequence[Path],
    config: Mapping[str, Any],
    index: Mapping[str, Any],
    scheduler: Mapping[str, Any],
) -> Evidence:
    """Weighs the evidence in its order.

    about: the world.json of an embedded model. names: folders or files whose names count, the nearest first. config,
    index, scheduler: contents of config.json, model_index.json and scheduler_config.json, or {}.
    """
    if "preset" in about:
        return Evidence(get_preset(str(about["preset"])), f"world.json names {about['preset']}")
    if metadata is not None and metadata.preset is not None:
        if metadata.preset not in PRESETS:
            raise WeightsError(
                f"{names[0]}: its metadata names the preset {metadata.preset!r}, which this version does not have; "
                f"choose one of {', '.join(PRESETS)}"
            )
        return Evidence(get_preset(metadata.preset), f"the file's metadata names {metadata.preset}")
    for path in names:
        for pattern, preset in _NAMES:
            name = path.name.lower()
            if (re.search if "lingbot" in pattern else re.fullmatch)(pattern, name):
                return Evidence(get_preset(preset), f"the {_kind(path)} is called {path.name}")
    if config.get("_class_name") == _DIFFUSERS_CLASS or _DIFFUSERS_CONFIG.items() <= config.items():
        return Evidence(get_preset("v2-diffusers"), "its config.json is that of the diffusers release of v2")
    entry = index.get("transformer")
    listed = entry[-1] if isinstance(entry, list) and entry else None
    shift = scheduler.get("flow_shift", scheduler.get("shift", 5.0))
    if (listed == _DIFFUSERS_CLASS or "LingBotWorld" in str(index.get("_class_name", ""))) and shift == 5.0:
        return Evidence(get_preset("v2-diffusers"), "its model_index.json is that of the diffusers release of v2")
    return Evidence(None, "its files do not say which sampling recipe it was made for")


def refuse_base(paths: Sequence[Path]) -> None:
    """Raises WeightsError when a name is that of an expert of the bidirectional Base model.

    Its tensors have the very names and shapes of ours, so the name is all there is to go by.
    """
    for path in paths:
        for name in REFUSED_NAMES:
            if name in path.name.lower():
                raise WeightsError(
                    f"{path} is an expert of the bidirectional Base model (its name has {name}), which cannot make a "
                    "world chunk by chunk; use LingBot-World-Fast, whose folder is lingbot_world_fast or transformers"
                )


def _kind(path: Path) -> str:
    return "file" if path.is_file() else "folder"
