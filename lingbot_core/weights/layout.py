"""What a path is: which files are the transformer, the VAE, the text encoder and the tokenizer of a model.

Known are the published folders of v1 (the transformer in ``lingbot_world_fast``, the rest beside it as .pth) and of v2
(``transformers``, ``transformer_causal``), component folders in the manner of diffusers (the embedded tiny model is
one), single files as ComfyUI keeps them, and ComfyUI's folder of models when it holds one of ours. Every part may also
be given by a path of its own.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputFileError, LingBotError, PresetError, WeightsError
from ..presets import PRESETS, Preset
from .checkpoint import Checkpoint
from .evidence import REFUSED_NAMES, Evidence, find_preset, refuse_base
from .files import SAFETENSORS, names_the_path, open_file
from .folder import SHARD, existing, listing, own_listing, read_json, tensor_files, tensors_in
from .keys import TEXT, TRANSFORMER, VAE, identify, is_steerable
from .metadata import file_name
from .tokenizer import FILES, UMT5_VOCABULARY, inside

TINY = "tiny"
SINGLE = "single file, as ComfyUI keeps them"
EMBEDDED_TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"

TRANSFORMER_FOLDERS = ("lingbot_world_fast", "transformers", "transformer", "transformer_causal")
BASE_FOLDERS = ("low_noise_model", "high_noise_model")
VAE_NAMES = ("Wan2.1_VAE.pth", "Wan2.1_VAE.safetensors", "wan_2.1_vae.safetensors", "Wan2_1_VAE_*.safetensors")
TEXT_NAMES = ("models_t5_umt5-xxl-enc-bf16.pth", "models_t5_umt5-xxl-enc-bf16.safetensors", "umt5[-_]xxl*.safetensors")
TOKENIZER_FOLDERS = ("tokenizer", "google/umt5-xxl", "umt5-xxl")
# ComfyUI's names.
TEXT_FOLDERS = ("text_encoders", "clip")
MODEL_FOLDERS = ("diffusion_models", "unet")
# How deep in them models are looked for.
DEPTHS = ("*", "*/*", "*/*/*")
# Where v1's README puts the model that its other parts come from.
DIFFUSERS_FILE = "diffusion_pytorch_model"
V1_BASE = ("lingbot-world-base-cam", "lingbot-world-base-act")
SOURCE = "robbyant/lingbot-world-base-cam has it"

_WHAT = {
    "lingbot_world_fast": "LingBot-World v1 folder",
    "transformers": "LingBot-World v2 folder",
    "transformer_causal": "LingBot-World v2 folder",
    "transformer": "folder of components, in the manner of diffusers",
}


@dataclass(frozen=True)
class Part:
    """Files of one part and what config.json beside them says ({} without one)."""

    kind: str
    files: tuple[Path, ...]
    config: dict[str, Any] = field(default_factory=dict)

    def open(self) -> Checkpoint:
        """Reads the headers. Raises WeightsError."""
        return Checkpoint(self.kind, self.files)


@dataclass(frozen=True)
class Layout:
    """The parts of one model on disk; None for those that are not there.

    tokenizer: a folder, a spiece.model, a tokenizer.json, or a text encoder's file with one of them inside.
    what: the kind of layout, for people. base: the folder in which missing parts are looked for. native_area: pixels of
    a picture at the size the model was made for, when it says so. about: what the model says of itself: its world.json,
    or what was carried over from it into the metadata of a converted file. notes: what else is worth knowing.
    """

    name: str
    what: str
    base: Path
    transformer: Part
    vae: Part | None
    text: Part | None
    tokenizer: Path | None
    evidence: Evidence
    native_area: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def preset(self) -> Preset | None:
        """The recipe the files point to."""
        return self.evidence.preset

    @property
    def preset_reason(self) -> str:
        """Why ``preset`` was chosen, or why none could be."""
        return self.evidence.reason

    @property
    def missing(self) -> dict[str, str]:
        """Absent part -> what to put where."""
        advice = {}
        if self.vae is None:
            advice[VAE] = (
                f"put Wan2.1_VAE.pth or wan_2.1_vae.safetensors into {self._place('vae')}, or give it with --vae"
            )
        if self.text is None:
            advice[TEXT] = (
                f"put models_t5_umt5-xxl-enc-bf16.pth or umt5_xxl_fp16.safetensors into {self._place(*TEXT_FOLDERS)}, "
                "or give it with --text-encoder"
            )
        if self.tokenizer is None and vocabulary(self.text) == UMT5_VOCABULARY:
            advice["tokenizer"] = f"put the folder google/umt5-xxl into {self.base}, or give it with --tokenizer"
        said = {part: f"{text} ({SOURCE})" for part, text in advice.items()}
        if self.tokenizer is None and "tokenizer" not in advice:
            said["tokenizer"] = (
                "this text encoder has a vocabulary of its own, which umT5's tokenizer does not fit; put its own "
                f"tokenizer folder, called tokenizer, into {self.base}, or give it with --tokenizer"
            )
        return said

    def _place(self, *names: str) -> Path:
        return next((self.base / name for name in names if (self.base / name).is_dir()), self.base)

    def require(self, *parts: str) -> None:
        """Raises WeightsError saying where to put those of the parts that are absent."""
        absent = [f"there is no {part}: {advice}" for part, advice in self.missing.items() if part in parts]
        if absent:
            raise WeightsError(f"{self.name}: " + "; ".join(absent))

    def require_preset(self) -> Preset:
        """The preset, or PresetError listing those one can choose from."""
        if self.preset is None:
            raise PresetError(f"{self.name}: {self.preset_reason}; choose a preset: {', '.join(PRESETS)}")
        return self.preset


@names_the_path
def find_layout(
    model: str | Path,
    *,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> Layout:
    """Looks at a folder, a single file, or at the embedded model for ``tiny``; only headers are read.

    vae, text_encoder: a file or folder each; tokenizer: a folder, a spiece.model, a tokenizer.json, or a text encoder's
    file that has one of them inside; to be used instead of what lies beside the model.
    Raises InputFileError or WeightsError.
    """
    root = (
        EMBEDDED_TINY if str(model) == TINY else existing(model, "model", f"; give a LingBot-World model, or {TINY!r}")
    )
    refuse_base([root, root.parent])
    found = _single_file(root) if root.is_file() else _folder(root)
    world = read_json(found.base / "world.json")
    checkpoint = found.part.open()
    own = checkpoint.about
    about = {**world, **(own.about if own else {})}
    evidence = find_preset(
        about=world,
        metadata=own,
        names=found.names,
        config=found.part.config,
        index=read_json(found.base / "model_index.json"),
        scheduler=read_json(found.base / "scheduler" / "scheduler_config.json"),
    )
    places = places_of_parts(found.base, found.part.files[0].parent)
    source = own.source if own else None
    text = _find_text(places, source) if text_encoder is None else _given(TEXT, existing(text_encoder, "text encoder"))
    if tokenizer is not None:
        words: Path | None = existing(tokenizer, "tokenizer")
    else:
        # The one inside belongs to the text encoder; a folder beside it may be another model's.
        words = (None if text is None else inside(text.files)) or _find_tokenizer(places)
    return Layout(
        name=str(about.get("name", found.name)),
        what=found.what,
        base=found.base,
        transformer=found.part,
        vae=_find_vae(places, source) if vae is None else _given(VAE, existing(vae, "VAE")),
        text=text,
        tokenizer=words,
        evidence=evidence,
        native_area=_area(about, found.part.files[0]),
        about=about,
        notes=found.notes,
    )


@dataclass(frozen=True)
class _Found:
    """A transformer. names: the paths whose names are evidence, the nearest first."""

    name: str
    what: str
    base: Path
    part: Part
    names: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def _folder(root: Path) -> _Found:
    listing(root)
    within = [name for name in TRANSFORMER_FOLDERS if (root / name).is_dir()]
    if within:
        folder, base = root / within[0], root
        what = _WHAT[within[0]]
    elif refused := [root / name for name in BASE_FOLDERS if (root / name).is_dir()]:
        refuse_base(refused)
    elif root.name == MODEL_FOLDERS[0] and not (root / "config.json").is_file():
        return _models(root.parent)
    elif any((root / name).is_dir() for name in MODEL_FOLDERS):
        return _models(root)
    elif tensor_files(root):
        folder, base = root, root.parent
        what = _WHAT.get(root.name, "folder of a transformer alone")
    else:
        raise WeightsError(
            f"{root}: no transformer found; looked for *.safetensors in it and in "
            f"{', '.join((*TRANSFORMER_FOLDERS, MODEL_FOLDERS[0]))}; "
            "give the folder or the file of a LingBot-World model"
        )
    if base == EMBEDDED_TINY:
        what = "the embedded model"
    notes = [f"{root / name} is another transformer; give that folder to use it" for name in within[1:]]
    part = Part(TRANSFORMER, tensors_in(folder), read_json(folder / "config.json"))
    names = [folder, *([] if folder == base else [base])]
    if root.parent.name == "snapshots":
        # The cache of huggingface_hub: models--OWNER--NAME/snapshots/REVISION.
        names.append(root.parent.parent)
    elif folder == root and folder.parent.parent.name == "snapshots":
        names.append(folder.parent.parent.parent)
    # A folder that holds a transformer alone may have the other parts in it as well as beside it.
    if folder == root and root.name not in TRANSFORMER_FOLDERS:
        base = root
    return _Found(base.name, what, base, part, tuple(names), tuple(notes))


def _models(root: Path) -> _Found:
    """ComfyUI's folder of all models, when exactly one of them is ours; those of other kinds are passed over."""
    found: list[Path] = []
    refused: list[Path] = []
    unreadable: list[Path] = []
    for path in _transformer_files(root):
        try:
            ours = is_steerable(open_file(path).entries)
        except LingBotError:
            unreadable.append(path)
            continue
        if ours:
            (refused if any(name in path.name.lower() for name in REFUSED_NAMES) else found).append(path)
    if len(found) == 1:
        return replace(_single_file(found[0]), base=root, what="ComfyUI's folder of models")
    if found:
        raise InputFileError(
            f"{root} holds {len(found)} LingBot-World transformers; name one of them: {', '.join(map(str, found))}"
        )
    refuse_base(refused)
    broken = f" ({', '.join(path.name for path in unreadable)} cannot be read)" if unreadable else ""
    raise WeightsError(
        f"{root}: no *.safetensors file in {root / MODEL_FOLDERS[0]} is a LingBot-World transformer{broken}; put one "
        "there, or give a model's own folder or file"
    )


