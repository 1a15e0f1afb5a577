"""Milliseconds of each distinct convolution of the VAE's decoder, every way that could do it.

A row is one convolution of a steady decode, for one latent and for three at once. "fold" rows are the convolutions
after a nearest upsampling as four of 2x2 on the small picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingbot_core.models.vae import DecoderState, VAEConfig, WanVAE

from .timing import milliseconds

CHANNELS_LAST = torch.channels_last
CHANNELS_LAST_3D = torch.channels_last_3d


@dataclass(frozen=True)
class Shape:
    """A convolution from ``inner`` to ``outer`` channels that gives ``frames`` frames; taps in time, height, width."""

    inner: int
    outer: int
    taps: tuple[int, int, int]
    frames: int
    height: int
    width: int

    @property
    def flops(self) -> int:
        taps = self.taps[0] * self.taps[1] * self.taps[2]
        return 2 * taps * self.inner * self.outer * self.frames * self.height * self.width

    @property
    def name(self) -> str:
        taps = "x".join(map(str, self.taps))
        return f"{self.inner}-{self.outer} {taps} at {self.frames}x{self.height}x{self.width}"


def shapes(config: VAEConfig, height: int, width: int) -> Counter[Shape]:
    """The convolutions of one steady latent and how often each comes, found by a run on the meta device."""
    vae = WanVAE(config, device="meta")
    found: Counter[Shape] = Counter()

    def note(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d | nn.Conv3d)
        taps = module.kernel_size if len(module.kernel_size) == 3 else (1, *module.kernel_size)
        frames = output.shape[2] if output.ndim == 5 else output.shape[0]
        found[Shape(module.in_channels, module.out_channels, taps, frames, *output.shape[-2:])] += 1

    state = DecoderState()
    latent = torch.zeros(config.z_dim, 1, height // 8, width // 8, device="meta")
    vae.decode(latent, state)
    hooks = [m.register_forward_hook(note) for m in vae.decoder.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    vae.decode(latent, state)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def measure(
    config: VAEConfig, height: int, width: int, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """A row for each convolution and number of latents."""
    for shape, count in shapes(config, height, width).items():
        for latents in (1, 3):
            several = replace(shape, frames=latents * shape.frames)
            facts = {"shape": several.name, "latents": latents, "count": count, "gflop": round(several.flops / 1e9, 1)}
            ways = _library(several, device, dtype) | _own(several, device, dtype, few=latents == 1)
            yield (
                facts | _times(ways, several.flops, device) | (_errors(several, device, dtype) if latents == 1 else {})
            )
            if shape.taps == (1, 3, 3) and device.type == "cuda":
                small = replace(several, outer=4 * shape.outer, taps=(1, 2, 2), height=shape.height // 2,
                                width=shape.width // 2)  # fmt: skip
                facts |= {"shape": f"fold {several.name}"}
                ways = _library(small, device, dtype) | _own(small, device, dtype, few=latents == 1)
                yield facts | _times(ways, small.flops, device)


def _library(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """PyTorch's ways; "tuned" ones with cudnn.benchmark."""
    t, y, x = shape.taps
    weight = torch.randn(shape.outer, shape.inner, t, y, x, device=device, dtype=dtype) * 0.02
    volume = torch.randn(1, shape.inner, shape.frames + t - 1, shape.height, shape.width, device=device, dtype=dtype)
    border = (y // 2, x // 2)
    ways: dict[str, Callable[[], Any]] = {}

    def conv3d(layout: torch.memory_format) -> Callable[[], Any]:
        v, w = volume.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
        return lambda: F.conv3d(v, w, padding=(0, *border))

    def conv2d(frames: int, inner: int, outer: int) -> Callable[[], Any]:
        v = torch.randn(frames, inner, shape.height, shape.width, device=device, dtype=dtype)
        w = torch.randn(outer, inner, y, x, device=device, dtype=dtype)
        v, w = v.contiguous(memory_format=CHANNELS_LAST), w.contiguous(memory_format=CHANNELS_LAST)
        return lambda: F.conv2d(v, w, padding=border)

    if t > 1:
        ways["conv3d"] = conv3d(torch.contiguous_format)
        ways["conv3d nhwc"] = conv3d(CHANNELS_LAST_3D)
        ways["conv2d stacked nhwc"] = conv2d(shape.frames, t * shape.inner, shape.outer)
        ways["conv2d, taps as outputs, nhwc"] = conv2d(shape.frames + t - 1, shape.inner, t * shape.outer)
    else:
        frames, kernel = volume[0].transpose(0, 1).contiguous(), weight[:, :, 0]
        ways["conv2d"] = lambda: F.conv2d(frames, kernel, padding=border)
        ways["conv2d nhwc"] = conv2d(shape.frames, shape.inner, shape.outer)
    if device.type == "cuda":
        ways |= {f"{name}, tuned": _tuned(way) for name, way in ways.items()}
    return ways


def _tuned(way: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        torch.backends.cudnn.benchmark = True
        try:
            return way()
        finally:
            torch.backends.cudnn.benchmark = False

    return run


def _own(shape: Shape, device: torch.device, dtype: torch.dtype, *, few: bool) -> dict[str, Callable[[], Tensor]]:
    """Our kernel with several tiles; on a CPU none, because the interpreter's time says nothing."""
    if device.type != "cuda" or shape.outer % 16 or shape.taps == (1, 1, 1):
        return {}
    t, y, x = shape.taps
    frames = shape.frames + t - 1
    source = torch.randn(frames * (shape.height + 1) * (shape.width + 1), shape.inner, device=device, dtype=dtype)
    weight = torch.randn(shape.outer, t, y, x, shape.inner, device=device, dtype=dtype) * 0.02
    tiles = _tiles(shape, _kernel().Tile)
    chosen = tiles[: 1 + len(tiles) // 2] if few else tiles
    return {tile.name: _way(shape, source, weight, tile) for tile in chosen}


def _errors(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Our kernel's largest relative error to a float32 convolution over all tiles, and the tile that has it."""
    if device.type != "cuda" or shape.outer % 16 or shape.taps == (1, 1, 1):
        return {}
    t, y, x = shape.taps
    volume = torch.randn(1, shape.inner, shape.frames + t - 1, shape.height, shape.width, device=device, dtype=dtype)
    weight = torch.randn(shape.outer, shape.inner, t, y, x, device=device, dtype=dtype) * 0.02
    exact = F.conv3d(volume.float(), weight.float(), padding=(0, y // 2, x // 2))[0].permute(1, 2, 3, 0)
    source = F.pad(volume[0].permute(1, 2, 3, 0), (0, 0, 0, 1, 0, 1)).reshape(-1, shape.inner)
    kernel = weight.permute(0, 2, 3, 4, 1).contiguous()
    found: dict[str, float] = {}
    for tile in _tiles(shape, _kernel().Tile):
        try:
            out = _way(shape, source, kernel, tile)().view(-1, shape.height + 1, shape.width + 1, shape.outer)
            difference = out[:, : shape.height, : shape.width].float() - exact
            found[tile.name] = float(f"{float(difference.norm() / exact.norm()):.2e}")
        except Exception:
            continue  # named among the times
    worst = max(found, key=lambda name: found[name], default="")
    return {"largest_error": {worst: found.get(worst)}}


def _kernel() -> Any:
    import lingbot_core.models.vae_convolution as module

    return module


def _way(shape: Shape, source: Tensor, weight: Tensor, tile: Any) -> Callable[[], Tensor]:
    rows = shape.frames * (shape.height + 1) * (shape.width + 1)
    out = torch.empty(rows, shape.outer, device=source.device, dtype=source.dtype)
    size = (shape.height, shape.width)
    return lambda: _kernel().convolve(source, weight, None, out, size=size, taps=shape.taps, tile=tile)


def _tiles(shape: Shape, tile: Any) -> list[Any]:
    if shape.inner % 32:
        return [tile(128, 128, 0, 16, 4, 8)]
    return _single(shape, tile)


def _single(shape: Shape, tile: Any) -> list[Any]:
    if shape.inner == 96:
        return [
            tile(256, 64, 32, 32, 5, 8),
            tile(128, 64, 32, 32, 6, 4),
            tile(256, 128, 0, 32, 4, 8),
            tile(128, 64, 32, 32, 5, 8),
            tile(256, 64, 32, 32, 3, 8),
            tile(256, 64, 32, 32, 3, 8, registers=128),
            tile(256, 64, 32, 32, 4, 8, registers=128),
            tile(128, 128, 0, 32, 4, 4),
            tile(128, 64, 32, 32, 5, 4, described=False, cached=True),
            tile(256, 64, 32, 32, 4, 8, described=False, cached=True),
            tile(128, 64, 32, 32, 5, 4, described=False),
        ]
    if shape.outer % 128:
        return [
            tile(128, 128, 64, 64, 4, 8),
            tile(256, 128, 64, 64, 3, 8),
            tile(256, 64, 0, 64, 4, 8),
            tile(128, 64, 32, 64, 4, 4),
            tile(256, 64, 32, 64, 3, 8),
            tile(128, 128, 64, 64, 3, 8),
            tile(128, 64, 0, 64, 4, 4),
            tile(128, 128, 64, 32, 5, 8),
            tile(128, 128, 64, 64, 3, 8, described=False, cached=True),
        ]
    return [
        tile(128, 128, 0, 64, 4, 8),
        tile(256, 128, 0, 64, 3, 8),
        tile(128, 128, 64, 64, 4, 8),
        tile(128, 256, 0, 64, 3, 8),
        tile(256, 128, 64, 64, 3, 8),
        tile(128, 128, 0, 64, 3, 4),
        tile(128, 128, 0, 64, 3, 8),
        tile(128, 128, 0, 64, 3, 8, described=False),
        tile(128, 128, 0, 64, 3, 8, described=False, cached=True),
    ]


def _times(ways: dict[str, Callable[[], Any]], flops: int, device: torch.device) -> dict[str, Any]:
    """[milliseconds, TFLOP/s] of each way, the fastest first."""
    found: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name, way in ways.items():
        try:
            ms = milliseconds(way, device, runs=3, warm=2)
            found[name] = [round(ms, 3), round(flops / ms / 1e9, 1)]
        except Exception as error:  # a way that this card or PyTorch does not have is named, not hidden
            failed[name] = f"{type(error).__name__}: {error}"[:160]
    return {"ways": dict(sorted(found.items(), key=lambda item: item[1][0])), **({"failed": failed} if failed else {})}
