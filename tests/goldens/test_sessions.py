"""Whole sessions against the reference: every step's flow and x0, the final latents and the caches.

What a file holds is read from its metadata, so that a folder may have session files this pack has never seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from lingbot_core.camera import camera_rays, latent_actions
from lingbot_core.camera.controls import clip_controls
from lingbot_core.camera.rays import action_rays
from lingbot_core.camera.trajectory import CameraTrajectory
from lingbot_core.camera.units import translation_unit
from lingbot_core.engine.chunk import commit, denoise
from lingbot_core.engine.noise import InjectedNoise
from lingbot_core.models.dit import CausalWanDiT, ChunkContext, DiTConfig
from lingbot_core.models.kv_cache import KVCache
from lingbot_core.presets import LabelSteps, Preset, TableSteps, UniPCSteps
from lingbot_core.schedule import distilled_steps, flow_to_x0, renoise
from lingbot_core.solver import UniPC

FILES: tuple[str, ...] = ()  # any session_*.safetensors; see conftest

TOLERANCE = 1e-4
GUIDED_TOLERANCE = 5e-4
KNOWN_RECIPES = {
    "v1_fast",
    "v1_fast_act",
    "v1_fast_reuse_last_kv",
    "v2_fast_window",
    "v2_command_line",
    "v2_diffusers",
    "v2_causal_cfg",
}


class Golden:
    """One session file: its recipe as a preset, its weights as a model, and its tensors."""

    def __init__(self, path: Path) -> None:
        self.file = safe_open(path, "pt")
        self.keys = set(self.file.keys())
        self.meta = meta = self.file.metadata()
        assert meta["recipe"] in KNOWN_RECIPES, f"{path.name} has an unknown recipe {meta['recipe']}"
        selection = json.loads(meta["selection"])
        steps: TableSteps | LabelSteps | UniPCSteps
        if "indices" in selection:
            steps = TableSteps(tuple(selection["indices"]))
        elif "labels" in selection:
            steps = LabelSteps(tuple(float(x) for x in selection["labels"]))
        else:
            steps = UniPCSteps(selection["unipc_steps"])
        window = int(meta["window"])
        self.preset = Preset(
            meta["recipe"],
            chunk=int(meta["chunk"]),
            selection=steps,
            shift=float(meta["shift"]),
            window=None if window < 0 else window,
            sink=int(meta["sink"]),
            guidance_scale=float(meta.get("guide_scale", 1.0)),
            reuse_last_step_kv=meta["reuse_last_step_kv"] == "true",
        )
        self.dit = self._model(path)
        self.noise = self["in.noise"]
        self.chunks = self.noise.shape[1] // self.preset.chunk
        self.latent_size = tuple(self.noise.shape[2:])
        self.tolerance = GUIDED_TOLERANCE if self.preset.guided else TOLERANCE
        self.worst: dict[str, float] = {}
        self.rays = self["in.plucker"] if "in.plucker" in self.keys else self.rays_from_poses()

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.file.get_tensor(key)

    def _model(self, path: Path) -> CausalWanDiT:
        owner = self.file if self.meta["weights"] == "own" else safe_open(path.parent / self.meta["weights"], "pt")
        marker = "state_dict."
        weights = {
            key.split(marker, 1)[1]: owner.get_tensor(key).float()
            for key in owner.keys()  # noqa: SIM118 - not a dict
            if marker in key
        }
        sizes = json.loads(self.meta["config"])
        shapes = {key: tuple(value.shape) for key, value in weights.items()}
        config = DiTConfig.from_shapes(shapes, num_heads=sizes["num_heads"], text_len=sizes["text_len"])
        assert config.control == self.meta["control"]
        dit = CausalWanDiT(config)
        dit.load_state_dict(weights)
        return dit.eval().requires_grad_(False)

    def rays_from_poses(self) -> torch.Tensor:
        """The rays of the whole path, by the reference's rule for a path known in advance."""
        height, width = (8 * side for side in self.latent_size)
        intrinsics = self["in.intrinsics"].double().numpy()
        path = CameraTrajectory.from_arrays(self["in.poses"].double().numpy(), intrinsics, width=832, height=480)
        latent = path.to_latent(self.preset.chunk)
        unit = translation_unit("clip", latent_poses=latent.poses)
        controls = clip_controls(
            latent, chunk=self.preset.chunk, unit=unit, first_delta="identity", width=width, height=height
        )
        relative = np.concatenate([c.relative for c in controls])
        pixels = latent.intrinsics_at(width, height)
        if self.meta["control"] == "act":
            actions = latent_actions(self["in.action"].numpy(), len(relative))
            return action_rays(relative, pixels, actions, height, width)
        return camera_rays(relative, pixels, height, width)

    def caches(self) -> list[KVCache]:
        return [
            KVCache(
                self.dit.cache_shape(*self.latent_size),
                window=self.preset.window,
                sink=self.preset.sink,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            for _ in range(2 if self.preset.guided else 1)
        ]

    def draw(self, chunk: int) -> InjectedNoise:
        frames = slice(chunk * self.preset.chunk, (chunk + 1) * self.preset.chunk)
        renoise = self["in.renoise"][chunk] if "in.renoise" in self.keys else ()
        return InjectedNoise(self.noise[:, frames], tuple(renoise))

    def compare(self, what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
        assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
        error = (got.double() - expected.double()).abs().max().item()
        self.worst[what] = max(self.worst.get(what, 0.0), error)
        limit = self.tolerance if tolerance is None else tolerance
        assert error <= limit, f"{what}: off by {error:.2e}, {limit:.0e} is allowed"

    def compare_cache(self, what: str, cache: KVCache, layer: int, key: str) -> None:
        """Our slots may be in any order: they are sorted by frame, as the reference keeps them."""
        order = np.argsort(cache.slot_frames)
        tokens = cache.shape.frame_tokens
        for got, name in zip(cache.view(layer), ("k", "v"), strict=True):
            slots = got.unflatten(0, (-1, tokens))[torch.from_numpy(order)].flatten(0, 1)
            self.compare(f"{what} cache", slots, self[f"{key}.layer{layer}.{name}"][0])


@pytest.fixture
def golden(session_file: Path) -> Golden:
    return Golden(session_file)


def test_session_equals_the_reference_step_by_step(golden: Golden) -> None:
    preset, dit = golden.preset, golden.dit
    caches = golden.caches()
    crosses = [dit.encode_prompt(golden["in.context"])]
    if preset.guided:
        crosses.append(dit.encode_prompt(golden["in.context_null"]))
    flows: list[torch.Tensor] = []
    forward = dit.forward
    dit.forward = lambda x, t, context: flows.append(forward(x, t, context)) or flows[-1]  # type: ignore[method-assign]
    times: list[float] = []
    encode_time = dit.encode_time
    dit.encode_time = lambda t, device: times.append(t) or encode_time(t, device)  # type: ignore[method-assign]
    latents = []
    layers = (0, dit.config.num_layers - 1)
    for chunk in range(golden.chunks):
        frames = slice(chunk * preset.chunk, (chunk + 1) * preset.chunk)
        rays = golden.rays[:, :, frames]
        camera = dit.encode_camera(rays)
        rope = dit.rope(frames.start, preset.chunk, *golden.latent_size, rays.device)
        contexts = []
        for cross, cache in zip(crosses, caches, strict=True):
            cache.begin(frames.start, preset.chunk)
            contexts.append(ChunkContext(frames.start, golden["in.y"][:, frames], camera, rope, cross, cache))
        flows.clear()
        times.clear()
        noise = golden.draw(chunk)
        done = denoise(dit, preset, contexts, lambda step, noise=noise: noise.draw(0, step))
        check_steps(golden, chunk, flows, done.x0)
        expected_times = golden["in.timesteps"].double()[: preset.steps]
        branches = len(caches)
        golden.compare("timestep", torch.tensor(times[::branches], dtype=torch.float64), expected_times, 1e-9)
        for name in ("kv_before_update", "kv_after_last_denoise"):
            for layer in layers:
                key = f"{name}_chunk{chunk}"
                if f"{key}.layer{layer}.k" in golden.keys:
                    golden.compare_cache(name, caches[0], layer, key)
        latents.append(done.x0)
        if not preset.reuse_last_step_kv:
            if "cache_update.flow" in golden.keys:
                golden.compare("commit flow", forward(done.x0, 0.0, contexts[0]), golden["cache_update.flow"][chunk])
            commit(dit, contexts, done.x0)
        for cache in caches:
            cache.end()
        if "slot_frames" in golden.keys:
            expected = golden["slot_frames"][chunk]
            assert sorted(caches[0].slot_frames) == sorted(expected[expected >= 0].tolist())
        for layer in range(dit.config.num_layers):
            if f"kv_after_chunk{chunk}.layer{layer}.k" in golden.keys:
                golden.compare_cache("kv_after_chunk", caches[0], layer, f"kv_after_chunk{chunk}")
    golden.compare("latents", torch.cat(latents, dim=1), golden["out.latents"])
    for name in ("kv_final", "kv_final_cond"):
        for layer in layers:
            if f"{name}.layer{layer}.k" in golden.keys:
                golden.compare_cache(name, caches[0], layer, name)
    if preset.guided:
        for layer in layers:
            golden.compare_cache("kv_final_uncond", caches[1], layer, "kv_final_uncond")
    for layer in range(dit.config.num_layers):
        if f"crosskv.layer{layer}.k" in golden.keys:
            golden.compare("cross k", crosses[0].keys[layer], golden[f"crosskv.layer{layer}.k"][0])
            golden.compare("cross v", crosses[0].values[layer], golden[f"crosskv.layer{layer}.v"][0])
    print("\nachieved", {what: f"{error:.1e}" for what, error in golden.worst.items()})


def check_steps(golden: Golden, chunk: int, flows: list[torch.Tensor], x0: torch.Tensor) -> None:
    """Flow and sample of every step, as far as the file holds them; samples are worked out again from the flows."""
    preset, noise = golden.preset, golden.draw(chunk)
    x = noise.draw(0, 0)
    if preset.guided:
        assert isinstance(preset.selection, UniPCSteps)
        solver = UniPC(preset.selection.count, preset.shift)
        for step in range(preset.steps):
            positive, negative = flows[2 * step], flows[2 * step + 1]
            golden.compare("flow", positive, golden["step.flow_cond"][chunk, step])
            golden.compare("negative flow", negative, golden["step.flow_uncond"][chunk, step])
            guided = negative + preset.guidance_scale * (positive - negative)
            golden.compare("guided flow", guided, golden["step.flow_guided"][chunk, step], 10 * golden.tolerance)
            x = solver.step(guided, x)
            golden.compare("x", x, golden["step.x_next"][chunk, step])
        golden.compare("x0", x0, golden["step.x_next"][chunk, -1])
        return
    for i, (step, flow) in enumerate(zip(distilled_steps(preset), flows, strict=True)):
        golden.compare("flow", flow, golden["step.flow"][chunk, i])
        clean = flow_to_x0(flow, x, step.sigma)
        if "step.x0" in golden.keys:
            golden.compare("x0", clean, golden["step.x0"][chunk, i])
        if step.renoise is not None:
            x = renoise(clean, noise.draw(0, i + 1), step.renoise)
    assert torch.equal(x0, clean)


def test_rays_made_from_the_poses_equal_the_recorded_ones(session_file: Path) -> None:
    golden = Golden(session_file)
    if not {"in.poses", "in.plucker"} <= golden.keys:
        # One of the two is all there is: the guided session was recorded without poses, thinned files without rays.
        assert {"in.poses", "in.plucker"} & golden.keys
        return
    golden.compare("rays", golden.rays_from_poses(), golden["in.plucker"], 1e-5)
    print("\nachieved", golden.worst)


def test_commit_leaves_what_a_whole_forward_at_time_zero_leaves(golden: Golden) -> None:
    dit = golden.dit
    caches = [golden.caches()[0] for _ in range(2)]
    frames = slice(0, golden.preset.chunk)
    rays, x = golden.rays[:, :, frames], golden.noise[:, frames]
    for cache, run in zip(caches, (dit.forward, dit.remember), strict=True):
        cache.begin(0, golden.preset.chunk)
        rope = dit.rope(0, golden.preset.chunk, *golden.latent_size, x.device)
        cross = dit.encode_prompt(golden["in.context"])
        context = ChunkContext(0, golden["in.y"][:, frames], dit.encode_camera(rays), rope, cross, cache)
        run(x, 0.0, context)
    for layer in range(dit.config.num_layers):
        for whole, short in zip(caches[0].view(layer), caches[1].view(layer), strict=True):
            assert torch.equal(whole, short)
