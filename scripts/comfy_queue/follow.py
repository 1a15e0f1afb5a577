"""Submits the runs, follows them until each has ended, and fetches what they made."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .console import Console
from .problems import failure_lines, refusal_lines, was_interrupted
from .runs import Run, safe_name
from .server import Refused, Server, ServerGone
from .workflow import WorkflowError

POLL_SECONDS = 1.0
"""How often /queue and /history are asked."""

SOON_SECONDS = 0.05
"""How soon they are asked after a run's last event, which comes shortly before its history; then ever more rarely."""

SOCKET_SECONDS = 5.0
"""How long the first run waits for the socket, so that its progress is seen from the beginning."""

MISSES = 3
"""A run that is in neither of the two for so many questions in a row is lost."""


class Batch:
    """The runs of one call on one server.

    What is true of a run stands in /history: ComfyUI writes it shortly after its last event, and it is still there
    after a lost connection. Events are for the progress on the screen.
    """

    def __init__(
        self,
        server: Server,
        runs: list[Run],
        out: Path,
        console: Console,
        *,
        patience: float,
        previews: bool = False,
        keep_going: bool = False,
        image_input: tuple[str, str] | None = None,
    ) -> None:
        self.server, self.runs, self.out, self.console = server, runs, out, console
        self.patience, self.previews, self.keep_going, self.image_input = patience, previews, keep_going, image_input
        self.stop = asyncio.Event()
        self._by_id: dict[str, Run] = {}
        self._misses: dict[str, int] = {}
        self._started: dict[str, float] = {}
        self._uploaded: dict[Path, str] = {}
        self._wake = asyncio.Event()
        self._listening = asyncio.Event()
        # A quick server tells of a prompt before its answer about it has come.
        self._early: deque[tuple[str, dict[str, Any]]] = deque(maxlen=1000)

    def interrupt(self) -> None:
        """Asks for the end; called in the event loop."""
        self.stop.set()
        self._wake.set()

    async def work(self) -> None:
        """Returns when every run has ended, or its end can no longer be learnt."""
        listening = asyncio.create_task(self._listen())
        try:
            with suppress(TimeoutError):  # without the socket there is no progress, but all the rest
                await asyncio.wait_for(self._listening.wait(), SOCKET_SECONDS)
            await self._submit_all()
            await self._follow()
            if self.stop.is_set():
                await self._cancel()
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    async def _submit_all(self) -> None:
        for run in self.runs:
            if self.stop.is_set():
                return
            try:
                if run.image is not None and self.image_input is not None:
                    run.workflow = run.workflow.with_value(*self.image_input, await self._upload(run.image))
                run.prompt_id, answer = await self.server.submit(run.workflow.nodes)
            except (ServerGone, OSError) as error:
                run.fail(str(error))
            except Refused as refusal:
                run.fail(*refusal_lines(refusal.answer, run.workflow))
            else:
                run.state = "queued"
                self._by_id[run.prompt_id] = run
                if answer.get("node_errors"):  # ComfyUI runs the rest and leaves these outputs out
                    run.problems.extend(refusal_lines(answer, run.workflow))
                self.console.line(f"queued {run.name} as {run.prompt_id}")
                early, self._early = self._early, deque(maxlen=1000)
                for event, data in early:
                    self._show_event(event, data)
                continue
            self._show_failure(run)
            if not self.keep_going:
                return

    async def _upload(self, image: Path) -> str:
        if image not in self._uploaded:
            self._uploaded[image] = await self.server.upload(image, image.name)
        return self._uploaded[image]

    def _living(self) -> list[Run]:
        return [run for run in self._by_id.values() if not run.over]

    async def _follow(self, limit: float | None = None) -> None:
        last_answer, pause = time.monotonic(), POLL_SECONDS
        end = None if limit is None else last_answer + limit
        while self._living() and (end is None or time.monotonic() < end):
            if limit is None and self.stop.is_set():
                return
            try:
                await self._ask()
                last_answer = time.monotonic()
            except ServerGone as error:
                silent = time.monotonic() - last_answer
                if silent > self.patience:
                    for run in self._living():
                        run.fail(f"{error}; given up after {silent:.0f} s of silence (--patience)")
                        self._show_failure(run)
                    return
                self.console.line(f"{error}; trying again")
            if self._living():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
                pause = SOON_SECONDS if self._wake.is_set() else min(2 * pause, POLL_SECONDS)
                self._wake.clear()

    async def _ask(self) -> None:
        # In this order: a prompt leaves the queue in the same instant in which it enters the history.
        running, waiting = await self.server.queue()
        for run in self._living():
            assert run.prompt_id is not None
            if run.prompt_id in running:
                self._begin(run)
            if run.prompt_id in running or run.prompt_id in waiting:
                self._misses.pop(run.prompt_id, None)
                continue
            entry = await self.server.history(run.prompt_id)
            if entry is not None:
                await self._finish(run, entry)
                continue
            self._misses[run.prompt_id] = self._misses.get(run.prompt_id, 0) + 1
            if self._misses[run.prompt_id] >= MISSES:
                run.fail("the server no longer knows this run: it was restarted, or somebody deleted it from the queue")
                self._show_failure(run)

    def _begin(self, run: Run) -> None:
        if run.state == "queued" and run.prompt_id is not None:
            run.state = "running"
            self._started[run.prompt_id] = time.monotonic()
            self.console.line(f"running {run.name}")

    async def _finish(self, run: Run, entry: dict[str, Any]) -> None:
        assert run.prompt_id is not None
        run.seconds = _seconds(entry) or time.monotonic() - self._started.get(run.prompt_id, time.monotonic())
        succeeded = entry.get("status", {}).get("status_str") != "error"
        # Also of a failed run: what was finished before the error is somebody's work.
        await self._fetch(run, entry)
        if not succeeded:
            run.state = "interrupted" if was_interrupted(entry) else "failed"
            run.problems.extend(failure_lines(entry, run.workflow))
        elif run.problems:
            run.state = "failed"
        else:
            run.state = "done"
        if run.state == "done":
            self.console.line(f"done {run.name} in {run.seconds:.1f} s, {_files(len(run.files))}")
        else:
            self._show_failure(run)

    async def _fetch(self, run: Run, entry: dict[str, Any]) -> None:
        items = list(output_files(entry))
        chosen = [item for item in items if self.previews or item["type"] != "temp"]
        if items and not chosen:
            self.console.line(f"{run.name} made only previews; --previews downloads them")
        for item in chosen:
            try:
                target = _free_name(self.out / f"{run.name}__{safe_name(Path(item['filename']).name)}")
                await self.server.download(item, target)
                run.files.append(target)
                self.console.line(f"  {target}")
            except ServerGone as error:
                run.problems.append(str(error))
            except OSError as error:
                run.problems.append(
                    f"{target} cannot be written: {error.strerror or error}; the server has it in its {item['type']} "
                    f"folder as {'/'.join(filter(None, (item.get('subfolder'), item['filename'])))}"
                )

    async def _cancel(self) -> None:
        """Takes this call's prompts back, and nobody else's."""
        living = self._living()
        if not living:
            return
        self.console.line(f"stopping: taking {len(living)} run(s) back (Ctrl-C again: leave at once)")
        try:
            # Twice: a waiting prompt may have begun between the two questions.
            asked: set[str] = set()
            for _ in range(2):
                running, waiting = await self.server.queue()
                mine = [run for run in self._living() if run.prompt_id in waiting]
                if mine:
                    await self.server.delete_waiting([run.prompt_id for run in mine if run.prompt_id])
                for run in self._living():
                    if run.prompt_id in running and run.prompt_id not in asked:
                        asked.add(run.prompt_id)
                        await self.server.interrupt(run.prompt_id)
                still = (await self.server.queue())[0]
                for run in mine:
                    if run.prompt_id not in still:
                        run.state = "taken back"
            await self._follow(limit=self.patience)
        except ServerGone as error:
            self.console.line(f"{error}; the server may still be working on them")
        for run in self._living():
            run.state = "left on the server"

    def _show_failure(self, run: Run) -> None:
        self.console.line(f"{run.state} {run.name}")
        for problem in run.problems:
            self.console.line(f"  {problem}")

    async def _listen(self) -> None:
        lost = False
        async for event, data in self.server.events():
            if event == "disconnected":
                if not lost and self._living():
                    self.console.line(f"progress is lost ({data['error']}); connecting again, the runs go on")
                lost = True
            elif event == "connected":
                if lost and self._living():
                    self.console.line("connected again")
                lost = False
                self._listening.set()
            else:
                self._show_event(event, data)

    def _show_event(self, event: str, data: dict[str, Any]) -> None:
        run = self._by_id.get(str(data.get("prompt_id")))
        if event == "progress_text":
            run = next((run for run in self._living() if run.state == "running"), None)
            if run is None:
                self._early.append((event, data))
            else:
                self.console.progress(run.name, f"{self._node(run, data['node'])}: {data['text'].strip()}")
            return
        if run is None:
            self._early.append((event, data))
            return
        if run.over:
            return
        if event in ("execution_success", "execution_error", "execution_interrupted"):
            self._wake.set()
        elif event in ("execution_start", "executing", "progress"):
            self._begin(run)
            if data.get("node") is None:
                return
            text = self._node(run, str(data.get("display_node") or data["node"]))
            if event == "progress" and data.get("max"):
                text += f" {data.get('value')}/{data['max']}"
            self.console.progress(run.name, text)

    def _node(self, run: Run, node: str) -> str:
        return run.workflow.title(node) if node in run.workflow.nodes else f"node {node}"


