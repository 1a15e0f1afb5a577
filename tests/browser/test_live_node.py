"""LingBot Live World on ComfyUI's real front end, in both renderers, with the pack's own live handler behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from lingbot_core.engine.walked import walked_poses
from lingbot_core.engine.world import World

NODE = "LingBotLiveWorld"
EMPTY = {"nodes": [], "links": [], "version": 0.4, "last_node_id": 0, "last_link_id": 0}


@pytest.fixture(scope="module")
def tiny() -> World:
    return World.load("tiny", device="cpu")


def add_node(page: Any, name: str = "live") -> None:
    """A live node alone in the graph."""
    page.load_workflow(EMPTY)
    page.page.evaluate(
        """([type, name]) => {
            const graph = window.app.graph, node = window.LiteGraph.createNode(type)
            node.pos = [300, 60]
            graph.add(node)
            node.widgets.find(widget => widget.name === 'name').value = name
        }""",
        [NODE, name],
    )
    page.settle()


def drives(page: Any) -> Any:
    """The element, once it drives."""
    live = page.page.locator(".lbw-live")
    expect(live).to_have_attribute("data-role", "drive", timeout=30_000)
    return live


@pytest.fixture
def editor(stub, open_page, renderer) -> Any:
    return open_page(stub.url, renderer)


def test_the_node_shows_its_world_and_is_steered_by_keys(stub, editor, tiny, screenshot, renderer):
    add_node(editor)
    expect(editor.page.locator(".lbw-note")).to_contain_text("No world is open", timeout=20_000)
    with stub.walk(tiny) as (world, _):
        live = drives(editor)
        editor.page.wait_for_function("() => document.querySelector('.lbw-live').dataset.frame !== undefined")
        editor.page.locator(".lbw-stage").click()
        editor.page.keyboard.down("w")
        editor.wait_until(lambda: world.chunks >= 3)
        editor.page.keyboard.up("w")
        editor.page.keyboard.press("Space")
        expect(live).to_have_attribute("data-state", "paused")
        screenshot(editor, f"live_node_{renderer}")
        poses = walked_poses(world.walk.handle.history)
        assert poses[-1, 2, 3] > 0.14
        np.testing.assert_allclose(poses[:, :2, 3], 0, atol=1e-9)
    expect(editor.page.locator(".lbw-note")).to_contain_text("The walk is over".lower(), ignore_case=True)
    assert editor.errors == []


def test_keys_are_the_worlds_with_the_focus_and_the_editors_without(stub, editor, tiny):
    add_node(editor)
    sidebar = "() => document.querySelector('.side-bar-panel, .comfy-vue-side-bar-container') !== null"
    with stub.walk(tiny, running=False) as (world, _):
        drives(editor)
        editor.page.locator(".lbw-stage").click()
        nodes = len(editor.graph()["nodes"])
        for key in ("w", "r", "q", "Delete", "Backspace", "."):
            editor.page.keyboard.press(key)
        editor.settle()
        assert not editor.page.evaluate(sidebar), "a key of the world opened something of the editor"
        assert len(editor.graph()["nodes"]) == nodes, "Delete deleted the node"
        assert editor.page.evaluate("() => document.activeElement.className").startswith("lbw-stage")
        assert editor.errors == []
        world.steering.clear()
        # Escape gives the keys back: W is the editor's shortcut for its workflows again.
        editor.page.keyboard.press("Escape")
        editor.page.mouse.click(40 + 800, 850)
        editor.page.keyboard.press("w")
        editor.wait_until(lambda: editor.page.evaluate(sidebar), 10)
        assert world.steering.held == ""
        assert not world.steering.take(3).presses


def test_keys_that_are_held_when_the_focus_goes_are_up(stub, editor, tiny):
    add_node(editor)
    with stub.walk(tiny, running=False) as (world, _):
        drives(editor)
        editor.page.locator(".lbw-stage").click()
        editor.page.keyboard.down("w")
        editor.wait_until(lambda: world.steering.held == "w", 10)
        editor.page.mouse.click(840, 850)  # the empty canvas
        editor.wait_until(lambda: world.steering.held == "", 10)
        editor.page.keyboard.up("w")


def test_dragging_the_picture_turns_the_camera_and_does_not_move_the_node(stub, editor, tiny):
    add_node(editor)
    with stub.walk(tiny, running=False) as (world, _):
        drives(editor)
        editor.settle()
        before = editor.graph()["nodes"][0]["pos"]
        box = editor.page.locator(".lbw-stage").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        editor.page.mouse.move(x, y)
        editor.page.mouse.down()
        editor.page.mouse.move(x + box["width"] / 10, y, steps=5)
        editor.page.mouse.up()
        editor.page.wait_for_timeout(300)
        taken = world.steering.take(3)
        assert 3 * taken.look[0] == pytest.approx(9.0, abs=0.5)
        assert editor.graph()["nodes"][0]["pos"] == before


def test_another_name_is_another_world_and_a_prompt_is_typed_in_peace(stub, editor, tiny):
    add_node(editor, "valley")
    with stub.walk(tiny, "valley", running=False) as (world, _):
        drives(editor)
        prompt = editor.page.locator(".lbw-prompt")
        prompt.click()
        prompt.fill("")
        prompt.press_sequentially("wild water")
        prompt.press("Enter")
        editor.wait_until(lambda: world.status()["prompt_waits"], 10)
        assert not world.steering.take(3).presses


def test_after_a_change_of_tabs_the_node_drives_on(stub, editor, tiny):
    add_node(editor)
    with stub.walk(tiny) as (world, _):
        drives(editor)
        editor.wait_until(lambda: world.chunks >= 1)
        saved = editor.graph()
        editor.page.evaluate(
            "() => window.app.loadGraphData({ nodes: [], links: [], version: 0.4, last_node_id: 0, last_link_id: 0 })"
        )
        editor.wait_until(lambda: world.state == "waiting", 20)
        made = world.chunks
        editor.load_workflow(saved)
        drives(editor)
        editor.wait_until(lambda: world.chunks > made + 1)
        assert editor.page.locator(".lbw-live").count() == 1


def test_inside_a_subgraph_it_works_as_outside(stub, editor, tiny):
    add_node(editor)
    editor.page.evaluate(
        """() => {
            const graph = window.app.graph
            graph.convertToSubgraph(new Set(graph.nodes.filter(node => node.type === 'LingBotLiveWorld')))
        }"""
    )
    # As it is opened from a file: right after the conversion the new renderer may show no element of any pack.
    editor.load_workflow(editor.graph())
    editor.page.evaluate(
        """() => {
            const node = window.app.graph.nodes.find(node => node.subgraph)
            window.app.canvas.openSubgraph(node.subgraph, node)
        }"""
    )
    editor.settle()
    with stub.walk(tiny, running=False) as (world, _):
        drives(editor)
        editor.page.locator(".lbw-stage").click()
        editor.page.keyboard.press("d")
        editor.page.get_by_role("button", name="Step", exact=True).click()
        editor.wait_until(lambda: world.chunks == 1)
        assert world.walk.handle.history.chunks[0].controls.keys == ("d", "", "")
    assert editor.errors == []


def test_it_is_no_value_of_the_workflow_and_none_of_the_prompt(stub, editor):
    add_node(editor)
    [node] = editor.graph()["nodes"]
    assert node["widgets_values"] == ["live", "restart", False, False, 0, False]
    [queued] = editor.to_prompt().values()
    assert set(queued["inputs"]) == {"name", "mode", "paused", "keep_going", "chunks", "all_images"}


def test_it_speaks_chinese(stub, open_page, tiny):
    page = open_page(stub.url, locale="zh")
    add_node(page)
    expect(page.page.locator(".lbw-note")).to_contain_text("没有打开的世界", timeout=20_000)
