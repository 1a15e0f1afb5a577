"""Training of the tiny transformer: teacher forcing, then contexts that the model made itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.vae import WanVAE
from lingbot_core.presets import Preset, get_preset
from lingbot_core.schedule import distilled_steps

from .dit_forward import Batch, Teacher, block_begin, block_end, block_forward, masked
from .files import Log, load_parts, save_parts
from .latents import decode_latents
from .optimise import Guard, Optimiser, Schedule, clear_grads, cosine, replayed
from .pool import Encoded, Pool, encode_walks
from .rollout import roll_out
from .source import Source
from .text import TEXT_LEN, Prompts
from .vae_forward import fast_ways

CONFIG = DiTConfig(dim=256, ffn_dim=1024, num_layers=6, num_heads=4, text_dim=64, text_len=TEXT_LEN)


@dataclass(frozen=True)
class DiTTraining:
    """Everything that decides the result.

    window: chunks that attention sees. chunks: of a training piece; clip_chunks: of the clips it is cut from. levels:
    odds of the preset's steps; exact: share of chunks at those steps instead of anywhere between. context_noise: most
    noise on a context, for half of the pieces. own_from: progress from which contexts the model made itself are used,
    own: share of the pieces that use them then, own_clips of which are made every own_every steps; free: share of those
    made from pure noise. pool: clips; refresh: steps after which refresh_clips of them are replaced.
    """

    config: DiTConfig = CONFIG
    preset: str = "tiny"
    window: int = 3
    chunks: int = 5
    clip_chunks: int = 10
    batch: int = 64
    lr: float = 6e-4
    warm_up: int = 300
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    ema: float = 0.9985
    levels: tuple[float, ...] = (0.34, 0.22, 0.2, 0.24)
    exact: float = 0.8
    context_noise: float = 0.15
    from_start: float = 0.4
    own_from: float = 0.5
    own: float = 0.0
    own_clips: int = 384
    own_every: int = 80
    free: float = 0.0
    sigma_power: float = 0.0
    pool: int = 3584
    refresh: int = 300
    refresh_clips: int = 128
    seed: int = 20260303
    compiled: bool = True
    graphs: bool = True
    masked: bool = False


def initialise(dit: CausalWanDiT, seed: int) -> None:
    """As Wan is initialised: Xavier Linears, a head of zeros, small gates; the camera begins without effect."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in dit.named_parameters():
        with torch.no_grad():
            if "modulation" in name:
                p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1]))
            elif name.endswith(("norm_q.weight", "norm_k.weight", "norm3.weight")):
                p.fill_(1)
            elif p.ndim < 2 or name == "head.head.weight" or "cam_scale_layer" in name or "cam_shift_layer" in name:
                p.zero_()
            elif name.startswith(("text_embedding", "time_embedding")):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02)
            else:
                flat = p.flatten(1)
                bound = math.sqrt(6 / sum(flat.shape))
                p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * bound)


@dataclass(eq=False)
class Inputs:
    """The fixed tensors of a step. weight: of each chunk's loss [B, n]; level: row of the statistics, int64 [B, n]."""

    target: Tensor
    context: Tensor
    noise: Tensor
    sigma: Tensor
    t: Tensor
    weight: Tensor
    level: Tensor
    batch: Batch

    def tensors(self) -> tuple[Tensor, ...]:
        b = self.batch
        return (self.target, self.context, self.noise, self.sigma, self.t, self.weight, self.level, b.condition, b.rays,
                b.prompts)  # fmt: skip

    def copy_(self, other: Inputs) -> None:
        for mine, new in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(new)


