"""With VideoHelperSuite beside this pack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from comfy_server import find_video_helper_suite
from video_file import read_video, stored_prompt

ROOT = Path(__file__).resolve().parents[2]


def test_a_world_is_saved_by_video_combine(server, tmp_path):
    assert find_video_helper_suite(), "there is no VideoHelperSuite; set VHS_DIR, or run scripts/test"
    workflow = ROOT / "workflows" / "api" / "image_to_world_vhs.json"
    command = [sys.executable, ROOT / "scripts" / "queue_world.py", workflow, "--server", server.url, "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("*.mp4")
    video = read_video(file)
    assert len(video.frames) == 45
    assert video.fps == 16
    assert stored_prompt(video) == json.loads(workflow.read_text(encoding="utf-8"))
