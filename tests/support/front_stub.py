"""ComfyUI's real front end (the package comfyui-frontend-package) with just enough of a server behind it.

It serves the pack's own ``js`` folder and locales, and answers with the nodes of an object_info; what it is asked and
does not know it writes down in ``unknown``. Live worlds are the pack's own, on the embedded model: ``walk`` opens one.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from aiohttp import web
from live_server import HeldHost, live_world

from lingbot_core.engine.world import World
from lingbot_core.realtime.live_routes import LiveWorlds, live_routes, web_routes
from lingbot_core.realtime.live_world import LiveWorld
from lingbot_core.realtime.server import Visitors

ROOT = Path(__file__).resolve().parents[2]
PACK = "lingbot-world"
NEVER_SHOW = {"Comfy.TutorialCompleted": True, "Comfy.Workflow.ShowMissingModelsWarning": True}


class FrontStub:
    """``with FrontStub(object_info) as stub``: ``stub.url``; ``stub.prompts`` are what the page has queued."""

    def __init__(self, object_info: dict[str, Any]) -> None:
        self.object_info = object_info
        self.settings: dict[str, Any] = dict(NEVER_SHOW)
        self.prompts: list[dict[str, Any]] = []
        self.unknown: set[str] = set()
        self.static = Path(str(files("comfyui_frontend_package"))) / "static"
        self.version = version("comfyui-frontend-package")
        self.log_text = ""
        self._ready = threading.Event()

    def __enter__(self) -> FrontStub:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    @contextmanager
    def walk(self, loaded: World, name: str = "live", **options: Any) -> Iterator[tuple[LiveWorld, HeldHost]]:
        """A live world of that name. options: of live_server.live_world."""
        opened = live_world(loaded, **options)

        async def begin() -> tuple[HeldHost, LiveWorld, asyncio.Future[None]]:
            host, _, world = await opened.__aenter__()
            self.worlds.open(name, world)
            return host, world, asyncio.ensure_future(world.run())

        async def end() -> None:
            host.gate.set()
            world.close()
            await life
            self.worlds.close(name, "the walk is over; queue the workflow to walk again")
            await opened.__aexit__(None, None, None)

        host, world, life = self.on_loop(begin())
        try:
            yield world, host
        finally:
            self.on_loop(end())

    def on_loop(self, work: Any) -> Any:
        """Runs a coroutine beside the server."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 28)
        # The page asks for both, /ws and /api/ws.
        for prefix in ("/api", ""):
            app.router.add_get(f"{prefix}/ws", self._socket)
        app.router.add_route("*", "/api/settings", self._settings)
        app.router.add_route("*", "/api/settings/{name}", self._setting)
        app.router.add_post("/api/prompt", self._prompt)
        app.router.add_route("*", "/api/userdata/{file:.*}", self._userdata)
        app.router.add_get("/api/view", self._view)
        app.router.add_get("/api/{path:.*}", self._get)
        self.worlds = LiveWorlds()
        app.add_routes([*live_routes(self.worlds, Visitors), *web_routes("/lingbot_world/web")])
        app.router.add_get(f"/extensions/{PACK}/{{file:.+}}", self._pack_file)
        app.router.add_get("/templates/{file:.*}", self._no_templates)
        app.router.add_get("/{file:.*}", self._front_file)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        await self.worlds.hang_up("the test is over")
        await runner.cleanup()

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_json({"type": "status", "data": {"status": EMPTY_STATUS, "sid": "stub"}})
        async for _ in socket:
            pass
        return socket

    async def _settings(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.settings.update(await request.json())
        return web.json_response(self.settings)

    async def _setting(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if request.method == "POST":
            self.settings[name] = await request.json()
        return web.json_response(self.settings.get(name))

    async def _prompt(self, request: web.Request) -> web.Response:
        self.prompts.append(await request.json())
        return web.json_response({"prompt_id": f"stub-{len(self.prompts)}", "number": 0, "node_errors": {}})

    async def _userdata(self, request: web.Request) -> web.Response:
        """Nothing of the user's is stored but what the page expects of every user."""
        file = request.match_info["file"]
        if request.method == "GET" and file not in USER_FILES:
            if file not in NOT_THERE:
                self.unknown.add(f"userdata/{file}")
            return web.Response(status=404)
        return web.Response(text=USER_FILES.get(file, "{}"), content_type=guess_type(file)[0] or "application/json")

    async def _no_templates(self, request: web.Request) -> web.Response:
        return web.json_response([])

    async def _view(self, request: web.Request) -> web.StreamResponse:
        """The start picture, under whatever name a LoadImage node asks for it."""
        return web.FileResponse(ROOT / "examples" / "tiny" / "day.png")

    async def _get(self, request: web.Request) -> web.Response:
        path = request.match_info["path"].strip("/")
        if path == "object_info":
            return web.json_response(self.object_info)
        if path == "extensions":
            scripts = sorted((ROOT / "js").rglob("*.js"))
            names = [f"/extensions/{PACK}/{script.relative_to(ROOT / 'js').as_posix()}" for script in scripts]
            return web.json_response(names)
        if path == "i18n":
            return web.json_response(locales())
        if path in ANSWERS:
            return web.json_response(ANSWERS[path])
        self.unknown.add(path)
        return web.json_response({}, status=404)

    async def _pack_file(self, request: web.Request) -> web.StreamResponse:
        return _file(ROOT / "js", request.match_info["file"])

    async def _front_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"] or "index.html"
        return web.Response(content_type="text/css") if name == "user.css" else _file(self.static, name)

    def log(self, lines: int = 60) -> str:
        return f"front end {self.version}; asked for and unknown: {', '.join(sorted(self.unknown)) or 'nothing'}"


def locales() -> dict[str, Any]:
    """What ComfyUI makes of the pack's locales folder: main.json, and each other file under its own name."""
    merged: dict[str, Any] = {}
    for folder in sorted((ROOT / "locales").glob("*/")):
        texts = merged.setdefault(folder.name, {})
        for file in sorted(folder.glob("*.json")):
            content = json.loads(file.read_text(encoding="utf-8"))
            texts.update(content if file.stem == "main" else {file.stem: content})
    return merged


def _file(folder: Path, name: str) -> web.StreamResponse:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return web.Response(status=404)
    return web.FileResponse(path)


NOT_THERE = {"workflows/.index.json"}
"""What the page looks for once a workflow was saved, and a new user does not have: a real server answers 404, too."""
USER_FILES = {"user.css": "", "comfy.templates.json": "[]"}
"""Without them every start of the page logs an error of its own."""

EMPTY_STATUS = {"exec_info": {"queue_remaining": 0}}
SYSTEM = {
    "os": "linux", "comfyui_version": "0.33.0", "python_version": "3.11", "pytorch_version": "2", "argv": [],
    "embedded_python": False, "ram_total": 1 << 34, "ram_free": 1 << 33, "required_frontend_version": "0",
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "users": {"storage": "server", "migrated": True},
    "userdata": [],
    "v2/userdata": [],
    "queue": {"queue_running": [], "queue_pending": []},
    "history": {},
    "jobs": {"jobs": [], "pagination": {"offset": 0, "limit": 200, "total": 0, "has_more": False}},
    "prompt": EMPTY_STATUS,
    "features": {"supports_preview_metadata": True},
    "system_stats": {"system": SYSTEM, "devices": []},
    "embeddings": [],
    "models": [],
    "experiment/models": [],
    "workflow_templates": {},
    "node_replacements": {},
    "global_subgraphs": {},
    "folder_paths": {},
}
