"""The looks of the little world: six palettes, and the words that call for them."""

from __future__ import annotations

import torch
from torch import Tensor

STYLES = ("day", "sunset", "night", "snow", "desert", "blossom")

# At most six words each: the text encoder of the tiny world reads no more.
PHRASES: dict[str, tuple[str, str, str]] = {
    "day": ("a sunny day", "green meadow under blue sky", "bright daylight"),
    "sunset": ("an orange sunset", "warm evening light", "the sun goes down"),
    "night": ("a moonlit night", "dark blue night", "midnight under the moon"),
    "snow": ("a snowy winter", "white snow everywhere", "cold winter landscape"),
    "desert": ("a sandy desert", "dry dunes and red rocks", "hot yellow desert"),
    "blossom": ("pink cherry blossom", "spring with pink trees", "soft pink garden"),
}

# Rows of a palette, each an RGB colour in 0..1.
SKY_TOP, SKY_LOW, CLOUD, SUN, MOUNTAIN, GROUND_A, GROUND_B, GROUND_C, LIGHT, AMBIENT, CAP, TRUNK, CROWN = range(13)
OBJECTS = 13  # the first of the object colours
OBJECT_COLOURS = 6
ROWS = OBJECTS + OBJECT_COLOURS
# CAP colours what faces upwards; how much of it is the palette's own number per style.
CAP_AMOUNT = {"snow": 0.85, "desert": 0.15, "blossom": 0.15, "day": 0.0, "sunset": 0.0, "night": 0.0}

_COLOURS: dict[str, tuple[str, ...]] = {
    # sky top, sky low, cloud, sun, mountain, ground a, b, c, light, ambient, cap, trunk, crown, then six of objects
    "day": (
        "3f8fe0", "c4e2f4", "ffffff", "fff4c0", "7392b4", "7cb64e", "5a9a3c", "94bf58", "fff6e0", "8aa0b8", "ffffff",
        "7a5230", "2f8a3a",
        "d8432f", "f2b134", "3a6fc4", "e9e2d0", "9a4fa8", "e07a3a",
    ),
    "sunset": (
        "5a3f86", "ffab66", "ff8f7a", "ffe08a", "7a4a72", "c48a58", "985f48", "d09a5c", "ffc896", "9a7490", "ffd0a0",
        "6a3c2a", "a8843a",
        "c8362e", "f09a38", "6a4a9a", "f0cfae", "a83a6e", "e86a34",
    ),
    "night": (
        "1a2a66", "4a6ab0", "6a84c4", "f4f6ff", "2c4284", "4a8494", "38688c", "5c949a", "c4d4ff", "7c8ec4", "a0b8e8",
        "5a5478", "3c9a8c",
        "d0587e", "f0cc6a", "5a7cf0", "c4d0f0", "9a72d8", "e88c5a",
    ),
    "snow": (
        "8fb4d8", "eaf2f8", "ffffff", "fffbe8", "a8bcd4", "f2f6fa", "cfdeea", "e2ecf4", "fffaf0", "a4b4c8", "ffffff",
        "6a4c3a", "4a7a6a",
        "c83a3a", "e0a040", "3a64a8", "b8a89a", "7a5a9a", "c86a3a",
    ),
    "desert": (
        "2f9aa8", "f6e6b4", "fff4dc", "fffbe0", "c07a50", "ecc474", "d8a654", "f4d48c", "fff0c8", "b08a6a", "fff0c0",
        "8a5a34", "6a9a4a",
        "b4482c", "e8e0c8", "2a8a8a", "d0763a", "8a3a4a", "f0b040",
    ),
    "blossom": (
        "9a8ee0", "fbdcec", "ffffff", "fff4d8", "a48ac4", "9ed2a0", "7fbf92", "c0dca0", "fff0f0", "a494bc", "fff0f6",
        "7a4a52", "f27aac",
        "e04a7a", "f8d060", "5a7ad8", "fff0f4", "8a5ac0", "5ac0b0",
    ),
}  # fmt: skip


def _rgb(code: str) -> list[float]:
    return [int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def palettes(device: torch.device | str = "cpu") -> Tensor:
    """All palettes, float32 [styles, ROWS + 1, 3]; the last row holds the amount of CAP three times."""
    table = [[_rgb(c) for c in _COLOURS[name]] + [[CAP_AMOUNT[name]] * 3] for name in STYLES]
    return torch.tensor(table, dtype=torch.float32, device=device)


def style_of(prompt: str) -> int | None:
    """The index of the style that a phrase calls for, None for a text that is none of the phrases."""
    for index, name in enumerate(STYLES):
        if prompt in PHRASES[name]:
            return index
    return None