def _transformer_files(root: Path) -> list[Path]:
    """Safetensors files in ComfyUI's folders of transformers, sorted, each once whatever links lead to it."""
    for name in MODEL_FOLDERS:
        listing(root / name)  # glob passes over folders that may not be read
    files = [path for name in MODEL_FOLDERS for depth in DEPTHS for path in (root / name).glob(depth)]
    files = [path for path in files if path.suffix.lower() in SAFETENSORS and path.is_file()]
    return sorted({os.path.realpath(path): path for path in reversed(files)}.values())


def _single_file(file: Path) -> _Found:
    if SHARD.fullmatch(file.name):
        raise InputFileError(f"{file} is one of several shards; give its folder {file.parent}")
    if file.suffix == ".json":
        raise InputFileError(f"{file} is not a file of tensors; give its folder {file.parent}")
    if file.name.startswith(DIFFUSERS_FILE):
        return _folder(file.parent)
    return _Found(file.stem, SINGLE, base_of_file(file), Part(TRANSFORMER, (file,)), (file, file.parent))


def base_of_file(file: Path) -> Path:
    """The folder that a single file's other parts are looked for in: ComfyUI's folder of models, or the file's own."""
    for parent in list(file.parents)[:4]:
        if parent.name in (*MODEL_FOLDERS, "checkpoints"):
            return parent.parent
    return file.parent


