"""The shipped workflows on a running ComfyUI, as people and scripts run them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from comfy_client import Client, Listener, files_of, problems
from live_driver import Driver, drive
from node_info import START_PICTURE
from video_file import VideoFile, read_video, stored_prompt

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / "workflows"
# Frames of a world of n chunks of three latent frames: the first latent gives one frame, all others four.
FRAMES = {chunks: 1 + 4 * (3 * chunks - 1) for chunks in range(1, 9)}
VIDEOS = {
    "image_to_world": {"image_to_world": 4},
    "continue": {"continue_1": 2, "continue_2": 4},
    "branch": {"branch_left": 4, "branch_right": 4},
    "events": {"events": 5},
}


def prompt_of(name: str) -> dict:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def node_of(prompt: dict, title: str) -> str:
    [node] = [node for node, content in prompt.items() if content["_meta"]["title"] == title]
    return node


def with_inputs(prompt: dict, title: str, **inputs: object) -> dict:
    node = node_of(prompt, title)
    return prompt | {node: prompt[node] | {"inputs": prompt[node]["inputs"] | inputs}}


@pytest.fixture
def client(server):
    server.add_input(ROOT / "examples" / START_PICTURE, START_PICTURE)
    return Client(server.url)


def videos(client: Client, outputs: dict, folder: Path) -> dict[str, VideoFile]:
    """By the beginning of the file's name, as filename_prefix says it."""
    files = [client.download(item, folder) for item in files_of(outputs) if item["filename"].endswith(".mp4")]
    return {file.stem.rsplit("_", 2)[0]: read_video(file) for file in files}


@pytest.mark.parametrize("name", VIDEOS)
def test_a_shipped_workflow_gives_its_videos_with_their_frames_rate_size_and_workflow(client, tmp_path, name):
    prompt, workflow = prompt_of(name), json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    made = videos(client, client.run(prompt, workflow=workflow), tmp_path)
    assert {key: len(video.frames) for key, video in made.items()} == {
        key: FRAMES[chunks] for key, chunks in VIDEOS[name].items()
    }
    for video in made.values():
        assert video.size == (160, 96), "the start picture has the model's own size"
        assert video.fps == 16
        assert video.codec == "h264"
        assert stored_prompt(video) == prompt
        assert json.loads(video.tags["workflow"]) == workflow
        assert np.diff(video.frames.astype(int), axis=0).any(axis=(1, 2, 3)).all(), "every frame differs from the last"
    # A lossy codec looks ahead: near the end of the common part the files may differ where the frames did not.
    one, other = (made[key].frames for key in (*made, *made)[:2])
    assert np.array_equal(one[:9], other[:9])
    if name == "branch":
        assert not np.array_equal(one[-1], other[-1])


def test_the_live_workflow_saves_what_was_walked_and_walks_it_again(server, client, tmp_path):
    prompt = prompt_of("live_world")

    async def walk(driver: Driver) -> None:
        await driver.ask("pause")
        await driver.read(lambda: driver.status["state"] == "paused" and not driver.status["making"])
        for held in ("w", "wl", "l"):
            await driver.step(held)
        await driver.ask("stop")

    running = client.queue(prompt)
    drive(server, walk)
    entry = client.wait(running, 120)
    assert entry["status"]["status_str"] == "success", problems(entry)
    made = videos(client, entry["outputs"], tmp_path)
    assert set(made) == {"live_world", "live_world_again"}
    walked, again = made["live_world"].frames, made["live_world_again"].frames
    assert len(walked) >= FRAMES[3]
    assert np.array_equal(walked, again)


def queue_world(server, *arguments: object) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "scripts" / "queue_world.py"), *map(str, arguments), "--server", server.url]
    return subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)


