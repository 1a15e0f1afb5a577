"""What the documents say of the tiny world is what was measured on the weights that ship."""

from __future__ import annotations

import json
import re
import shutil

import cv2
import numpy as np
import pytest

from training import publish
from training.evaluate import as_text, table

EVALUATION = json.loads((publish.ROOT / publish.FOLDER / "evaluation.json").read_text(encoding="utf-8"))


def read(path) -> str:
    return (publish.ROOT / path).read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_shipped_weights():
    assert EVALUATION["fingerprint"] == json.loads(read("lingbot_core/assets/tiny/world.json"))["fingerprint"]


@pytest.mark.parametrize(("path", "change"), [(publish.PAGE, publish.page), (publish.CARD, publish.card)])
def test_documents_hold_the_figures_of_the_evaluation(path, change):
    assert change(read(path), EVALUATION) == read(path)
    assert as_text(EVALUATION).strip() in read(path)


def test_what_is_below_must_or_not_measured_is_said_in_words():
    said = publish.figures(EVALUATION)
    for what, value, must, _, _ in table(EVALUATION):
        line = rf"^\* {re.escape(what.strip())}: .*\(must {must:g}\)$"
        assert bool(re.search(line, said, re.MULTILINE)) == (value is not None and value < must), what
        assert (f"\n* {what.strip()}\n" in said + "\n") == (value is None), what


def test_pictures_are_there_and_small():
    text = read(publish.PAGE)
    shown = re.findall(r"\]\((tiny/[^)]+)\)", text)
    sheets = sorted((publish.ROOT / publish.FOLDER).glob("*.jpg"))
    assert {f"tiny/{path.name}" for path in sheets} | {"tiny/walk.webp"} == set(shown)
    assert len(sheets) == 8
    assert sum(path.stat().st_size for path in sheets) <= publish.MOST_BYTES
    assert (publish.ROOT / publish.FOLDER / "walk.webp").stat().st_size <= publish.MOST_BYTES
    assert "docs/tiny/walk.webp" in read("README.md")


def test_publishing_replaces_figures_and_sheets_and_nothing_else(tmp_path):
    root, evaluation = tmp_path / "root", tmp_path / "evaluation"
    for path in (publish.PAGE, publish.CARD):
        (root / path).parent.mkdir(parents=True)
        shutil.copyfile(publish.ROOT / path, root / path)
    (evaluation / "sheets").mkdir(parents=True)
    cv2.imwrite(str(evaluation / "sheets" / "w.png"), np.full((40, 60, 3), 90, np.uint8))
    worse = json.loads(json.dumps(EVALUATION))
    worse["walks"]["vae_psnr"] = 12.5
    (evaluation / "evaluation.json").write_text(json.dumps(worse))
    publish.publish(evaluation, root)
    for path, change in ((publish.PAGE, publish.page), (publish.CARD, publish.card)):
        text = (root / path).read_text(encoding="utf-8")
        assert "* VAE alone, whole walks: 12.5 dB (must 29)" in text
        assert change(text, EVALUATION) == read(path)
    assert cv2.imread(str(root / publish.FOLDER / "w.jpg")).shape == (40, 60, 3)
    assert json.loads((root / publish.FOLDER / "evaluation.json").read_text()) == worse


def test_marks_that_are_missing_are_an_error():
    for text in ("no marks", "## Limits ## Measured", "## Measured ## Measured ## Limits"):
        with pytest.raises(ValueError, match="must be there once each"):
            publish.card(text, EVALUATION)


def test_every_frame_of_the_walk_has_its_keys(tmp_path):
    events = tmp_path / "walk.jsonl"
    lines = [{"event_id": 0, "frames": [["w"], ["w", "l"], []]}, {"event_id": 1, "prompt": "n", "frames": [["k"]] * 3}]
    events.write_text("\n".join(map(json.dumps, lines)) + "\n")
    said = publish.captions(events)
    day = publish.START_PROMPT
    expected = [f'W forward   "{day}"'] + [f'W forward, L look right   "{day}"'] * 4 + [f'no key   "{day}"'] * 4
    assert said == expected + ['K look down   "n"'] * 12
    frame = np.zeros((96, 160, 3), np.uint8)
    assert publish.captioned(frame, said[0]).shape == (96 * 3 + publish.LINE, 480, 3)
