"""A server that answers as ComfyUI's prompt queue does, and fails in the ways that ComfyUI and networks do."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

Plan = Callable[[dict[str, Any]], dict[str, Any]]

NODES = {
    "LoadImage": {"required": {"image": [[]]}},
    "Start": {"required": {"image": ["IMAGE"], "seed": ["INT"]}, "optional": {"preset": ["COMBO"], "strict": ["BOOL"]}},
    "Save": {"required": {"video": ["VIDEO"], "filename_prefix": ["STRING"], "format": ["COMBO"]}},
}


def succeed(prompt: dict[str, Any]) -> dict[str, Any]:
    return {"outputs": {"3": {"images": [{"filename": "video.mp4", "subfolder": "a b", "type": "output"}]}}}


class QueueStub:
    """Runs in a thread of its own; ``plan`` says of each prompt what comes of it.

    A plan returns some of: ``outputs``; ``error``, the data of an execution_error; ``refuse``, the answer of /prompt;
    ``left_out``, node_errors of an accepted prompt; ``wait``, True to run until it is interrupted; ``vanish``, True to
    forget the prompt; ``drop_sockets``, True to close every WebSocket in the middle of the run.
    """

    def __init__(self, plan: Plan = succeed, inputs: tuple[str, ...] = ()) -> None:
        self.plan = plan
        self.input_files = dict.fromkeys(inputs, b"there")
        self.prompts: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.sockets: list[web.WebSocketResponse] = []
        self.connections = 0
        self.running: str | None = None
        self.waiting: list[str] = []
        self.history: dict[str, Any] = {}
        self.others = ["somebody-elses"]
        self._interrupted: asyncio.Event
        self._ready = threading.Event()

    def __enter__(self) -> QueueStub:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """The server is gone; connections to it are refused."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._over, self._interrupted = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/ws", self._socket)
        app.router.add_get("/queue", self._get_queue)
        app.router.add_post("/queue", self._delete)
        app.router.add_post("/prompt", self._prompt)
        app.router.add_post("/interrupt", self._interrupt)
        app.router.add_get("/history/{id}", self._history)
        app.router.add_get("/object_info/{name}", self._info)
        app.router.add_get("/view", self._view)
        app.router.add_post("/upload/image", self._upload)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        for socket in self.sockets:
            await socket.close()
        await runner.cleanup()

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.connections += 1
        self.sockets.append(socket)
        await socket.send_json({"type": "status", "data": {"status": {}, "sid": request.query["clientId"]}})
        async for _ in socket:
            pass
        self.sockets.remove(socket)
        return socket

    async def _tell(self, event: str, **data: Any) -> None:
        for socket in list(self.sockets):
            await socket.send_json({"type": event, "data": data})

    async def _prompt(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = len(self.prompts)
        self.prompts.append(body["prompt"])
        plan = self.plan(body["prompt"])
        if "refuse" in plan:
            return web.json_response(plan["refuse"], status=400)
        prompt_id = f"prompt-{number}"
        self.waiting.append(prompt_id)
        self._work = asyncio.create_task(self._run(prompt_id, plan))
        return web.json_response({"prompt_id": prompt_id, "number": number, "node_errors": plan.get("left_out", {})})

    async def _run(self, prompt_id: str, plan: dict[str, Any]) -> None:
        while self.running is not None or (prompt_id in self.waiting and self.waiting[0] != prompt_id):
            await asyncio.sleep(0.01)
        if prompt_id not in self.waiting:
            return
        self.waiting.remove(prompt_id)
        if plan.get("vanish"):
            return
        self.running = prompt_id
        self._interrupted.clear()
        begun = int(time.time() * 1000)
        messages: list[list[Any]] = [["execution_start", {"prompt_id": prompt_id, "timestamp": begun}]]
        await self._tell("execution_start", prompt_id=prompt_id)
        await self._tell("executing", node="2", display_node="2", prompt_id=prompt_id)
        await self._tell("progress", node="2", value=1, max=4, prompt_id=prompt_id)
        for socket in list(self.sockets):
            await socket.send_bytes(struct.pack(">I", 1) + b"\xff\xd8 a preview")
            await socket.send_bytes(struct.pack(">II", 3, 1) + b"2" + b"8.1 fps")
        if plan.get("drop_sockets"):
            for socket in list(self.sockets):
                await socket.close()
        if plan.get("wait"):
            await self._interrupted.wait()
            messages.append(["execution_interrupted", {"prompt_id": prompt_id, "node_id": "2", "node_type": "Start"}])
        elif "error" in plan:
            messages.append(["execution_error", {"prompt_id": prompt_id, **plan["error"]}])
        else:
            messages.append(["execution_success", {"prompt_id": prompt_id, "timestamp": begun + 1500}])
        await self._tell(messages[-1][0], **messages[-1][1])
        # ComfyUI writes the history after the last event.
        await asyncio.sleep(0.15)
        failed = messages[-1][0] != "execution_success"
        self.running = None
        self.history[prompt_id] = {
            "outputs": plan.get("outputs", {}),
            "status": {"status_str": "error" if failed else "success", "completed": not failed, "messages": messages},
        }

    async def _get_queue(self, request: web.Request) -> web.Response:
        running = [[0, self.running, {}, {}, []]] if self.running else []
        pending = [[1, prompt_id, {}, {}, []] for prompt_id in self.waiting + self.others]
        return web.json_response({"queue_running": running, "queue_pending": pending})

    async def _delete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("delete", body["delete"]))
        for prompt_id in body["delete"]:
            self.waiting.remove(prompt_id)
        return web.Response()

    async def _interrupt(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("interrupt", body["prompt_id"]))
        if body["prompt_id"] == self.running:
            self._interrupted.set()
        return web.Response()

    async def _history(self, request: web.Request) -> web.Response:
        prompt_id = request.match_info["id"]
        return web.json_response({prompt_id: self.history[prompt_id]} if prompt_id in self.history else {})

    async def _info(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response({name: {"input": NODES[name]}} if name in NODES else {})

    async def _view(self, request: web.Request) -> web.Response:
        folder, name = request.query.get("subfolder", ""), request.query["filename"]
        path = f"{folder}/{name}" if folder else name
        if request.query["type"] == "input":
            found = self.input_files.get(path)
        else:
            found = self.files.get(path, b"bytes of " + path.encode())
        return web.Response(status=404) if found is None else web.Response(body=found)

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        upload, folder = form["image"], str(form.get("subfolder", ""))
        assert isinstance(upload, web.FileField)
        name, content = upload.filename, upload.file.read()
        stem, dot, suffix = name.rpartition(".")
        number = 0
        while self.input_files.get(f"{folder}/{name}" if folder else name, content) != content:
            number += 1
            name = f"{stem} ({number}){dot}{suffix}"
        self.input_files[f"{folder}/{name}" if folder else name] = content
        return web.json_response({"name": name, "subfolder": folder, "type": "input"})


def write_workflow(path: Path, image: str = "start.png") -> Path:
    """A prompt of three nodes; one of its titles and one of its inputs have a dot."""
    nodes = {
        "1": {"class_type": "LoadImage", "inputs": {"image": image}, "_meta": {"title": "Load Image"}},
        "2": {
            "class_type": "Start",
            "inputs": {"image": ["1", 0], "seed": 5, "strict": False},
            "_meta": {"title": "World v1.0"},
        },
        "3": {
            "class_type": "Save",
            "inputs": {"video": ["2", 0], "filename_prefix": "video/x", "format": "mp4", "format.codec": "h264"},
            "_meta": {"title": "Save"},
        },
    }
    path.write_text(json.dumps(nodes), encoding="utf-8")
    return path
