"""Judges a trained tiny world on scenes that it has not seen, against pictures rendered along the same walk.

    python -m training.evaluate MODEL_FOLDER --out FOLDER [--scenes 20] [--chunks 8] [--keys one|mixed]

Writes evaluation.json, evaluation.txt and a contact sheet per key. ``--keys one`` walks every scene once per key;
``mixed`` holds each key for two chunks in turn, a quarter of the work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lingbot_core.engine.world import World
from lingbot_core.weights.layout import find_layout

from . import sheets
from .measures import agrees, along_key, global_motion, gradient_energy, psnr, statistics, stretches
from .walks import (
    CHUNK,
    ONE_KEY,
    Walk,
    advance,
    drive,
    key_walk,
    mixed_walks,
    start_session,
    switch_walk,
    truth,
    wander,
)

HEIGHT, WIDTH = 96, 160
LOOK_KEYS, MOVE_AND_TURN = "ik", "wsadjl"
SWITCH_AT, SWITCH_CHUNKS = 3, 5  # judged on the second chunk after the switch
LONG_CHUNKS, EARLY, LATE = 20, 1, 19
SHEET_SCENES = 2

# What counts as a picture that is still alive, against the model's own second chunk.
ALIVE_STD, ALIVE_ENERGY, ALIVE_COLOUR = (0.6, 1.6), (0.35, 2.5), 0.12


@dataclass
class Judged:
    """One walk: motions along each held key (key, model, truth), and per chunk PSNR and gradient energies."""

    name: str
    motions: list[tuple[str, float, float]]
    psnr: list[float]
    energy: list[float]
    true_energy: list[float]
    vae_psnr: float | None = None
    pictures: tuple[Tensor, Tensor] | None = field(default=None, repr=False)


def chunk_slices(chunks: int) -> list[slice]:
    """The video frames of every chunk; the given first picture is left out of the first."""
    size = 4 * CHUNK
    return [slice(1 if i == 0 else size * i - 3, size * (i + 1) - 3) for i in range(chunks)]


def compare(walk: Walk, shown: Tensor, true: Tensor) -> Judged:
    """Judges frames against the truth, both float32 [F, 3, H, W] in 0..1."""
    width = true.shape[-1]
    seen, real = global_motion(shown), global_motion(true)
    parts = chunk_slices(walk.chunks)
    return Judged(
        name=walk.name,
        motions=[(k, along_key(seen[s], k, width), along_key(real[s], k, width)) for k, s in stretches(walk.keys)],
        psnr=[psnr(shown[part], true[part]) for part in parts],
        energy=[gradient_energy(shown[part]) for part in parts],
        true_energy=[gradient_energy(true[part]) for part in parts],
    )


@torch.inference_mode()
def vae_psnr(world: World, true: Tensor) -> float:
    """What the VAE alone loses on frames in 0..1."""
    video = (true.permute(1, 0, 2, 3) * 2 - 1).to(world.device)
    back = world.vae.decode(world.vae.encode(video)).float().cpu().permute(1, 0, 2, 3) / 2 + 0.5
    return psnr(back.clamp(0, 1), true)


def judge_walk(world: World, walk: Walk, *, window: int | None, with_vae: bool = False, keep: bool = False) -> Judged:
    """Drives the model along one walk and judges it."""
    frames = truth(walk, HEIGHT, WIDTH, device=world.device.type)
    true = frames.float().cpu() / 255
    shown = drive(world, walk, frames[0], window=window)
    judged = compare(walk, shown, true)
    if with_vae:
        judged.vae_psnr = vae_psnr(world, true)
    if keep:
        judged.pictures = sheets.pick(true), sheets.pick(shown)
    return judged


def judge_long(world: World, walk: Walk, *, window: int | None) -> dict[str, Any]:
    """Whether the picture is alive at chunk 20, against chunk 2; the truth's own change stands beside it."""
    frames = truth(walk, HEIGHT, WIDTH, device=world.device.type)
    parts = chunk_slices(walk.chunks)
    shown = drive(world, walk, frames[0], window=window)
    true = frames.float().cpu() / 255
    return alive(shown, true, parts[EARLY], parts[min(LATE, walk.chunks - 1)])


