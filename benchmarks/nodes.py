"""What ComfyUI's nodes add to a chunk: Advance World against the session alone, in turn, in one process.

    COMFYUI_DIR=... .venv-comfy/bin/python -m benchmarks.nodes [--chunks 8] [--rounds 6] [--threads 2] [--json]

Runs on the embedded model: what a node adds (frames as IMAGE, the file, previews, progress, the report) does not grow
with the model, so the share measured here is the largest there is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from .comfy_pack import call, has_cuda, load_comfyui, load_pack, part

KEYS = "w"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load_comfyui(cpu=not has_cuda())
    load_pack()
    import torch

    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        parts = call("nodes.loading", "LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto")
        image = torch.rand(1, 96, 160, 3, generator=torch.Generator().manual_seed(0))
        result = measure(parts, image, options.chunks, options.rounds)
    result["threads"] = options.threads
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


def measure(parts: Any, image: Any, chunks: int, rounds: int) -> dict[str, Any]:
    """Seconds per chunk of both ways, ratio, and frames per second, of rounds that take turns; the first warms up.

    parts: MODEL, CLIP and VAE. image: IMAGE, brought to the model's own size.
    """
    import comfy.model_management

    model, clip, vae = parts
    positive = clip.encode_from_tokens_scheduled(clip.tokenize("a sunny day"))
    [picture, *_] = call("nodes.world", "LingBotStartImage", image=image, vae=vae, size="model", model=model)
    host = part("nodes.host.worlds").host_world(model, vae, clip)
    preset = host.world.preset
    route = part("lingbot_core.engine.route").route_from_keys(KEYS, preset)
    session_class = part("lingbot_core.engine.session").WorldSession
    seconds: dict[str, list[float]] = {"core": [], "nodes": []}
    for turn in range(rounds + 1):
        comfy.model_management.load_models_gpu(host.patchers)
        session = session_class.start(
            host.world, picture.condition, "a sunny day", translation_unit=route.translation_unit()[0]
        )
        begin = now(host.world.device)
        for controls in route.controls(session, picture.image, act=False, chunks=chunks):
            session.advance(controls)
        core = (now(host.world.device) - begin) / chunks
        session.close()
        [world, *_] = call(
            "nodes.world", "LingBotStartWorld", model=model, vae=vae, positive=positive, start_image=picture, seed=turn
        )
        begin = now(host.world.device)
        call("nodes.world", "LingBotAdvanceWorld", world=world, chunks=chunks, keys=KEYS)
        nodes = (now(host.world.device) - begin) / chunks
        part("nodes.host.run").WORLDS.free()
        if turn:
            seconds["core"].append(core)
            seconds["nodes"].append(nodes)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [node / core for node, core in zip(seconds["nodes"], seconds["core"], strict=True)]
    return {
        "device": str(host.world.device),
        "chunks": chunks,
        "rounds": rounds,
        "core_seconds_per_chunk": medians["core"],
        "nodes_seconds_per_chunk": medians["nodes"],
        "core_fps": preset.frames(chunks) / chunks / medians["core"],
        "nodes_fps": preset.frames(chunks) / chunks / medians["nodes"],
        "ratio": statistics.median(ratios),
        "ratio_of_fastest": min(seconds["nodes"]) / min(seconds["core"]),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def now(device: Any) -> float:
    """Seconds of a clock, once the device has done what it was asked for."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
