"""Our bf16 transformer and the reference's, side by side at full size with the same random weights.

    python -m benchmarks.parity --reference FOLDER [--tiny]

Both are also held against float32: the same bf16 weights, every product in float32. One JSON object per line: errors
of one forward by layer, of single forwards along a walk (same inputs), of whole free-running walks, and seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingbot_core.camera import camera_rays
from lingbot_core.camera.keys import PER_LATENT, walk
from lingbot_core.camera.pose import relative_steps
from lingbot_core.engine.noise import SeededNoise
from lingbot_core.engine.transfer import to_device
from lingbot_core.models.dit import CausalWanDiT, ChunkContext, CrossKV, DiTConfig
from lingbot_core.models.kv_cache import KVCache
from lingbot_core.presets import Preset, get_preset
from lingbot_core.schedule import distilled_steps, flow_to_x0, renoise

from .reference import ReferenceSession, load_reference

CHUNK = 3
Forward = Callable[[Tensor, float], Tensor]


class UpcastLinear(nn.Linear):
    """Computes in the dtype of its input, whatever the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class UpcastConv3d(nn.Conv3d):
    """As UpcastLinear."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.conv3d(x, self.weight.to(x.dtype), bias, self.stride)


class Upcast:
    """Operations of the float32 run: it streams float32 copies of the shared weights, layer by layer."""

    Linear = UpcastLinear
    Conv3d = UpcastConv3d


def twin(reference: nn.Module, config: DiTConfig, *, float32: bool) -> CausalWanDiT:
    """Our transformer around the reference's own parameters; nothing is copied."""
    compute = torch.float32 if float32 else torch.bfloat16
    operations = Upcast if float32 else nn
    dit = CausalWanDiT(config, operations=operations, device="meta", dtype=torch.bfloat16, compute_dtype=compute)
    dit.load_state_dict(reference.state_dict(), assign=True)
    return dit.eval().requires_grad_(False)