class Sampler:
    """Draws the inputs of a step from a pool."""

    def __init__(self, recipe: DiTTraining, preset: Preset, generator: torch.Generator) -> None:
        self.recipe, self.generator = recipe, generator
        steps = distilled_steps(preset)
        device = generator.device
        # A chunk begins as pure noise; later steps see what re-noising gives.
        sigmas = [1.0, *(float(step.renoise) for step in steps if step.renoise is not None)]
        self.sigmas = torch.tensor(sigmas, device=device)
        self.times = torch.tensor([step.t for step in steps], device=device)
        self.odds = torch.tensor(recipe.levels, device=device)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.generator.device)

    def __call__(self, pool: Pool, own: float) -> Inputs:
        """own: share of the pieces whose contexts the model made itself."""
        r, g = self.recipe, self.generator
        device = g.device
        size = r.batch
        clips = torch.randint(len(pool.data), (size,), generator=g, device=device)
        start = torch.randint(1, r.clip_chunks - r.chunks + 2, (size,), generator=g, device=device)
        start = torch.where(self._rand(size) < r.from_start, 0, start.clamp(max=r.clip_chunks - r.chunks))
        mine = torch.zeros(size, dtype=torch.bool, device=device)
        pick = clips
        if own > 0 and len(pool.rolled):
            mine = self._rand(size) < own
            pick = torch.randint(len(pool.rolled), (size,), generator=g, device=device)
            clips = torch.where(mine, pool.rolled[pick], clips)
        target, batch = pool.batch(clips, start, r.chunks, r.config.patch_size)
        context = target
        if own > 0 and len(pool.rolled):
            index = start[:, None] + torch.arange(r.chunks, device=device)
            made = pool.contexts[pick.clamp(max=len(pool.rolled) - 1)[:, None], index].float()
            context = torch.where(mine.view(-1, 1, 1, 1, 1, 1), made, target)
        amount = self._rand(size, r.chunks) * r.context_noise * (self._rand(size, 1) < 0.5)
        amount = amount.view(size, r.chunks, 1, 1, 1, 1)
        context = (1 - amount) * context + amount * torch.empty_like(target).normal_(generator=g)

        chosen = torch.multinomial(self.odds, size * r.chunks, replacement=True, generator=g).view(size, r.chunks)
        exact = self._rand(size, r.chunks) < r.exact
        anywhere = 0.02 + 0.98 * self._rand(size, r.chunks)
        sigma = torch.where(exact, self.sigmas[chosen], anywhere)
        t = torch.where(exact, self.times[chosen], 1000 * anywhere)
        # The first chunk of a piece from the middle of a clip lacks the past that it would have in a session.
        weight = torch.ones(size, r.chunks, device=device)
        weight[:, 0] = (start == 0).float()
        level = torch.where(exact, chosen, len(self.sigmas))
        noise = torch.empty_like(target).normal_(generator=g)
        return Inputs(target, context, noise, sigma, t, weight, level, batch)


def flow_loss(teacher: Teacher, inputs: Inputs, power: float) -> tuple[Tensor, Tensor]:
    """The loss and each chunk's mean squared error of x0 [B, n]."""
    sigma = inputs.sigma.view(*inputs.sigma.shape, 1, 1, 1, 1)
    noisy = (1 - sigma) * inputs.target + sigma * inputs.noise
    flow = teacher.flow(inputs.context, noisy, inputs.t, inputs.batch)
    error = (flow - (inputs.noise - inputs.target)).square().mean(dim=(2, 3, 4, 5))
    weight = inputs.weight * inputs.sigma.pow(power)
    loss = (error * weight).sum() / weight.sum()
    return loss, (error.detach() * inputs.sigma.square())


def compiled_differs(teacher: Teacher, inputs: Inputs, power: float) -> float:
    """Compiles the blocks and returns how far their gradients are from eager ones, relative in norm."""
    parameters = [p for p in teacher.dit.parameters() if p.requires_grad]

    def gradients() -> Tensor:
        clear_grads(parameters)
        flow_loss(teacher, inputs, power)[0].backward()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    eager = gradients()
    again = gradients()
    torch._dynamo.config.cache_size_limit = 64
    teacher.run_block = torch.compile(block_forward, dynamic=False)
    compiled = gradients()
    clear_grads(parameters)
    noise = float((again - eager).norm() / eager.norm())
    return max(0.0, float((compiled - eager).norm() / eager.norm()) - noise)


