"""Where a chunk's time goes, against what the card could do, with random weights of full size.

    python -m benchmarks.chunk [--json] [--reference FOLDER] [--parts ceilings,pieces,ours,...] [--tiny]

Prints a line of JSON for each measurement. --reference: a folder with the package wan of the LingBot-World code, which
then runs beside ours. On a CPU only --tiny makes sense: small sizes, the same script.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lingbot_core.models.attention import sdpa
from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.pieces import PYTORCH
from lingbot_core.models.vae import VAEConfig
from lingbot_core.presets import get_preset

from ..parity import CHUNK, Inputs
from ..random_weights import randomise
from ..reference import load_reference
from . import ceilings, convolutions, decoder, pieces, transformer
from .floor import floor_ms

PARTS = ("ceilings", "pieces", "ours", "plain", "profile", "syncs", "window", "reference", "convolutions", "decoder")
TINY = DiTConfig(dim=128, ffn_dim=256, num_layers=4, num_heads=2, freq_dim=64, text_dim=64)


def show(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Bench:
    """Everything the parts share; models are built when they are first asked for and dropped between parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.config, self.height, self.width = DiTConfig(), 480, 832
        self.vae = VAEConfig()
        if options.tiny:
            self.config, self.height, self.width = TINY, 96, 160
            self.vae = VAEConfig(dim=16, num_res_blocks=1)
        self.inputs = Inputs(self.config, options.chunks, self.height, self.width, self.device)
        self.preset = get_preset("v1-fast")
        self.frame_tokens = self.height * self.width // 256
        self._dit: CausalWanDiT | None = None

    @property
    def dit(self) -> CausalWanDiT:
        if self._dit is None:
            torch.manual_seed(0)
            dit = CausalWanDiT(self.config, device=self.device, dtype=self.dtype, attention=sdpa("auto"))
            randomise(dit.eval().requires_grad_(False))
            dit.join()
            self._dit = dit
        return self._dit

    def ceilings(self) -> None:
        frames = [CHUNK * (i + 1) for i in range(self.options.chunks)]
        args = (self.config, CHUNK * self.frame_tokens, self.frame_tokens, frames, self.device, self.dtype)
        found = ceilings.measure(*args)
        show(what="ceilings", **found.as_dict())
        kinds = {"bf16": False, "fp8": True} if found.fp8 else {str(self.dtype).removeprefix("torch."): False}
        for name, fp8 in kinds.items():
            floors = [round(floor_ms(found, self.config, count, fp8=fp8), 1) for count in frames]
            show(what="floor", linear=name, chunk_ms=floors, sum_ms=round(sum(floors), 1))

    def pieces(self) -> None:
        for row in pieces.measure(self.config, CHUNK * self.frame_tokens, self.device, self.dtype):
            show(what="piece", **row)

    def ours(self) -> None:
        for attempt in ("cold", "warm"):
            show(what="ours", run=attempt, **transformer.ours(self.dit, self.inputs, self.preset))

    def plain(self) -> None:
        """The same with PyTorch's own pieces."""
        self.dit.pieces = PYTORCH
        try:
            show(what="ours, PyTorch's pieces", **transformer.ours(self.dit, self.inputs, self.preset))
        finally:
            self.dit.pieces = None

    def profile(self) -> None:
        show(what="profile", **transformer.profile(self.dit, self.inputs, self.preset, min(3, self.options.chunks - 1)))

    def syncs(self) -> None:
        if self.device.type == "cuda":
            show(what="syncs in a chunk", count=transformer.syncs(self.dit, self.inputs, self.preset))

    def window(self) -> None:
        """Steady chunks: a window that evicts from the fifth chunk on."""
        inputs = Inputs(self.config, 10, self.height, self.width, self.device)
        preset = self.preset.with_overrides(window=12, sink=3)
        show(what="ours, window 12", **transformer.ours(self.dit, inputs, preset))

    def reference(self) -> None:
        if self.options.reference is None:
            show(what="reference", missing="no --reference FOLDER")
            return
        self._dit = None
        transformer._tidy(self.device)
        model = load_reference(self.options.reference, self.config, self.device)
        for attempt in ("cold", "warm"):
            show(what="reference", run=attempt, **transformer.reference(model, self.inputs, self.preset))

    def convolutions(self) -> None:
        self._dit = None
        transformer._tidy(self.device)
        for row in convolutions.measure(self.vae, self.height, self.width, self.device, self.dtype):
            show(what="convolution", **row)

    def decoder(self) -> None:
        self._dit = None
        transformer._tidy(self.device)
        for row in decoder.measure(self.vae, self.height, self.width, self.device, self.options.reference):
            show(what="decoder", **row)


def main() -> None:
    """The command line; exits with 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--reference", type=Path, help="folder that holds the package wan")
    parser.add_argument("--chunks", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small sizes, any device")
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always so)")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    bench = Bench(options)
    if bench.device.type == "cpu" and not options.tiny:
        sys.exit("full size needs a GPU; use --tiny here")
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    show(device=name, torch=torch.__version__, dim=bench.config.dim, layers=bench.config.num_layers)
    failed = False
    for name in names:
        part: Callable[[], None] = getattr(bench, name)
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            show(what=name, failed=f"{type(error).__name__}: {error}"[:300])
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