def alive(shown: Tensor, true: Tensor, early: slice, late: slice) -> dict[str, Any]:
    """Ratios of a late chunk to an early one, the shift of the mean colour, and what they say."""
    out: dict[str, Any] = {}
    for name, frames in (("model", shown), ("truth", true)):
        a, b = statistics(frames[early]), statistics(frames[late])
        out[name] = {
            "std_ratio": b["std"] / max(a["std"], 1e-9),
            "energy_ratio": b["gradient_energy"] / max(a["gradient_energy"], 1e-12),
            "colour_shift": float(np.linalg.norm(np.subtract(b["mean"], a["mean"]))),
            "early": a,
            "late": b,
        }
    m, t = out["model"], out["truth"]
    # Where the walk itself leads to another view, the truth's change is allowed for.
    out["alive"] = bool(
        ALIVE_STD[0] * min(1, t["std_ratio"]) <= m["std_ratio"] <= ALIVE_STD[1] * max(1, t["std_ratio"])
        and ALIVE_ENERGY[0] * min(1, t["energy_ratio"])
        <= m["energy_ratio"]
        <= ALIVE_ENERGY[1] * max(1, t["energy_ratio"])
        and m["colour_shift"] <= ALIVE_COLOUR + t["colour_shift"]
    )
    return out


def judge_switch(world: World, walk: Walk, *, window: int | None) -> dict[str, Any]:
    """How far the mean colour has gone from the old style's to the new one's in the second chunk after the switch."""
    device = world.device.type
    frames = truth(walk, HEIGHT, WIDTH, device=device)
    old = truth(walk, HEIGHT, WIDTH, styles=(walk.styles[0],) * walk.chunks, device=device).float().cpu() / 255
    shown = drive(world, walk, frames[0], window=window)
    return switched(shown, old, frames.float().cpu() / 255, chunk_slices(walk.chunks)[SWITCH_AT + 1])


def switched(shown: Tensor, old: Tensor, new: Tensor, part: slice) -> dict[str, Any]:
    """Progress 0 (the old style's colour) to 1 (the new one's), and the distances to both."""
    m, a, b = (frames[part].mean(dim=(0, 2, 3)).double() for frames in (shown, old, new))
    progress = float((m - a) @ (b - a) / ((b - a) @ (b - a)).clamp(min=1e-12))
    to_old, to_new = float((m - a).norm()), float((m - b).norm())
    return {"progress": progress, "to_old": to_old, "to_new": to_new, "switched": to_new < to_old and progress > 0.5}


