"""The player page of the standalone server, in Chromium, on a server that sends real fragments."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from scipy.spatial.transform import Rotation
from socket_stub import Gone, Peer, SocketStub

from lingbot_core.camera import PER_LATENT, step_pose
from lingbot_core.engine.fragments import FragmentWriter

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "lingbot_core" / "web"
PATH = "/v1/realtime/video"
WIDTH, HEIGHT, FPS = 160, 96, 16


class Video:
    """A talk that answers session.start with chunks of 9 and then 12 moving frames, one every ``pause`` seconds.

    chunks: how many at most; the start's num_frames decides otherwise. vanish_after: chunks until the connection
    breaks.
    """

    def __init__(self, pause: float = 0.05, refuse: dict | None = None, vanish_after: int | None = None) -> None:
        self.pause, self.refuse, self.vanish_after = pause, refuse, vanish_after
        self.start: dict = {}
        self.messages: list[dict] = []
        self.sent_frames = 0
        self.hold = False

    async def __call__(self, peer: Peer) -> None:
        self.start = json.loads(await peer.receive())
        if self.refuse is not None:
            await peer.send(json.dumps({"type": "error", **self.refuse}))
            await peer.receive()
        chunks = ((self.start["num_frames"] - 1) // 4 + 1) // 3
        await peer.send(json.dumps({"type": "video.start", "request_id": "r", "format": "m4s", "config": {}}))
        reader = asyncio.ensure_future(self._read(peer))
        try:
            made = await self._send_chunks(peer, chunks)
            reason = "stopped" if made < chunks else "completed"
            await peer.send(json.dumps({"type": "session.done", "chunks": made, "reason": reason}))
            await reader
        finally:
            reader.cancel()

    async def _send_chunks(self, peer: Peer, chunks: int) -> int:
        writer = FragmentWriter(width=WIDTH, height=HEIGHT, fps=FPS)
        for index in range(chunks):
            if any(message["type"] == "session.stop" for message in self.messages):
                return index
            if index == self.vanish_after:
                peer.vanish()
                raise Gone
            count = 9 if index == 0 else 12
            metadata = {"type": "video.chunk_metadata", "kind": "chunk", "num_frames": count}
            await peer.send(json.dumps({**metadata, "generation_chunk_index": index, "active_event_ids": []}))
            await peer.send(writer.push(self._frames(count)))
            await asyncio.sleep(self.pause)
        return chunks

    def _frames(self, count: int) -> np.ndarray:
        """A white bar that goes to the right, 4 pixels with every frame."""
        frames = np.full((count, HEIGHT, WIDTH, 3), 40, np.uint8)
        for frame in frames:
            at = 4 * self.sent_frames % WIDTH
            frame[:, at : at + 8] = 255
            self.sent_frames += 1
        return frames

    async def _read(self, peer: Peer) -> None:
        while True:
            message = json.loads(await peer.receive())
            self.messages.append(message)
            if message["type"] == "session.interaction":
                event = message["interaction"]["event_id"]
                await peer.send(json.dumps({"type": "session.interaction.queued", "event_id": event}))

    def cameras(self) -> list[dict]:
        events = [message["interaction"]["event"] for message in self.messages if "interaction" in message]
        return [event["multi_modal_data"]["camera"] for event in events if "multi_modal_data" in event]


@pytest.fixture
def open_player(browser: Browser) -> Iterator[object]:
    """``open_player(talk)`` serves the page with that talk behind it and opens it; ``errors`` are on the page."""
    stubs, contexts = [], []

    def open_at(talk: Video, *, width: int = 1000, dark: bool = False, script: str = "") -> Page:
        stub = SocketStub({PATH: talk}, folder=WEB).__enter__()
        stubs.append(stub)
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.errors = []
        page.on("console", lambda message: message.type == "error" and page.errors.append(message.text))
        page.on("pageerror", lambda error: page.errors.append(f"uncaught: {error}"))
        page.goto(f"{stub.url}/player.html")
        return page

    yield open_at
    for context in contexts:
        context.close()
    for stub in stubs:
        stub.__exit__(None, None, None)


def begin(page: Page, seconds: int = 3) -> None:
    page.get_by_label("Seconds", exact=True).fill(str(seconds))
    page.get_by_role("button", name="Start").click()


def test_a_world_plays_to_its_end_and_every_frame_arrives(open_player):
    talk = Video()
    page = open_player(talk)
    begin(page, seconds=3)

    page.wait_for_function("() => document.querySelector('video').currentTime > 0.3", timeout=20_000)
    expect(page.locator("#state")).to_have_text("done: 4 chunks, completed", timeout=20_000)
    page.wait_for_function("() => document.querySelector('video').ended", timeout=20_000)

    # 49 frames were asked for: 13 latent frames, of which 4 chunks of 3 fit.
    assert talk.sent_frames == 9 + 12 + 12 + 12
    expect(page.locator("#frames")).to_have_text("45")
    expect(page.locator("#chunk")).to_have_text("3")
    expect(page.locator("#problem")).to_be_hidden()
    video = page.evaluate(
        """() => {
          const video = document.querySelector("video");
          return {
            ranges: video.buffered.length, begin: video.buffered.start(0), end: video.buffered.end(0),
            duration: video.duration, width: video.videoWidth, height: video.videoHeight,
          };
        }"""
    )
    assert video["ranges"] == 1, "there is a gap between two fragments"
    assert video["begin"] == 0
    assert video["end"] == pytest.approx(45 / FPS, abs=1e-3)
    assert video["duration"] == pytest.approx(45 / FPS, abs=1e-3)
    assert (video["width"], video["height"]) == (WIDTH, HEIGHT)
    assert page.errors == []


def test_the_last_frame_of_the_stream_is_what_is_seen_at_the_end(open_player):
    talk = Video(pause=0)
    page = open_player(talk)
    begin(page, seconds=1)
    page.wait_for_function("() => document.querySelector('video').ended", timeout=20_000)

    assert talk.sent_frames == 9
    bright = page.evaluate(
        """() => {
          const video = document.querySelector("video");
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
          const context = canvas.getContext("2d");
          context.drawImage(video, 0, 0);
          const row = context.getImageData(0, 48, canvas.width, 1).data;
          return [...Array(canvas.width).keys()].filter((x) => row[4 * x] > 150);
        }"""
    )
    assert np.mean(bright) == pytest.approx(4 * 8 + 3.5, abs=1.5)  # the ninth frame's bar, from 32 to 39


def test_what_is_sent_at_the_start(open_player):
    talk = Video(pause=0)
    page = open_player(talk)
    page.get_by_label("Prompt").fill("snow")
    page.get_by_label("Seed").fill("7")
    begin(page, seconds=2)
    expect(page.locator("#state")).to_contain_text("done", timeout=20_000)

    picture = talk.start.pop("image_reference")["image_url"]
    assert talk.start == {
        "type": "session.start",
        "prompt": "snow",
        "format": "m4s",
        "num_frames": 33,
        "seed": 7,
        "extra_params": {"translation_unit": 0.05, "first_delta": "from_rest"},
    }
    head, _, data = picture.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == (ROOT / "examples" / "tiny" / "day.png").read_bytes()


def test_a_picture_of_the_users_own_begins_the_world(open_player):
    talk = Video(pause=0)
    page = open_player(talk)
    file = ROOT / "examples" / "03" / "image.jpg"
    page.get_by_label("First picture").set_input_files(file)
    begin(page, seconds=1)
    expect(page.locator("#state")).to_contain_text("done", timeout=20_000)

    head, _, data = talk.start["image_reference"]["image_url"].partition(",")
    assert head == "data:image/jpeg;base64"
    assert base64.b64decode(data) == file.read_bytes()


def test_held_keys_are_sent_as_the_steps_that_the_pack_computes(open_player):
    talk = Video(pause=0.1)
    page = open_player(talk)
    begin(page, seconds=60)
    expect(page.locator("#state")).to_have_text("making", timeout=20_000)

    held = []
    expected = []
    for down, key in [(True, "w"), (True, "l"), (True, "i"), (False, "w"), (False, "i"), (True, "d"), (False, "l")]:
        (page.keyboard.down if down else page.keyboard.up)(key)
        held = [*held, key] if down else [other for other in held if other != key]
        expected.append("".join(held))
    page.keyboard.up("d")
    expected.append("")
    page.wait_for_timeout(300)

    cameras = talk.cameras()
    assert [camera["mode"] for camera in cameras] == ["velocity"] * len(expected)
    for camera, keys in zip(cameras, expected, strict=True):
        step = step_pose(np.eye(4), keys, PER_LATENT)
        np.testing.assert_allclose(camera["data"]["translation"], step[:3, 3], atol=1e-7)
        rotation = Rotation.from_quat(camera["data"]["rotation"]).as_matrix()
        np.testing.assert_allclose(rotation, step[:3, :3], atol=1e-9)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#state")).to_contain_text("stopped", timeout=20_000)
    assert page.errors == []


def test_typing_a_prompt_moves_nothing_and_changes_the_prompt_when_it_is_sent(open_player):
    talk = Video(pause=0.1)
    page = open_player(talk)
    begin(page, seconds=60)
    expect(page.locator("#state")).to_have_text("making", timeout=20_000)

    prompt = page.get_by_label("Prompt")
    prompt.fill("")
    prompt.press_sequentially("a wild lake")
    page.get_by_role("button", name="Change prompt").click()
    page.wait_for_timeout(300)

    events = [message["interaction"]["event"] for message in talk.messages if "interaction" in message]
    assert events == [{"prompt": "a wild lake"}]


def test_buttons_hold_keys_for_a_pointer_and_for_the_keyboard(open_player):
    talk = Video(pause=0.1)
    page = open_player(talk)
    begin(page, seconds=60)
    expect(page.locator("#state")).to_have_text("making", timeout=20_000)

    right = page.get_by_role("button", name="Look right, key L")
    right.hover()
    page.mouse.down()
    expect(right).to_have_attribute("aria-pressed", "true")
    page.mouse.up()
    expect(right).to_have_attribute("aria-pressed", "false")
    forward = page.get_by_role("button", name="Forward, key W")
    forward.focus()
    page.keyboard.down("Enter")
    expect(forward).to_have_attribute("aria-pressed", "true")
    page.keyboard.up("Enter")
    page.wait_for_timeout(300)

    pressed = [[*camera["data"]["translation"], camera["data"]["rotation"][1]] for camera in talk.cameras()]
    turn = np.sin(np.radians(3))
    np.testing.assert_allclose(pressed, [[0, 0, 0, turn], [0, 0, 0, 0], [0, 0, 0.05, 0], [0, 0, 0, 0]], atol=1e-9)


def test_keys_are_released_when_the_window_loses_the_focus(open_player):
    talk = Video(pause=0.1)
    page = open_player(talk)
    begin(page, seconds=60)
    expect(page.locator("#state")).to_have_text("making", timeout=20_000)
    page.keyboard.down("w")
    page.evaluate("() => window.dispatchEvent(new Event('blur'))")
    page.wait_for_timeout(300)
    assert [camera["data"]["translation"][2] for camera in talk.cameras()] == [0.05, 0]


def test_a_server_that_refuses_is_quoted(open_player):
    page = open_player(Video(refuse={"code": "loading", "message": "the model is loading; try again in a while"}))
    begin(page)
    expect(page.get_by_role("alert")).to_have_text("the model is loading; try again in a while (loading)")
    expect(page.locator("#state")).to_have_text("refused")
    expect(page.get_by_role("button", name="Start")).to_be_enabled()


def test_a_server_that_vanishes_is_said_and_what_came_is_played(open_player):
    page = open_player(Video(vanish_after=2))
    begin(page, seconds=5)
    expect(page.get_by_role("alert")).to_contain_text("The server closed the connection", timeout=20_000)
    expect(page.locator("#state")).to_have_text("connection lost")
    page.wait_for_function("() => document.querySelector('video').ended", timeout=20_000)
    assert page.evaluate("() => document.querySelector('video').duration") == pytest.approx(21 / FPS, abs=1e-3)


def test_a_picture_that_falls_behind_catches_up_and_what_is_far_behind_it_is_let_go(open_player):
    talk = Video(pause=0)
    page = open_player(talk)
    # Heard, not asked for: on a busy machine the last fragment may be there before the question.
    page.evaluate(
        "() => { const video = document.querySelector('video'); window.rates = []; "
        "video.addEventListener('ratechange', () => window.rates.push(video.playbackRate)); }"
    )
    begin(page, seconds=120)
    # 60 s are there long before they are shown.
    page.wait_for_function("() => +document.querySelector('#frames').textContent > 1000", timeout=30_000)
    page.wait_for_function("() => window.rates.includes(1.25)", timeout=10_000)
    page.evaluate("() => { document.querySelector('video').currentTime = 55 }")
    page.wait_for_function("() => document.querySelector('video').buffered.start(0) > 30", timeout=30_000)
    expect(page.locator("#state")).to_contain_text("done", timeout=30_000)
    page.wait_for_function("() => document.querySelector('video').playbackRate === 1", timeout=20_000)
    assert page.evaluate("() => document.querySelector('video').duration") == pytest.approx(talk.sent_frames / FPS)
    assert page.errors == []


def test_a_second_world_follows_the_first(open_player):
    talk = Video(pause=0)
    page = open_player(talk)
    for _ in range(2):
        begin(page, seconds=1)
        page.wait_for_function(
            "() => document.querySelector('#state').textContent.startsWith('done') "
            "&& document.querySelector('video').ended",
            timeout=20_000,
        )
    assert talk.sent_frames == 18
    assert page.errors == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("delete window.MediaSource; delete window.ManagedMediaSource", "has no Media Source Extensions"),
        ("MediaSource.isTypeSupported = () => false", "cannot decode video/mp4; codecs"),
    ],
)
def test_a_browser_that_cannot_play_is_told_so(open_player, script, message):
    page = open_player(Video(), script=script)
    if page.get_by_role("button", name="Start").is_enabled():
        begin(page)
    expect(page.get_by_role("alert")).to_contain_text(message, timeout=20_000)


@pytest.mark.parametrize(("width", "dark"), [(320, False), (320, True), (1000, False), (1000, True)])
def test_the_page_fits_and_can_be_read(open_player, width, dark, tmp_path):
    page = open_player(Video(), width=width, dark=dark)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    ink, paper = page.evaluate(
        "() => [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(ink, paper) > 7
    boxes = {key.get_attribute("data-key"): key.bounding_box() for key in page.locator("[data-key]").all()}
    for up, left, down, right in ("wasd", "ijkl"):
        assert all(min(boxes[key]["width"], boxes[key]["height"]) >= 44 for key in (up, left, down, right))
        assert boxes[up]["y"] + boxes[up]["height"] <= boxes[down]["y"]
        assert boxes[left]["x"] + boxes[left]["width"] <= boxes[down]["x"]
        assert boxes[down]["x"] + boxes[down]["width"] <= boxes[right]["x"]
    for field in page.locator("input, textarea, button").all():
        name = field.evaluate("field => field.ariaLabel || field.labels?.[0]?.textContent || field.textContent")
        assert name.strip()
    screenshots = ROOT / "outputs" / "screenshots"
    screenshots.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=screenshots / f"player_{width}_{'dark' if dark else 'light'}.png", full_page=True)


def test_the_world_is_reached_by_the_tab_key_first(open_player):
    page = open_player(Video())
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "stage"


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours such as rgb(1, 2, 3)."""

    def luminance(colour: str) -> float:
        values = np.array([float(part) for part in colour[4:-1].split(",")]) / 255
        linear = np.where(values <= 0.03928, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
