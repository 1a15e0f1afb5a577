"""Text files in ComfyUI's output folder."""

from __future__ import annotations

import os

import folder_paths

from ...lingbot_core.encodable import as_text
from ...lingbot_core.errors import InputFileError


def save_text(text: str, prefix: str, suffix: str) -> str:
    """Writes PREFIX_00001_SUFFIX, with the next free number, below the output folder; returns its whole path.

    Raises InputFileError for a prefix that leads out of the folder, and for a file that cannot be written.
    """
    root = folder_paths.get_output_directory()
    prefix = as_text(prefix)
    if "\0" in prefix:
        raise InputFileError(f"the file name {prefix[:80]!r} holds a NUL character; remove it")
    try:
        folder, name, number, *_ = folder_paths.get_save_image_path(prefix.strip(), root)
    except OSError as error:
        raise InputFileError(f"nothing can be saved as {prefix[:80]!r}: {error.strerror or error}") from None
    except Exception:  # ComfyUI raises a plain Exception for what lies outside
        raise InputFileError(f"{prefix[:80]!r} is not a name below the output folder {root}; use another") from None
    while True:
        path, opened = os.path.join(folder, f"{name}_{number:05}_{suffix}"), False
        try:
            with open(path, "x", encoding="utf-8", newline="\n") as file:
                opened = True
                file.write(text)
            return path
        except FileExistsError:  # another run was faster
            number += 1
        except OSError as error:
            if opened:  # half a text is none
                os.unlink(path)
            raise InputFileError(f"{path} cannot be written: {error.strerror or error}") from None
