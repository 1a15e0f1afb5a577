"""DynamicVRAM: ComfyUI loads weights as they are used. It is chosen when ComfyUI starts, so a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..comfy_pack import ROOT
from .card import GIB
from .report import ABSENT, OK, NotHereError, Report
from .rig import Rig, difference

ROUNDED = 1e-2
"""Relative L2 of latents where ComfyUI hands weights over in another way: its encoder in bfloat16 rounds otherwise."""

PARTS = ("vram", "lora", "fp8", "oom", "encode_oom", "evict")
TIMEOUT = 240  # seconds


def all_parts(rig: Rig, report: Report) -> None:
    """Every part that has a meaning there, in a process with DynamicVRAM; plenty of memory."""
    rig.need_gpu(static=True)
    _run(rig, report, PARTS, 0.0)


def tight(rig: Rig, report: Report) -> None:
    """The same walk where DynamicVRAM is told to leave free all but what half of the weights need."""
    rig.need_gpu(static=True)
    size, vae = rig.weights()
    need = rig.need() + vae + size / 2
    rig.empty()
    free, _ = torch.cuda.mem_get_info()
    report.facts["headroom_gib"] = headroom = max(0.0, (free - need) / GIB)
    _run(rig, report, ("vram",), headroom)


def _run(rig: Rig, report: Report, parts: tuple[str, ...], headroom: float) -> None:
    reference = _save_reference(rig)
    rig.empty()
    command = [sys.executable, "-m", "benchmarks.nodes_gpu", "--dynamic", "--size", rig.size.name]
    command += ["--base", str(rig.folder.parents[2]), "--reference", str(reference), "--parts", ",".join(parts)]
    command += ["--vram-headroom", str(headroom)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    report.facts["inside"] = found = [line for line in lines if "part" in line]
    print(done.stderr, file=sys.stderr, flush=True)
    report.check("the process came to its end", done.returncode in (0, 1) and bool(found), returncode=done.returncode)
    if found and all(line["status"] == ABSENT for line in found):
        raise NotHereError(found[0]["why"])
    for line in found:
        report.check(line["part"], line["status"] in (OK, ABSENT))


def _save_reference(rig: Rig) -> Path:
    path = rig.folder.parents[2] / "reference.safetensors"
    if not path.exists():
        save_file({"latents": rig.reference.latents.contiguous(), "condition": rig.condition().contiguous()}, path)
    return path


def compare_with(path: Path, rig: Rig, report: Report) -> None:
    """Inside: the walk against the one of the process that began this one."""
    known = load_file(path)
    found = difference(rig.reference.latents, known["latents"])
    report.facts["condition"] = difference(rig.condition(), known["condition"])
    model: Any = rig.parts[0]
    report.facts |= {"patcher": type(model).__name__, "loaded_gib": model.loaded_size() / GIB}
    report.check("DynamicVRAM's patcher", model.is_dynamic())
    report.check("the same latents as without", found["relative"] <= ROUNDED, latents=found)
