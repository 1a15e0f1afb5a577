"""A run through the nodes, written down and made again: the same world bit for bit, or the field that differs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def as_in_a_node(graph):
    """ComfyUI runs nodes like this; each test has its own worlds."""
    with torch.inference_mode():
        yield
    import world_graph

    world_graph.forget_everything()


def part(name):
    import world_graph

    return world_graph.part(name)


def camera(name, **inputs):
    nodes = {cls.GET_SCHEMA().node_id: cls for cls in part("nodes.camera").NODES}
    return nodes[name].EXECUTE_NORMALIZED(**inputs).result


def latents(world):
    return torch.cat([record.latents for record in world.history.chunks], dim=1)


def test_a_run_is_repeated_from_its_record_in_one_part_and_in_two(graph):
    script = "0: | w\n1: Night falls | wj j none"
    controls = camera("LingBotWorldEvents", script=script, preset="tiny", chunks=3)[0]
    world = graph.advance(graph.start(controls=controls), chunks=3, controls=controls)[2]
    _, text, _ = camera("LingBotControlsRecord", world=world)
    replay = camera("LingBotControls", preset="tiny", record=text)[0]
    whole = graph.advance(graph.start(controls=replay), chunks=3, controls=replay)[2]
    assert torch.equal(latents(whole), latents(world))
    begun = graph.advance(graph.start(controls=replay), chunks=1, controls=replay)[2]
    parts = graph.advance(begun, chunks=2, controls=replay, controls_from="continue")[2]
    assert torch.equal(latents(parts), latents(world))
    assert camera("LingBotControlsRecord", world=parts)[1] == text


def test_a_record_in_another_world_names_what_differs(graph):
    keys = camera("LingBotControls", preset="tiny", keys="w")[0]
    world = graph.advance(graph.start(controls=keys), chunks=2, controls=keys)[2]
    replay = camera("LingBotControls", preset="tiny", record=camera("LingBotControlsRecord", world=world)[1])[0]
    error = part("lingbot_core.errors").HistoryError
    with pytest.raises(error, match="recorded with seed=3, but this world has seed=4"):
        graph.advance(graph.start(controls=replay, seed=4), chunks=1, controls=replay)
    with pytest.raises(error, match=r"recorded with preset\.selection="):
        graph.advance(graph.start(controls=replay, steps="0,400"), chunks=1, controls=replay)
