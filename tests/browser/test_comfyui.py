"""The editor of a running ComfyUI, with the front end that this ComfyUI asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from comfy_client import files_of, problems
from node_info import START_PICTURE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def short_walk(server):
    """The first workflow, of one chunk, and its start picture on the server."""
    server.add_input(ROOT / "examples" / START_PICTURE, START_PICTURE)
    workflow = json.loads((ROOT / "workflows" / "image_to_world.json").read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        if node["type"] == "LingBotAdvanceWorld":
            assert node["widgets_values"][0] == 4
            node["widgets_values"][0] = 1
    return workflow


def content(graph):
    """What a workflow is, apart from places and ids of links."""
    nodes = [(node["id"], node["type"], node.get("title"), node.get("widgets_values")) for node in graph["nodes"]]
    links = {(link[1], link[2], link[3], link[4], link[5]) for link in graph["links"]}
    return sorted(nodes), links, sorted(group["title"] for group in graph["groups"])


def test_the_editor_opens_without_errors(server, open_page, renderer, screenshot):
    page = open_page(server.url, renderer)
    screenshot(page, f"comfyui_{renderer}")
    assert page.errors == []


def test_a_workflow_runs_from_the_page_and_its_video_brings_it_back(
    server, open_page, renderer, short_walk, screenshot, tmp_path
):
    page = open_page(server.url, renderer)
    page.load_workflow(short_walk)
    page.show_everything()
    before = content(page.graph())
    known = set(server.client.call("/history"))
    page.queue()
    [prompt_id] = page.wait_until(lambda: set(server.client.call("/history")) - known)
    entry = server.client.wait(prompt_id)
    assert entry["status"]["status_str"] == "success", problems(entry)
    page.page.wait_for_timeout(1500)
    screenshot(page, f"comfyui_ran_{renderer}")
    assert page.errors == []
    [video] = [item for item in files_of(entry["outputs"]) if item["filename"].endswith(".mp4")]
    file = server.client.download(video, tmp_path)

    other = open_page(server.url, renderer)
    assert content(other.graph()) != before
    other.drop_file(file)
    other.wait_until(lambda: content(other.graph()) == before)
    assert other.errors == []
    other.show_everything()
    screenshot(other, f"comfyui_dropped_{renderer}")


def test_the_template_browser_shows_the_workflows_with_their_pictures_and_opens_them(server, open_page, screenshot):
    page = open_page(server.url)
    page.page.evaluate("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.page.get_by_text("lingbot-world", exact=True).first.click()
    # Where a picture is missing, the page shows a square of its own.
    pictures = """() => [...document.querySelectorAll('[role=dialog] img')]
        .filter(picture => picture.naturalWidth === 320 && picture.naturalHeight === 192)
        .map(picture => picture.alt).sort()"""
    names = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    page.wait_until(lambda: page.page.evaluate(pictures) == names, 20)
    screenshot(page, "comfyui_templates")
    page.page.get_by_text(names[0], exact=True).first.click()
    workflow = json.loads((ROOT / "workflows" / f"{names[0]}.json").read_text(encoding="utf-8"))
    page.wait_until(lambda: content(page.graph()) == content(workflow), 20)


def test_help_pages_and_translations_are_served(server, open_page):
    page = open_page(server.url, locale="zh")
    for name, node in server.client.object_info().items():
        if name.startswith("LingBot"):
            assert server.client.call(f"/extensions/lingbot-world/docs/{name}.md").startswith(b"# "), name
            shown = page.page.evaluate("name => window.LiteGraph.registered_node_types[name].nodeData", name)
            assert shown["display_name"] != node["display_name"]
            assert shown["description"] != node["description"]
