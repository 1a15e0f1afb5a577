"""One forward of the transformer, its intermediates and its cache, for both kinds of control."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lingbot_core.models.dit import CausalWanDiT, ChunkContext, DiTConfig
from lingbot_core.models.kv_cache import KVCache
from lingbot_core.models.rope import axis_angles

FILES = ("dit_forward.safetensors",)
TOLERANCE = 1e-4


class Golden:
    """The file's tensors of one kind of control, a model with its weights, and a record of its inner results."""

    def __init__(self, path: Path, control: str) -> None:
        self.control = control
        self.file = safe_open(path, "pt")
        self.keys = {k.split(".", 1)[1] for k in self.file.keys() if k.startswith(control + ".")}  # noqa: SIM118
        sizes = json.loads(self.file.metadata()["config"])
        prefix = next(k for k in self.keys if "state_dict." in k).split("state_dict.")[0] + "state_dict."
        weights = {k.removeprefix(prefix): self[k].float() for k in self.keys if k.startswith(prefix)}
        shapes = {k: tuple(v.shape) for k, v in weights.items()}
        config = DiTConfig.from_shapes(shapes, num_heads=sizes["num_heads"], text_len=sizes["text_len"])
        self.dit = CausalWanDiT(config)
        self.dit.load_state_dict(weights)
        self.dit.eval().requires_grad_(False)
        self.seen: dict[str, Tensor] = {}
        self._record()
        self.worst: dict[str, float] = {}

    def __getitem__(self, key: str) -> Tensor:
        return self.file.get_tensor(f"{self.control}.{key}")

    def _record(self) -> None:
        def keep(name: str, what: str = "out") -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                self.seen[name] = inputs[0] if what == "in" else output

            return hook

        self.dit.patch_embedding.register_forward_hook(keep("patch"))
        self.dit.patch_embedding_wancamctrl.register_forward_hook(keep("cam_linear"))
        self.dit.text_embedding.register_forward_hook(keep("text_embedding"))
        self.dit.head.register_forward_hook(keep("head_tokens"))
        for i, block in enumerate(self.dit.blocks):
            block.register_forward_hook(keep(f"block{i}_out"))
            block.self_attn.register_forward_hook(keep(f"block{i}_self_attn_in", "in"))
            block.self_attn.register_forward_hook(keep(f"block{i}_self_attn_out"))
            block.cross_attn.register_forward_hook(keep(f"block{i}_cross_attn_in", "in"))
            block.cross_attn.register_forward_hook(keep(f"block{i}_cross_attn_out"))
            block.ffn.register_forward_hook(keep(f"block{i}_ffn_out"))

    def compare(self, what: str, got: Tensor, key: str) -> None:
        expected = self[key]
        error = (got.double() - expected.reshape(got.shape).double()).abs().max().item()
        self.worst[what] = max(self.worst.get(what, 0.0), error)
        assert error <= TOLERANCE, f"{key}: off by {error:.2e}"


@pytest.fixture(params=["cam", "act"])
def golden(golden_dir: Path, request: pytest.FixtureRequest) -> Golden:
    return Golden(golden_dir / FILES[0], request.param)


def context(golden: Golden, prefix: str, first: int, cache: KVCache) -> ChunkContext:
    rays = golden[f"{prefix}in.plucker"]
    frames, height, width = rays.shape[2:]
    cache.begin(first, frames)
    return ChunkContext(
        first,
        golden[f"{prefix}in.y"],
        golden.dit.encode_camera(rays),
        golden.dit.rope(first, frames, height, width, rays.device),
        golden.dit.encode_prompt(golden["in.context"]),
        cache,
    )


def test_forward_and_every_intermediate_equal_the_reference(golden: Golden) -> None:
    dit = golden.dit
    x = golden["in.x"]
    shape = dit.cache_shape(*x.shape[2:])
    cache = KVCache(shape, window=None, dtype=torch.float32, device=x.device)
    first = context(golden, "", 0, cache)
    flow = dit(x, float(golden["in.t"][0]), first)
    golden.compare("flow", flow, "out.flow")
    golden.compare("patch", golden.seen["patch"].flatten(2).transpose(1, 2), "mid.patch_embedding")
    golden.compare("camera", golden.seen["cam_linear"], "mid.cam_linear")
    time = dit.encode_time(float(golden["in.t"][0]), x.device)
    golden.compare("time", time.rows, "mid.time_e0")
    recorded = [k for k in golden.keys if k.startswith("mid.") and k.removeprefix("mid.") in golden.seen]
    assert recorded
    for key in recorded:
        golden.compare(key.removeprefix("mid.").split("_", 1)[-1], golden.seen[key.removeprefix("mid.")], key)
    for layer in range(dit.config.num_layers):
        for values, name in zip(cache.view(layer), ("k", "v"), strict=True):
            if f"kv.{layer}.{name}" in golden.keys:
                golden.compare("cache", values, f"kv.{layer}.{name}")
        if f"crosskv.{layer}.k" in golden.keys:
            golden.compare("cross cache", first.cross.keys[layer], f"crosskv.{layer}.k")
            golden.compare("cross cache", first.cross.values[layer], f"crosskv.{layer}.v")
    cache.end()
    if "chunk1.in.x" in golden.keys:
        x = golden["chunk1.in.x"]
        second = context(golden, "chunk1.", x.shape[1], cache)
        golden.compare("second chunk's flow", dit(x, 0.0, second), "chunk1.out.flow_t0")
    print(f"\nachieved {golden.control}", {what: f"{error:.1e}" for what, error in golden.worst.items()})


def test_rotation_tables_equal_the_reference(golden: Golden) -> None:
    expected_cos, expected_sin = golden["rope_cos_first64"], golden["rope_sin_first64"]
    pairs = golden.dit.config.head_dim // 2
    spatial = pairs // 3
    axes = [axis_angles(0, 64, n, torch.device("cpu")) for n in (pairs - 2 * spatial, spatial, spatial)]
    angles = torch.cat(axes, dim=1)
    assert (angles.cos() - expected_cos).abs().max() <= 1e-12
    assert (angles.sin() - expected_sin).abs().max() <= 1e-12
