"""The transformer's training at toy size: it learns, resumes, exports, and what comes out loads as a world."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lingbot_core.camera import PER_VIDEO, CameraCarry, KeyMotion, relative_steps, to_controls, walk
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.world import World
from lingbot_core.models.dit import DiTConfig
from lingbot_core.models.vae import VAEConfig, WanVAE
from training.dit_training import DiTTraining, finished_weights, load_dit, train_dit
from training.export import runs, write_card, write_world
from training.files import save_parts
from training.latents import fold_statistics
from training.source import Walks
from training.styles import PHRASES
from training.text import Prompts, encoder, train_text
from training.vae_training import initialise, latent_statistics

H, W = 32, 48
CPU = torch.device("cpu")


def walks(count: int, latents: int, seed: int) -> Walks:
    """A picture that slides to the left under D and to the right under A."""
    rng = np.random.default_rng(seed)
    frames = 4 * latents - 3
    videos, relative, prompts = [], [], []
    for _ in range(count):
        key = str(rng.choice(["a", "d"]))
        base = np.sin(np.arange(400) * 0.4 + rng.random() * 6)[None] * np.ones((H, 1))
        sign = 1 if key == "d" else -1
        rows = [base[:, 100 + sign * t // 2 :][:, :W] for t in range(frames)]
        videos.append(((np.stack(rows) + 1) * 127).astype(np.uint8)[:, None].repeat(3, axis=1))
        steps = relative_steps(walk(np.eye(4), [key] * latents, PER_VIDEO, per_latent=True))
        steps[:, :3, 3] /= PER_VIDEO.move_per_latent
        relative.append(steps)
        prompts.append([PHRASES["day"][0]] * (latents // 3))
    intrinsics = torch.tensor([30.0, 30.0, W / 2, H / 2], dtype=torch.float64).expand(count, 4)
    return Walks(torch.from_numpy(np.stack(videos)), torch.from_numpy(np.stack(relative)).float(), intrinsics, prompts)


def test_training_resumes_and_becomes_a_world(tmp_path: Path) -> None:
    text, vae_folder = tmp_path / "text", tmp_path / "vae"
    train_text(text, steps=1, batch=4)
    vae = WanVAE(VAEConfig(dim=8, num_res_blocks=1)).requires_grad_(False)
    initialise(vae, 1)
    fold_statistics(vae, *latent_statistics(vae, walks(4, 6, 1).video, torch.float32))
    save_parts(vae_folder, "vae", vae.state_dict(), torch.float16, about={"dim": 8, "blocks": 1})
    recipe = DiTTraining(
        config=DiTConfig(dim=32, ffn_dim=48, num_layers=2, num_heads=2, freq_dim=32, text_dim=64, text_len=64),
        window=3, chunks=2, clip_chunks=3, batch=4, lr=3e-3, warm_up=5, own_from=0.5, own=0.4, own_clips=4, own_every=5,
        pool=12, refresh=10, refresh_clips=4,
    )  # fmt: skip
    prompts = Prompts(encoder(text), wordings=1, text_len=64)
    common = {"device": CPU, "seconds": 60.0, "size": (H // 8, W // 8)}
    train_dit(walks, vae, prompts, tmp_path / "a", recipe, steps=30, **common)
    train_dit(walks, vae, prompts, tmp_path / "b", recipe, steps=60, resume=tmp_path / "a", **common)

    def lines(folder: str) -> list[dict]:
        return [json.loads(line) for line in (tmp_path / folder / "dit.jsonl").read_text().splitlines()]

    first, last = lines("a")[-1], lines("b")[-1]
    assert (first["step"], last["step"]) == (30, 60)
    assert any(line["what"] == "own contexts" for line in lines("b"))
    loss = {name: [line["loss"] for line in lines(name) if line["what"] == "step"][-1] for name in "ab"}
    assert loss["b"] < loss["a"]
    assert last["skipped"] == 0
    assert last["window"] == 9

    world_folder = tmp_path / "world"
    about = write_world(vae_folder, tmp_path / "b", text, world_folder)
    write_card(world_folder, about, logs=tmp_path / "b", measured="D 97 %", card="CPU")
    card = (world_folder / "README.md").read_text()
    assert "D 97 %" in card
    assert "| transformer | 60 |" in card
    assert [(run.steps, run.skipped) for run in runs(tmp_path / "b" / "dit.jsonl")] == [(60, 0)]
    # A new plan that changes nothing begins and ends with the finished weights.
    still = replace(recipe, lr=0.0, own=0.0, own_from=0.0)
    train_dit(walks, vae, prompts, tmp_path / "c", still, steps=1, begin=world_folder, **common)
    assert not any(line["what"] == "own contexts" for line in lines("c"))
    for name, weight in finished_weights(tmp_path / "c").items():
        assert torch.equal(weight, finished_weights(tmp_path / "b")[name]), name
    world = World.load(world_folder, device="cpu")
    assert world.preset.name == "tiny"
    assert world.dit.config == load_dit(tmp_path / "b")[1]
    assert world.fingerprint == about["fingerprint"]
    picture = walks(1, 1, 5).video[0, 0].permute(1, 2, 0).numpy()
    session = WorldSession.start(world, picture, "a sunny day", translation_unit=PER_VIDEO.move_per_latent)
    controls, _ = to_controls(
        KeyMotion(("d", "d", "d"), PER_VIDEO),
        latents=3,
        unit=PER_VIDEO.move_per_latent,
        first_delta="identity",
        carry=CameraCarry.start(),
    )
    assert torch.isfinite(session.advance(controls).frames).all()
