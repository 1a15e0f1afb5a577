"""Training of the tiny VAE: pictures, then clips; its latents are brought to mean 0 and deviation 1."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lingbot_core.models.vae import VAEConfig, WanVAE

from .files import Log, load_parts, save_parts
from .latents import encode_clips, fold_statistics, pictures
from .optimise import Guard, Optimiser, Schedule, clear_grads, cosine, replayed
from .vae_forward import Ways, compiled_norm, decode_raw, encode_moments, norm_rows

Videos = Callable[[int, int, int], Tensor]
"""(count, video frames, seed) -> uint8 [count, frames, 3, H, W] on the training device."""


@dataclass(frozen=True)
class Stage:
    """until: progress at which it ends. frames: of a clip; batch: clips a step."""

    until: float
    frames: int
    batch: int


@dataclass(frozen=True)
class VAETraining:
    """Everything that decides the result. steady: weight of `unsteadiness`. pool: video frames held as uint8; refresh:
    steps after which a piece of them is replaced."""

    dim: int = 16
    blocks: int = 1
    lr: float = 2e-3
    warm_up: int = 200
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.97)
    clip: float = 1.0
    ema: float = 0.998
    gradient: float = 0.5
    square: float = 2.0
    kl: float = 1e-4
    steady: float = 0.02
    seed: int = 20260301
    # The last stage is as long as it takes latents to settle: what is trained on short clips drifts in long ones.
    stages: tuple[Stage, ...] = (Stage(0.15, 1, 256), Stage(0.5, 9, 40), Stage(0.7, 17, 20), Stage(1.0, 57, 6))
    pool: int = 2048 * 17
    refresh: int = 100
    compiled: bool = True
    graphs: bool = True
    stacked: bool | None = None

    @property
    def config(self) -> VAEConfig:
        return VAEConfig(dim=self.dim, num_res_blocks=self.blocks)


def initialise(vae: WanVAE, seed: int) -> None:
    """Variance-preserving weights of a VAE that treats every frame nearly alone, so that what pictures teach lasts.

    Taps that look back are a tenth, changes of the frame rate pass frames through, residual branches begin at a fifth.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, p in vae.named_parameters():
        if p.ndim < 2 or name.endswith("gamma"):
            nn.init.constant_(p, 1.0 if name.endswith("gamma") else 0.0)
            continue
        value = torch.randn(p.shape, generator=generator)
        if name.endswith("time_conv.weight"):
            value *= 0.1 / math.sqrt(3 * p.shape[1])
            channels = p.shape[1]
            value[:, :, -1, 0, 0] += torch.eye(channels).repeat(p.shape[0] // channels, 1)
        else:
            gain = 0.2 if name.endswith(("residual.6.weight", "proj.weight")) else 1.0
            value *= gain / math.sqrt(p.shape[1] * math.prod(p.shape[-2:]))
            if p.ndim == 5 and p.shape[2] == 3:
                value[:, :, :-1] *= 0.1
        with torch.no_grad():
            p.copy_(value)


def losses(vae: WanVAE, video: Tensor, noise: Tensor, recipe: VAETraining, ways: Ways) -> tuple[Tensor, Tensor]:
    """The loss, and the mean squared error, of pictures [B, T, H, W, 3] in [-1, 1]. noise: [B, t, h, w, 16]."""
    moments = encode_moments(vae, video, ways).float()
    mean, log_variance = moments.chunk(2, dim=-1)
    log_variance = log_variance.clamp(-20, 10)
    latents = mean + (0.5 * log_variance).exp() * noise
    error = decode_raw(vae, latents.to(video.dtype), ways).float() - video.float()
    loss, square = difference(error, recipe.gradient, recipe.square)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return loss + recipe.kl * divergence + recipe.steady * unsteadiness(mean), square


def unsteadiness(latents: Tensor) -> Tensor:
    """How much mean and deviation of latents [B, t, h, w, 16] depend on their place in the clip; 0 if they do not.

    A causal encoder's may go on growing for a dozen latent frames, each of which a transformer has to learn anew.
    """
    scaled = latents / latents.detach().std(dim=(0, 1, 2, 3)).clamp(min=1e-6)
    mean, deviation = scaled.mean(dim=(0, 2, 3)), scaled.std(dim=(0, 2, 3))
    return (mean - mean.mean(dim=0)).square().mean() + (deviation - deviation.mean(dim=0)).square().mean()


def difference(error: Tensor, gradient: float, square: float) -> tuple[Tensor, Tensor]:
    """The loss of a picture's error [B, T, H, W, 3]: absolute, of its gradients, squared; and the mean square alone."""
    squared = error.square().mean()
    across = (error[:, :, :, 1:] - error[:, :, :, :-1]).abs().mean()
    down = (error[:, :, 1:] - error[:, :, :-1]).abs().mean()
    return error.abs().mean() + gradient * 0.5 * (across + down) + square * squared, squared.detach()


def psnr(square: float) -> float:
    """dB of a mean squared error between pictures in [-1, 1]."""
    return 10 * math.log10(4 / max(square, 1e-12))


class Pool:
    """Clips as uint8, from which steps draw shorter pieces; a part of them is replaced from time to time."""

    def __init__(self, videos: Videos, clips: int, frames: int, seed: int, piece: int = 256) -> None:
        self._videos, self._frames, self._piece, self._seed = videos, frames, min(piece, clips), seed
        self._next = 0
        parts = []
        for begin in range(0, clips, self._piece):
            parts.append(self._draw(min(self._piece, clips - begin)))
        self.data = torch.cat(parts)

    def _draw(self, count: int) -> Tensor:
        self._seed += 1
        return self._videos(count, self._frames, self._seed)

    def refresh(self) -> None:
        """Replaces the oldest piece."""
        count = min(self._piece, len(self.data) - self._next)
        self.data[self._next : self._next + count] = self._draw(count)
        self._next = (self._next + count) % len(self.data)

    def sample(self, batch: int, frames: int, generator: torch.Generator) -> Tensor:
        """uint8 [batch, frames, 3, H, W]: random pieces, half of them mirrored."""
        device = self.data.device
        clip = torch.randint(len(self.data), (batch,), generator=generator, device=device)
        start = torch.randint(self._frames - frames + 1, (batch,), generator=generator, device=device)
        flip = torch.rand(batch, generator=generator, device=device) < 0.5
        video = self.data[clip[:, None], start[:, None] + torch.arange(frames, device=device)]
        return torch.where(flip.view(-1, 1, 1, 1, 1), video.flip(-1), video)


@torch.no_grad()
def evaluate(vae: WanVAE, video: Tensor, dtype: torch.dtype, piece: int = 8) -> float:
    """PSNR in dB of clips uint8 [N, T, 3, H, W] through the mean latents and clamped, as `WanVAE` shows them."""
    total = 0.0
    for part in video.split(piece):
        target = pictures(part, torch.float32)
        moments = encode_moments(vae, target.to(dtype), Ways())
        out = decode_raw(vae, moments[..., : vae.config.z_dim], Ways()).float().clamp(-1, 1)
        total += float((out - target).square().mean()) * len(part)
    return psnr(total / len(video))


def choose_ways(vae: WanVAE, video: Tensor, recipe: VAETraining, log: Log) -> Ways:
    """Measures both kinds of convolution over time on this device and takes the faster one."""
    torch._dynamo.config.cache_size_limit = 64
    norm = compiled_norm(video.device) if recipe.compiled else norm_rows
    if recipe.stacked is not None or video.device.type != "cuda":
        return Ways(recipe.stacked is not False, norm)
    taken = {}
    noise = torch.zeros(*_latent_size(video), device=video.device)
    for stacked in (True, False):
        ways = Ways(stacked, norm)
        for _ in range(3):  # the last one counts
            torch.cuda.synchronize()
            begin = time.monotonic()
            losses(vae, video, noise, recipe, ways)[0].backward()
            torch.cuda.synchronize()
            taken[stacked] = time.monotonic() - begin
        clear_grads(vae.parameters())
    log("ways", stacked_ms=1000 * taken[True], conv3d_ms=1000 * taken[False])
    return Ways(taken[True] <= taken[False], norm)


def _latent_size(video: Tensor) -> tuple[int, ...]:
    batch, frames, height, width, _ = video.shape
    return batch, (frames - 1) // 4 + 1, height // 8, width // 8, 16


def train_vae(
    videos: Videos,
    out: Path,
    recipe: VAETraining,
    *,
    device: torch.device,
    seconds: float,
    plan: float | None = None,
    steps: int | None = None,
    resume: Path | None = None,
    begin: Path | None = None,
    profile: bool = False,
    statistics_clips: int = 512,
) -> WanVAE:
    """Trains for ``seconds`` (of a plan of so many in all), saves to ``out`` and returns the folded average in float32.

    videos: unlimited training clips. resume: goes on with an unfinished run of this plan. begin: a finished VAE (a
    run's folder or a model folder) that a new plan starts from. Files: vae_ema, vae_raw and vae_squares to go on from,
    ``vae`` to use.
    """
    log = Log(out / "vae.jsonl")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    vae = WanVAE(recipe.config)
    initialise(vae, recipe.seed)
    if begin is not None:
        vae.load_state_dict(load_vae(begin, torch.device("cpu")).state_dict())
    vae.to(device)
    optimiser = Optimiser(
        vae, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, clip=recipe.clip, ema=recipe.ema
    )
    schedule = Schedule(plan or seconds, seconds, steps)
    step = resumed_at = 0
    if resume is not None:
        raw, about = load_parts(resume, "vae_raw")
        optimiser.restore(raw, load_parts(resume, "vae_ema")[0], load_parts(resume, "vae_squares")[0])
        step = resumed_at = schedule.before_steps = about["step"]
        schedule.before_seconds = about["seconds"]
        optimiser.updates = step
    generator = torch.Generator(device).manual_seed(recipe.seed + step)
    longest = max(stage.frames for stage in recipe.stages)
    pool = Pool(videos, max(1, recipe.pool // longest), longest, recipe.seed + 1000 * (step + 1))
    unseen = videos(16, longest, 7)
    log("vae", recipe=asdict(recipe), parameters=sum(p.numel() for p in vae.parameters()), pool=list(pool.data.shape),
        begun_with=None if begin is None else begin.name)  # fmt: skip

    probe = pictures(pool.sample(min(16, recipe.stages[-1].batch), longest, generator), dtype)
    ways = choose_ways(vae, probe, recipe, log)
    guard = Guard(optimiser)
    run: Callable[[], Tensor] | None = None
    stage: Stage | None = None
    sums = torch.zeros(2, device=device)
    spoken, counted, last = schedule.elapsed, 0, step
    while not schedule.over(step):
        progress = schedule.progress(step)
        current = next(s for s in recipe.stages if progress < s.until or s is recipe.stages[-1])
        if current is not stage:
            stage = current
            video = pictures(pool.sample(stage.batch, stage.frames, generator), dtype)
            noise = torch.zeros(_latent_size(video), device=device)
            log("stage", step=step, frames=stage.frames, batch=stage.batch)
            run = _make_step(vae, optimiser, video, noise, sums, recipe, ways, device, log)
            # Warming up moved the weights a little with whatever was there; nothing needs to be undone.
            sums.zero_()
            spoken, counted, last = schedule.elapsed, 0, step
            guard.forget()
        video.copy_(pictures(pool.sample(stage.batch, stage.frames, generator), dtype))
        noise.normal_(generator=generator)
        warm = min(1.0, (step - resumed_at + 1) / recipe.warm_up)
        optimiser.prepare(warm * cosine(progress))
        assert run is not None
        run()
        step += 1
        counted += 1
        if step % recipe.refresh == 0:
            pool.refresh()
        if counted == 50 or schedule.elapsed - spoken >= 10 or schedule.over(step):
            loss, square = (sums / max(1, step - last)).tolist()
            took = schedule.elapsed - spoken
            log(
                "step", step=step, progress=schedule.progress(step), loss=loss, psnr=psnr(square),
                ms=1000 * took / (step - last), clips_per_s=(step - last) * stage.batch / took,
                norm=float(optimiser.norm), skipped=float(optimiser.skipped), lr=float(optimiser.lr),
            )  # fmt: skip
            sums.zero_()
            spoken, last = schedule.elapsed, step
            if guard.check(loss):
                log("restored", step=step, peak=optimiser.peak)
            if profile and counted >= 50:
                break
    spent = schedule.before_seconds + schedule.elapsed
    about = {"step": step, "seconds": spent, "dim": recipe.dim, "blocks": recipe.blocks}
    save_parts(out, "vae_ema", optimiser.averaged(), torch.float16, about=about)
    save_parts(out, "vae_raw", optimiser.raw(), torch.float16, about=about)
    # Squares below the range of float16 matter; bfloat16 holds them.
    save_parts(out, "vae_squares", optimiser.second_moments(), torch.bfloat16, about=about)

    final = WanVAE(recipe.config).to(device).requires_grad_(False)
    final.load_state_dict(optimiser.averaged())
    mean, std = latent_statistics(final, pool.data[: min(statistics_clips, len(pool.data))], dtype)
    fold_statistics(final, mean, std)
    final.load_state_dict({name: t.half().float() for name, t in final.state_dict().items()})
    quality = evaluate(final, unseen, torch.float32)
    save_parts(out, "vae", final.state_dict(), torch.float16, about={**about, "psnr": quality})
    log(
        "vae done", step=step, seconds=spent, psnr_unseen=quality, skipped=float(optimiser.skipped),
        restored=guard.restored, latent_mean=mean.tolist(), latent_std=std.tolist(),
    )  # fmt: skip
    log.close()
    return final


def _make_step(
    vae: WanVAE,
    optimiser: Optimiser,
    video: Tensor,
    noise: Tensor,
    sums: Tensor,
    recipe: VAETraining,
    ways: Ways,
    device: torch.device,
    log: Log,
) -> Callable[[], Tensor]:
    def work() -> Tensor:
        clear_grads(optimiser.parameters)
        loss, square = losses(vae, video, noise, recipe, ways)
        loss.backward()
        optimiser.step()
        sums.add_(torch.stack([loss.detach(), square]))
        return sums

    if not recipe.graphs:
        return work
    optimiser.prepare(0.0)  # warming up must not move anything
    try:
        return replayed(work, device)
    except RuntimeError as error:
        log("no graph", error=str(error)[:300])
        return work


@torch.no_grad()
def latent_statistics(vae: WanVAE, video: Tensor, dtype: torch.dtype, piece: int = 16) -> tuple[Tensor, Tensor]:
    """Mean and deviation [16] of the normalised latents of clips uint8 [N, T, 3, H, W]."""
    parts = [encode_clips(vae, part, Ways(), dtype).double() for part in video.split(piece)]
    latents = torch.cat(parts).transpose(0, 1).flatten(1)
    return latents.mean(dim=1), latents.std(dim=1)


def load_vae(folder: Path, device: torch.device) -> WanVAE:
    """The finished VAE of `train_vae`, or the one in a model folder, in float32."""
    if (folder / "vae.0.safetensors").is_file():
        tensors, _ = load_parts(folder, "vae")
    else:
        tensors = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    vae = WanVAE(VAEConfig.from_state_dict(tensors))
    vae.load_state_dict({name: t.float() for name, t in tensors.items()})
    return vae.to(device).requires_grad_(False).eval()
