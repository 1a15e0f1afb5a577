"""The picture that the shipped workflows start from, in ComfyUI's input folder, so that they run as they are."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import folder_paths

NAME = "lingbot_tiny_day.png"
SOURCE = Path(__file__).resolve().parents[2] / "examples" / NAME


def offer_example_picture() -> None:
    """Copies the picture unless a file of its name is there. Nothing that goes wrong keeps the pack from loading."""
    target = Path(folder_paths.get_input_directory()) / NAME
    part = target.with_name(f".{NAME}.{os.getpid()}")
    try:
        if target.exists() or not target.parent.is_dir():
            return
        shutil.copyfile(SOURCE, part)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        logging.info("LingBot World: the workflows' start picture could not be put into the input folder: %s", error)
