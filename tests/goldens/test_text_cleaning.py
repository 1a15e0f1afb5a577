"""Prompt cleaning against recorded pairs of the reference implementation."""

from __future__ import annotations

import json

from lingbot_core.models.text import clean_text

FILES = ("text_cleaning.json",)


def test_prompts_are_cleaned_exactly(golden_dir):
    pairs = json.loads((golden_dir / "text_cleaning.json").read_text(encoding="utf-8"))["pairs"]
    assert pairs
    assert [clean_text(raw) for raw, _ in pairs] == [clean for _, clean in pairs]
    print(f"text_cleaning.json: {len(pairs)} pairs, all exact")
