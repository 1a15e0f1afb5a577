"""While a world runs: progress, previews, text, and the cancel button."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import threading

import comfy.model_management as mm
import comfy.utils
import cv2
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("wg")

STEPS = 2


class Server:
    """As much of PromptServer as a run talks to, with a running event loop."""

    def __init__(self, client="me", metadata=True):
        self.client_id, self.last_prompt_id = client, "prompt"
        flags = {"supports_preview_metadata": metadata}
        self.sockets_metadata = {client: {"feature_flags": flags}}
        self.sent, self.texts, self.wait = [], [], threading.Event()
        self.wait.set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def send_bytes(self, event, data, sid):
        while not self.wait.is_set():
            await asyncio.sleep(0.005)
        self.sent.append((event, bytes(data), sid))

    def send_progress_text(self, text, node_id, sid=None):
        self.texts.append((text, node_id, sid))

    def flush(self):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), self.loop).result(10)

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def serve(wg, monkeypatch):
    servers = []

    def start(**options):
        servers.append(Server(**options))
        monkeypatch.setattr(wg.part("nodes.host.progress"), "prompt_server", lambda: servers[-1])
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def bar(monkeypatch):
    """What ComfyUI's progress hook is told: (value, total, preview, node)."""
    told = []
    hook = lambda value, total, preview, node_id=None: told.append((value, total, preview, node_id))  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0)
    return told


def decoded(message):
    """(metadata or None, picture [H, W, 3] RGB) of a preview as the front end reads it."""
    event, data, _ = message
    about = None
    if event == 4:
        [length] = struct.unpack(">I", data[:4])
        about, data = json.loads(data[4 : 4 + length]), data[4 + length :]
    else:
        assert event == 1
        assert struct.unpack(">I", data[:4]) == (1,)
        data = data[4:]
    return about, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]


def test_the_bar_counts_chunks_times_steps(graph, bar):
    graph.advance(graph.start(), 3)
    values = [value for value, *_ in bar]
    assert values == sorted(values)
    assert set(values) == set(range(3 * STEPS + 1))
    assert {(total, preview, node) for _, total, preview, node in bar} == {(6, None, "7")}


def test_the_newest_frames_are_shown_encoded_already(graph, serve):
    server = serve()
    images, *_ = graph.advance(graph.start(), 2)
    server.flush()
    assert server.sent
    about, shown = decoded(server.sent[-1])
    assert about["node_id"] == about["display_node_id"] == "7"
    assert about["prompt_id"] == "prompt"
    assert about["image_type"] == "image/jpeg"
    last = images[-1].mul(255).numpy()
    assert np.abs(shown - last).mean() < np.abs(shown - images[0].mul(255).numpy()).mean()
    assert np.abs(shown.mean((0, 1)) - last.mean((0, 1))).max() < 4
    assert {sid for *_, sid in server.sent} == {"me"}


def test_front_ends_without_node_previews_get_the_old_message(graph, serve):
    server = serve(metadata=False)
    graph.advance(graph.start(), 1)
    server.flush()
    assert decoded(server.sent[-1])[1].shape == (16, 32, 3)


def test_text_has_chunk_seconds_and_fps(graph, serve):
    server = serve()
    graph.advance(graph.start(), 2)
    texts = [text for text, node, sid in server.texts if (node, sid) == ("7", "me")]
    assert len(texts) == 2
    assert texts[-1].startswith("chunk 2/2: 21 frames in ")
    assert texts[-1].endswith(" fps")


@pytest.mark.parametrize("absent", ["client", "server"])
def test_nobody_listens(graph, wg, serve, monkeypatch, absent):
    server = serve(client=None)
    if absent == "server":
        monkeypatch.setattr(wg.part("nodes.host.progress"), "prompt_server", lambda: None)
    images, *_ = graph.advance(graph.start(), 1)
    assert len(images) == 9
    assert server.sent == server.texts == []


def test_previews_are_throttled_and_dropped_while_one_is_on_its_way(wg, serve):
    server, now = serve(), [0.0]
    preview = wg.part("nodes.host.progress").LivePreview("7", clock=lambda: now[0])
    frame = np.zeros((32, 48, 3), np.uint8)
    assert preview.show(frame)
    server.flush()
    now[0] = 0.05
    assert not preview.show(frame)
    assert preview.show(frame, now=True)
    server.flush()
    server.wait.clear()
    now[0] = 1.0
    assert preview.show(frame)
    now[0] = 2.0
    assert not preview.show(frame)  # the front end is behind: the queue does not grow
    assert not preview.show(frame, now=True)
    server.wait.set()
    server.flush()
    assert preview.show(frame)


def test_previews_are_no_larger_than_comfyuis_own(wg):
    jpeg = wg.part("nodes.host.progress").encode_jpeg(np.zeros((480, 832, 3), np.uint8), 512)
    assert cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR).shape == (295, 512, 3)


class Button:
    """Presses cancel when the transformer runs for the n-th time; counts what runs after."""

    def __init__(self, wg, dit, monkeypatch, press_at):
        self.forwards = 0
        forward = dit.forward

        def watched(*args, **kwargs):
            self.forwards += 1
            if self.forwards == press_at:
                wg.cancel()
            return forward(*args, **kwargs)

        monkeypatch.setattr(dit, "forward", watched)


@pytest.mark.parametrize("press_at", range(1, 3 * STEPS + 1))
def test_cancel_acts_within_a_step_and_loses_nothing(graph, wg, monkeypatch, caplog, press_at):
    whole, *_ = graph.advance(graph.start(), 3, keys="w-9")
    start = graph.start()
    button = Button(wg, start.source.host.world.dit, monkeypatch, press_at)
    caplog.set_level(logging.INFO)
    with pytest.raises(mm.InterruptProcessingException):
        graph.advance(start, 3, keys="w-9")
    assert button.forwards == press_at  # not one more step
    # ComfyUI's layers look at the button, too: the step in which it is pressed is not finished.
    chunks = (press_at - 1) // STEPS
    info = wg.worlds().info(start)
    assert info.head == chunks
    stopped = [r.getMessage() for r in caplog.records if "finished frames are in" in r.getMessage()]
    frames = [0, 9, 21][chunks]
    assert len(stopped) == bool(frames)
    if frames:
        path = stopped[0].split("finished frames are in ")[1]
        video = wg.part("nodes.host.video").InputImpl.VideoFromFile(path)
        assert video.get_frame_count() == frames
    images, _, world, report = graph.advance(start, 3, keys="w-9")
    assert torch.equal(images, whole)
    assert report["made"]["chunks_reused"] == chunks
    assert button.forwards == press_at + STEPS * (3 - chunks)
    assert world.chunks == 3


def test_cancel_acts_while_chunks_are_decoded_again(graph, wg):
    start = graph.start()
    graph.advance(start, 3)
    wg.cancel()
    with pytest.raises(mm.InterruptProcessingException):
        graph.advance(start, 3)
    assert wg.worlds().info(start).head == 3


def test_cancel_acts_while_another_thread_has_the_device(graph, wg):
    start = graph.start()
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with wg.worlds().lease(graph.model.load_device):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    wg.cancel()
    try:
        with pytest.raises(mm.InterruptProcessingException):
            graph.advance(start, 1)
    finally:
        leave.set()
        thread.join()
    graph.advance(start, 1)
