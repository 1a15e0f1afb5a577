"""The HTTP and WebSocket calls of one ComfyUI server."""

from __future__ import annotations

import asyncio
import json
import struct
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

TEXT_EVENT = 3
"""ComfyUI's number of a binary event that carries a node's progress text."""


class ServerGone(Exception):
    """No answer from the server, or none that ComfyUI would give."""


class BadAddress(Exception):
    """No server can have that address."""


class Refused(Exception):
    """The server did not take a prompt; ``answer`` is what it said."""

    def __init__(self, answer: Any) -> None:
        super().__init__("the server refused the workflow")
        self.answer = answer


class Server:
    """An ``async with`` client; ``url`` may lack its scheme and may have a path, as behind a proxy."""

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        self.url = _address(url)
        self.client_id = uuid.uuid4().hex
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        self._session = aiohttp.ClientSession(timeout=self._timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def _json(self, method: str, path: str, *, accept: Iterable[int] = (200,), **options: Any) -> Any:
        """The answer as JSON (None where it has no body); ServerGone for everything but a status in ``accept``."""
        assert self._session is not None
        try:
            async with self._session.request(method, self.url + path, **options) as response:
                body = await response.read()
                status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"no answer from {self.url}: {error or type(error).__name__}") from None
        if status not in accept:
            raise ServerGone(f"{self.url}{path} answered {status}: {body[:300].decode(errors='replace')}")
        try:
            return (status, json.loads(body)) if body else (status, None)
        except ValueError:
            raise ServerGone(f"{self.url}{path} is no ComfyUI: it did not answer with JSON") from None

    async def submit(self, prompt: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Puts a prompt into the queue; returns its id and the whole answer. Raises Refused."""
        body = {"prompt": prompt, "client_id": self.client_id}
        status, answer = await self._json("POST", "/prompt", accept=(200, 400), json=body)
        if status != 200 or not isinstance(answer, dict) or "prompt_id" not in answer:
            raise Refused(answer)
        return answer["prompt_id"], answer

    async def queue(self) -> tuple[set[str], set[str]]:
        """The ids of the running and of the waiting prompts, everybody's."""
        _, answer = await self._json("GET", "/queue")
        running, pending = (
            {item[1] for item in answer.get(key, [])} if isinstance(answer, dict) else set()
            for key in ("queue_running", "queue_pending")
        )
        return running, pending

    async def history(self, prompt_id: str) -> dict[str, Any] | None:
        """What became of a prompt; None while it is not finished, or when the server does not know it."""
        _, answer = await self._json("GET", f"/history/{prompt_id}")
        return answer.get(prompt_id) if isinstance(answer, dict) else None

    async def input_names(self, class_type: str) -> set[str]:
        """The inputs of a node class; empty when the server does not know the class."""
        _, answer = await self._json("GET", f"/object_info/{class_type}")
        inputs = (answer or {}).get(class_type, {}).get("input", {})
        return {name for group in ("required", "optional") for name in inputs.get(group) or {}}

    async def has_input_file(self, name: str) -> bool:
        """Whether the server's input folder holds the file ``name``, which may lie in a subfolder."""
        assert self._session is not None
        folder, _, file = name.rpartition("/")
        query = {"filename": file, "subfolder": folder, "type": "input"}
        try:
            async with self._session.get(self.url + "/view", params=query) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"no answer from {self.url}: {error or type(error).__name__}") from None

    async def upload(self, file: Path, name: str) -> str:
        """Puts a picture into the input folder; returns the name that a LoadImage node needs for it.

        The server gives it another name when a different file has that one.
        """
        folder, _, base = name.rpartition("/")
        # As browsers do it: names as they are, not with percent signs in them.
        form = aiohttp.FormData(quote_fields=False)
        form.add_field("image", file.read_bytes(), filename=base, content_type="application/octet-stream")
        form.add_field("type", "input")
        if folder:
            form.add_field("subfolder", folder)
        _, answer = await self._json("POST", "/upload/image", data=form)
        return "/".join(part for part in (answer.get("subfolder"), answer["name"]) if part)

    async def download(self, item: dict[str, Any], target: Path) -> None:
        """Writes one output file; ``target`` exists only when all of it has come."""
        assert self._session is not None
        query = {"filename": item["filename"], "subfolder": item.get("subfolder") or "", "type": item["type"]}
        part = target.with_name(f".{target.name}.part")
        try:
            async with self._session.get(self.url + "/view", params=query) as response:
                if response.status != 200:
                    raise ServerGone(f"{item['filename']} cannot be downloaded: the server answered {response.status}")
                with part.open("wb") as file:
                    async for block in response.content.iter_chunked(1 << 20):
                        file.write(block)
            part.rename(target)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ServerGone(f"{item['filename']} did not arrive whole: {error or type(error).__name__}") from None
        finally:
            part.unlink(missing_ok=True)

    async def delete_waiting(self, prompt_ids: Iterable[str]) -> None:
        await self._json("POST", "/queue", json={"delete": list(prompt_ids)})

    async def interrupt(self, prompt_id: str) -> None:
        await self._json("POST", "/interrupt", json={"prompt_id": prompt_id})

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """What the server tells this client, for ever; begins again by itself when the connection is lost.

        ``("connected", {})`` and ``("disconnected", {"error"})`` are events of this side. A node's progress text comes
        as ``("progress_text", {"node", "text"})``; previews are dropped.
        """
        assert self._session is not None
        address, wait = f"{self.url}/ws?clientId={self.client_id}", 0.5
        while True:
            problem = "the server closed the connection"
            try:
                async with self._session.ws_connect(address, heartbeat=30, max_msg_size=0) as socket:
                    wait = 0.5
                    yield "connected", {}
                    async for message in socket:
                        event = _event(message)
                        if event is not None:
                            yield event
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                problem = str(error) or type(error).__name__
            yield "disconnected", {"error": problem}
            await asyncio.sleep(wait)
            wait = min(2 * wait, 10.0)


def _address(text: str) -> str:
    """A server's address, with its scheme; BadAddress for what is none."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket, a port that is no number or too large
        usable = False
    if not usable or any(letter.isspace() for letter in url):
        raise BadAddress(f"--server {text!r} is no address of a server, such as http://127.0.0.1:8188")
    return url.rstrip("/")


def _event(message: aiohttp.WSMessage) -> tuple[str, dict[str, Any]] | None:
    if message.type is aiohttp.WSMsgType.TEXT:
        try:
            content = json.loads(message.data)
        except ValueError:
            return None
        data = content.get("data") if isinstance(content, dict) else None
        return (str(content.get("type")), data) if isinstance(data, dict) else None
    if message.type is aiohttp.WSMsgType.BINARY and len(message.data) >= 8:
        kind, length = struct.unpack_from(">II", message.data)
        if kind == TEXT_EVENT and 8 + length <= len(message.data):
            node, text = message.data[8 : 8 + length], message.data[8 + length :]
            return "progress_text", {"node": node.decode(errors="replace"), "text": text.decode(errors="replace")}
    return None