def places_of_parts(base: Path, files: Path) -> list[Path]:
    """Folders in which the other parts may lie, the likeliest first. files: the folder of the transformer.

    The first is ``base``: it and those inside it are the model's own, the others may be anybody's.
    """
    inside = [base / name for name in ("vae", *TEXT_FOLDERS)]
    beside = [base.parent / name for name in V1_BASE]
    return [base, *inside, files, base.parent, *beside]


def searched_folders(layout: Layout) -> tuple[list[Path], list[Path]]:
    """Folders in or below which the transformer of a layout is looked for, and those in which its other parts are."""
    files = layout.transformer.files[0].parent
    return [files, *(layout.base / name for name in MODEL_FOLDERS)], places_of_parts(layout.base, files)


def _find_vae(places: Sequence[Path], source: str | None = None) -> Part | None:
    """source: what a converted transformer was made from, whose other parts may have its name."""
    folder = places[0] / "vae"
    # ComfyUI's folder of the same name holds the VAEs of all models, but has no transformer's folder beside it.
    if tensor_files(folder) and any((places[0] / name).is_dir() for name in TRANSFORMER_FOLDERS):
        return Part(VAE, tensors_in(folder), read_json(folder / "config.json"))
    own = () if source is None else (f"{vae_name(source)}.safetensors",)
    file = _first(places, own) or _first(places, VAE_NAMES)
    return None if file is None else Part(VAE, (file,))


