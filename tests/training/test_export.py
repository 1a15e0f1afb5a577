"""The model card tells every training from its log."""

from __future__ import annotations

import json
from pathlib import Path

from training.export import Run, runs, write_card

WORLD = {"bytes": 1_000_000, "lens": {"fx": 1.0, "fy": 1.0, "width": 2, "height": 2}}


def write_log(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_log_may_hold_several_runs_and_one_that_was_stopped(tmp_path):
    log = tmp_path / "dit.jsonl"
    write_log(
        log,
        [
            {"device": "a card"},
            {"what": "dit", "at": 1.0, "recipe": {"seed": 3}},
            {"what": "step", "at": 20.5, "step": 90, "skipped": 2.0},
            {"what": "dit", "at": 1.0, "recipe": {"seed": 4}},
            {"what": "step", "at": 9.0, "step": 10, "skipped": 0.0},
            {"what": "dit done", "at": 12.0, "step": 11, "seconds": 11.5, "skipped": 1.0, "restored": 1},
        ],
    )
    assert runs(log) == [Run("dit", 90, 20.5, 3, 2.0, 0), Run("dit", 11, 11.5, 4, 1.0, 1)]
    assert runs(tmp_path / "vae.jsonl") == []


def test_the_card_holds_the_runs_of_both_rounds_and_what_was_different(tmp_path):
    for folder, steps in (("first", 5), (".", 7)):
        done = {"what": "vae done", "step": steps, "seconds": 2.0, "skipped": 1.0}
        write_log(tmp_path / folder / "vae.jsonl", [{"what": "vae", "recipe": {"seed": 1}}, done])
    (tmp_path / "first" / "about.txt").write_text("In two rounds: the first was shorter.\n", encoding="utf-8")
    write_card(tmp_path, WORLD, logs=tmp_path, measured="", card="CPU")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "On one CPU. In two rounds: the first was shorter.\n" in card
    assert card.index("| VAE | 5 | 2 | 1 |") < card.index("| VAE | 7 | 2 | 1 |")
    assert "2 steps were skipped" in card
