"""From checkpoints to the model folder that ships: float16 safetensors, world.json, and a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lingbot_core.camera.intrinsics import scale_intrinsics
from lingbot_core.models.dit import CausalWanDiT
from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.presets import get_preset
from lingbot_core.weights.load import fingerprint
from lingbot_core.weights.metadata import FileMetadata, write_metadata

from .dit_training import load_dit
from .make_random_tiny import write_json
from .scene import INTRINSICS, INTRINSICS_SIZE
from .source import HEIGHT, WIDTH
from .styles import PHRASES
from .vae_training import load_vae

MOST_BYTES = 25_000_000
SOURCE = "training/ of this repository"


def write_world(vae_folder: Path, dit_folder: Path, text_folder: Path, target: Path) -> dict[str, Any]:
    """Writes the model folder and returns what stands in world.json. Raises ValueError above MOST_BYTES."""
    dit_weights, config, about = load_dit(dit_folder)
    if about["window"] != get_preset("tiny").window:
        raise ValueError(f"trained with a window of {about['window']}; the preset has {get_preset('tiny').window}")
    vae = load_vae(vae_folder, torch.device("cpu"))
    vae_weights = {name: t.half() for name, t in vae.state_dict().items()}
    for name in ("transformer", "vae"):
        (target / name).mkdir(parents=True, exist_ok=True)
    extra = {"num_heads": config.num_heads, "text_len": config.text_len}
    metadata = write_metadata(FileMetadata("tiny", config.control, extra, SOURCE))
    save_file(dit_weights, target / "transformer" / "diffusion_pytorch_model.safetensors", metadata=metadata)
    write_json(target / "transformer" / "config.json", {**extra, "control_type": config.control})
    metadata = write_metadata(FileMetadata(source=SOURCE))
    save_file(vae_weights, target / "vae" / "diffusion_pytorch_model.safetensors", metadata=metadata)
    for name in ("text_encoder", "tokenizer"):
        if (text_folder / name).resolve() != (target / name).resolve():
            shutil.rmtree(target / name, ignore_errors=True)
            shutil.copytree(text_folder / name, target / name)

    for path in target.rglob("*.safetensors"):
        path.chmod(0o644)
    fx, fy, cx, cy = scale_intrinsics(INTRINSICS, INTRINSICS_SIZE, (WIDTH, HEIGHT)).round(3).tolist()
    world = {
        "name": "tiny",
        "preset": "tiny",
        "native_area": HEIGHT * WIDTH,
        "trained": True,
        "lens": {"fx": fx, "fy": fy, "cx": cx, "cy": cy, "width": WIDTH, "height": HEIGHT},
        "prompts": [phrase for phrases in PHRASES.values() for phrase in phrases],
        "note": "trained by training/ on a procedural world; a demonstration of control, not of picture quality",
        "fingerprint": _fingerprint(target, config, vae.config),
    }
    write_json(target / "world.json", world)
    total = sum(path.stat().st_size for path in target.rglob("*.safetensors"))
    if total > MOST_BYTES:
        raise ValueError(f"the weights take {total} bytes; at most {MOST_BYTES} may ship")
    return {**world, "bytes": total}


def _fingerprint(target: Path, config: Any, vae_config: VAEConfig) -> str:
    """What a session loaded with float32 weights will report."""
    dit, vae = CausalWanDiT(config), WanVAE(vae_config)
    for name, module in (("transformer", dit), ("vae", vae)):
        weights = load_file(target / name / "diffusion_pytorch_model.safetensors")
        module.load_state_dict({key: t.to(torch.float32) for key, t in weights.items()})
    return fingerprint({"dit": dit, "vae": vae})


@dataclass(frozen=True)
class Run:
    """One training as its log tells it. seconds: of its whole plan so far."""

    part: str
    steps: int
    seconds: float
    seed: int | None
    skipped: float
    restored: int


def runs(log: Path) -> list[Run]:
    """The trainings in a log, in order: each begins with the line that has the log's own name. [] without a file."""
    if not log.is_file():
        return []
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    heads = [number for number, line in enumerate(lines) if line.get("what") == log.stem]
    out = []
    for begin, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        head, steps = lines[begin], [line for line in lines[begin:end] if "step" in line]
        last: dict[str, Any] = {key: value for line in steps for key, value in line.items()}
        # What stopped before its end tells its time only by the line's own.
        seconds = last.get("seconds", last.get("at", 0.0))
        recipe = head.get("recipe", {})
        out.append(
            Run(log.stem, last.get("step", 0), seconds, recipe.get("seed"),
                float(last.get("skipped", 0)), int(last.get("restored", 0)))
        )  # fmt: skip
    return out