def _find_text(places: Sequence[Path], source: str | None = None) -> Part | None:
    """source: as for the VAE."""
    folder = places[0] / "text_encoder"
    if tensor_files(folder):
        return Part(TEXT, tensors_in(folder), read_json(folder / "config.json"))
    own = () if source is None else (f"{text_name(source)}_*.safetensors",)
    file = _first(places, own) or _first(places, TEXT_NAMES)
    return None if file is None else Part(TEXT, (file,))


def _find_tokenizer(places: Sequence[Path]) -> Path | None:
    for place in places:
        for name in TOKENIZER_FOLDERS:
            found = own_listing(place / name, places[0])
            if any(path.name in FILES.values() and path.is_file() for path in found):
                return place / name
    return None


def text_name(model: str) -> str:
    """What a text encoder of other sizes than the published one's is called, without dtype and suffix."""
    return f"{file_name(model).removesuffix('_text_encoder')}_text_encoder"


def vae_name(model: str) -> str:
    """The same of a VAE."""
    return f"{file_name(model).removesuffix('_vae')}_vae"


def vocabulary(text: Part | None) -> int:
    """Tokens that a text encoder knows; umT5's when there is none, or none that can be read."""
    try:
        return UMT5_VOCABULARY if text is None else text.open().shapes()["shared.weight"][0]
    except (LingBotError, LookupError):
        return UMT5_VOCABULARY


def _area(about: Mapping[str, Any], file: Path) -> int | None:
    area = about.get("native_area")
    if area is not None and (isinstance(area, bool) or not isinstance(area, int) or area < 1):
        raise WeightsError(f"{file}: the model's native_area {area!r} must be a whole number of pixels above 0")
    return area


def _first(places: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first file of the first name, in the first place; the larger of several, which is the less compressed."""
    for place in places:
        found = own_listing(place, places[0])
        for name in names:
            files = [path for path in found if fnmatch.fnmatch(path.name, name) and path.is_file()]
            if files:
                return max(files, key=lambda path: (path.stat().st_size, path.name))
    return None


def _given(kind: str, path: Path) -> Part:
    """A part from a path of its own: a file, its folder, or the folder of a model that has it."""
    if path.is_file():
        return Part(kind, (path,))
    found = _find_vae([path]) if kind == VAE else _find_text([path])
    if found is not None:
        return found
    if not tensor_files(path):
        raise WeightsError(f"{path}: there is no {kind} in this folder; give the file itself")
    return Part(kind, tensors_in(path), read_json(path / "config.json"))


@names_the_path
def part_of_file(path: Path) -> Part | None:
    """Which part of a model a file, or a folder of files, is by its tensors; None when it is none that is known."""
    files = (path,) if path.is_file() else tensors_in(path)
    kind = identify([name for file in files for name in open_file(file).entries])
    folder = path if path.is_dir() else path.parent
    return None if kind is None else Part(kind, files, read_json(folder / "config.json"))
