"""Calls of ComfyUI's API for tests: plain and blocking, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NotThere(Exception):
    """Nothing answers."""


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


@dataclass(frozen=True)
class Event:
    """One message of the socket; ``data`` is bytes for pictures. ``at`` is time.monotonic()."""

    type: str
    data: Any
    at: float


class Client:
    """One user of the server at ``url``; ``client_id`` decides whose socket hears of a prompt."""

    def __init__(self, url: str) -> None:
        self.url, self.client_id = url, uuid.uuid4().hex

    def call(self, path: str, body: Any = None, *, timeout: float = 60.0) -> Any:
        """GET, or POST with a body; JSON where the answer is JSON, else bytes, None when empty."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                content, kind = response.read(), response.headers.get_content_type()
        except urllib.error.HTTPError as error:
            text = error.read()
            with contextlib.suppress(ValueError):
                text = json.loads(text)
            raise Refused(error.code, text) from None
        except OSError as error:
            raise NotThere(f"{self.url}: {error}") from None
        return json.loads(content) if content and kind == "application/json" else content or None

    def system_stats(self) -> dict[str, Any]:
        return self.call("/system_stats", timeout=5.0)

    def object_info(self, node: str = "") -> dict[str, Any]:
        return self.call(f"/object_info/{node}" if node else "/object_info")

    def queue(self, prompt: dict[str, Any], **extra: Any) -> str:
        """Puts a prompt into the queue and returns its id; Refused with the node errors. ``extra``: extra_pnginfo."""
        body = {"prompt": prompt, "client_id": self.client_id, "extra_data": {"extra_pnginfo": extra}}
        return str(self.call("/prompt", body)["prompt_id"])

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        return self.call(f"/history/{prompt_id}").get(prompt_id)

    def wait(self, prompt_id: str, timeout: float = 120.0) -> dict[str, Any]:
        """The history of the prompt when it has ended, however it did; TimeoutError."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            entry = self.history(prompt_id)
            if entry is not None:
                return entry
            time.sleep(0.05)
        raise TimeoutError(f"the prompt did not end within {timeout:.0f} s")

    def run(self, prompt: dict[str, Any], timeout: float = 120.0, **extra: Any) -> dict[str, Any]:
        """Queues, waits, and returns the outputs per node; AssertionError with ComfyUI's messages."""
        entry = self.wait(self.queue(prompt, **extra), timeout)
        assert entry["status"]["status_str"] == "success", problems(entry)
        return entry["outputs"]

    def download(self, item: dict[str, Any], folder: Path) -> Path:
        """One file of an output into ``folder``."""
        query = urllib.parse.urlencode({key: item[key] for key in ("filename", "subfolder", "type")})
        with urllib.request.urlopen(f"{self.url}/view?{query}", timeout=60) as response:
            target = folder / item["filename"]
            target.write_bytes(response.read())
        return target

    def interrupt(self, prompt_id: str | None = None) -> None:
        self.call("/interrupt", {} if prompt_id is None else {"prompt_id": prompt_id})

    def free(self) -> None:
        """Unloads models and drops cached outputs; the server does it when its queue is next idle."""
        self.call("/free", {"unload_models": True, "free_memory": True})


def problems(entry: dict[str, Any]) -> str:
    """What a history entry says went wrong."""
    lines = []
    for event, data in entry["status"]["messages"]:
        if event == "execution_error":
            lines.append(f"{data['node_type']} (node {data['node_id']}): {data['exception_message']}")
            lines.extend(data["traceback"])
        elif event == "execution_interrupted":
            lines.append(f"interrupted in {data['node_type']}")
    return "\n".join(lines)


def files_of(outputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Every file that the outputs of a prompt name, whatever key it is under."""
    return [
        item
        for output in outputs.values()
        for items in output.values()
        for item in (items if isinstance(items, list) else [])
        if isinstance(item, dict) and "filename" in item
    ]


class Listener:
    """``with Listener(client) as heard``: ``heard.events`` grows while the server tells this client things."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.events: list[Event] = []

    def __enter__(self) -> Listener:
        self._connected = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._connected.wait(10):
            raise NotThere("the socket did not open")
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._listen())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _listen(self) -> None:
        import aiohttp

        address = f"{self.client.url}/ws?clientId={self.client.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            # Said first, as the page does: with it previews come with the node they belong to.
            await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
            self._connected.set()
            async for message in socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    content = json.loads(message.data)
                    self.events.append(Event(content["type"], content["data"], time.monotonic()))
                elif message.type is aiohttp.WSMsgType.BINARY:
                    self.events.append(_binary(message.data))

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.type == kind]

    def wait_for(self, kind: str, timeout: float = 30.0, count: int = 1) -> Event:
        """The ``count``-th event of that type; TimeoutError."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = self.of(kind)
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.01)
        seen = ", ".join(sorted({event.type for event in self.events}))
        raise TimeoutError(f"no {kind} event within {timeout:.0f} s; there were {seen}")


def _binary(data: bytes) -> Event:
    """Previews become ``preview`` with {"node", "picture"}, progress texts ``text`` with {"node", "text"}."""
    [kind] = struct.unpack_from(">I", data)
    now = time.monotonic()
    if kind == 4:
        [length] = struct.unpack_from(">I", data, 4)
        about = json.loads(data[8 : 8 + length])
        return Event("preview", {"node": about.get("display_node_id"), "picture": data[8 + length :]}, now)
    if kind == 3:
        [length] = struct.unpack_from(">I", data, 4)
        return Event("text", {"node": data[8 : 8 + length].decode(), "text": data[8 + length :].decode()}, now)
    return Event("preview", {"node": None, "picture": data[8:]}, now)
