"""The VAE's decoder in 16 bits on a GPU: the same layers as `vae.Decoder`, step by step over planes (`vae_planes`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .vae_blocks import AttentionBlock, ResidualBlock, RMSNorm, Tape, Upsample
from .vae_planes import PLAIN, SPACE, TIME, Kernel, PlanePieces, Planes

OLDEST = (8, 0)
"""Compute capability from which on the hardware computes in bfloat16."""

Weights = Callable[[nn.Module, Tensor], AbstractContextManager[tuple[Tensor, Tensor | None]]]
"""A convolution's weight and bias, on the device and in the dtype of the tensor; good inside the context."""


@contextmanager
def own_weights(conv: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The parameters as they are."""
    assert isinstance(conv, nn.Conv2d | nn.Conv3d)
    yield conv.weight, conv.bias


class PlaneDecoder:
    """The decoder's way through planes. modules: the VAE's ``decoder`` and ``conv2``."""

    def __init__(self, decoder: Any, conv2: nn.Module, pieces: PlanePieces, weights: Weights = own_weights) -> None:
        self._decoder, self._conv2, self._pieces, self._weights = decoder, conv2, pieces, weights

    def decode(self, latents: Tensor, tape: Tape, out: Tensor) -> None:
        """Decodes latents [1, z_dim, t, h, w], not normalised, in 16 bits, into out, float32 [3, T, 8h, 8w].

        t is 1 where a clip starts. tape: read and written slot by slot as by the decoder's own forward.
        """
        x = self._convolved(Planes.of(latents), self._conv2)
        x = self._convolved(self._prepared(x, tape), self._decoder.conv1)
        for block in (*self._decoder.middle, *self._decoder.upsamples):
            x = self._block(block, x, tape)
        norm, _, conv = self._decoder.head
        ready = self._prepared(x, tape, norm)
        del x
        with self._weights(conv, ready.rows) as weights:
            self._pieces.picture(ready, Kernel.of(*weights), out)

    def _convolved(self, x: Planes, conv: nn.Module, place: int = PLAIN, add: Planes | None = None) -> Planes:
        with self._weights(conv, x.rows) as weights:
            kernel = (Kernel.folded if place == SPACE else Kernel.of)(*weights)
            return self._pieces.convolved(x, kernel, place, add)

    def _prepared(self, x: Planes, tape: Tape, norm: Any = None) -> Planes:
        ready, slot = self._pieces.prepared(x, tape.take(), norm)
        tape.put(slot)
        return ready

    def _block(self, block: nn.Module, x: Planes, tape: Tape) -> Planes:
        if isinstance(block, ResidualBlock):
            return self._residual(block, x, tape)
        if isinstance(block, AttentionBlock):
            return self._attention(block, x)
        assert isinstance(block, Upsample)
        if block.time_conv is not None:
            if tape.first:
                tape.skip()
            else:
                x = self._convolved(self._prepared(x, tape), block.time_conv, TIME)
        return self._convolved(x, block.resample[1], SPACE)

    def _residual(self, block: ResidualBlock, x: Planes, tape: Tape) -> Planes:
        norm1, _, conv1, norm2, _, _, conv2 = block.residual
        # Nothing that is not needed any more keeps a name: these are the largest tensors of all.
        ready = self._prepared(x, tape, norm1)
        beside = x if isinstance(block.shortcut, nn.Identity) else self._convolved(x, block.shortcut)
        del x
        between = self._convolved(ready, conv1)
        del ready
        ready = self._prepared(between, tape, norm2)
        del between
        return self._convolved(ready, conv2, add=beside)

    def _attention(self, block: AttentionBlock, x: Planes) -> Planes:
        frames, channels = x.count, x.rows.shape[1]
        together = self._convolved(self._pieces.normed(x, block.norm), block.to_qkv).frames
        q, k, v = together.reshape(frames, 1, x.height * x.width, 3 * channels).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v).view(frames, x.height, x.width, channels)
        return self._convolved(Planes.of_frames(seen), block.proj, add=x)


def usable(modules: Iterable[nn.Module], device: torch.device, weights: Weights = own_weights) -> bool:
    """Whether every convolution has weights of 16 bits, and channels that our kernels can take.

    The parameters themselves are read only where they lie on the device and nothing patches them in use, as a host's
    convolutions may; for those the host says how to get at them.
    """
    convs = [module for module in modules if isinstance(module, nn.Conv2d | nn.Conv3d)]
    widths = [conv.in_channels for conv in convs] + [conv.out_channels for conv in convs if conv.out_channels > 3]
    kinds = {conv.weight.dtype for conv in convs}
    here = weights is not own_weights or all(_lies_on(device, conv.weight) and not _patched(conv) for conv in convs)
    return here and kinds in ({torch.bfloat16}, {torch.float16}) and not any(width % 16 for width in widths)


def _lies_on(device: torch.device, weight: Tensor) -> bool:
    return weight.device.type == device.type and device.index in (None, weight.device.index)


def _patched(module: nn.Module) -> bool:
    """ComfyUI's marks of weights that are cast or patched whenever they are used."""
    return any(getattr(module, name, None) for name in ("comfy_cast_weights", "weight_function", "bias_function"))


@functools.cache
def fused_planes(device: torch.device) -> PlanePieces | None:
    """Kernels for a CUDA device, tried once; None where they cannot run: an older card, no Triton, no C compiler."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        return None
    with torch.cuda.device(device):
        return working(device)


def working(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PlanePieces | None:
    """Kernels if a small picture comes out as it should on this device; a warning says why not."""
    try:
        from .vae_kernels import FusedPlanePieces

        pieces = FusedPlanePieces(device)
        # The decoder's widths, the one where most of the time goes first: each has a tile of its own.
        right = all(_same(pieces, channels, device, dtype) for channels in (96, 192, 384))
    except ImportError:  # PyTorch comes without Triton on some systems
        return None
    except Exception as error:  # whatever compiling may raise: all of it works without, only slower
        logging.warning("LingBot World: its decoder's kernels cannot run on %s and are left out: %s", device, error)
        return None
    if not right:
        logging.warning("LingBot World: its decoder's kernels are wrong on %s and are left out", device)
        return None
    return pieces


def _same(pieces: PlanePieces, channels: int, device: torch.device, dtype: torch.dtype) -> bool:
    noise = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise).to(device, dtype)

    x, past = Planes.of(rand(1, channels, 1, 3, 5)), rand(1, channels, 2, 3, 5)
    norm = RMSNorm(channels, 3, device=device, dtype=dtype)
    kernel = Kernel(rand(channels, 3, 3, 3, channels) / (27 * channels) ** 0.5, rand(channels))

    def result(which: PlanePieces) -> Tensor:
        return which.convolved(which.prepared(x, past, norm)[0], kernel, add=x).volume.float()

    with torch.no_grad():
        expected = result(PlanePieces())
        return bool((result(pieces) - expected).norm() < 0.02 * expected.norm())


def pieces_for(
    modules: Iterable[nn.Module], device: torch.device, weights: Weights = own_weights
) -> PlanePieces | None:
    """What `PlaneDecoder` should be given on this device, None where the modules themselves are the way."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not usable(modules, device, weights):
        return None
    return fused_planes(device)
