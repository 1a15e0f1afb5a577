"""Camera files in ComfyUI's input folder, and the paths that people type."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import folder_paths

from ...lingbot_core.errors import InputFileError

MAX_ENTRIES = 20_000
MAX_DEPTH = 12


def list_cameras() -> list[str]:
    """Folders of the input folder with a poses.npy (``walk/``), then all .npy files, as names with slashes."""
    files = list_arrays()
    folders = {str(PurePosixPath(name).parent) + "/" for name in files if PurePosixPath(name).name == "poses.npy"}
    return [*sorted(folders - {"./"}), *files]


def list_arrays() -> list[str]:
    """All .npy files below the input folder, sorted. Links are followed, each folder is looked into once."""
    root = folder_paths.get_input_directory()
    found, seen, looked_at = [], {os.path.realpath(root)}, 0
    for folder, subfolders, names in os.walk(root, followlinks=True):
        where = PurePosixPath(os.path.relpath(folder, root).replace(os.sep, "/"))
        looked_at += len(names) + len(subfolders)
        fresh = [name for name in sorted(subfolders) if os.path.realpath(os.path.join(folder, name)) not in seen]
        seen |= {os.path.realpath(os.path.join(folder, name)) for name in fresh}
        subfolders[:] = fresh if looked_at < MAX_ENTRIES and len(where.parts) < MAX_DEPTH else []
        found += [str(where / name) for name in names if name.lower().endswith(".npy") and _is_text(name)]
    return sorted(name for name in found if _is_text(name))


def in_input_folder(name: str) -> Path:
    """The file or folder of that name below the input folder. Raises InputFileError for one outside, or none."""
    root = Path(folder_paths.get_input_directory())
    parts = PurePosixPath(name.replace("\\", "/"))
    if not name.strip() or "\0" in name or ":" in name or parts.is_absolute() or ".." in parts.parts:
        raise InputFileError(f"{name[:80]!r} is not the name of a file in the input folder; choose one from the list")
    path = root.joinpath(*parts.parts)
    try:
        found = path.exists()
    except OSError:
        found = False
    if not found:
        raise InputFileError(f"{name[:80]!r} is not in the input folder {root}; upload it, or choose one from the list")
    return path


def typed_path(text: str) -> Path:
    """An absolute path that was typed; ``~`` is the home folder. Raises InputFileError for others."""
    if "\0" in text:
        raise InputFileError(f"the path {text[:80]!r} holds a NUL character; remove it")
    try:
        path = Path(text.strip().strip('"')).expanduser()
    except RuntimeError as error:
        raise InputFileError(f"the path {text[:80]!r} cannot be used: {error}") from None
    if not path.is_absolute():
        raise InputFileError(
            f"the path {text[:80]!r} is not absolute; give the whole path of a folder with poses.npy, or of a .npy file"
        )
    return path


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