class Averaged:
    """Inside ``with``, the module holds the moving average."""

    def __init__(self, optimiser: Optimiser) -> None:
        self._optimiser = optimiser

    def __enter__(self) -> None:
        o = self._optimiser
        self._kept = [p.detach().clone() for p in o.parameters]
        torch._foreach_copy_([p.detach() for p in o.parameters], o.average)

    def __exit__(self, *_: object) -> None:
        torch._foreach_copy_([p.detach() for p in self._optimiser.parameters], self._kept)


@torch.no_grad()
def examine(
    teacher: Teacher, vae: WanVAE, preset: Preset, pool: Pool, recipe: DiTTraining, clips: int = 24
) -> dict[str, list[float]]:
    """Free runs over unseen clips: per chunk x0's mean squared error, PSNR in dB and gradient energy against truth."""
    device = teacher.device
    rows = torch.arange(min(clips, len(pool.data)), device=device)
    start = torch.zeros_like(rows)
    truth, batch = pool.batch(rows, start, recipe.clip_chunks, recipe.config.patch_size)
    generator = torch.Generator(device).manual_seed(99)
    # Few clips: compiling for their number would take longer than running them does.
    parts = teacher.run_begin, teacher.run_end
    teacher.run_begin, teacher.run_end = block_begin, block_end
    made = roll_out(teacher, preset, batch, truth, start, generator)
    teacher.run_begin, teacher.run_end = parts
    error = (made - truth).square().mean(dim=(0, 2, 3, 4, 5))
    shown, real = (decode_latents(vae, t.transpose(1, 2).flatten(2, 3), teacher.dtype) for t in (made, truth))
    psnr, energy = [], []
    frames = 4 * teacher.chunk
    for index in range(recipe.clip_chunks):
        piece = slice(max(0, index * frames - 3), (index + 1) * frames - 3)
        a, b = shown[:, piece], real[:, piece]
        psnr.append(10 * math.log10(4 / max(1e-12, float((a - b).square().mean()))))
        energy.append(float(_gradient_energy(a) / _gradient_energy(b)))
    return {"x0": error.tolist(), "psnr_vs_decoded": psnr, "energy": energy}


def _gradient_energy(video: Tensor) -> Tensor:
    """video: [B, T, H, W, 3]."""
    across = (video[:, :, :, 1:] - video[:, :, :, :-1]).square().mean()
    return across + (video[:, :, 1:] - video[:, :, :-1]).square().mean()


