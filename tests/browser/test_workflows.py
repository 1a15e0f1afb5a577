"""The shipped workflows in the editor, in both renderers, on the newest front end."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))


def read(*parts: str):
    return json.loads(WORKFLOWS.joinpath(*parts).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_loads_without_errors_and_nothing_lies_on_anything(stub, open_page, renderer, name, screenshot):
    page = open_page(stub.url, renderer)
    page.load_workflow(read(f"{name}.json"))
    page.show_everything()
    screenshot(page, f"{name}_{renderer}")
    assert page.errors == []
    assert page.alerts() == []
    assert stub.unknown == set()
    graph = page.graph()
    assert [node["type"] for node in graph["nodes"]] == [node["type"] for node in read(f"{name}.json")["nodes"]]
    boxes = page.boxes()
    assert len(boxes) == len(graph["nodes"])
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        apart = a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]
        assert apart, f"{one} and {other} overlap: {a}, {b}"


def test_a_start_picture_that_is_not_there_is_told(stub, open_page, renderer):
    """Also the proof that `alerts` sees what a person would see."""
    page = open_page(stub.url, renderer)
    workflow = read("image_to_world.json")
    [picture] = [node for node in workflow["nodes"] if node["type"] == "LoadImage"]
    picture["widgets_values"][0] = "not_there.jpg"
    page.load_workflow(workflow)
    page.wait_until(page.alerts, 10)
    assert "missing" in page.alerts()[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_converts_to_the_prompt_that_is_shipped_for_the_queue(stub, open_page, name):
    page = open_page(stub.url)
    page.load_workflow(read(f"{name}.json"))
    assert page.to_prompt() == read("api", f"{name}.json")
    page.queue()
    page.page.wait_for_timeout(300)
    assert stub.prompts[-1]["prompt"] == read("api", f"{name}.json")


def test_every_workflow_has_a_thumbnail_and_a_prompt_for_the_queue():
    assert set(NAMES) >= {"image_to_world", "continue", "branch", "events"}
    for name in NAMES:
        assert (WORKFLOWS / f"{name}.jpg").is_file(), name
        assert (WORKFLOWS / "api" / f"{name}.json").is_file(), name
