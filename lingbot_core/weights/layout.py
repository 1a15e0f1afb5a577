"""Which files of a folder are the transformer, the VAE, the text encoder and the tokenizer, and which preset fits.

Two layouts are known: component folders (``transformer`` or ``transformers``, ``vae``, ``text_encoder``,
``tokenizer``; the embedded tiny model has it), and the published one of LingBot-World v1, where the transformer lies
in ``lingbot_world_fast`` beside ``Wan2.1_VAE.pth``, ``models_t5_umt5-xxl-enc-bf16.pth`` and ``google/umt5-xxl``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputFileError, PresetError, WeightsError
from ..presets import PRESETS, Preset, get_preset

TINY = "tiny"
EMBEDDED_TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"

TRANSFORMER_FOLDERS = ("transformer", "transformers", "lingbot_world_fast")
VAE_FILES = ("Wan2.1_VAE.pth", "Wan2.1_VAE.safetensors", "wan_2.1_vae.safetensors")
TEXT_FILES = ("models_t5_umt5-xxl-enc-bf16.pth", "models_t5_umt5-xxl-enc-bf16.safetensors")
REFUSED_FOLDERS = ("low_noise_model", "high_noise_model")

# What a folder's own name says about its recipe; the names are those of the published repositories.
PRESET_BY_FOLDER = (
    ("lingbot_world_fast", "v1-fast"),
    ("lingbot-world-fast", "v1-fast"),
    ("causal-fast-diffusers", "v2-diffusers"),
    ("lingbot-world-v2-14b-causal-fast", "v2-causal-fast"),
    ("transformer_causal", "v2-causal-pretrain"),
)


@dataclass(frozen=True)
class Layout:
    """The parts of one model on disk. text, tokenizer: None when they are not there.

    preset_reason: why ``preset`` was chosen, or why none could be. native_area: pixels of a picture at the size the
    model was made for, when it says so.
    """

    name: str
    transformer: tuple[Path, ...]
    transformer_config: dict[str, Any]
    vae: Path
    text: tuple[Path, ...]
    text_config: dict[str, Any] | None
    tokenizer: Path | None
    preset: Preset | None
    preset_reason: str
    native_area: int | None

    def require_preset(self) -> Preset:
        """The preset, or PresetError listing those one can choose from."""
        if self.preset is None:
            raise PresetError(f"{self.name}: {self.preset_reason}; choose a preset: {', '.join(PRESETS)}")
        return self.preset


def find_layout(model: str | Path) -> Layout:
    """Looks at a folder, or at the embedded model for ``tiny``. Raises InputFileError or WeightsError."""
    root = EMBEDDED_TINY if str(model) == TINY else Path(model).expanduser()
    if not root.exists():
        raise InputFileError(f"model {str(model)!r} does not exist; give the folder of a LingBot-World model, or {TINY!r}")
    if not root.is_dir():
        raise InputFileError(f"model {str(model)!r} is a file; give the folder that holds transformer, VAE and text encoder")
    root = root.resolve()
    base, transformer = _transformer(root)
    about = _json(base / "world.json")
    preset, reason = _preset(about, transformer, base)
    text, tokenizer = _text(base)
    return Layout(
        name=str(about.get("name", base.name)),
        transformer=_tensors(transformer),
        transformer_config=_json(transformer / "config.json"),
        vae=_vae(base),
        text=text,
        text_config=_json(text[0].parent / "config.json") or None if text else None,
        tokenizer=tokenizer,
        preset=preset,
        preset_reason=reason,
        native_area=about.get("native_area"),
    )


def _transformer(root: Path) -> tuple[Path, Path]:
    """(folder of the other parts, folder of the transformer)."""
    if root.name in REFUSED_FOLDERS:
        raise WeightsError(f"{root}: this is an expert of the bidirectional Base model; LingBot-World-Fast is needed")
    for name in TRANSFORMER_FOLDERS:
        if (root / name).is_dir():
            return root, root / name
    if any(root.glob("*.safetensors")) and (root / "config.json").is_file():
        return root.parent, root
    refused = [name for name in REFUSED_FOLDERS if (root / name).is_dir()]
    if refused:
        raise WeightsError(
            f"{root} holds {' and '.join(refused)}: the experts of the bidirectional Base model cannot be used; put "
            "LingBot-World-Fast into its sub-folder lingbot_world_fast"
        )
    raise WeightsError(f"{root}: no transformer found; looked for {', '.join(TRANSFORMER_FOLDERS)} with *.safetensors")


def _tensors(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder; shards are checked against their index."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise WeightsError(f"{folder}: there is no *.safetensors file in it")
    for index in folder.glob("*.safetensors.index.json"):
        wanted = set(_json(index).get("weight_map", {}).values())
        missing = sorted(wanted - {f.name for f in files})
        if missing:
            raise WeightsError(f"{folder}: {len(missing)} of {len(wanted)} shards are missing, the first is {missing[0]}")
        files = tuple(f for f in files if f.name in wanted)
    return files


def _vae(base: Path) -> Path:
    candidates = [*sorted((base / "vae").glob("*.safetensors")), *(base / name for name in VAE_FILES)]
    for file in candidates:
        if file.is_file():
            return file
    raise WeightsError(f"{base}: no VAE found; put Wan2.1_VAE.pth or wan_2.1_vae.safetensors there")


def _text(base: Path) -> tuple[tuple[Path, ...], Path | None]:
    folder = base / "text_encoder"
    files = _tensors(folder) if folder.is_dir() else tuple(base / n for n in TEXT_FILES if (base / n).is_file())[:1]
    tokenizer = next((p for p in (base / "tokenizer", base / "google" / "umt5-xxl") if p.is_dir()), None)
    return files, tokenizer


def _preset(about: dict[str, Any], transformer: Path, base: Path) -> tuple[Preset | None, str]:
    if "preset" in about:
        return get_preset(about["preset"]), f"world.json names {about['preset']}"
    for marker, name in PRESET_BY_FOLDER:
        for folder in (transformer, base):
            if folder.name.lower() == marker or folder.name.lower().endswith(marker):
                return get_preset(name), f"the folder is called {folder.name}"
    return None, "its files do not say which sampling recipe it was made for"


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputFileError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputFileError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data
