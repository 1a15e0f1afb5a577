"""The pack in a running ComfyUI."""

from __future__ import annotations

import re


def test_the_pack_and_a_second_one_with_its_own_nodes_package_load_side_by_side(server, client):
    for pack in server.packs:
        # ComfyUI writes "0.1 seconds (IMPORT FAILED): FOLDER" of a pack that did not load.
        assert re.search(rf"\d seconds: \S+/custom_nodes/{pack}$", server.log(2000), re.MULTILINE), pack
    prompt = {"1": {"class_type": "SecondPackEcho", "inputs": {"text": "hello"}}}
    text, package = client.run(prompt)["1"]["text"]
    assert text == "hello"
    assert package.endswith("second_pack.nodes")
