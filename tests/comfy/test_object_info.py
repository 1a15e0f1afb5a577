"""What a running ComfyUI says of the pack's nodes."""

from __future__ import annotations

import node_info
import pytest


@pytest.fixture(scope="module")
def object_info(server):
    return server.client.object_info()


def test_all_nodes_are_there(object_info):
    names = {name for name in object_info if name.startswith(node_info.PREFIX)}
    assert len(names) >= 14
    assert {
        "LingBotLoadWorldModel", "LingBotLoadWorldFolder", "LingBotStartImage", "LingBotStartWorld",
        "LingBotAdvanceWorld", "LingBotWorldSession", "LingBotWorldEvents", "LingBotCloseWorld", "LingBotWorldInfo",
        "LingBotMemoryEstimate", "LingBotCameraKeys", "LingBotCameraLoad", "LingBotControls", "LingBotWorldLatents",
    } <= names  # fmt: skip


def test_every_node_is_described_and_found(object_info):
    for name, node in node_info.kept(object_info).items():
        if name.startswith(node_info.PREFIX):
            assert node["category"].split("/")[0] == "LingBot World", name
            assert node["description"].strip(), name
            assert node["search_aliases"], name
            assert not node.get("deprecated"), name


def test_every_input_and_output_has_a_tooltip(object_info):
    bare = [
        f"{name}.{key}"
        for name, node in node_info.kept(object_info).items()
        if name.startswith(node_info.PREFIX)
        for key, tooltip in [
            *((key, spec[1].get("tooltip")) for key, spec in node_info.inputs_of(node).items()),
            *node_info.outputs_of(node),
        ]
        if not (tooltip or "").strip()
    ]
    assert bare == []


def test_the_committed_part_is_what_the_server_says(object_info):
    # The browser tests, the help pages and the translations are checked against the file.
    assert node_info.load() == node_info.kept(object_info), "run scripts/update_node_info"
