"""One command for each part of the training.

    python -m training.run text --out DIR
    python -m training.run vae --seconds 420 --out DIR [--resume DIR | --begin DIR] [--plan SECONDS]
    python -m training.run decoder --seconds 420 --vae DIR --out DIR
    python -m training.run dit --seconds 560 --vae DIR --text DIR --out DIR [--resume DIR | --begin DIR] [--plan S]
    python -m training.run export --vae DIR --dit DIR --text DIR --out FOLDER [--figures evaluation.json]
    python -m training.run evaluate MODEL ... (see training/evaluate.py)
    python -m training.publish EVALUATION     (into the documents; see training/publish.py)

--profile stops after 50 steps and prints ms a step. --steps N ends the plan after N steps instead of by the clock.
--set NAME=VALUE changes a field of the recipe (a Python literal). Logs are lines of JSON, in the folder and on screen.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from .decoder_training import DecoderTraining, train_decoder
from .dit_training import DiTTraining, train_dit
from .export import write_card, write_world
from .files import fail
from .source import HEIGHT, WIDTH, procedural, videos_of
from .text import SEED, Prompts, encoder, train_text
from .vae_training import Stage, VAETraining, load_vae, train_vae


def changed(recipe: Any, changes: list[str]) -> Any:
    """A recipe with fields from NAME=VALUE texts; stages are (until, frames, batch) triples."""
    known = {field.name for field in fields(recipe)}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            fail(f"{name!r} is no field of {type(recipe).__name__}; there are {', '.join(sorted(known))}")
        value = ast.literal_eval(text)
        if name == "stages":
            value = tuple(Stage(*stage) for stage in value)
        elif name == "config":
            value = replace(recipe.config, **value)
        recipe = replace(recipe, **{name: value})
    return recipe


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m training.run", description=__doc__.splitlines()[0])
    parts = top.add_subparsers(dest="part", required=True)
    text = parts.add_parser("text")
    text.add_argument("--steps", type=int, default=1800)
    for name in ("vae", "decoder", "dit"):
        part = parts.add_parser(name)
        part.add_argument("--seconds", type=float, required=True, help="of this run, everything included")
        part.add_argument("--steps", type=int)
        if name != "decoder":
            part.add_argument("--plan", type=float, help="seconds of all runs together; the rates fall over these")
            start = part.add_mutually_exclusive_group()
            start.add_argument("--resume", type=Path, help="folder of an unfinished run of the same plan")
            start.add_argument("--begin", type=Path, help="finished weights that a new plan starts from")
            part.add_argument("--profile", action="store_true")
        part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        part.add_argument("--set", action="append", default=[], dest="changes", metavar="NAME=VALUE")
        part.add_argument("--size", type=int, nargs=2, default=(HEIGHT, WIDTH), help="height and width, for trials")
        if name != "vae":
            part.add_argument("--vae", type=Path, required=True)
        if name == "dit":
            part.add_argument("--text", type=Path, required=True)
            part.add_argument("--cache", type=Path, help="keeps the encoded clips for the next run on this machine")
    export = parts.add_parser("export")
    for name in ("vae", "dit", "text"):
        export.add_argument(f"--{name}", type=Path, required=True)
    export.add_argument("--logs", type=Path, default=Path("training/logs"), help="folder with the logs of all parts")
    export.add_argument("--figures", type=Path)
    export.add_argument("--card", default="NVIDIA H200")
    for part in parts.choices.values():
        part.add_argument("--out", type=Path, required=True)
    return top


def main(arguments: list[str]) -> None:
    """Runs one part."""
    if arguments[:1] == ["evaluate"]:
        from . import evaluate

        evaluate.main(arguments[1:])
        return
    begin = time.monotonic()
    a = parser().parse_args(arguments)
    if a.part == "text":
        report = {**train_text(a.out, steps=a.steps), "seed": SEED, "seconds": time.monotonic() - begin}
        (a.out / "text.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(report))
        return
    if a.part == "export":
        from . import publish

        world = write_world(a.vae, a.dit, a.text, a.out)
        measured = publish.figures(json.loads(a.figures.read_text(encoding="utf-8"))) if a.figures else ""
        write_card(a.out, world, logs=a.logs, measured=measured, card=a.card)
        print(json.dumps(world))
        return
    device = torch.device(a.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    source = procedural(device, height=a.size[0], width=a.size[1])
    if a.part == "decoder":
        recipe = changed(DecoderTraining(), a.changes)
        train_decoder(videos_of(source), a.vae, a.out, recipe, device=device, seconds=a.seconds, steps=a.steps)
        return
    common = {
        "device": device,
        "seconds": a.seconds,
        "plan": a.plan,
        "steps": a.steps,
        "resume": a.resume,
        "begin": a.begin,
        "profile": a.profile,
    }
    if a.part == "vae":
        train_vae(videos_of(source), a.out, changed(VAETraining(), a.changes), **common)
        return
    recipe = changed(DiTTraining(), a.changes)
    prompts = Prompts(encoder(a.text), text_len=recipe.config.text_len)
    size = (a.size[0] // 8, a.size[1] // 8)
    if a.cache is not None:
        a.cache.parent.mkdir(parents=True, exist_ok=True)
    train_dit(source, load_vae(a.vae, device), prompts, a.out, recipe, size=size, cache=a.cache, **common)


if __name__ == "__main__":
    main(sys.argv[1:])
