"""Start images of the little world, one per look, for examples and demos: ``python -m training.start_images FOLDER``.

The scenes are unseen in training and other ones than those that the evaluation walks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import sheets
from .source import HEIGHT, WIDTH
from .styles import STYLES
from .walks import CHUNK, UNSEEN_SEED, Walk, truth

# Chosen by eye: something near, something far, and room to walk.
SCENES = {"day": 1004, "sunset": 1162, "night": 1216, "snow": 975, "desert": 1237, "blossom": 993}


def write_start_images(folder: Path) -> list[Path]:
    """Writes NAME.png, 160 x 96, for every look."""
    paths = []
    for name, scene in SCENES.items():
        walk = Walk(UNSEEN_SEED + scene, ("",) * CHUNK, (STYLES.index(name),))
        path = folder / f"{name}.png"
        sheets.save(path, truth(walk, HEIGHT, WIDTH)[0].permute(1, 2, 0).numpy())
        paths.append(path)
    return paths


if __name__ == "__main__":
    for written in write_start_images(Path(sys.argv[1])):
        print(written)
