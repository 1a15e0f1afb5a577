"""Our nodes on ComfyUI's memory management, without a server: what it loads, streams, patches, frees, and what if it
runs out.

    COMFYUI_DIR=... python -m benchmarks.nodes_gpu [--parts vram,partial,...] [--size mid] [--device auto]

Prints a line of JSON for each part and a table at the end; exits with 1 if a check failed. On a CPU a tiny world is
walked, and parts that need a GPU say so.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..comfy_pack import has_cuda, load_comfyui, load_pack
from ..stand_ins import stand_in, stand_in_for_writer
from . import dynamic_vram
from .report import ABSENT, FAILED, NotHereError, Report, run_part, table
from .sizes import SIZES

NAMES = (
    "vram",
    "partial",
    "dynamic",
    "dynamic_tight",
    "lora",
    "fp8",
    "oom",
    "encode_oom",
    "evict",
    "overhead",
    "streaming",
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(NAMES), help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--size", choices=[*SIZES], help="default: mid on a GPU, tiny on a CPU")
    parser.add_argument("--base", type=Path, help="folder for the world's files; default: one that is removed again")
    # A card is made smaller by PyTorch's limit, which counts what its own allocator reserves, but of cudaMallocAsync
    # only what is in use: with that, more would seem free than a card of this size has.
    parser.add_argument("--allocator", choices=["comfyui", "native"], default="native", help="PyTorch's own: native")
    parser.add_argument("--dynamic", action="store_true", help="run the parts with DynamicVRAM")
    parser.add_argument("--vram-headroom", type=float, default=0.0, help="of DynamicVRAM, in GiB")
    parser.add_argument("--log", action="store_true", help="ComfyUI's own messages on stderr")
    parser.add_argument("--reference", type=Path, help="latents that the walk is compared with")
    options = parser.parse_args()
    if options.log:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory(prefix="nodes-gpu-") as folder:
        reports = run(options, names, options.base or Path(folder))
    print(table(reports), flush=True)
    sys.exit(any(report.status == FAILED for report in reports))


def run(options: argparse.Namespace, names: list[str], base: Path) -> list[Report]:
    """Every part in turn; a report of each."""
    gpu = options.device == "cuda" or (options.device == "auto" and has_cuda())
    load_comfyui(
        cpu=not gpu,
        base_directory=str(base),
        disable_dynamic_vram=not options.dynamic,
        vram_headroom=options.vram_headroom,
        disable_cuda_malloc=options.allocator == "native",
    )
    if absent := stand_in():
        print(json.dumps({"stand_ins": absent}), flush=True)
    try:
        rig = _rig(options, base, "mid" if gpu else "tiny")
    except NotHereError as error:
        return [_shown(Report(name, status=ABSENT, why=str(error))) for name in names]
    import torch

    reports = []
    parts = _parts(options)
    for name in names:
        with torch.inference_mode():
            reports.append(_shown(run_part(name, partial(parts[name], rig), time.perf_counter)))
            rig.empty()
    return reports


def _rig(options: argparse.Namespace, base: Path, size: str) -> Any:
    if options.dynamic:
        dynamic_vram.init_library()
    import torch

    if options.dynamic:
        dynamic_vram.init_devices(options.vram_headroom)
    load_pack()
    stand_in_for_writer()
    from .rig import Rig

    with torch.inference_mode():
        return Rig(SIZES[options.size or size], base, dynamic=options.dynamic)


def _parts(options: argparse.Namespace) -> dict[str, Callable[[Any, Report], None]]:
    from . import eviction, exhausted, on_demand, overhead, streaming, vram, weights

    def plenty(rig: Any, report: Report) -> None:
        vram.plenty(rig, report)
        if options.reference is not None:
            on_demand.compare_with(options.reference, rig, report)

    functions = (
        plenty,
        vram.half,
        on_demand.all_parts,
        on_demand.tight,
        weights.lora,
        weights.fp8,
        exhausted.stages,
        exhausted.encoding,
        eviction.worlds_and_others,
        overhead.overhead,
        streaming.streaming,
    )
    return dict(zip(NAMES, functions, strict=True))


def _shown(report: Report) -> Report:
    print(json.dumps(report.as_dict()), flush=True)
    return report


if __name__ == "__main__":
    main()
