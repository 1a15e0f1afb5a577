"""``lingbot-world play`` as its user runs it: from the first line to what is left when it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import av
import pytest

from lingbot_core.cli import main
from lingbot_core.cli.play import walkable
from lingbot_core.engine.controls_file import load_controls
from lingbot_core.presets import get_preset

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--size", "32x48", "--fit", "crop")


def start(*options: object) -> tuple[subprocess.Popen[str], str]:
    """The running program, and the address of its page."""
    command = [sys.executable, "-m", "lingbot_core", "play", "--model", "tiny", "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if (found := re.match(r"ready: walk on (\S+)", line)) is not None:
            return process, found[1]
    raise AssertionError("it ended before it was ready")


def end(process: subprocess.Popen[str]) -> str:
    """Ctrl-C; returns what it says then."""
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    return said


async def walk(url: str, chunks: int) -> None:
    async with aiohttp.ClientSession() as client:
        async with client.get(url) as page:
            assert "play.mjs" in await page.text()
        for name in ("play.mjs", "live.mjs", "live.css", "start.png"):
            async with client.get(url + name) as file:
                assert file.status == 200, name
        async with client.ws_connect(url + "v1/live", max_msg_size=0) as socket:
            await socket.send_json({"type": "hello", "v": 1, "client": "x", "drive": True})
            await socket.send_json({"type": "control", "seq": 1, "held": "w", "press": "w"})
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT and message.json().get("type") == "chunk":
                    chunks -= 1
                    if not chunks:
                        return


def test_a_walk_leaves_its_video_and_its_controls(tmp_path):
    video, record = tmp_path / "walk.mp4", tmp_path / "walk.jsonl"
    process, url = start("--output", video, "--record", record, "--seed", 3, "--prompt", "deep snow", *SMALL)
    try:
        asyncio.run(walk(url, 2))
    finally:
        said = end(process)
    kept = load_controls(record.read_text(encoding="utf-8"))
    assert (kept.start.seed, kept.start.prompt, kept.start.height) == (3, "deep snow", 32)
    assert kept.controls[0].keys == ("w", "w", "w")
    with av.open(str(video)) as file:
        frames = sum(1 for _ in file.decode(video=0))
    assert frames == kept.start.preset.frames(len(kept.controls))
    assert f"{frames} frames" in said


def test_a_world_in_which_nobody_walked_leaves_nothing(tmp_path):
    video, record = tmp_path / "walk.mp4", tmp_path / "walk.jsonl"
    process, _ = start("--output", video, "--record", record, "--paused", *SMALL)
    assert "no frames were made" in end(process)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--model", "somewhere"), "--image is missing"),
        (("--model", "tiny", "--output", "walk.avi"), "must end in .mp4"),
        (("--model", "tiny", "--host", " "), "--host is empty"),
        (("--model", "tiny", "--host", "300.1.1.1"), "cannot listen on"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(capsys, options, why):
    assert main(["play", *options]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_a_walk_without_end_has_a_window_unless_none_is_asked_for():
    fast, windowed = get_preset("v1-fast"), get_preset("v2-diffusers")
    assert walkable(fast, None, None, None).label == "v1-fast (sink=3, window=18)"
    assert walkable(fast, None, 6, 12).label == "v1-fast (sink=6, still_window=12, window=18)"
    assert walkable(fast, 0, None, None) == fast
    assert walkable(windowed, None, None, None) == windowed
    assert walkable(windowed, None, None, 12).still_window == 12
