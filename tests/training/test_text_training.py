"""The tiny text encoder learns to tell styles apart and keeps the files that a world loads."""

from __future__ import annotations

from pathlib import Path

import torch

from training.styles import PHRASES, STYLES
from training.text import Prompts, encoder, train_text


def test_a_little_training_makes_styles_easier_to_tell_apart(tmp_path: Path) -> None:
    report = train_text(tmp_path, steps=150, batch=24)
    assert report["after"]["training"] > report["before"]["training"] + 0.05

    texts = encoder(tmp_path)
    prompts = Prompts(texts, wordings=2, text_len=64)
    phrase = PHRASES["snow"][0]
    row = prompts.rows.index(phrase)
    states = texts.encode(phrase).states
    torch.testing.assert_close(prompts.table[row, : len(states)], states)
    assert not prompts.table[row, len(states) :].any()
    assert prompts.indices([["", phrase, phrase]], seed=1, free=0.0).tolist() == [[0, row, row]]
    # A freely worded sentence stays the same while the chunks' prompt does.
    swapped = prompts.indices([[phrase, phrase, ""]], seed=1, free=1.0)[0].tolist()
    assert swapped[0] == swapped[1] != row
    assert swapped[2] == 0
    assert len(prompts.rows) == 1 + len(STYLES) * (3 + 2)
