"""The pack in a running ComfyUI."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from comfy_client import files_of, problems
from PIL import Image

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


def test_an_error_that_quotes_half_a_character_does_not_end_the_server(client):
    """ComfyUI's log cannot write it, and a failing log ends the thread that runs prompts."""
    camera = {"1": {"class_type": "LingBotCameraLoad", "inputs": {"file": "(path below)", "path": "/half \ud83d"}}}
    shown = {"2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 2]}}}
    entry = client.wait(client.queue({**camera, **shown}), 30)
    assert r"/half \ud83d" in problems(entry)
    assert client.run({"1": {"class_type": "SecondPackEcho", "inputs": {"text": "still here"}}})


def test_a_model_is_loaded_again_when_its_file_was_replaced_and_not_before(server, client):
    folder = server.base / "models" / "lingbot_world" / "replaced"
    shutil.copytree(ROOT / "lingbot_core" / "assets" / "tiny", folder)
    choice = {"weight_dtype": "as stored", "preset": "auto"}
    prompt = {
        "1": {"class_type": "LingBotLoadWorldFolder", "inputs": {"folder": "replaced/", **choice}},
        "2": {"class_type": "LingBotLoadWorldModel", "inputs": {"model_name": "replaced/", **choice}},
        "3": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["2", 0]}},
    }

    def kept():
        """Nodes whose outputs ComfyUI had from before."""
        entry = client.wait(client.queue(prompt))
        assert entry["status"]["status_str"] == "success", problems(entry)
        [cached] = [set(data["nodes"]) for event, data in entry["status"]["messages"] if event == "execution_cached"]
        return cached & {"1", "2"}

    kept()
    assert kept() == {"1", "2"}
    os.utime(folder / "vae" / "diffusion_pytorch_model.safetensors", ns=(0, 0))
    assert kept() == {"2"}
    os.utime(folder / "transformer" / "diffusion_pytorch_model.safetensors", ns=(0, 0))
    assert kept() == set()
    assert kept() == {"1", "2"}


def test_what_a_loader_compares_gives_no_path_away(server, client, tmp_path):
    """ComfyUI saves it with every picture."""
    folder = server.base / "models" / "lingbot_world" / "private"
    shutil.copytree(ROOT / "lingbot_core" / "assets" / "tiny", folder)
    loader = {"folder": "private/", "weight_dtype": "as stored", "preset": "auto"}
    prompt = {
        "1": {"class_type": "LingBotLoadWorldFolder", "inputs": loader},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
        "3": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
        "4": {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}},
    }
    [picture] = files_of(client.run(prompt))
    saved = Image.open(client.download(picture, tmp_path)).text["prompt"]
    assert json.loads(saved)["1"]["is_changed"]
    assert str(server.base) not in saved
