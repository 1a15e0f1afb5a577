"""What nodes of any type, such as reroutes and switches, let into widgets."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from comfy_api.latest import io

PACK = "lingbot_world_pack"


@pytest.fixture
def nodes(pack):
    parts = [importlib.import_module(f"{PACK}.nodes.{name}") for name in ("loading", "camera", "world")]
    return {node.define_schema().node_id: node for part in parts for node in part.NODES}


def refusals(node, value):
    """What a node says of a value in each of its widgets, by name."""
    inputs = node.define_schema().inputs
    said = {}
    for wrong in (one.id for one in inputs if isinstance(one, io.WidgetInput)):
        with pytest.raises(TypeError) as raised:
            node.execute(**{one.id: value if one.id == wrong else None for one in inputs})
        said[wrong] = str(raised.value)
    return said


@pytest.mark.parametrize(
    ("value", "kind"),
    [(torch.zeros(1, 8, 8, 3), r"a Tensor of shape [1, 8, 8, 3]"), ({"samples": 0}, "a dict"), ([[0, {}]], "a list")],
)
def test_what_no_widget_can_hold_is_refused_with_the_name_of_the_input(nodes, value, kind):
    said = {(node, name): text for node, cls in nodes.items() for name, text in refusals(cls, value).items()}
    assert said.keys() >= {
        ("LingBotAdvanceWorld", "keys"),
        ("LingBotWorldSession", "prompt"),
        ("LingBotControls", "chunk"),
    }
    assert len(said) > 100
    for (_, name), text in said.items():
        assert text.startswith(f"the {name} input got {kind}, which is neither text nor a number; ")
        assert text.endswith("remove the link and set it here")


def test_a_number_in_a_text_is_its_digits_and_numbers_of_numpy_are_numbers(nodes):
    paths = [nodes["LingBotCameraKeys"].execute(keys="w-4", speed=half).args[0] for half in (0.5, np.float32(0.5))]
    assert np.array_equal(paths[0].poses, paths[1].poses)
    with pytest.raises(Exception, match="do not say how long they are held"):
        nodes["LingBotCameraKeys"].execute(keys=4)
    with pytest.raises(Exception, match="nothing is given; give exactly one of"):
        nodes["LingBotControls"].execute(preset="tiny", keys=None, events=None)
