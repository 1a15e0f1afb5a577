"""Writes workflows/*.json and workflows/api/*.json: one description, drawn and saved by ComfyUI's own page.

Run it after a change of a node's schema, in .venv, with a Chromium and .venv-comfy there (scripts/test makes both):

    .venv/bin/python scripts/make_workflows.py             # all of them
    .venv/bin/python scripts/make_workflows.py events      # one

Thumbnails are made from the videos that the workflows give: scripts/make_workflows.py --thumbnails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from comfy_client import Client, files_of  # noqa: E402
from comfy_page import FLAGS, ComfyPage, find_chromium  # noqa: E402
from comfy_server import make_server  # noqa: E402
from live_driver import Driver, drive  # noqa: E402
from workflow_drawings import DRAWINGS, PICTURE  # noqa: E402

WORKFLOWS = ROOT / "workflows"


DRAW = """
async drawing => {
  const app = window.app, graph = app.graph, made = {}
  graph.clear()
  for (const spec of drawing.nodes) {
    const node = window.LiteGraph.createNode(spec.type)
    if (!node) throw new Error(`no node ${spec.type}`)
    graph.add(node)
    made[spec.key] = node
    if (spec.title) node.title = spec.title
    for (const [name, value] of Object.entries(spec.values)) {
      const widget = name ? node.widgets?.find(widget => widget.name === name) : node.widgets[0]
      if (!widget) throw new Error(`${spec.type} has no widget ${name}; it has ${node.widgets?.map(w => w.name)}`)
      widget.value = value
      widget.callback?.(value, app.canvas, node)
    }
    node.pos = spec.at
    if (spec.size) node.setSize([Math.max(spec.size[0], 200), Math.max(spec.size[1], node.computeSize()[1])])
  }
  for (const spec of drawing.nodes) {
    for (const [input, source] of Object.entries(spec.links)) {
      const [key, output] = source.split('.')
      const from = made[key].outputs.findIndex(slot => slot.name === output)
      const to = made[spec.key].inputs.findIndex(slot => slot.name === input)
      if (from < 0 || to < 0) throw new Error(`no link ${source} -> ${spec.key}.${input}`)
      made[key].connect(from, made[spec.key], to)
    }
  }
  for (const spec of drawing.groups) {
    const group = new window.LiteGraph.LGraphGroup(spec.title)
    group.pos = [spec.box[0], spec.box[1]]
    group.size = [spec.box[2], spec.box[3]]
    group.color = spec.color
    graph.add(group)
  }
  await new Promise(done => setTimeout(done, 500))
}
"""

HELPER_SUITE = {
    "class_type": "VHS_VideoCombine",
    "inputs": {
        "frame_rate": 16, "loop_count": 0, "filename_prefix": "lingbot_world/image_to_world",
        "format": "video/h264-mp4", "pix_fmt": "yuv420p", "crf": 19, "save_metadata": True,
        "trim_to_audio": False, "pingpong": False, "save_output": True,
    },
    "_meta": {"title": "Save Video"},
}  # fmt: skip


def make(page: ComfyPage, name: str) -> None:
    """Draws one workflow and writes it in both formats."""
    page.page.evaluate(DRAW, asdict(DRAWINGS[name]))
    page.settle()
    workflow = page.graph()
    workflow["extra"] = {"ds": {"scale": 0.6, "offset": [40, 60]}}
    prompt = page.to_prompt()
    write(WORKFLOWS / f"{name}.json", workflow)
    write(WORKFLOWS / "api" / f"{name}.json", prompt)
    if name == "image_to_world":
        write(WORKFLOWS / "api" / f"{name}_vhs.json", with_helper_suite(prompt))


def with_helper_suite(prompt: dict[str, Any]) -> dict[str, Any]:
    """The same, saved by VHS_VideoCombine."""
    changed = {}
    for node, content in prompt.items():
        if content["class_type"] == "SaveVideo":
            source, _ = content["inputs"]["video"]
            content = {**HELPER_SUITE, "inputs": {"images": [source, 0], **HELPER_SUITE["inputs"]}}
        changed[node] = content
    return changed


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))


def make_thumbnail(client: Client, name: str) -> None:
    """Runs the workflow and keeps four of its frames as one picture: from first to last, or of both branches."""
    import av
    import numpy as np
    from PIL import Image

    prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = walk_and_run(client, prompt) if name == "live_world" else client.run(prompt, timeout=300)
        files = [client.download(item, Path(folder)) for item in files_of(outputs)]
        frames = {}
        for file in sorted(files):
            with av.open(str(file)) as video:
                frames[file] = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    *_, last = frames.values()
    if name == "branch":
        rows = [[video[len(video) // 2], video[-1]] for video in frames.values()]
    else:
        chosen = [last[round(place * (len(last) - 1) / 3)] for place in range(4)]
        rows = [chosen[:2], chosen[2:]]
    picture = Image.fromarray(np.vstack([np.hstack(row) for row in rows]))
    picture.save(WORKFLOWS / f"{name}.jpg", quality=88)
    print((WORKFLOWS / f"{name}.jpg").relative_to(ROOT))


def walk_and_run(client: Client, prompt: dict[str, Any]) -> dict[str, Any]:
    """A workflow that waits for somebody to walk."""

    async def walk(driver: Driver) -> None:
        for held in ("w", "w", "wl", "w"):
            await driver.step(held)
        await driver.ask("stop")

    waiting = {
        node: content | {"inputs": content["inputs"] | {"paused": True}}
        if content["class_type"] == "LingBotLiveWorld" else content
        for node, content in prompt.items()
    }  # fmt: skip
    running = client.queue(waiting)
    drive(client, walk)
    return client.wait(running, 300)["outputs"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRAWINGS))
    parser.add_argument("--thumbnails", action="store_true", help="make the pictures instead, by running the workflows")
    options = parser.parse_args()
    names = options.names or list(DRAWINGS)
    if unknown := set(names) - set(DRAWINGS):
        parser.error(f"there is no workflow {', '.join(unknown)}; there are {', '.join(DRAWINGS)}")
    from playwright.sync_api import sync_playwright

    python = os.environ.get("COMFY_PYTHON") or str(ROOT / ".venv-comfy" / "bin" / "python")
    with make_server(python, helper_suite=False) as server:
        server.add_input(ROOT / "examples" / PICTURE, PICTURE)
        if options.thumbnails:
            for name in names:
                make_thumbnail(server.client, name)
            return 0
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            for name in names:
                # A page of its own: the front end remembers values of widgets by the numbers of their nodes.
                page = ComfyPage(browser.new_page(viewport={"width": 1600, "height": 900}), server.url)
                page.prepare({"Comfy.VueNodes.Enabled": False})
                page.open()
                make(page, name)
                page.page.close()
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
