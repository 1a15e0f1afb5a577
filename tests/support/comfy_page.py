"""ComfyUI's editor in a browser, as a test drives it."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import re
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Page

# The page and other packs ask for news, pictures and models from elsewhere; the tests let nothing out.
ELSEWHERE = re.compile(
    r"net::ERR_(FAILED|BLOCKED)|(Content Security Policy|cannot load|Loading|Connecting).*https://(?!127\.0)", re.DOTALL
)
# What ComfyUI's page says by itself at every start: a style sheet that the user does not have, and an early look of its
# own at the graph.
ITS_OWN = re.compile(r"status of 404 .*/user\.css\)$|^ComfyApp graph accessed before initialization")


T = TypeVar("T")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--mute-audio",
]  # fmt: skip


def find_chromium() -> str:
    """$CHROMIUM, else the system's."""
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    for name in names:
        path = shutil.which(name) if name else None
        if path:
            return path
    raise FileNotFoundError("there is no Chromium; install one, or set CHROMIUM to its path")


class ComfyPage:
    """One open editor. ``errors`` are the console's errors and uncaught exceptions so far."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        self.warnings: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))

    def _heard(self, message: Any) -> None:
        place = message.location.get("url", "")
        text = f"{message.text} ({place})"
        if message.type == "warning":
            self.warnings.append(text)
        elif message.type == "error" and not (ELSEWHERE.search(text) or ITS_OWN.search(text)):
            self.errors.append(text)

    def prepare(self, settings: dict[str, Any]) -> None:
        """Settings have to stand before the page is loaded."""
        body = json.dumps({"Comfy.TutorialCompleted": True, **settings}).encode()
        request = urllib.request.Request(
            f"{self.url}/api/settings", data=body, headers={"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def open(self) -> None:
        self.page.goto(self.url, wait_until="domcontentloaded")
        # The graph may not be touched before the page is set up.
        ready = "() => document.querySelector('#graph-canvas') && window.app?.extensionManager?.setting"
        self.page.wait_for_function(ready, timeout=60_000)
        self.page.wait_for_function("() => !document.querySelector('[aria-busy=true]') && window.app.canvas?.graph")
        self.settle()

    def settle(self) -> None:
        """Lets the page finish what it began: two painted frames and a moment."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.page.wait_for_timeout(400)

    def wait_until(self, condition: Callable[[], T], seconds: float = 60.0) -> T:
        """Waits until ``condition`` gives something that counts, and returns that. The page lives on meanwhile."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"it did not happen within {seconds:.0f} s"
            self.page.wait_for_timeout(100)
        return found

    def load_workflow(self, workflow: dict[str, Any]) -> None:
        """As if the user opened it."""
        self.page.evaluate("workflow => window.app.loadGraphData(workflow)", workflow)
        self.settle()

    def drop_file(self, path: Path) -> None:
        """Drops a file of this machine onto the empty canvas."""
        content = base64.b64encode(path.read_bytes()).decode()
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.page.evaluate(
            """async ([content, name, type]) => {
                const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt(0))
                const transfer = new DataTransfer()
                transfer.items.add(new File([bytes], name, { type }))
                const canvas = document.querySelector('#graph-canvas')
                const place = { bubbles: true, cancelable: true, dataTransfer: transfer, clientX: 20, clientY: 500 }
                canvas.dispatchEvent(new DragEvent('dragover', place))
                canvas.dispatchEvent(new DragEvent('drop', place))
            }""",
            [content, path.name, kind],
        )
        self.settle()

    def graph(self) -> dict[str, Any]:
        """The workflow that is open, as the page would save it."""
        return self.page.evaluate("() => JSON.parse(JSON.stringify(window.app.graph.serialize()))")

    def to_prompt(self) -> dict[str, Any]:
        """The workflow that is open, as the page would queue it."""
        return self.page.evaluate("async () => (await window.app.graphToPrompt()).output")

    def queue(self) -> None:
        """Presses "run"."""
        self.page.evaluate("() => window.app.queuePrompt(0, 1)")

    def show_everything(self) -> None:
        """Moves and scales the view so that the whole graph is seen."""
        self.page.evaluate(
            """() => {
                const canvas = window.app.canvas, nodes = window.app.graph.nodes, groups = window.app.graph.groups
                const boxes = [...nodes, ...groups].map(item => item.boundingRect ?? item.getBounding())
                const left = Math.min(...boxes.map(box => box[0])), top = Math.min(...boxes.map(box => box[1]))
                const right = Math.max(...boxes.map(box => box[0] + box[2]))
                const bottom = Math.max(...boxes.map(box => box[1] + box[3]))
                const area = document.querySelector('#graph-canvas').getBoundingClientRect()
                const scale = Math.min((area.width - 180) / (right - left), (area.height - 150) / (bottom - top), 1.2)
                canvas.ds.scale = scale
                canvas.ds.offset[0] = (area.width / scale - (left + right)) / 2 + 30
                canvas.ds.offset[1] = (area.height / scale - (top + bottom)) / 2 + 20
                canvas.setDirty(true, true)
            }"""
        )
        self.settle()

    def boxes(self) -> dict[str, list[float]]:
        """x, y, width and height of every node as it is drawn, in the canvas's units, with its title bar."""
        return self.page.evaluate(
            """() => {
                const { scale } = window.app.canvas.ds, boxes = {}
                for (const node of window.app.graph.nodes) {
                    const element = document.querySelector(`[data-node-id="${node.id}"]`)
                    const drawn = element?.getBoundingClientRect()
                    const own = node.getBounding()
                    boxes[`${node.title} (${node.id})`] = drawn?.width
                        ? [drawn.x / scale, drawn.y / scale, drawn.width / scale, drawn.height / scale]
                        : [own[0], own[1], own[2], own[3]]
                }
                return boxes
            }"""
        )

    def alerts(self) -> list[str]:
        """Dialogs, toasts and warnings that the page shows."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll(
                '[role=dialog], [role=alertdialog], .p-toast-message, [role=status][class*=border-l-4]')]
                .map(element => element.innerText.trim()).filter(Boolean)"""
        )
