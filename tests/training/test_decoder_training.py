"""Training the decoder alone lowers the error of pictures and leaves the encoder bitwise as it was."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from training.decoder_training import DecoderTraining, train_decoder
from training.vae_training import Stage, VAETraining, load_vae, train_vae

from .test_vae_training import videos

CPU = torch.device("cpu")


def test_the_decoder_improves_and_the_encoder_stays(tmp_path: Path) -> None:
    small = VAETraining(dim=8, stages=(Stage(1.0, 5, 4),), pool=40, compiled=False, graphs=False)
    train_vae(videos, tmp_path / "vae", small, device=CPU, seconds=60, steps=12, statistics_clips=8)
    recipe = DecoderTraining(frames=5, batch=4, pool=40, warm_up=4, lr=2e-3)
    train_decoder(videos, tmp_path / "vae", tmp_path / "out", recipe, device=CPU, seconds=60, steps=25)

    before, after = (load_vae(tmp_path / name, CPU).state_dict() for name in ("vae", "out"))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(name.startswith(("decoder.", "conv2.")) for name in moved)

    last = json.loads((tmp_path / "out" / "decoder.jsonl").read_text().splitlines()[-1])
    assert last["psnr_unseen"] > last["psnr_before"] + 0.3
