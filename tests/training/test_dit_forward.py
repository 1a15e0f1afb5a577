"""Teacher forcing and rolling out give what CausalWanDiT with a KVCache gives, for the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lingbot_core.camera import PER_VIDEO, camera_rays, relative_steps, walk
from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.dit_blocks import ChunkContext
from lingbot_core.models.kv_cache import KVCache
from lingbot_core.presets import get_preset
from lingbot_core.schedule import distilled_steps, flow_to_x0, renoise
from training.dit_forward import Batch, Teacher, masked
from training.rays import ray_tokens
from training.rollout import roll_out

CONFIG = DiTConfig(dim=48, ffn_dim=64, num_layers=3, num_heads=2, freq_dim=32, text_dim=8, text_len=6)
H, W, CHUNK, WINDOW, CHUNKS = 4, 6, 3, 3, 5


def make_dit() -> CausalWanDiT:
    dit = CausalWanDiT(CONFIG)
    generator = torch.Generator().manual_seed(11)
    for name, p in dit.named_parameters():
        value = torch.randn(p.shape, generator=generator) * 0.15
        p.data = value + 1 if name.endswith(("norm_q.weight", "norm_k.weight", "norm3.weight")) else value
    return dit.requires_grad_(False)


class Case:
    """Two clips of random latents and cameras, and the table of prompts."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(12)
        keys = ["w", "wd", "l", "", "ai", "s", "j", "k", "d", "wl", "w", "w", "a", "jk", "w"]
        poses = walk(torch.eye(4).numpy(), keys, PER_VIDEO, per_latent=True)
        relative = torch.from_numpy(relative_steps(poses))
        relative[:, :3, 3] /= PER_VIDEO.move_per_latent
        self.relative = torch.stack([relative, relative.flip(0)])
        self.intrinsics = torch.tensor([[30.0, 31.0, 24.0, 16.0], [40.0, 41.0, 23.0, 15.0]])
        self.lengths = [3, 6, 1]
        self.table = torch.randn(3, 6, 8, generator=g)
        for row, length in zip(self.table, self.lengths, strict=True):
            row[length:] = 0
        rays = ray_tokens(self.relative, self.intrinsics, H * 8, W * 8, CONFIG.patch_size)
        shape = (2, CHUNKS, 20, CHUNK, H, W)
        self.batch = Batch(
            torch.randn(shape, generator=g),
            rays.unflatten(1, (CHUNKS, -1)),
            torch.tensor([[0, 0, 1, 1, 2], [2, 1, 0, 1, 1]]),
        )
        self.clean = torch.randn(2, CHUNKS, 16, CHUNK, H, W, generator=g)
        self.noisy = torch.randn(self.clean.shape, generator=g)
        self.t = torch.rand(2, CHUNKS, generator=g) * 1000

    def contexts(self, dit: CausalWanDiT, clip: int, chunk: int, cache: KVCache) -> ChunkContext:
        first = chunk * CHUNK
        rays = camera_rays(
            self.relative[clip, first : first + CHUNK].numpy(), self.intrinsics[clip].tolist(), H * 8, W * 8
        )
        prompt = int(self.batch.prompts[clip, chunk])
        cross = dit.encode_prompt(self.table[prompt, : self.lengths[prompt]])
        cache.begin(first, CHUNK)
        condition = self.batch.condition[clip, chunk]
        rope = dit.rope(first, CHUNK, H, W, torch.device("cpu"))
        return ChunkContext(first, condition, dit.encode_camera(rays), rope, cross, cache)


def make_teacher(dit: CausalWanDiT, table: Tensor) -> Teacher:
    return Teacher(dit, table, window=WINDOW, chunk=CHUNK, size=(H, W), dtype=torch.float32)


def make_cache(dit: CausalWanDiT) -> KVCache:
    return KVCache(dit.cache_shape(H, W), window=WINDOW * CHUNK, dtype=torch.float32, device=torch.device("cpu"))


def test_ray_tokens_are_those_of_the_model() -> None:
    case, dit = Case(), make_dit()
    teacher = make_teacher(dit, case.table)
    rays = camera_rays(case.relative[1, :CHUNK].numpy(), case.intrinsics[1].tolist(), H * 8, W * 8)
    c, f, h, w = rays.shape[1:]
    want = rays.view(c, f, h // 2, 2, w // 2, 2).permute(1, 2, 4, 0, 3, 5).reshape(teacher.tokens, -1)
    torch.testing.assert_close(case.batch.rays[1, 0], want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("way", ["windowed", "masked"])
def test_teacher_forcing_equals_a_session(way: str) -> None:
    case, dit = Case(), make_dit()
    teacher = make_teacher(dit, case.table)
    if way == "masked":
        teacher.attention = masked
    got = teacher.flow(case.clean, case.noisy, case.t, case.batch)
    for clip in range(2):
        cache = make_cache(dit)
        for chunk in range(CHUNKS):
            context = case.contexts(dit, clip, chunk, cache)
            want = dit(case.noisy[clip, chunk], float(case.t[clip, chunk]), context)
            dit.remember(case.clean[clip, chunk], 0.0, context)
            cache.end()
            torch.testing.assert_close(got[clip, chunk], want, atol=1e-4, rtol=1e-4)


def test_rolling_out_equals_a_session() -> None:
    case, dit = Case(), make_dit()
    teacher = make_teacher(dit, case.table)
    preset = get_preset("tiny")
    start = torch.tensor([0, 2])
    got = roll_out(teacher, preset, case.batch, case.clean, start, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    draws = [torch.empty(2, 16, CHUNK, H, W).normal_(generator=generator) for _ in range(CHUNKS * preset.steps)]
    for clip in range(2):
        cache = make_cache(dit)
        for chunk in range(CHUNKS):
            context = case.contexts(dit, clip, chunk, cache)
            noise = [d[clip] for d in draws[chunk * preset.steps :][: preset.steps]]
            x = noise[0]
            for i, step in enumerate(distilled_steps(preset)):
                x0 = flow_to_x0(dit(x, step.t, context), x, step.sigma) if i >= start[clip] else case.clean[clip, chunk]
                if step.renoise is not None:
                    x = renoise(x0, noise[i + 1], step.renoise)
            torch.testing.assert_close(got[clip, chunk], x0, atol=1e-3, rtol=1e-3)
            dit.remember(x0, 0.0, context)
            cache.end()
