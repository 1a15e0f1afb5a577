"""Which files a model may be made of, told by their names alone: what to look at to know that it has changed.

Nothing is opened, so this may be asked as often as one likes. What ``layout.find_layout`` takes, which opens files to
decide, is among these.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .files import PICKLED, SAFETENSORS
from .layout import (
    DIFFUSERS_FILE,
    MODEL_FOLDERS,
    TEXT_FOLDERS,
    TEXT_NAMES,
    TOKENIZER_FOLDERS,
    TRANSFORMER_FOLDERS,
    VAE_NAMES,
    base_of_file,
    places_of_parts,
    text_name,
    vae_name,
)

_SUFFIXES = (*SAFETENSORS, *PICKLED, ".json", ".model")
# What a model says of itself, in its base folder.
_ABOUT = ("world.json", "model_index.json", "scheduler/scheduler_config.json")
_OTHER_FOLDERS = ("vae", "text_encoder", *TEXT_FOLDERS, *(name.split("/")[0] for name in TOKENIZER_FOLDERS))
_OTHER_NAMES = (*VAE_NAMES, *TEXT_NAMES, f"*{vae_name('')}.safetensors", f"*{text_name('')}_*.safetensors")
# ComfyUI's folder of models, which may be one of ours, is as deep as this.
_DEPTH = 4


def transformer_candidates(model: Path) -> list[Path]:
    """Files that a file's or folder's transformer and its preset may come from, sorted; none that cannot be reached."""
    if model.name.startswith(DIFFUSERS_FILE):
        model = model.parent
    if os.path.isfile(model):  # and not its method, which raises where a folder may not be entered
        return _sorted([model, *_about(base_of_file(model))])
    inside = _inside(model, passed_over=_OTHER_FOLDERS)
    own = (path for path in inside if not (path.parent == model and _is_named(path, _OTHER_NAMES)))
    return _sorted([*own, *_about(model.parent)])


def candidates(folder: Path) -> list[Path]:
    """The same for all parts of a folder's model, which may lie in it and beside it."""
    found = [*_inside(folder), *_about(folder.parent)]
    bases = [folder]
    if folder.name in (*TRANSFORMER_FOLDERS, MODEL_FOLDERS[0]):
        bases.append(folder.parent)  # it is the transformer of the model around it
    for place in dict.fromkeys(place for base in bases for place in places_of_parts(base, folder)):
        found += [path for path in _listing(place) if _is_named(path, _OTHER_NAMES)]
        found += [path for name in TOKENIZER_FOLDERS for path in _listing(place / name)]
    return _sorted(found)


def _inside(folder: Path, passed_over: Iterable[str] = (), depth: int = _DEPTH) -> Iterator[Path]:
    """Files below a folder. passed_over: folders in it that are not looked into; nor are hidden ones, such as .git."""
    for path in _listing(folder):
        if not os.path.isdir(path):
            yield path
        elif depth > 1 and path.name not in passed_over and not path.name.startswith("."):
            yield from _inside(path, (), depth - 1)


def _about(base: Path) -> list[Path]:
    return [base / name for name in _ABOUT]


def _listing(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it is missing or may not be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_named(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)


def _sorted(paths: Iterable[Path]) -> list[Path]:
    return sorted({path for path in paths if path.suffix.lower() in _SUFFIXES and os.path.isfile(path)})
