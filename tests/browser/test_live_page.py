"""The live page in Chromium, on the real live server with the embedded model: real keys, real frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import HeldHost
from live_thread import LiveThread
from playwright.sync_api import Browser, Page, expect

from lingbot_core.engine.walked import walked_poses
from lingbot_core.engine.world import World
from lingbot_core.errors import SessionError

SCREENSHOTS = Path(__file__).resolve().parents[2] / "outputs" / "screenshots"
LEFT_ALONE = """() => {
  window.leaked = []
  for (const kind of ['keydown', 'keyup', 'wheel']) {
    window.addEventListener(kind, event => window.leaked.push(event.code ?? kind))
  }
}"""


@pytest.fixture(scope="module")
def tiny() -> World:
    return World.load("tiny", device="cpu")


class LivePage:
    """A page on a live world. errors: of its console."""

    def __init__(self, page: Page, live: LiveThread) -> None:
        self.page, self.live = page, live
        self.errors: list[str] = []
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))

    def open(self, role: str = "drive") -> LivePage:
        self.page.goto(self.live.url)
        expect(self.page.locator(".lbw-live")).to_have_attribute("data-role", role, timeout=30_000)
        self.page.wait_for_function(
            "() => document.querySelector('.lbw-live').dataset.frame !== undefined", timeout=30_000
        )
        self.stage.focus()
        return self

    @property
    def stage(self) -> Any:
        return self.page.locator(".lbw-stage")

    def fact(self, name: str) -> str:
        return self.page.locator(f".lbw-{name}").inner_text()

    def picture(self) -> np.ndarray:
        """What the canvas shows, uint8 [H, W, 3]."""
        data = self.page.evaluate(
            """() => {
                const canvas = document.querySelector('.lbw-picture')
                const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
                return [canvas.height, canvas.width, [...data]]
            }"""
        )
        return np.array(data[2], np.uint8).reshape(data[0], data[1], 4)[:, :, :3]

    def becomes(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"it did not happen; {self.page.inner_text('.lbw-live')}"
            self.page.wait_for_timeout(30)
        return found

    def chunks(self, count: int) -> None:
        self.becomes(lambda: len(self.live.history) >= count)

    def steered(self) -> list[str]:
        """The keys of every latent frame so far."""
        return [keys for record in self.live.history.chunks for keys in record.controls.keys or ("?",) * 3]

    def shot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@pytest.fixture
def open_live(browser: Browser, tiny) -> Iterator[Callable[..., LivePage]]:
    """``open_live(...)`` opens a page on a new world, or with ``live`` another page on one that is there."""
    threads, contexts = [], []

    def open_at(
        live: LiveThread | None = None, *, role: str = "drive", context: Any = None, **options: Any
    ) -> LivePage:
        if live is None:
            live = LiveThread(tiny, **options)
            threads.append(live)
            live.__enter__()
        context = browser.new_context(viewport={"width": 900, "height": 900})
        contexts.append(context)
        return LivePage(context.new_page(), live).open(role)

    yield open_at
    for context in contexts:
        context.close()
    for thread in threads:
        thread.__exit__(None, None, None)


def test_w_for_two_seconds_goes_forward_and_the_picture_changes(open_live):
    page = open_live(running=False)
    before = page.picture()
    page.page.keyboard.press("Space")
    page.page.keyboard.down("w")
    expect(page.page.locator("kbd[data-key=w]")).to_have_class("lbw-down")
    page.page.wait_for_timeout(2000)
    page.page.keyboard.up("w")
    page.chunks(3)
    page.page.keyboard.press("Space")
    expect(page.page.locator(".lbw-live")).to_have_attribute("data-state", "paused")
    steered = page.steered()
    assert steered.count("w") >= 3
    forward = walked_poses(page.live.history)
    moved = [index for index, keys in enumerate(steered) if keys == "w"]
    assert forward[moved[-1], 2, 3] == pytest.approx(0.05 * len(moved), rel=1e-4)
    np.testing.assert_allclose(forward[:, :2, 3], 0, atol=1e-9)
    page.becomes(lambda: np.abs(page.picture().astype(int) - before).mean() > 3)
    page.becomes(lambda: "key to picture" in page.fact("latency"))
    page.shot("live_page")
    assert page.errors == []


@pytest.mark.parametrize(
    ("key", "kept"),
    [*zip("dajl", "dajl", strict=True), ("ArrowUp", "i"), ("ArrowLeft", "j"), ("q", "?"), ("e", "?")],
)
def test_a_tap_moves_one_latent_frame_of_the_next_chunk(open_live, key, kept):
    page = open_live(running=False)
    page.page.keyboard.press(key)
    page.page.get_by_role("button", name="Step").click()
    page.chunks(1)
    expected = ["?"] * 3 if kept == "?" else [kept, "", ""]
    assert page.steered() == expected
    if kept == "?":
        pose = walked_poses(page.live.history)
        sign = -1 if key == "e" else 1
        np.testing.assert_allclose(pose[:, 1, 3], sign * 0.05, atol=1e-9)


def test_a_mouse_that_is_dragged_turns_the_camera(open_live):
    page = open_live(running=False)
    box = page.stage.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.page.mouse.move(x, y)
    page.page.mouse.down()
    page.page.mouse.move(x + box["width"] / 10, y - box["width"] / 30, steps=6)
    page.page.mouse.up()
    page.page.wait_for_timeout(200)
    page.page.get_by_role("button", name="Step").click()
    page.chunks(1)
    pose = walked_poses(page.live.history)[-1]
    yaw = np.degrees(np.arctan2(pose[0, 2], pose[2, 2]))
    pitch = np.degrees(np.arcsin(-pose[1, 2]))
    assert yaw == pytest.approx(9.0, abs=0.3)
    assert pitch == pytest.approx(3.0, abs=0.3)


def test_pads_and_the_buttons_for_up_and_down_work_for_a_finger(open_live):
    page = open_live(running=False)
    page.page.evaluate("() => (document.querySelector('.lbw-live').dataset.pads = 'show')")
    pad = page.page.locator(".lbw-pad.lbw-move")
    pad.scroll_into_view_if_needed()
    box = pad.bounding_box()
    page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 1)
    page.page.mouse.down()
    page.becomes(lambda: page.live.at.world.steering._axes[0] > 0.9)
    page.shot("live_page_pads")
    page.live.call(page.live.at.world.step)
    page.chunks(1)
    page.page.mouse.up()
    page.becomes(lambda: not any(page.live.at.world.steering._axes))
    assert walked_poses(page.live.history)[-1, 2, 3] > 0.13
    up = page.page.get_by_title("Up (E)")
    up.hover()
    page.page.mouse.down()
    page.becomes(lambda: page.live.at.world.steering.held == "e")
    page.page.mouse.up()
    page.becomes(lambda: page.live.at.world.steering.held == "")


def test_a_gamepad_of_the_standard_layout_steers(open_live, browser):
    page = open_live(running=False)
    page.page.evaluate(
        """() => {
            const buttons = Array(17).fill({ value: 0 })
            const pad = { connected: true, mapping: 'standard', axes: [0, -1, 0.5, 0], buttons }
            navigator.getGamepads = () => [pad]
            window.pad = pad
            window.dispatchEvent(new Event('gamepadconnected'))
        }"""
    )
    forward, right, up, pitch, yaw = page.becomes(
        lambda: any(page.live.at.world.steering._axes) and page.live.at.world.steering._axes
    )
    assert (forward, right, up, pitch) == (1, 0, 0, 0)
    assert 0.3 < yaw < 0.5
    page.page.evaluate("() => (window.pad.axes = [0, 0, 0, 0])")
    page.becomes(lambda: not any(page.live.at.world.steering._axes))


def test_keys_are_up_when_the_focus_goes_or_the_window_is_left(open_live):
    page = open_live(running=False)
    steering = page.live.at.world.steering
    for leave in (
        lambda: page.page.evaluate("() => window.dispatchEvent(new Event('blur'))"),
        lambda: page.page.locator(".lbw-prompt").focus(),
        lambda: page.page.locator("#record").focus(),
        lambda: page.page.keyboard.press("Escape"),
    ):
        page.stage.focus()
        page.page.keyboard.down("w")
        page.becomes(lambda: steering.held == "w")
        leave()
        page.becomes(lambda: steering.held == "")
        page.page.keyboard.up("w")


def test_typing_a_prompt_moves_nothing_and_enter_sends_it(open_live):
    page = open_live(running=False)
    prompt = page.page.locator(".lbw-prompt")
    prompt.fill("")
    prompt.press_sequentially("a wild lake")
    assert page.live.at.world.steering.held == ""
    prompt.press("Enter")
    page.becomes(lambda: page.live.at.world.status()["prompt_waits"])
    page.page.get_by_role("button", name="Step").click()
    page.chunks(1)
    assert page.live.history.prompt == "a wild lake"
    assert page.steered() == ["", "", ""]


def test_nothing_that_is_pressed_here_reaches_the_page_around_and_without_focus_all_does(open_live):
    page = open_live(running=False)
    page.page.evaluate(LEFT_ALONE)
    for key in ("w", "r", "Delete", "Backspace", "Enter", "5", "ArrowUp"):
        page.page.keyboard.press(key)
    assert page.page.evaluate("() => window.leaked") == []
    page.page.keyboard.press("Control+Enter")  # the page's own: it goes its way
    assert "Enter" in page.page.evaluate("() => window.leaked")
    waiting = page.live.at.world.steering.take(3).presses
    assert set(waiting) == {"w", "i"}, "the taps before that count"
    page.page.evaluate("() => { document.activeElement.blur(); window.leaked = [] }")
    page.page.keyboard.press("w")
    assert page.page.evaluate("() => window.leaked") == ["KeyW", "KeyW"]
    assert page.live.at.world.steering.held == ""
    assert not page.live.at.world.steering._presses


def test_where_the_focus_is_can_be_seen(open_live):
    page = open_live(running=False)
    style = "() => getComputedStyle(document.querySelector('.lbw-stage')).outlineColor"
    focused = page.page.evaluate(style)
    page.page.evaluate("() => document.activeElement.blur()")
    assert page.page.evaluate(style) != focused
    page.page.keyboard.press("Tab")
    assert page.page.evaluate("() => document.activeElement.className") != ""


def test_a_page_that_is_loaded_again_in_the_middle_of_a_walk_goes_on(open_live):
    page = open_live()
    page.page.keyboard.down("w")
    page.chunks(2)
    page.page.reload()
    page.page.keyboard.up("w")
    expect(page.page.locator(".lbw-live")).to_have_attribute("data-role", "drive", timeout=30_000)
    page.stage.focus()
    made = len(page.live.history)
    page.page.keyboard.down("l")
    page.chunks(made + 3)
    assert page.steered()[-1] == "l"
    page.page.keyboard.up("l")
    page.shot("live_page_reloaded")


def test_a_second_tab_watches_is_told_and_can_take_the_wheel(open_live):
    page = open_live()
    other = open_live(page.live, role="watch")
    expect(other.page.locator(".lbw-watching")).to_contain_text("somebody else drives")
    expect(other.page.get_by_role("button", name="Stop")).to_be_disabled()
    before = other.page.locator(".lbw-live").get_attribute("data-frame")
    other.becomes(lambda: other.page.locator(".lbw-live").get_attribute("data-frame") != before)
    other.shot("live_page_watching")
    other.page.get_by_role("button", name="Take the wheel").click()
    expect(page.page.locator(".lbw-watching")).to_contain_text("another page has taken the wheel")
    expect(other.page.get_by_role("button", name="Stop")).to_be_enabled()


def test_back_anew_snapshot_speeds_and_keep_going(open_live):
    page = open_live(running=False)
    step = page.page.get_by_role("button", name="Step")
    for count in (1, 2):
        step.click()
        page.chunks(count)
        expect(page.page.locator(".lbw-chunk")).to_contain_text(f"chunk {count}")
    page.page.get_by_role("button", name="Snapshot").click()
    expect(page.page.locator(".lbw-note")).to_contain_text("after chunk 2")
    page.page.get_by_role("button", name="Back").click()
    expect(page.page.locator(".lbw-chunk")).to_contain_text("chunk 1")
    page.page.get_by_label("Moving").fill("0.5")
    page.becomes(lambda: page.live.at.world.steering.speeds.move == 0.5)
    page.page.get_by_label("Keep going").check()
    page.becomes(lambda: page.live.at.world.status()["keep_going"])
    page.page.get_by_role("button", name="Anew").click()
    page.becomes(lambda: page.live.at.world.rewound and len(page.live.history) >= 1)
    page.page.get_by_role("button", name="Pause").click()
    expect(page.page.locator(".lbw-live")).to_have_attribute("data-state", "paused")


def test_a_hidden_page_makes_the_world_wait(open_live):
    page = open_live()
    page.chunks(1)
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true })
        document.dispatchEvent(new Event('visibilitychange'))
    }"""
    page.page.evaluate(hide, True)
    page.becomes(lambda: page.live.at.world.state == "waiting")
    page.page.evaluate(hide, False)
    page.becomes(lambda: page.live.at.world.state == "running")


