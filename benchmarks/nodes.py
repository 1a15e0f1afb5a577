"""What ComfyUI's nodes add to a chunk: Advance World against the session alone, in turn, in one process.

    COMFYUI_DIR=... .venv-comfy/bin/python -m benchmarks.nodes [--chunks 8] [--rounds 6] [--threads 2] [--json]

Runs on the embedded model: what a node adds (frames as IMAGE, the file, previews, progress, the report) does not grow
with the model, so the share measured here is the largest there is.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACK = "lingbot_world_pack"
KEYS = "w"


def load_pack() -> None:
    """This folder as ComfyUI imports it; ComfyUI's own folder takes its place on sys.path."""
    comfyui = Path(os.environ.get("COMFYUI_DIR") or Path.home() / ".cache" / "lingbot-world" / "ComfyUI")
    if not (comfyui / "main.py").is_file():
        sys.exit(f"{comfyui} is no ComfyUI; set COMFYUI_DIR")
    sys.path[:] = [str(comfyui), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    import torch
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()
    spec = importlib.util.spec_from_file_location(PACK, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[PACK] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def part(name: str) -> Any:
    """A module of the pack."""
    return importlib.import_module(f"{PACK}.{name}")


def call(module: str, node_id: str, **inputs: Any) -> Any:
    """The outputs of a node, called as ComfyUI calls it."""
    from comfy_api.latest import io

    [node] = [cls for cls in part(module).NODES if cls.define_schema().node_id == node_id]
    node.GET_SCHEMA()
    hidden = {io.Hidden("UNIQUE_ID"): "1", io.Hidden("PROMPT"): None, io.Hidden("EXTRA_PNGINFO"): None}
    return node.PREPARE_CLASS_CLONE({"hidden_inputs": hidden}).execute(**inputs).args


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load_pack()
    import torch

    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        result = measure(options.chunks, options.rounds)
    result["threads"] = options.threads
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


def measure(chunks: int, rounds: int) -> dict[str, Any]:
    """Median seconds per chunk of both ways, and their ratio, of rounds that take turns; the first warms up."""
    import comfy.model_management
    import torch

    model, clip, vae = call(
        "nodes.loading", "LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto"
    )
    positive = clip.encode_from_tokens_scheduled(clip.tokenize("a sunny day"))
    image = torch.rand(1, 96, 160, 3, generator=torch.Generator().manual_seed(0))
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
        begin = time.perf_counter()
        for controls in route.controls(session, picture.image, act=False, chunks=chunks):
            session.advance(controls)
        core = (time.perf_counter() - begin) / chunks
        session.close()
        [world, *_] = call(
            "nodes.world", "LingBotStartWorld", model=model, vae=vae, positive=positive, start_image=picture, seed=turn
        )
        begin = time.perf_counter()
        call("nodes.world", "LingBotAdvanceWorld", world=world, chunks=chunks, keys=KEYS)
        nodes = (time.perf_counter() - begin) / chunks
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
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


if __name__ == "__main__":
    main()