def frames_per_second(model: str, *, threads: int = 2, window: int = 9, chunks: int = 4) -> dict[str, float]:
    """Speed on CPU cores, decoding included: the median of some chunks after the window is full."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        world = World.load(model, device="cpu")
        walk = wander(0, chunks + 3)
        session = start_session(world, truth(walk, HEIGHT, WIDTH)[0], walk, window=window)
        seconds = []
        for index in range(walk.chunks):
            begin = time.perf_counter()
            advance(session, walk, index)
            seconds.append(time.perf_counter() - begin)
        session.close()
    finally:
        torch.set_num_threads(before)
    median = float(np.median(seconds[3:]))
    return {"threads": threads, "window": window, "seconds_per_chunk": median, "fps": 4 * CHUNK / median}


# Gathering


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """The numbers of many walks. Motion shares are sums over stretches, so that a wrong way counts against it."""
    agree, seen, real = defaultdict(list), defaultdict(float), defaultdict(float)
    for one in judged:
        for key, model, true in one.motions:
            agree[key].append(agrees(model))
            seen[key] += model
            real[key] += true
    keys = sorted(agree, key="wsadjlik".index)
    all_agree = [hit for hits in agree.values() for hit in hits]
    chunks = max((len(one.psnr) for one in judged), default=0)
    vae = [one.vae_psnr for one in judged if one.vae_psnr is not None]
    return {
        "walks": len(judged),
        "stretches": len(all_agree),
        "agreement": float(np.mean(all_agree)) if all_agree else None,
        "agreement_per_key": {key: float(np.mean(agree[key])) for key in keys},
        "motion_share_per_key": {key: seen[key] / real[key] for key in keys},
        "psnr_per_chunk": [float(np.mean([one.psnr[i] for one in judged])) for i in range(chunks)],
        "energy_per_chunk": [
            float(np.mean([one.energy[i] for one in judged]) / np.mean([one.true_energy[i] for one in judged]))
            for i in range(chunks)
        ],
        "vae_psnr": float(np.mean(vae)) if vae else None,
    }


def table(result: dict[str, Any]) -> list[tuple[str, float | None, float, float, str]]:
    """Rows (what, value, must, aim, unit) of the numbers that a model is judged by."""
    main = result["walks"]

    def at(values: Sequence[float], index: int) -> float | None:
        return values[index] if index < len(values) else None

    def percent(value: float | None) -> float | None:
        return None if value is None else 100 * value

    def share(items: Sequence[dict[str, Any]], name: str) -> float | None:
        return 100 * float(np.mean([item[name] for item in items])) if items else None

    rows = [("half seconds that go the key's way", percent(main["agreement"]), 96, 98, "%")]
    rows += [(f"  key {k.upper()}", percent(v), 96, 98, "%") for k, v in main["agreement_per_key"].items()]
    rows += [
        (f"motion against the true one, {k.upper()}", percent(v), 60, 80, "%")
        for k, v in main["motion_share_per_key"].items()
        if k in MOVE_AND_TURN
    ]
    rows += [
        ("PSNR against truth, chunk 1", at(main["psnr_per_chunk"], 0), 25, 26, "dB"),
        ("PSNR against truth, chunk 5", at(main["psnr_per_chunk"], 4), 20, 21, "dB"),
        ("gradient energy against truth, chunk 8", at(main["energy_per_chunk"], 7), 0.45, 0.6, ""),
        ("VAE alone, whole walks", main["vae_psnr"], 29, 31, "dB"),
        ("alive at chunk 20", share(result.get("long", []), "alive"), 100, 100, "%"),
        ("palette switched within two chunks", share(result.get("switch", []), "switched"), 100, 100, "%"),
        ("2 CPU cores, window 9", (result.get("speed") or {}).get("fps"), 10, 12, "fps"),
    ]
    return rows


def as_text(result: dict[str, Any]) -> str:
    """The table, with what stays below must marked, and the numbers per chunk."""
    lines = [f"{'':44}{'value':>10}{'must':>8}{'aim':>8}"]
    for what, value, must, aim, unit in table(result):
        shown = "-" if value is None else f"{value:.2f}"
        verdict = "" if value is None else "below must" if value < must else "aim" if value >= aim else "must"
        lines.append(f"{what:44}{shown:>10}{must:>8g}{aim:>8g} {unit:4} {verdict}")
    main = result["walks"]
    lines += [
        "",
        "PSNR per chunk      " + " ".join(f"{v:6.2f}" for v in main["psnr_per_chunk"]),
        "gradient energy     " + " ".join(f"{v:6.2f}" for v in main["energy_per_chunk"]),
        f"{main['walks']} walks, {main['stretches']} half seconds",
    ]
    if live := result.get("live"):
        per_key = ", ".join(f"{k.upper()} {100 * v:.0f}" for k, v in live["agreement_per_key"].items())
        lines.append(f"live keys (one step per latent): {100 * live['agreement']:.1f} % agree ({per_key})")
    return "\n".join(lines) + "\n"


# Running


Job = tuple[str, Walk, dict[str, Any]]
_WORLD: World | None = None


def _begin(model: str, device: str, threads: int, dtype: str) -> None:
    global _WORLD  # noqa: PLW0603 - one world per process, loaded once
    torch.set_num_threads(threads)
    _WORLD = World.load(model, device=device, dtype=dtype)


def _work(job: Job) -> Any:
    kind, walk, options = job
    assert _WORLD is not None
    judges = {"walk": judge_walk, "live": judge_walk, "long": judge_long, "switch": judge_switch}
    return judges[kind](_WORLD, walk, **options)


def jobs_for(
    scenes: int, chunks: int, keys: str, *, window: int | None, live: int, long: int, switch: int
) -> list[Job]:
    """Everything to judge. keys: 'one' or 'mixed'. live, long, switch: scenes for each of those."""
    jobs: list[Job] = []
    for scene in range(scenes):
        walks = [key_walk(scene, key, chunks) for key in ONE_KEY] if keys == "one" else mixed_walks(scene, chunks)
        for number, walk in enumerate(walks):
            options = {"window": window, "with_vae": number == 0, "keep": keys == "one" and scene < SHEET_SCENES}
            jobs.append(("walk", walk, options))
    plain = {"window": window}
    jobs += [("live", walk, plain) for scene in range(live) for walk in mixed_walks(scene, chunks, steps=1)]
    jobs += [("long", wander(scene, LONG_CHUNKS), plain) for scene in range(long)]
    jobs += [("switch", switch_walk(scene, SWITCH_CHUNKS, SWITCH_AT), plain) for scene in range(switch)]
    return jobs


def evaluate(
    model: str,
    jobs: Sequence[Job],
    *,
    device: str = "auto",
    dtype: str = "float32",
    workers: int = 1,
    threads: int = 2,
    log: bool = False,
) -> dict[str, Any]:
    """Judges a model folder (or 'tiny'); without the speed. The pictures for the sheets are under 'pictures'.

    dtype: of the transformer; a CPU, which the model is made for, computes in float32.
    """
    results: dict[str, list[Any]] = defaultdict(list)
    pictures: dict[str, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
    begin = time.perf_counter()
    for done, (job, value) in enumerate(_results(model, jobs, device, workers, threads, dtype), 1):
        results[job[0]].append(value)
        if isinstance(value, Judged) and value.pictures is not None:
            pictures[value.name].append((4 * CHUNK * job[1].chunks - 3, *value.pictures))
        if log and (done % 20 == 0 or done == len(jobs)):
            print(f"{done} of {len(jobs)} walks, {time.perf_counter() - begin:.0f} s", flush=True)
    out: dict[str, Any] = {
        "walks": summary(results["walk"]),
        "long": results["long"],
        "switch": results["switch"],
        "pictures": dict(pictures),
    }
    if results["live"]:
        out["live"] = summary(results["live"])
    return out


def _results(
    model: str, jobs: Sequence[Job], device: str, workers: int, threads: int, dtype: str
) -> Iterator[tuple[Job, Any]] | Iterable[tuple[Job, Any]]:
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, _begin, (model, device, threads, dtype)) as pool:
            yield from zip(jobs, pool.map(_work, jobs), strict=True)
        return
    before = torch.get_num_threads()
    _begin(model, device, threads, dtype)
    try:
        for job in jobs:
            yield job, _work(job)
    finally:
        torch.set_num_threads(before)


def write(result: dict[str, Any], folder: Path) -> str:
    """Writes evaluation.json, evaluation.txt and sheets/KEY.png; returns the text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, shown in result.pop("pictures").items():
        title = sheets.NAMES.get(name, name)
        picture = sheets.sheet(title, shown[0][0], [(true, model) for _, true, model in shown])
        sheets.save(folder / "sheets" / f"{name}.png", picture)
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = as_text(result)
    (folder / "evaluation.txt").write_text(text, encoding="utf-8")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="judge a trained tiny world")
    parser.add_argument("model", help="a model folder, or tiny for the embedded one")
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation"))
    parser.add_argument("--scenes", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--keys", choices=("one", "mixed"), default="one", help="one walk per key, or mixed walks")
    parser.add_argument("--window", type=int, help="latent frames of attention; default: the model's preset")
    parser.add_argument("--live", type=int, default=5, help="scenes walked with live keys")
    parser.add_argument("--long", type=int, default=10, help="scenes walked for 20 chunks")
    parser.add_argument("--switch", type=int, default=12, help="scenes whose prompt changes")
    parser.add_argument("--no-speed", action="store_true", help="do not time 2 CPU cores")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", help="of the transformer; float32 is what a CPU computes in")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with its own copy of the model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each process")
    args = parser.parse_args(argv)
    speed = None if args.no_speed else frames_per_second(args.model)
    jobs = jobs_for(
        args.scenes,
        args.chunks,
        args.keys,
        window=args.window,
        live=args.live,
        long=args.long,
        switch=args.switch,
    )
    where = {"device": args.device, "dtype": args.dtype, "workers": args.workers, "threads": args.threads}
    result = evaluate(args.model, jobs, **where, log=True)
    result["speed"] = speed
    result["fingerprint"] = find_layout(args.model).about.get("fingerprint")
    result["settings"] = {key: str(value) for key, value in vars(args).items()}
    print(write(result, args.out))


if __name__ == "__main__":
    main()
