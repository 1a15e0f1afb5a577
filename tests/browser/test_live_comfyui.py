"""A walk by hand in the editor of a running ComfyUI, from the shipped workflow to the files that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from comfy_client import files_of, problems
from node_info import START_PICTURE
from playwright.sync_api import expect
from video_file import read_video

ROOT = Path(__file__).resolve().parents[2]


def test_the_live_workflow_is_walked_by_hand_and_again_from_its_controls(
    server, open_page, renderer, screenshot, tmp_path
):
    server.add_input(ROOT / "examples" / START_PICTURE, START_PICTURE)
    page = open_page(server.url, renderer)
    page.load_workflow(json.loads((ROOT / "workflows" / "live_world.json").read_text(encoding="utf-8")))
    known = set(server.client.call("/history"))
    page.queue()
    live = page.page.locator(".lbw-live")
    expect(live).to_have_attribute("data-role", "drive", timeout=90_000)
    page.page.evaluate(
        """() => {
            const canvas = window.app.canvas, node = window.app.graph.nodes.find(one => one.type === 'LingBotLiveWorld')
            canvas.ds.scale = 0.8
            canvas.ds.offset[0] = 500 - node.pos[0]
            canvas.ds.offset[1] = 90 - node.pos[1]
            canvas.setDirty(true, true)
        }"""
    )
    page.settle()
    stage = page.page.locator(".lbw-stage")
    stage.click()
    page.page.keyboard.down("w")
    expect(page.page.locator(".lbw-chunk")).to_contain_text("chunk 2", timeout=60_000)
    page.page.keyboard.down("l")
    expect(page.page.locator(".lbw-chunk")).to_contain_text("chunk 4", timeout=60_000)
    page.page.keyboard.up("w")
    page.page.keyboard.up("l")
    screenshot(page, f"comfyui_live_{renderer}")
    page.page.get_by_role("button", name="Stop", exact=True).click()
    [prompt_id] = page.wait_until(lambda: set(server.client.call("/history")) - known, 120)
    entry = server.client.wait(prompt_id)
    assert entry["status"]["status_str"] == "success", problems(entry)
    expect(page.page.locator(".lbw-note")).to_contain_text("the walk is over", timeout=20_000)
    files = [item for item in files_of(entry["outputs"]) if item["filename"].endswith(".mp4")]
    videos = {item["filename"].rsplit("_", 2)[0]: server.client.download(item, tmp_path) for item in files}
    walked, again = (read_video(videos[name]).frames for name in ("live_world", "live_world_again"))
    assert len(walked) >= 45
    assert np.array_equal(walked, again)
    assert page.errors == []