def test_an_error_is_told_and_start_tries_again(open_live):
    page = open_live()
    page.chunks(1)
    host: HeldHost = page.live.at.host
    host.problem = SessionError("the card has gone to lunch")
    expect(page.page.locator(".lbw-problem")).to_have_text("the card has gone to lunch", timeout=20_000)
    made = len(page.live.history)
    host.problem = None
    page.page.get_by_role("button", name="Start").click()
    page.chunks(made + 1)
    expect(page.page.locator(".lbw-problem")).to_be_hidden()


def test_a_server_that_is_started_anew_is_told_and_the_recorded_way_is_walked_again(open_live, tiny):
    with LiveThread(tiny, running=False) as first:
        page = open_live(first)
        page.page.keyboard.down("w")
        for count in (1, 2):
            page.page.get_by_role("button", name="Step").click()
            page.chunks(count)
        page.page.keyboard.up("w")
        page.becomes(lambda: page.page.locator(".lbw-chunk").inner_text().startswith("chunk 2"))
        page.page.wait_for_timeout(300)
        port, walked = first.port, first.history
    expect(page.page.locator(".lbw-problem")).to_contain_text("The connection is lost", timeout=20_000)
    with LiveThread(tiny, running=False, port=port) as second:
        expect(page.page.locator(".lbw-offer")).to_contain_text("2 recorded chunks", timeout=20_000)
        page.shot("live_page_restarted")
        page.page.get_by_role("button", name="Walk it again").click()
        page.becomes(lambda: len(second.history) == 2)
        import torch

        for one, other in zip(walked.chunks, second.history.chunks, strict=True):
            assert torch.equal(one.latents, other.latents)
        page.page.close()
