"""``lingbot-world play`` with the embedded model at its own size, in Chromium: a walk, as a person takes it."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
from playwright.sync_api import Browser, expect

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "outputs" / "screenshots"


@pytest.fixture
def play_url():
    command = [sys.executable, "-m", "lingbot_core", "play", "--model", "tiny", "--port", "0"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    yield next(found[1] for line in process.stderr if (found := re.match(r"ready: walk on (\S+)", line)))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)


def test_a_walk_on_the_play_page(browser: Browser, play_url):
    page = browser.new_page(viewport={"width": 900, "height": 860})
    errors: list[str] = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(play_url)
    live = page.locator(".lbw-live")
    expect(live).to_have_attribute("data-role", "drive", timeout=60_000)
    strip = []

    def picture() -> np.ndarray:
        data = page.evaluate("() => document.querySelector('.lbw-picture').toDataURL('image/png').split(',')[1]")
        return cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)

    def walk(keys: str, chunks: int) -> None:
        for key in keys:
            page.keyboard.down(key)
        made = int(re.findall(r"\d+", page.locator(".lbw-chunk").inner_text())[0])
        expect(page.locator(".lbw-chunk")).to_contain_text(re.compile(rf"chunk {made + chunks}\b"), timeout=60_000)
        for key in keys:
            page.keyboard.up(key)
        strip.append(picture())

    page.wait_for_function("() => document.querySelector('.lbw-live').dataset.frame !== undefined")
    strip.append(picture())
    walk("w", 3)
    walk("l", 2)
    walk("wl", 2)
    page.keyboard.down("w")
    page.wait_for_timeout(300)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "play.png")
    page.keyboard.up("w")
    strip.append(picture())
    cv2.imwrite(str(SCREENSHOTS / "play_strip.png"), np.hstack(strip))
    changes = [np.abs(a.astype(int) - b).mean() for a, b in pairwise(strip)]
    assert min(changes[:3]) > 3, changes
    assert errors == []
    page.get_by_role("button", name="Stop").click()
    expect(live).to_have_attribute("data-state", "stopped")
    with page.expect_download() as download:
        page.get_by_text("Download the recorded controls").click()
    assert '"format": "lingbot-world controls"' in download.value.path().read_text(encoding="utf-8")
    page.close()
