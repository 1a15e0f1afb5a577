"""More training for the VAE's decoder alone. The latents stay what they are: a transformer may be trained beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lingbot_core.models.vae import LATENT_STD, WanVAE

from .files import Log, save_parts
from .latents import pictures
from .optimise import Guard, Optimiser, Schedule, clear_grads, cosine, replayed
from .vae_forward import decode_raw, encode_moments
from .vae_training import Pool, VAETraining, Videos, choose_ways, difference, evaluate, load_vae, psnr


@dataclass(frozen=True)
class DecoderTraining:
    """Everything that decides the result. frames: of a clip; batch: clips a step. wobble: most noise on the normalised
    latents, as the transformer's are not exact. The other fields mean what they mean in `VAETraining`."""

    lr: float = 8e-4
    warm_up: int = 200
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.97)
    clip: float = 1.0
    ema: float = 0.998
    gradient: float = 0.5
    square: float = 2.0
    wobble: float = 0.05
    frames: int = 57
    batch: int = 7
    pool: int = 2048 * 17
    refresh: int = 200
    seed: int = 20260307


def train_decoder(
    videos: Videos,
    folder: Path,
    out: Path,
    recipe: DecoderTraining,
    *,
    device: torch.device,
    seconds: float,
    steps: int | None = None,
) -> WanVAE:
    """Goes on with the finished VAE in ``folder`` and saves it, as ``vae``, to ``out``; its encoder stays bitwise."""
    log = Log(out / "decoder.jsonl")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    vae = load_vae(folder, device)
    scale = torch.tensor(LATENT_STD, device=device)  # noise of this is noise of 1 on normalised latents

    @torch.no_grad()
    def encoded() -> Tensor:
        return encode_moments(vae, video, ways)[..., : vae.config.z_dim].contiguous()

    vae.decoder.requires_grad_(True)
    vae.conv2.requires_grad_(True)
    optimiser = Optimiser(
        vae, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, clip=recipe.clip, ema=recipe.ema
    )
    schedule = Schedule(seconds, seconds, steps)
    generator = torch.Generator(device).manual_seed(recipe.seed)
    pool = Pool(videos, max(1, recipe.pool // recipe.frames), recipe.frames, recipe.seed)
    unseen = videos(32, recipe.frames, 7)
    before = evaluate(vae, unseen, torch.float32)
    video = pictures(pool.sample(recipe.batch, recipe.frames, generator), dtype)
    ways = choose_ways(vae, video, VAETraining(), log)
    latents = encoded()
    sums = torch.zeros(2, device=device)

    def work() -> Tensor:
        clear_grads(optimiser.parameters)
        error = decode_raw(vae, latents, ways).float() - video.float()
        loss, square = difference(error, recipe.gradient, recipe.square)
        loss.backward()
        optimiser.step()
        sums.add_(torch.stack([loss.detach(), square]))
        return sums

    optimiser.prepare(0.0)  # warming up must not move anything
    run = replayed(work, device)
    sums.zero_()
    guard = Guard(optimiser)
    log("decoder", psnr_before=before, clips=len(pool.data), seconds=schedule.elapsed)
    step, last, spoken = 0, 0, schedule.elapsed
    while not schedule.over(step):
        video.copy_(pictures(pool.sample(recipe.batch, recipe.frames, generator), dtype))
        fresh = encoded()
        amount = torch.rand(recipe.batch, 1, 1, 1, 1, generator=generator, device=device) * recipe.wobble
        noise = torch.empty(fresh.shape, device=device).normal_(generator=generator)
        latents.copy_(fresh + amount * scale * noise)
        optimiser.prepare(min(1.0, (step + 1) / recipe.warm_up) * cosine(schedule.progress(step)))
        run()
        step += 1
        if step % recipe.refresh == 0:
            pool.refresh()
        if schedule.elapsed - spoken >= 20 or schedule.over(step):
            loss, square = (sums / (step - last)).tolist()
            log("step", step=step, loss=loss, psnr=psnr(square), ms=1000 * (schedule.elapsed - spoken) / (step - last),
                lr=float(optimiser.lr), skipped=float(optimiser.skipped))  # fmt: skip
            sums.zero_()
            spoken, last = schedule.elapsed, step
            if guard.check(loss):
                log("restored", step=step, peak=optimiser.peak)
    weights = {**vae.state_dict(), **optimiser.averaged()}
    vae.load_state_dict({name: t.detach().half().float() for name, t in weights.items()})
    vae.requires_grad_(False)
    quality = evaluate(vae, unseen, torch.float32)
    about = {"dim": vae.config.dim, "blocks": vae.config.num_res_blocks, "psnr": quality}
    save_parts(out, "vae", vae.state_dict(), torch.float16, about=about)
    log("decoder done", step=step, seconds=schedule.elapsed, psnr_before=before, psnr_unseen=quality,
        skipped=float(optimiser.skipped), restored=guard.restored)  # fmt: skip
    log.close()
    return vae