PARTS = {"vae": "VAE", "decoder": "its decoder alone", "dit": "transformer"}
FIRST = "first"
"""The folder of logs/ with the logs of an earlier round, and about.txt, which says what was different in it."""


def _rows(trained: Sequence[Run]) -> str:
    return "\n".join(
        f"| {PARTS[run.part]} | {run.steps} | {_number(run.seconds)} | {run.seed if run.seed is not None else ''} |"
        for run in trained
    )


def fence(text: str) -> str:
    """Text with fixed columns, for Markdown."""
    lines = text.strip("\n")
    return f"```text\n{lines}\n```"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_number(v) for v in value)
    return str(value)


def write_card(target: Path, world: Mapping[str, Any], *, logs: Path, measured: str, card: str) -> None:
    """README.md of the model folder. logs: the folder with text.json, vae.jsonl, decoder.jsonl and dit.jsonl, and
    those of an earlier round in ``first``; measured: publish.figures of an evaluation; card: the GPU's name."""
    first, second = (
        [run for part in PARTS for run in runs(folder / f"{part}.jsonl")] for folder in (logs / FIRST, logs)
    )
    report = logs / "text.json"
    text_report = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    skipped, restored = (sum(getattr(run, name) for run in (*first, *second)) for name in ("skipped", "restored"))
    rounds = (logs / FIRST / "about.txt").read_text(encoding="utf-8").strip() if first else "In one round."
    pages = "\n".join(f"* {style}: {', '.join(phrases)}" for style, phrases in PHRASES.items())
    text = f"""# The tiny world

A world model of the structure of LingBot-World, small enough for a CPU: {world["bytes"] / 1e6:.1f} MB of float16
weights, pictures of 160 x 96, four steps a chunk of 12 frames. Made to show control and to test the code that runs
the large model; it knows one procedural toy world and nothing else.

## Data

Rendered while training by `training/`: walks through random scenes of trees, balls, boxes and pillars on a plane, with
keys held for 1 to 6 latent frames at both key steps, six palettes that may change once in a clip, views up to 85
degrees up and down. No recorded or downloaded data. Training scenes have seeds from 1000000 on, evaluation scenes from
500000 on.

## Training

On one {card}. {rounds}

| part | steps | seconds | seed |
| --- | --- | --- | --- |
{_rows([*first, *second])}
| text encoder (CPU) | {text_report.get("steps", "?")} | | {text_report.get("seed", "?")} |

{skipped:.0f} steps were skipped because their gradients were not finite; weights were put back {restored} times.
The logs are in `training/logs`. Stages follow the clock, so that another run takes other numbers of steps; with
`--steps` the seeds decide everything but the rounding of the GPU.

## Use

Preset `tiny`; translation unit `key` for keys, `clip` for paths. Sessions take its lens ({_lens(world["lens"])}) when
they are told of no other. Prompts it was trained on:

{pages}

Other wordings: a linear probe of the text states finds the style of {_share(text_report, "new_sentences")} of new
sentences with known words and {_share(text_report, "new_words")} of those with new words (six styles).

## Measured

{measured or "Not measured yet."}

## Limits

Pictures are soft and lose detail with time; outlines tend to squares; what leaves the view does not come back as it
was; things that were never in view are guessed, and few are. Photographs and other start pictures than those of the
toy world turn into it within a few chunks.
"""
    (target / "README.md").write_text(text, encoding="utf-8")


def _lens(lens: Mapping[str, Any]) -> str:
    return f"fx {lens['fx']:g}, fy {lens['fy']:g} at {lens['width']} x {lens['height']}"


def _share(report: Mapping[str, Any], name: str) -> str:
    value = report.get("after", {}).get(name)
    return "?" if value is None else f"{100 * value:.0f} %"