def test_a_batch_of_six_through_the_script(server, tmp_path):
    out = tmp_path / "out"
    done = queue_world(
        server, WORKFLOWS / "api" / "image_to_world.json", "--out", out, "--seeds", "1-6",
        "--set", "Walk.chunks=1", "--set", "Start World.steps=0,679",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted(out.glob("*.mp4"))
    assert [file.name.split("__")[0] for file in files] == [f"{seed}_seed{seed}" for seed in range(1, 7)]
    made = [read_video(file).frames for file in files]
    assert [len(frames) for frames in made] == [FRAMES[1]] * 6
    assert len({frames.tobytes() for frames in made}) == 6


def test_a_mistake_in_a_workflow_is_told_by_comfyui_and_shown_by_the_script(server, tmp_path):
    done = queue_world(
        server, WORKFLOWS / "api" / "image_to_world.json", "--out", tmp_path, "--set", "Start World.preset=v9"
    )
    assert done.returncode == 1
    assert "Start World (node 5, LingBotStartWorld): Value not in list: preset: 'v9'" in done.stderr


def test_an_error_of_a_node_is_shown_by_the_script(server, tmp_path):
    done = queue_world(
        server, WORKFLOWS / "api" / "image_to_world.json", "--out", tmp_path, "--set", "Walk.keys=w-4", "--set",
        "Walk.chunks=3",
    )  # fmt: skip
    assert done.returncode == 1
    assert "LengthError: 3 chunks were asked for, but the controls (keys) have 2" in done.stderr


def test_cancel_acts_at_once_keeps_frames_and_queueing_again_goes_on(server, client, tmp_path):
    prompt = with_inputs(prompt_of("image_to_world"), "Walk", chunks=40, keys="w-120")
    prompt = with_inputs(prompt, "Start World", seed=7)
    with Listener(client) as heard:
        prompt_id = client.queue(prompt)
        heard.wait_for("preview", 120)
        client.interrupt(prompt_id)
        asked = time.monotonic()
        entry = client.wait(prompt_id)
        took = time.monotonic() - asked
    assert entry["status"]["status_str"] == "error"
    assert [event for event, _ in entry["status"]["messages"]][-1] == "execution_interrupted"
    # One step of tiny takes about a tenth of a second on a machine that does nothing else.
    assert took < 5
    walk = with_inputs(prompt, "Walk", chunks=1)
    made = videos(client, client.run(walk), tmp_path)
    assert [len(video.frames) for video in made.values()] == [FRAMES[1]]


def test_progress_previews_and_text_come_while_a_world_runs(client):
    prompt = with_inputs(prompt_of("image_to_world"), "Start World", seed=11)
    walk = node_of(prompt, "Walk")
    with Listener(client) as heard:
        begun = time.monotonic()
        client.run(prompt)
        previews = [event for event in heard.of("preview") if event.data["node"] == walk]
        states = [event.data["nodes"].get(walk) for event in heard.of("progress_state")]
        texts = [event.data["text"] for event in heard.of("text") if event.data["node"] == walk]
    assert previews
    assert previews[0].data["picture"][:4] in (b"\x00\x00\x00\x01", b"\xff\xd8\xff\xe0", b"\xff\xd8\xff\xdb")
    assert previews[0].at - begun < 30
    assert [state["value"] for state in states if state][-1] == 16, "four chunks of four steps"
    assert any("chunk 4/4" in text and "fps" in text for text in texts)


def test_unloading_models_frees_a_world_and_it_goes_on_afterwards(client, tmp_path):
    prompt = with_inputs(prompt_of("continue"), "Start World", seed=13)
    first, second = node_of(prompt, "First Part"), node_of(prompt, "Second Part")
    info = {"class_type": "LingBotWorldInfo", "inputs": {"world": [first, 2]}, "_meta": {"title": "Info"}}
    half = {node: content for node, content in prompt.items() if node != second and not _needs(prompt, node, second)}
    half["99"] = info

    def held() -> dict:
        return json.loads(client.run(half)["99"]["text"][0])

    before = held()
    assert before["cache_bytes"] > 0
    client.call("/free", {"unload_models": True})
    time.sleep(1.5)  # the worker looks every second
    after = held()
    assert (after["state"], after["cache_bytes"]) == ("asleep", 0)
    made = videos(client, client.run(prompt), tmp_path)
    assert len(made["continue_2"].frames) == FRAMES[4]


def test_a_lora_on_model_changes_the_video(server, client, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(ROOT / "lingbot_core/assets/tiny/transformer/diffusion_pytorch_model.safetensors")
    import torch

    generator = torch.Generator().manual_seed(0)
    lora = {}
    for name, weight in weights.items():
        if name.startswith("blocks.0.") and name.endswith(("self_attn.q.weight", "ffn.0.weight")):
            key = "diffusion_model." + name.removesuffix(".weight")
            lora[f"{key}.lora_A.weight"] = torch.randn(2, weight.shape[1], generator=generator)
            lora[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], 2, generator=generator)
    assert len(lora) == 4
    (server.base / "models" / "loras").mkdir(exist_ok=True)
    save_file(lora, server.base / "models" / "loras" / "test.safetensors")
    plain = with_inputs(prompt_of("image_to_world"), "Walk", chunks=1)
    loader = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["1", 0], "lora_name": "test.safetensors", "strength_model": 0.2},
        "_meta": {"title": "LoRA"},
    }
    changed = with_inputs(plain, "Start World", model=["98", 0]) | {"98": loader}
    first = videos(client, client.run(plain), tmp_path)["image_to_world"].frames
    second = videos(client, client.run(changed), tmp_path)["image_to_world"].frames
    assert first.shape == second.shape
    assert not np.array_equal(first, second)


def test_a_world_model_in_ksampler_is_refused_in_words(client):
    prompt = prompt_of("image_to_world")
    clip, model = ["3", 0], ["1", 0]
    nodes = {
        "1": prompt["1"],
        "3": prompt["3"],
        "10": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "11": {
            "class_type": "KSampler",
            "inputs": {
                "model": model, "positive": clip, "negative": clip, "latent_image": ["10", 0], "seed": 0, "steps": 1,
                "cfg": 1.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0,
            },
        },
        "12": {"class_type": "VAEDecode", "inputs": {"samples": ["11", 0], "vae": ["1", 2]}},
        "13": {"class_type": "PreviewImage", "inputs": {"images": ["12", 0]}},
    }  # fmt: skip
    entry = client.wait(client.queue(nodes))
    assert entry["status"]["status_str"] == "error"
    assert "LingBot" in problems(entry).splitlines()[0]


def _needs(prompt: dict, node: str, other: str) -> bool:
    return any(isinstance(value, list) and value[0] == other for value in prompt[node]["inputs"].values())
