"""The nodes of a small graph of worlds, called as ComfyUI calls them, on the embedded model."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import comfy.model_management
import numpy as np
import torch
from comfy_api.latest import io

PACK = "lingbot_world_pack"
SIZE = {"size": "custom", "width": 32, "height": 16, "fit": "stretch"}


def part(name: str) -> ModuleType:
    """A module of the pack as ComfyUI imported it."""
    return importlib.import_module(f"{PACK}.{name}")


def node(name: str) -> type[io.ComfyNode]:
    """A node by its id."""
    return {cls.define_schema().node_id: cls for cls in (*part("nodes.loading").NODES, *part("nodes.world").NODES)}[
        name
    ]


def call(name: str, hidden: dict[str, Any] | None = None, /, **inputs: Any) -> tuple[Any, ...]:
    """The outputs of a node. hidden: unique_id, prompt, extra_pnginfo."""
    cls = node(name)
    cls.GET_SCHEMA()
    holder = {"UNIQUE_ID": "7", "PROMPT": None, "EXTRA_PNGINFO": None, **(hidden or {})}
    clone = cls.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden(key): value for key, value in holder.items()}})
    return clone.execute(**inputs).args


def picture(seed: int = 0, height: int = 40, width: int = 60, channels: int = 3) -> torch.Tensor:
    """An IMAGE of smooth colours."""
    rng = np.random.default_rng(seed)
    small = torch.from_numpy(rng.random((1, channels, 4, 6)).astype(np.float32))
    return torch.nn.functional.interpolate(small, (height, width), mode="bilinear").movedim(1, -1)


class Graph:
    """Loaders and encoded prompts, made once; worlds as the nodes make them."""

    def __init__(self) -> None:
        with torch.inference_mode():
            self.model, self.clip, self.vae = call(
                "LingBotLoadWorldFolder", folder="tiny", weight_dtype="as stored", preset="auto"
            )
            self.positive = self.conditioning("a red ball on grass")
            [self.image, *_] = call("LingBotStartImage", image=picture(), vae=self.vae, **SIZE)

    def conditioning(self, text: str) -> Any:
        return self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))

    def start(self, **inputs: Any) -> Any:
        return self.start_with_report(**inputs)[0]

    def start_with_report(self, **inputs: Any) -> tuple[Any, dict[str, Any]]:
        given = {
            "model": self.model,
            "vae": self.vae,
            "clip": self.clip,
            "positive": self.positive,
            "start_image": self.image,
            "preset": "auto",
            "seed": 3,
            "steps": "0,500",  # two steps: what happens between steps happens once
            **inputs,
        }
        world, report = call("LingBotStartWorld", **given)
        return world, json.loads(report)

    def advance(self, world: Any, chunks: int = 1, **inputs: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        images, video, after, report = call("LingBotAdvanceWorld", world=world, chunks=chunks, **inputs)
        return images, video, after, json.loads(report)

    def session(self, name: str, mode: str, chunks: int = 1, **inputs: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        given = {
            "model": self.model,
            "vae": self.vae,
            "clip": self.clip,
            "positive": self.positive,
            "start_image": self.image,
            "seed": 3,
            "steps": "0,500",
            **inputs,
        }
        images, video, after, report = call("LingBotWorldSession", name=name, mode=mode, chunks=chunks, **given)
        return images, video, after, json.loads(report)


def worlds() -> Any:
    """The registry of the pack."""
    return part("nodes.host.run").WORLDS


def forget_everything() -> None:
    """As after a restart of ComfyUI, but for the handles that somebody holds."""
    registry = worlds()
    registry.free()
    registry._living.clear()


def cancel(value: bool = True) -> None:
    """The user's cancel button."""
    comfy.model_management.interrupt_current_processing(value)
