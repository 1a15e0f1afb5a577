"""The pack in a running ComfyUI."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_pack_and_a_second_one_with_its_own_nodes_package_load_side_by_side(server, client):
    for pack in server.packs:
        # ComfyUI writes "0.1 seconds (IMPORT FAILED): FOLDER" of a pack that did not load.
        assert re.search(rf"\d seconds: \S+/custom_nodes/{pack}$", server.log(2000), re.MULTILINE), pack
    prompt = {"1": {"class_type": "SecondPackEcho", "inputs": {"text": "hello"}}}
    text, package = client.run(prompt)["1"]["text"]
    assert text == "hello"
    assert package.endswith("second_pack.nodes")


def test_every_template_that_comfyui_lists_is_served_with_its_picture(client):
    # Both examples and workflows are names of template folders, and ComfyUI serves only one folder of a pack.
    names = client.call("/api/workflow_templates")["lingbot-world"]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    for name in names:
        assert client.call(f"/api/workflow_templates/lingbot-world/{name}.json")["nodes"]
        picture = client.call(f"/api/workflow_templates/lingbot-world/{name}.jpg")
        assert picture == (ROOT / "workflows" / f"{name}.jpg").read_bytes()