class Inputs:
    """Random condition and text, and rays of a real walk, for any number of chunks; the same for all three runs."""

    def __init__(self, config: DiTConfig, chunks: int, height: int, width: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(3)
        self.config, self.device, self.chunks = config, device, chunks
        self.height, self.width = height, width
        frames = chunks * CHUNK
        self.condition = torch.randn(20, frames, height // 8, width // 8, generator=generator).to(device)
        self.states = torch.randn(100, config.text_dim, generator=generator).to(device)
        self.noise = SeededNoise(7, (16, CHUNK, height // 8, width // 8))
        held = [frozenset("wl")] * frames
        relative = relative_steps(walk(torch.eye(4).double().numpy(), held, PER_LATENT, per_latent=True))
        relative[:, :3, 3] /= PER_LATENT.move
        self.relative = relative
        self.intrinsics = (500.0, 500.0, width / 2, height / 2)

    def rays(self, chunk: int) -> Tensor:
        part = self.relative[chunk * CHUNK : (chunk + 1) * CHUNK]
        return camera_rays(part, self.intrinsics, self.height, self.width, device=self.device)

    def frames(self, chunk: int) -> slice:
        return slice(chunk * CHUNK, (chunk + 1) * CHUNK)

    def draw(self, chunk: int, step: int) -> Tensor:
        return to_device(self.noise.draw(chunk, step), self.device)


class OurRun:
    """Forwards of one of our twins, chunk after chunk."""

    def __init__(self, dit: CausalWanDiT, inputs: Inputs, window: int | None, sink: int) -> None:
        self.dit, self.inputs = dit, inputs
        self.cross: CrossKV = dit.encode_prompt(inputs.states)
        shape = dit.cache_shape(inputs.height // 8, inputs.width // 8)
        self.cache = KVCache(
            shape,
            window=window,
            sink=sink,
            capacity=inputs.chunks * CHUNK,
            dtype=dit.compute_dtype,
            device=inputs.device,
        )

    @contextmanager
    def chunk(self, index: int) -> Iterator[Forward]:
        inputs, first = self.inputs, index * CHUNK
        rope = self.dit.rope(first, CHUNK, inputs.height // 8, inputs.width // 8, inputs.device)
        camera = self.dit.encode_camera(inputs.rays(index))
        self.cache.begin(first, CHUNK)
        context = ChunkContext(first, inputs.condition[:, inputs.frames(index)], camera, rope, self.cross, self.cache)
        self._context = context
        yield lambda x, t: self.dit(x, t, context)
        self.cache.end()
        del self._context

    def remember(self, x: Tensor, t: float) -> None:
        """The commit of the chunk that is open."""
        self.dit.remember(x, t, self._context)


class ReferenceRun:
    """The same interface around the reference."""

    def __init__(self, model: nn.Module, inputs: Inputs, window: int | None, sink: int) -> None:
        self.inputs = inputs
        tokens = inputs.height * inputs.width // 256
        self.session = ReferenceSession(
            model, inputs.config, frame_tokens=tokens, frames=inputs.chunks * CHUNK, window=window, sink=sink
        )

    @contextmanager
    def chunk(self, index: int) -> Iterator[Forward]:
        inputs = self.inputs
        rays, condition = inputs.rays(index), inputs.condition[:, inputs.frames(index)]
        yield lambda x, t: self.session.forward(x, t, condition, rays, inputs.states, index * CHUNK)


Run = OurRun | ReferenceRun


@torch.no_grad()
def walk_chunks(run: Run, inputs: Inputs, preset: Preset, forced: list[Tensor] | None = None) -> dict[str, Any]:
    """All chunks. Returns inputs and flows of every forward, x0 of every chunk and seconds per chunk, on the CPU.

    forced: inputs of every forward in order, from another run, so that single forwards can be compared.
    """
    xs, flows, clean, seconds = [], [], [], []
    given = iter(forced) if forced is not None else None
    for index in range(inputs.chunks):
        synchronize(inputs.device)
        begun = time.perf_counter()
        with run.chunk(index) as forward:
            x = inputs.draw(index, 0)
            x0 = x
            for i, step in enumerate(distilled_steps(preset)):
                if given is not None:
                    x = next(given).to(inputs.device)
                flow = forward(x, step.t)
                xs.append(x.cpu())
                flows.append(flow.float().cpu())
                x0 = flow_to_x0(flow, x, step.sigma)
                if step.renoise is not None:
                    x = renoise(x0, inputs.draw(index, i + 1), step.renoise)
            if given is not None:
                x0 = next(given).to(inputs.device)
            xs.append(x0.cpu())
            forward(x0, 0.0)
        synchronize(inputs.device)
        clean.append(x0.float().cpu())
        seconds.append(round(time.perf_counter() - begun, 3))
    return {"inputs": xs, "flows": flows, "x0": clean, "seconds": seconds}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def relative(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error, computed in float64."""
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm())


def _stream(output: Any) -> Tensor:
    """The residual of what a block gives: ours gives more than that."""
    residual = output[0] if isinstance(output, tuple) else output
    return residual.float().cpu().squeeze(0)


@torch.no_grad()
def by_layer(runs: dict[str, Run], models: dict[str, nn.Module], inputs: Inputs) -> list[dict[str, Any]]:
    """Residual stream after every block of one forward at the first timestep, in groups of a tenth of the layers."""
    outputs: dict[str, list[Tensor]] = {}
    for name, run in runs.items():
        seen: list[Tensor] = []
        hooks = [
            block.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(_stream(out)))
            for block in models[name].blocks
        ]
        with run.chunk(0) as forward:
            forward(inputs.draw(0, 0), 999.0)
        for hook in hooks:
            hook.remove()
        outputs[name] = seen
    group = max(1, len(outputs["ours"]) // 10)
    rows = []
    for first in range(0, len(outputs["ours"]), group):
        layers = range(first, min(first + group, len(outputs["ours"])))

        def worst(a: str, b: str, layers: range = layers) -> float:
            return float(f"{max(relative(outputs[a][i], outputs[b][i]) for i in layers):.3e}")

        rows.append(
            {
                "layers": f"{layers.start}-{layers.stop - 1}",
                "ours_vs_reference": worst("ours", "reference"),
                "ours_vs_float32": worst("ours", "float32"),
                "reference_vs_float32": worst("reference", "float32"),
            }
        )
    return rows


def compare_layers(reference: nn.Module, config: DiTConfig, inputs: Inputs) -> None:
    """One forward of all three with empty caches."""
    models: dict[str, nn.Module] = {"reference": reference}
    runs: dict[str, Run] = {"reference": ReferenceRun(reference, inputs, None, 0)}
    for name in ("ours", "float32"):
        dit = twin(reference, config, float32=name == "float32")
        models[name], runs[name] = dit, OurRun(dit, inputs, None, 0)
    for row in by_layer(runs, models, inputs):
        report(what="one forward", kind="residual stream after blocks", **row)


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def shown(values: list[float]) -> list[float]:
    return [float(f"{value:.3e}") for value in values]


def compare(reference: nn.Module, config: DiTConfig, inputs: Inputs, preset: Preset, what: str) -> None:
    """Free-running and forced walks of all three, one after the other: their caches do not fit together."""
    models: dict[str, nn.Module] = {
        "reference": reference,
        "ours": twin(reference, config, float32=False),
        "float32": twin(reference, config, float32=True),
    }

    def run(name: str, forced: list[Tensor] | None = None) -> dict[str, Any]:
        made: Run
        if name == "reference":
            made = ReferenceRun(reference, inputs, preset.window, preset.sink)
        else:
            dit = models[name]
            assert isinstance(dit, CausalWanDiT)
            made = OurRun(dit, inputs, preset.window, preset.sink)
        result = walk_chunks(made, inputs, preset, forced)
        del made
        if inputs.device.type == "cuda":
            torch.cuda.empty_cache()
        return result

    exact = run("float32")
    forced = {name: run(name, exact["inputs"]) for name in ("reference", "ours")}
    errors = {
        pair: [relative(a, b) for a, b in zip(got["flows"], want["flows"], strict=True)]
        for pair, got, want in (
            ("ours_vs_float32", forced["ours"], exact),
            ("reference_vs_float32", forced["reference"], exact),
            ("ours_vs_reference", forced["ours"], forced["reference"]),
        )
    }
    ratio = sum(errors["ours_vs_float32"]) / sum(errors["reference_vs_float32"])
    report(
        what=what,
        kind="single forwards, same inputs",
        forwards=len(errors["ours_vs_float32"]),
        worst={pair: float(f"{max(values):.3e}") for pair, values in errors.items()},
        mean={pair: float(f"{sum(values) / len(values):.3e}") for pair, values in errors.items()},
        error_ratio_ours_to_reference=round(ratio, 4),
    )
    free = {name: run(name) for name in ("reference", "ours")}
    report(
        what=what,
        kind="free-running walk, x0 of every chunk",
        ours_vs_float32=shown([relative(a, b) for a, b in zip(free["ours"]["x0"], exact["x0"], strict=True)]),
        reference_vs_float32=shown([relative(a, b) for a, b in zip(free["reference"]["x0"], exact["x0"], strict=True)]),
        seconds_ours=free["ours"]["seconds"],
        seconds_reference=free["reference"]["seconds"],
        seconds_ratio=round(sum(free["reference"]["seconds"][1:]) / max(1e-9, sum(free["ours"]["seconds"][1:])), 3),
    )


def main() -> None:
    """Builds the shared weights and runs all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, required=True, help="folder that holds the package wan")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--cases", default="forward,chunk,past,window", help="which comparisons, comma-separated")
    options = parser.parse_args()
    # TF32 would make the float32 run no better than what it judges.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda")
    config, height, width = DiTConfig(), 480, 832
    if options.tiny:
        config = DiTConfig(dim=256, ffn_dim=512, num_layers=4, num_heads=2, freq_dim=64, text_dim=64)
        height, width = 96, 160
    torch.manual_seed(0)
    reference = load_reference(options.reference, config, device)
    parameters = sum(p.numel() for p in reference.parameters())
    report(device=torch.cuda.get_device_name(), torch=torch.__version__, parameters=parameters)
    one = Inputs(config, 1, height, width, device)
    preset = get_preset("v1-fast")
    cases = options.cases.split(",")
    if "forward" in cases:
        compare_layers(reference, config, one)
    if "chunk" in cases:
        compare(reference, config, one, preset, "one chunk")
    if "past" in cases:
        compare(reference, config, Inputs(config, 7, height, width, device), preset, "7 chunks, all past attended")
    if "window" in cases:
        windowed = preset.with_overrides(window=18, sink=6)
        compare(reference, config, Inputs(config, 8, height, width, device), windowed, "8 chunks, window 18, sink 6")


if __name__ == "__main__":
    main()
