"""The whole judging, on the embedded model and one short walk."""

from __future__ import annotations

import json

import cv2

from training import evaluate as judging
from training.walks import CHUNK


def test_a_model_is_judged_and_everything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "HEIGHT", 48)
    monkeypatch.setattr(judging, "WIDTH", 80)
    jobs = judging.jobs_for(1, 1, "one", window=None, live=0, long=0, switch=0)[:2]
    result = judging.evaluate("tiny", jobs)
    assert result["walks"]["walks"] == 2
    assert len(result["walks"]["psnr_per_chunk"]) == 1
    assert 0 < result["walks"]["vae_psnr"] < 99
    text = judging.write(result, tmp_path)
    assert "VAE alone" in text
    assert json.loads((tmp_path / "evaluation.json").read_text())["walks"]["stretches"] == CHUNK - 1
    assert cv2.imread(str(tmp_path / "sheets" / "w.png")).shape[1] > 6 * 160