def train_dit(
    source: Source,
    vae: WanVAE,
    prompts: Prompts,
    out: Path,
    recipe: DiTTraining,
    *,
    device: torch.device,
    seconds: float,
    plan: float | None = None,
    steps: int | None = None,
    resume: Path | None = None,
    begin: Path | None = None,
    profile: bool = False,
    size: tuple[int, int] = (12, 20),
    chunk: int = 3,
    cache: Path | None = None,
    save_every: float = 120.0,
) -> CausalWanDiT:
    """Trains for ``seconds`` (of a plan of so many in all), saves to ``out`` and returns the average in float32.

    resume: goes on with an unfinished run of this plan. begin: finished weights (a run's folder or a model folder) that
    a new plan starts from. size: latent height and width. cache: a file that keeps the first pool for later runs on the
    same machine, made by the same VAE. Files, also written every ``save_every`` seconds: dit_ema (to use and to go on
    from), dit_raw and dit_squares.
    """
    log = Log(out / "dit.jsonl")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    schedule = Schedule(plan or seconds, seconds, steps)
    preset = get_preset(recipe.preset)
    dit = CausalWanDiT(recipe.config)
    initialise(dit, recipe.seed)
    if begin is not None:
        dit.load_state_dict(finished_weights(begin))
    dit.to(device)
    optimiser = Optimiser(
        dit, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, clip=recipe.clip, ema=recipe.ema
    )
    step = resumed_at = 0
    if resume is not None:
        raw, about = load_parts(resume, "dit_raw")
        squares = load_parts(resume, "dit_squares")[0] if (resume / "dit_squares.0.safetensors").is_file() else None
        average = load_parts(resume, "dit_ema")[0]
        optimiser.restore(raw, average, squares)
        step = resumed_at = schedule.before_steps = about["step"]
        schedule.before_seconds = about["seconds"]
        optimiser.updates = step
    vae = vae.to(device)
    teacher = Teacher(dit, prompts.table.to(device), window=recipe.window, chunk=chunk, size=size, dtype=dtype)
    if recipe.masked:
        teacher.attention = masked
    seed = recipe.seed % 10_000 + 10 * (step + 1)

    def draw(count: int, number: int) -> Any:
        return encode_walks(vae, source, prompts, count, recipe.clip_chunks, chunk, number, ways=ways, dtype=dtype)

    ways = fast_ways(device)
    unseen = Pool(draw(min(24, recipe.pool), 3))
    piece = min(256, recipe.pool)
    if cache is not None and cache.is_file():
        pool = Pool(Encoded(*(t.to(device) for t in torch.load(cache, weights_only=True))))
    else:
        pool = Pool.of([draw(piece, seed + i) for i in range(-(-recipe.pool // piece))])
        if cache is not None:
            torch.save(pool.data.fields(), cache)
    seed += 1000
    log(
        "dit", recipe=asdict(recipe), parameters=sum(p.numel() for p in dit.parameters()), clips=len(pool.data),
        pool_seconds=schedule.elapsed, prompts=len(prompts.rows), resumed_at=resumed_at,
        begun_with=None if begin is None else begin.name,
    )  # fmt: skip

    def save() -> dict[str, Any]:
        about = {
            "step": step,
            "seconds": schedule.before_seconds + schedule.elapsed,
            "config": asdict(recipe.config),
            "window": recipe.window * chunk,
        }
        save_parts(out, "dit_ema", optimiser.averaged(), torch.float16, about=about)
        save_parts(out, "dit_raw", optimiser.raw(), torch.float16, about=about)
        save_parts(out, "dit_squares", optimiser.second_moments(), torch.bfloat16, about=about)
        return about

    generator = torch.Generator(device).manual_seed(recipe.seed + step)
    sampler = Sampler(recipe, preset, generator)
    inputs = sampler(pool, 0.0)
    if recipe.compiled and device.type == "cuda":
        undisturbed = {name: t.clone() for name, t in dit.state_dict().items()}
        _disturb_zeros(dit, generator)
        try:
            difference = compiled_differs(teacher, inputs, recipe.sigma_power)
        except Exception as error:  # whatever a compiler may raise: training goes on without it
            log("not compiled", error=str(error)[-300:])
            difference = math.inf
        clear_grads(optimiser.parameters)
        dit.load_state_dict(undisturbed)
        log("compiled", gradient_difference=str(difference), seconds=schedule.elapsed)
        if difference < 0.05:
            teacher.run_begin = torch.compile(block_begin, dynamic=False)
            teacher.run_end = torch.compile(block_end, dynamic=False)
        else:
            teacher.run_block = block_forward

    levels = len(sampler.sigmas) + 1
    sums = torch.zeros(2, levels, device=device)
    total = torch.zeros(2, device=device)
    run = _make_step(teacher, optimiser, inputs, total, sums, recipe, device, log)
    total.zero_()
    sums.zero_()
    guard = Guard(optimiser)
    spoken, last, examined, own = schedule.elapsed, step, schedule.elapsed, 0.0
    saved = schedule.elapsed
    log("begin", seconds=schedule.elapsed)
    while not schedule.over(step):
        progress = schedule.progress(step)
        if recipe.own > 0 and progress >= recipe.own_from and (own == 0.0 or step % recipe.own_every == 0):
            if own == 0.0:
                log("own contexts", step=step)
            own = recipe.own
            clips = torch.randperm(len(pool.data), generator=generator, device=device)[: recipe.own_clips]
            truth, batch = pool.batch(clips, torch.zeros_like(clips), recipe.clip_chunks, recipe.config.patch_size)
            later = torch.randint(1, preset.steps, clips.shape, generator=generator, device=device)
            free = torch.rand(clips.shape, generator=generator, device=device) < recipe.free
            pool.set_contexts(clips, roll_out(teacher, preset, batch, truth, torch.where(free, 0, later), generator))
            del truth, batch
        inputs.copy_(sampler(pool, own))
        warm = min(1.0, (step - resumed_at + 1) / recipe.warm_up)
        optimiser.prepare(warm * cosine(progress))
        run()
        step += 1
        if step % recipe.refresh == 0 and progress < 0.9:
            seed += 1
            pool.replace(draw(min(recipe.refresh_clips, recipe.pool), seed))
        if (profile and step - last == 50) or schedule.elapsed - spoken >= 10 or schedule.over(step):
            loss = float(total[0] / total[1])
            took = schedule.elapsed - spoken
            log(
                "step", step=step, progress=schedule.progress(step), loss=loss,
                x0=[float(f"{v:.4g}") for v in (sums[0] / sums[1].clamp(min=1)).tolist()],
                ms=1000 * took / (step - last), samples_per_s=(step - last) * recipe.batch / took,
                norm=float(optimiser.norm), skipped=float(optimiser.skipped), lr=float(optimiser.lr),
            )  # fmt: skip
            total.zero_()
            sums.zero_()
            spoken, last = schedule.elapsed, step
            if guard.check(loss):
                log("restored", step=step, peak=optimiser.peak)
            if profile:
                break
            if schedule.elapsed - saved > save_every:
                save()
                saved = schedule.elapsed
            if schedule.elapsed - examined > 120:
                with Averaged(optimiser):
                    log("examined", step=step, **_rounded(examine(teacher, vae, preset, unseen, recipe)))
                spoken = examined = schedule.elapsed
    with Averaged(optimiser):
        figures = _rounded(examine(teacher, vae, preset, unseen, recipe))
    about = save()
    log("dit done", **{k: v for k, v in about.items() if k != "config"}, restored=guard.restored,
        skipped=float(optimiser.skipped), **figures)  # fmt: skip
    log.close()
    final = CausalWanDiT(recipe.config).to(device).requires_grad_(False)
    final.load_state_dict(optimiser.averaged())
    return final


def _disturb_zeros(dit: nn.Module, generator: torch.Generator) -> None:
    """Gradients through a head of zeros would be zero; comparing them needs weights."""
    with torch.no_grad():
        for p in dit.parameters():
            p.add_(torch.empty_like(p).normal_(generator=generator), alpha=0.02)


def _rounded(figures: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(v, 3) for v in values] for name, values in figures.items()}


def _make_step(
    teacher: Teacher,
    optimiser: Optimiser,
    inputs: Inputs,
    total: Tensor,
    sums: Tensor,
    recipe: DiTTraining,
    device: torch.device,
    log: Log,
) -> Callable[[], Tensor]:
    rows = torch.arange(sums.shape[1], device=device)

    def work() -> Tensor:
        clear_grads(optimiser.parameters)
        loss, errors = flow_loss(teacher, inputs, recipe.sigma_power)
        loss.backward()
        optimiser.step()
        total.add_(torch.stack([loss.detach(), torch.ones_like(loss)]))
        of = (inputs.level.unsqueeze(-1) == rows).float() * inputs.weight.unsqueeze(-1)
        sums.add_(torch.stack([(of * errors.unsqueeze(-1)).sum((0, 1)), of.sum((0, 1))]))
        return total

    if not recipe.graphs:
        return work
    optimiser.prepare(0.0)  # warming up must not move anything
    try:
        return replayed(work, device)
    except RuntimeError as error:
        log("no graph", error=str(error)[:300])
        return work


def finished_weights(folder: Path) -> dict[str, Tensor]:
    """The weights that `train_dit` saved in ``folder``, or those of a model folder, in float32."""
    if (folder / "dit_ema.0.safetensors").is_file():
        tensors = load_parts(folder, "dit_ema")[0]
    else:
        tensors = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return {name: t.float() for name, t in tensors.items()}


def load_dit(folder: Path) -> tuple[dict[str, Tensor], DiTConfig, dict[str, Any]]:
    """The average that `train_dit` saved (float16), its sizes, and what is known about it."""
    tensors, about = load_parts(folder, "dit_ema")
    config = {**about["config"], "patch_size": tuple(about["config"]["patch_size"])}
    return tensors, DiTConfig(**config), about
