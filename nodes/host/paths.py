"""Which models a user can choose, and the files behind a choice.

A choice is one of a list that is read from the disk when it is needed; nothing a user types becomes part of a path.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import folder_paths

from ...lingbot_core.errors import InputFileError
from ...lingbot_core.weights.candidates import candidates, transformer_candidates
from ...lingbot_core.weights.files import PICKLED, SAFETENSORS
from ...lingbot_core.weights.layout import EMBEDDED_TINY, TINY, TRANSFORMER_FOLDERS

WORLD_FOLDER = "lingbot_world"
"""Name of our kind of model folder in ComfyUI: ``models/lingbot_world``, and a key for extra_model_paths.yaml."""

FILES_FOLDER = "diffusion_models"
_TENSORS = (*SAFETENSORS, *PICKLED)
# Folders of a model that has no transformer we know by name; they are listed so that loading can say what is wrong.
_SIGNS = (*TRANSFORMER_FOLDERS, "low_noise_model", "high_noise_model", "vae", "text_encoder")


@dataclass(frozen=True)
class Choice:
    """One entry of a list. name: as the user sees it; folders end with a slash. path: None for the embedded model."""

    name: str
    path: Path | None


def register() -> None:
    """Makes ComfyUI know ``models/lingbot_world``; folders that extra_model_paths.yaml gave it stay."""
    folder_paths.add_model_folder_path(WORLD_FOLDER, os.path.join(folder_paths.models_dir, WORLD_FOLDER))


def world_folders() -> list[Choice]:
    """The embedded model, and every folder of a model below the folders registered as ``lingbot_world``.

    A registered folder may be a model itself; models may lie in it directly or one level deeper (OWNER/NAME).
    """
    found: dict[str, Choice] = {TINY: Choice(TINY, None)}
    for root in map(Path, folder_paths.get_folder_paths(WORLD_FOLDER)):
        if any((root / name).is_dir() for name in _SIGNS):
            found.setdefault(f"{root.name}/", Choice(f"{root.name}/", root))
            continue
        for path in _folders(root):
            inner = [] if _is_model(path) else [deeper for deeper in _folders(path) if _is_model(deeper)]
            for model in inner or [path]:
                name = f"{model.relative_to(root).as_posix()}/"
                found.setdefault(name, Choice(name, model))
    return [found.pop(TINY), *sorted(found.values(), key=lambda choice: choice.name.lower())]


def world_models() -> list[Choice]:
    """Everything a transformer can come from: the folders, and single files in ``diffusion_models``."""
    files = []
    for name in folder_paths.get_filename_list(FILES_FOLDER):
        path = folder_paths.get_full_path(FILES_FOLDER, name)
        if path is not None and path.lower().endswith(_TENSORS):
            files.append(Choice(name.replace(os.sep, "/"), Path(path)))
    return [*world_folders(), *files]


def resolve_folder(name: str) -> Choice:
    """The choice of this name among `world_folders`. Raises InputFileError listing them and where they come from."""
    return _resolve(name, world_folders(), folder_paths.get_folder_paths(WORLD_FOLDER))


def resolve_model(name: str) -> Choice:
    """The choice of this name among `world_models`. Raises InputFileError listing them and where they come from."""
    roots = [*folder_paths.get_folder_paths(WORLD_FOLDER), *folder_paths.get_folder_paths(FILES_FOLDER)]
    return _resolve(name, world_models(), roots)


def files_of_folder(name: str) -> list[Path]:
    """All files that the choice of this name may be loaded from; none for a name that is not listed."""
    return [file for path in _listed(name, world_folders()) for file in candidates(path)]


def files_of_model(name: str) -> list[Path]:
    """The same for its transformer alone."""
    return [file for path in _listed(name, world_models()) for file in transformer_candidates(path)]


def _listed(name: str, choices: list[Choice]) -> list[Path]:
    return [choice.path or EMBEDDED_TINY for choice in choices if choice.name == name.replace("\\", "/")]


def _resolve(name: str, choices: list[Choice], roots: list[str]) -> Choice:
    for choice in choices:
        if choice.name == name.replace("\\", "/"):
            return choice
    raise InputFileError(
        f"there is no model {name!r}; there are {', '.join(choice.name for choice in choices)}. Searched: "
        f"{', '.join(roots)}. Put the model there (or name its folder in extra_model_paths.yaml) and refresh the page"
    )


def _folders(root: Path) -> list[Path]:
    """Visible folders in a folder, sorted; nothing where it is missing or may not be read."""
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _is_model(folder: Path) -> bool:
    """Whether a folder looks like a model: a component's folder or a file of tensors is in it."""
    try:
        return any(
            path.name in _SIGNS if path.is_dir() else path.suffix.lower() in _TENSORS for path in folder.iterdir()
        )
    except OSError:
        return False