async def send_missing_files(
    server: Server, runs: list[Run], folders: list[Path], console: Console, image_input: tuple[str, str] | None
) -> None:
    """Uploads what the LoadImage nodes name and the server lacks, when it lies in one of ``folders``.

    WorkflowError for a file that is in neither place.
    """
    names: dict[str, str] = {}
    for run in runs:
        for node in run.workflow.of_class("LoadImage"):
            name = run.workflow.nodes[node]["inputs"].get("image")
            if run.image is not None and (node, "image") == image_input:
                continue  # one of --images, uploaded with its run
            # "x.png [output]" names another folder of the server.
            if not isinstance(name, str) or name.endswith("]"):
                continue
            if name not in names:
                names[name] = await _send_missing(server, name, run.workflow.label(node), folders, console)
            run.workflow = run.workflow.with_value(node, "image", names[name])


async def _send_missing(server: Server, name: str, label: str, folders: list[Path], console: Console) -> str:
    if await server.has_input_file(name):
        return name
    for folder in folders:
        file = (folder / name).resolve()
        if file.is_file() and file.is_relative_to(folder.resolve()):
            sent = await server.upload(file, name)
            console.line(f"uploaded {file} as {sent}")
            return sent
    places = " and ".join(str(folder) for folder in folders)
    raise WorkflowError(
        f"{label} wants the picture {name}: it is not in the server's input folder, and not in {places}; "
        f"give --images FILE, or --set with the name of a picture that the server has"
    )


def output_files(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every file in a /history entry, whatever key its node reported it under: images, gifs, video, audio."""
    for output in entry.get("outputs", {}).values():
        for items in output.values():
            for item in items if isinstance(items, list) else []:
                if isinstance(item, dict) and item.get("filename") and item.get("type") in ("output", "temp"):
                    yield item


def _seconds(entry: dict[str, Any]) -> float | None:
    stamps = [
        data["timestamp"]
        for _, data in entry.get("status", {}).get("messages", [])
        if isinstance(data.get("timestamp"), (int, float))
    ]
    return (max(stamps) - min(stamps)) / 1000 if stamps else None


def _free_name(target: Path) -> Path:
    """``target``, or ``target`` with a number when an earlier run's file has that name."""
    candidate, number = target, 1
    while candidate.exists():
        candidate = target.with_name(f"{target.stem} ({number}){target.suffix}")
        number += 1
    return candidate


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"
