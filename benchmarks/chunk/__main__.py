"""Where a chunk's time goes, against what the card could do, with random weights of full size.

    python -m benchmarks.chunk [--json] [--reference FOLDER] [--parts ceilings,pieces,ours,...] [--tiny]

Prints a line of JSON for each measurement. --reference: a folder with the package wan of the LingBot-World code, which
then runs beside ours. On a CPU only --tiny makes sense: small sizes, the same script.

Parts of MORE run only when they are named: whole sessions, and recipes that are no longer exact. What each of them
measures, and what its figures do not say, stands at the top of its module.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lingbot_core.engine.image import RESOLUTIONS, fit_size
from lingbot_core.engine.world import World
from lingbot_core.models.attention import sdpa
from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.graphs import can_be_recorded
from lingbot_core.models.pieces import PYTORCH
from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.presets import get_preset

from ..parity import CHUNK, Inputs
from ..random_weights import randomise
from ..reference import load_reference
from . import (
    big,
    boundary,
    ceilings,
    convolutions,
    decoder,
    fp8,
    memory,
    options,
    pieces,
    steady,
    still,
    stream,
    transformer,
)
from .floor import floor_ms
from .walks import Scene, random_scene, tiny_scene

PARTS = ("ceilings", "pieces", "ours", "ours8", "plain", "profile", "syncs", "window", "reference", "decoder")
MORE = ("convolutions", "steady", "boundary", "stream", "big", "memory", "options", "still", "fp8")
TINY = DiTConfig(dim=128, ffn_dim=256, num_layers=4, num_heads=2, freq_dim=64, text_dim=64)


def show(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Bench:
    """Everything the parts share; models are built when they are first asked for and dropped between parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        cuda = options.device == "auto" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.config, self.height, self.width = DiTConfig(), 480, 832
        self.vae = VAEConfig()
        if options.tiny:
            self.config, self.height, self.width = TINY, 32, 64
            self.vae = VAEConfig(dim=8, num_res_blocks=1)
        self.inputs = Inputs(self.config, options.chunks, self.height, self.width, self.device)
        self.preset = get_preset("v1-fast")
        self.frame_tokens = self.height * self.width // 256
        self._dit: CausalWanDiT | None = None
        self._vae: WanVAE | None = None

    @property
    def dit(self) -> CausalWanDiT:
        if self._dit is None:
            torch.manual_seed(0)
            dit = CausalWanDiT(self.config, device=self.device, dtype=self.dtype, attention=sdpa("auto"))
            randomise(dit.eval().requires_grad_(False))
            dit.join()
            self._dit = fp8.converted(dit, fp8.find(), self.options.fp8_exclude) if self.options.float8 else dit
        return self._dit

    @property
    def world(self) -> World:
        """The transformer with a VAE of random weights, and no text encoder."""
        if self._vae is None:
            torch.manual_seed(0)
            vae = WanVAE(self.vae, device=self.device, dtype=torch.float32)
            randomise(vae.eval().requires_grad_(False))
            wanted = self.options.decoder_dtype
            vae.decode_in(self.dtype if wanted == "auto" else getattr(torch, wanted))  # auto: as World.load does
            self._vae = vae
        return World(
            dit=self.dit,
            vae=self._vae,
            text=None,
            preset=self.preset,
            device=self.device,
            cache_dtype=self.dtype,
            name="random",
            records=can_be_recorded(self.dit),
        )

    def drop(self) -> None:
        """Lets go of the models."""
        self._dit = None
        self._vae = None
        transformer._tidy(self.device)

    def ceilings(self) -> None:
        frames = [CHUNK * (i + 1) for i in range(self.options.chunks)]
        args = (self.config, CHUNK * self.frame_tokens, self.frame_tokens, frames, self.device, self.dtype)
        found = ceilings.measure(*args)
        show(what="ceilings", **found.as_dict())
        kinds = {"bf16": False, "fp8": True} if found.fp8 else {str(self.dtype).removeprefix("torch."): False}
        for name, eight in kinds.items():
            floors = [round(floor_ms(found, self.config, count, fp8=eight), 1) for count in frames]
            show(what="floor", linear=name, chunk_ms=floors, sum_ms=round(sum(floors), 1))

    def pieces(self) -> None:
        for row in pieces.measure(self.config, CHUNK * self.frame_tokens, self.device, self.dtype):
            show(what="piece", **row)

    def ours(self) -> None:
        for attempt in ("cold", "warm"):
            show(what="ours", run=attempt, **transformer.ours(self.dit, self.inputs, self.preset))

    def ours8(self) -> None:
        """With float8 linears; the exact transformer is gone after it."""
        dit = fp8.converted(self.dit, fp8.find(), self.options.fp8_exclude)
        self._dit = None
        for attempt in ("cold", "warm"):
            show(what="ours, float8", run=attempt, **transformer.ours(dit, self.inputs, self.preset))
        last = min(3, self.options.chunks - 1)
        show(what="profile, float8", **transformer.profile(dit, self.inputs, self.preset, last))

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
        self.drop()
        model = load_reference(self.options.reference, self.config, self.device)
        for attempt in ("cold", "warm"):
            show(what="reference", run=attempt, **transformer.reference(model, self.inputs, self.preset))

    def convolutions(self) -> None:
        self._dit = None
        transformer._tidy(self.device)
        for row in convolutions.measure(self.vae, self.height, self.width, self.device, self.dtype):
            show(what="convolution", **row)

    def decoder(self) -> None:
        self.drop()
        for row in decoder.measure(self.vae, self.height, self.width, self.device, self.options.reference):
            show(what="decoder", **row)

    # Whole sessions

    def steady(self) -> None:
        """A long walk; see steady.py."""
        world = self.world
        made = steady.measure(
            world,
            steady.windowed(),
            self.height,
            self.width,
            self.options.steady_chunks,
            decode=not self.options.no_decode,
            seconds=self.options.steady_seconds,
            sleep=not self.options.spin,
        )
        show(what="steady", **self.about(world), **made)
        if "failed" in made:
            raise RuntimeError(made["failed"])

    def boundary(self) -> None:
        """To the first new frame."""
        world = self.world
        found = boundary.measure(world, steady.windowed(), self.height, self.width)
        show(what="boundary", **self.about(world), **found)

    def stream(self) -> None:
        """Frames per second into a file."""
        world = self.world
        show(what="stream", **self.about(world), **stream.measure(world, steady.windowed(), self.height, self.width))

    def big(self) -> None:
        """720p, and 129 frames."""
        large = fit_size(720, 1280, RESOLUTIONS["720p"])
        sizes = {"720p": (*large, 3), "129 frames": (self.height, self.width, 11)}
        if self.options.tiny:
            sizes = {"720p": (2 * self.height, 2 * self.width, 3), "129 frames": (self.height, self.width, 11)}
        world = self.world
        for row in big.measure(world, self.preset, sizes):
            show(what="big", **self.about(world), **row)

    def memory(self) -> None:
        """Peaks by length: first all walks of the transformer, while there is no VAE."""
        self._vae = None
        lengths = (2, 3, 7)
        alone = [memory.alone(self.dit, self.preset, self.height, self.width, count) for count in lengths]
        for count, found in zip(lengths, alone, strict=True):
            world = self.world
            whole = memory.with_decode(world, self.preset, self.height, self.width, count)
            show(what="memory", **self.about(world), **memory.row(self.preset, count, found, whole))

    def options_(self) -> None:
        """Cheaper recipes: of random weights by time, of the embedded model by their pictures."""
        for scene in self.scenes():
            exact = scene.world.preset
            for row in options.measure(scene, exact, self.options.chunks):
                show(what="options", **self.about(scene.world), **row)

    def still(self) -> None:
        """A camera that stands still, and sees less while it does."""
        show(
            what="still",
            **self.about(self.world),
            **still.measure(self.world, steady.windowed(), self.height, self.width),
        )

    def fp8(self) -> None:
        """Quality and gain of float8 linears; models that were converted are dropped."""
        try:
            to_fp8 = fp8.find()
        except fp8.MissingError as error:
            show(what="fp8", missing=str(error))
            return
        if self.options.float8:
            show(what="fp8", missing="--float8 leaves no exact transformer to compare with")
            return
        drift, recipe = self.options.fp8_chunks, steady.windowed()
        for scene in self.scenes():
            plans = [fp8.Plan("drift", scene, scene.world.preset, drift)]
            height, width = scene.condition.height, scene.condition.width
            forced = Inputs(scene.world.dit.config, 2, height, width, self.device), scene.world.preset
            if not scene.frames:
                # Forty chunks of full size would take minutes; the linears are the same ones with fewer tokens.
                small = random_scene(self.world, self.height // 2, self.width // 2)
                plans = [
                    fp8.Plan("full size", scene, recipe, min(drift, self.options.chunks)),
                    fp8.Plan(f"drift at {self.height // 2}x{self.width // 2}", small, recipe, drift),
                ]
            try:
                for row in fp8.measure(scene.world.dit, to_fp8, plans, forced, self.options.fp8_exclude):
                    show(what="fp8", scene=scene.name, **row)
            finally:
                self.drop()

    def scenes(self) -> list[Scene]:
        """As --scenes names them: random weights of this size, and the embedded model."""
        made = []
        if "random" in self.options.scenes:
            made.append(random_scene(self.world, self.height, self.width))
        if "tiny" in self.options.scenes:
            scene = tiny_scene(self.device, self.dtype)
            if self.options.float8:
                scene = scene.with_dit(fp8.converted(scene.world.dit, fp8.find(), self.options.fp8_exclude))
            made.append(scene)
        return made

    def about(self, world: World) -> dict[str, Any]:
        """What rows of whole sessions say of the models."""
        return {
            "linears": "float8" if self.options.float8 else _name(self.dtype),
            "decoder": _name(next(world.vae.decoder.parameters()).dtype),
        }


def run(arguments: Sequence[str] | None = None) -> bool:
    """The command line; whether every part did its work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", type=_names, default=PARTS, help=f"by default {', '.join(PARTS)}; also {', '.join(MORE)}")
    add("--reference", type=Path, help="folder that holds the package wan")
    add("--chunks", type=int, default=7)
    add("--tiny", action="store_true", help="small sizes, any device")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: the GPU if there is one")
    add("--json", action="store_true", help="one JSON object per line (always so)")
    add("--float8", action="store_true", help="all parts run with float8 linears")
    add("--fp8-exclude", type=_names, default=(), metavar="NAME,..", help="given to the engine's use_float8")
    add("--decoder-dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of whole sessions")
    add("--steady-chunks", type=int, default=200, metavar="N", help="of the part steady")
    add("--steady-seconds", type=float, default=340.0, metavar="S", help="after which it ends with what it has")
    add("--no-decode", action="store_true", help="the part steady makes no frames")
    add("--spin", action="store_true", help="the part steady leaves the driver's way of waiting as it is")
    add("--fp8-chunks", type=int, default=40, metavar="N", help="of the part fp8's long walks")
    add("--scenes", type=_names, default=("random", "tiny"), help="of options and fp8: random, tiny, or both")
    options = parser.parse_args(arguments)
    names = options.parts
    if unknown := [name for name in names if name not in PARTS + MORE]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS + MORE)}")
    if unknown := [name for name in options.scenes if name not in ("random", "tiny")]:
        parser.error(f"there is no scene {', '.join(unknown)}; there are random and tiny")
    bench = Bench(options)
    if bench.device.type == "cpu" and not options.tiny:
        sys.exit("full size needs a GPU; use --tiny here")
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    show(device=name, torch=torch.__version__, dim=bench.config.dim, layers=bench.config.num_layers)
    well = True
    for name in names:
        part: Callable[[], None] = getattr(bench, "options_" if name == "options" else name)
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            show(what=name, failed=f"{type(error).__name__}: {error}"[:300])
            well = False
    return well


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(not run())
