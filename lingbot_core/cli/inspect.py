"""``lingbot-world inspect``: what a model on disk is, what is missing, and what it needs."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from ..presets import PRESETS, get_preset

if TYPE_CHECKING:
    from ..engine.inspection import Inspection, MemoryReport, PartReport

GIB = 2**30
WIDTH = 110
# Sizes worth a line; the rest is in --json.
SHOWN = ("dim", "ffn_dim", "num_layers", "num_heads", "in_dim", "text_len", "z_dim", "d_model", "d_ff", "vocab_size")


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Adds this verb to the subparsers of ``lingbot-world``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "inspect",
        help="say what a model on disk is, which preset it is for, what is missing, and what memory it needs",
        description="Reads only headers, so that a folder of 70 GB takes seconds. Exit code 2 for a path that is no "
        "model, or one that is refused.",
        allow_abbrev=False,
    )
    parser.add_argument("path", help="a folder, a single file, or 'tiny' for the embedded model")
    add_part_arguments(parser)
    parser.add_argument("--preset", choices=tuple(PRESETS), help="for the memory (default: as the files say)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_part_arguments(parser: Any) -> None:
    """The parts of a model that can be given by paths of their own."""
    parser.add_argument("--vae", metavar="PATH", help="VAE file or folder (default: beside the model)")
    parser.add_argument("--text-encoder", metavar="PATH", help="umT5 file or folder (default: beside the model)")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer folder, spiece.model or tokenizer.json (default: beside the model)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0."""
    from ..engine.inspection import inspect_model

    found = inspect_model(
        args.path,
        vae=args.vae,
        text_encoder=args.text_encoder,
        tokenizer=args.tokenizer,
        preset=None if args.preset is None else get_preset(args.preset),
    )
    if args.json:
        json.dump(found.as_dict(), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        print(describe(found))
    return 0


def describe(found: Inspection) -> str:
    """The report for people."""
    lines = [f"{found.name}: {found.what}"]
    for part in found.parts:
        lines += _row(part.kind, *_part(part))
    if found.loads is None:
        lines += _row("complete", "no: " + "; ".join(found.parts[0].problems) if found.parts[0].problems else "yes")
        return "\n".join(lines)
    if found.tokenizer is not None:
        lines += _row("tokenizer", found.tokenizer)
    lines += _row("control", found.control or "unknown")
    lines += _row("preset", f"{found.preset or 'unknown'}: {found.preset_reason}")
    lines += _row("licence", str(found.licence))
    for part_name, advice in found.missing.items():
        lines += _row("missing", f"{part_name}: {advice}")
    for note in found.notes:
        lines += _row("note", note)
    lines += _row("loads", *_loads(found))
    for memory in found.memory:
        lines += _row(f"memory {memory.size}", _memory(memory, found.window))
    return "\n".join(lines)


def _part(part: PartReport) -> list[str]:
    if len(part.files) == 1:
        place = part.files[0]
    else:
        place = f"{len(part.files)} files, {part.files[0]} and following"
    stored = ", ".join(f"{dtype} {size(count)}" for dtype, count in part.dtypes.items())
    if part.scaled:
        stored += f" ({part.scaled} weights with a scale)"
    sizes = ", ".join(f"{name} {part.config[name]}" for name in SHOWN if name in part.config)
    return [place, f"{_count(part.parameters)} parameters, stored as {stored}", *([sizes] if sizes else [])]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}e9" if parameters >= 10**8 else f"{parameters / 1e6:.2f}e6"


def _loads(found: Inspection) -> list[str]:
    if found.loads:
        return ["yes" if found.preset is not None else "yes, with a --preset"]
    reasons = [f"{part.kind}: {problem}" for part in found.parts for problem in part.problems]
    # Without a text encoder its tokenizer is not needed either.
    optional = {"text encoder", "tokenizer"} if "text encoder" in found.missing else set()
    needed = [name for name in found.missing if name not in optional]
    return ["no", *reasons, *([f"missing: {', '.join(needed)}"] if needed and not reasons else [])]


def _memory(memory: MemoryReport, window: int | None) -> str:
    counted = memory.bytes
    past = f"{memory.chunks} chunks, all of the past" if window is None else f"a window of {window} latent frames"
    return (
        f"{size(counted['total'])} for {memory.height}x{memory.width} and {past}: weights {size(counted['weights'])} "
        f"(bfloat16), keys and values {size(counted['kv_cache'])}, other "
        f"{size(counted['session'] - counted['kv_cache'])}"
    )


def _row(title: str, *texts: str) -> list[str]:
    """Lines under one title in the margin."""
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(text, WIDTH - 18, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"  {title if number == 0 else '':<14}{line}" for number, line in enumerate(lines)]


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
