"""Where a chunk's noise comes from. Step 0 is the chunk's first latent, step i > 0 the noise added before step i."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import LengthError, SessionError

SEED_LIMIT = 2**63


class NoiseSource(Protocol):
    """Random access to noise, so that a chunk can be tried again and a path walked again with the same result."""

    name: str

    def draw(self, chunk: int, step: int) -> Tensor:
        """float32 [channels, frames, h, w]; the same tensor whenever the same chunk and step are asked for."""
        ...


class SeededNoise:
    """The default: an own CPU generator for every (seed, chunk, step).

    Noise therefore depends neither on the device, nor on the number of chunks, nor on what was generated before.
    """

    name = "seeded"

    def __init__(self, seed: int, shape: Sequence[int]) -> None:
        self.seed, self.shape = seed, tuple(shape)

    def draw(self, chunk: int, step: int) -> Tensor:
        """See NoiseSource; on the CPU."""
        digest = hashlib.blake2b(f"{self.seed}/{chunk}/{step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") % SEED_LIMIT)
        return torch.randn(self.shape, generator=generator, dtype=torch.float32, device="cpu")


class ReferenceNoise:
    """The reference implementation's order of draws, for side-by-side runs of a declared length.

    One generator on the compute device first draws the whole clip, then one tensor per re-noising in chunk order.
    Going back in time starts the generator again and skips what lies before.
    """

    name = "reference"

    def __init__(self, seed: int, shape: Sequence[int], *, chunks: int, steps: int, device: torch.device) -> None:
        self.seed, self.shape, self.chunks, self.steps, self.device = seed, tuple(shape), chunks, steps, device
        self._clip: Tensor | None = None  # drawn when it is first needed

    def draw(self, chunk: int, step: int) -> Tensor:
        """See NoiseSource; on the compute device. Raises LengthError beyond the declared length."""
        if chunk >= self.chunks:
            raise LengthError(
                f"this session was declared to have {self.chunks} chunks (noise='reference'); chunk {chunk} lies "
                "beyond. Declare more at the start, or use noise='seeded'"
            )
        frames = self.shape[1]
        if self._clip is None:
            self._restart()
        assert self._clip is not None
        if step == 0:
            return self._clip[:, chunk * frames : (chunk + 1) * frames]
        wanted = chunk * (self.steps - 1) + step - 1
        if wanted < self._drawn - 1:
            self._restart()
        while self._drawn <= wanted:
            self._last = self._randn(self.shape)
            self._drawn += 1
        return self._last

    def _restart(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)
        channels, frames, height, width = self.shape
        clip = (channels, frames * self.chunks, height, width)
        self._clip = self._last = self._randn(clip)
        self._drawn: int = 0

    def _randn(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device=self.device)


class InjectedNoise:
    """Noise given by the caller for one chunk: ``initial`` and one tensor per re-noising."""

    name = "injected"

    def __init__(self, initial: Tensor, renoise: Sequence[Tensor] = ()) -> None:
        self._tensors = (initial, *renoise)

    def check(self, shape: Sequence[int], count: int) -> None:
        """Raises SessionError unless these are at least ``count`` finite tensors of ``shape``."""
        for step, tensor in enumerate(self._tensors):
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != tuple(shape) or not tensor.is_floating_point():
                raise SessionError(f"injected noise of step {step} must be a floating point tensor {list(shape)}")
        if len(self._tensors) < count:
            raise LengthError(f"injected noise has {len(self._tensors)} tensors; this preset draws {count} a chunk")

    def draw(self, chunk: int, step: int) -> Tensor:
        """See NoiseSource; the chunk's number does not matter."""
        if step >= len(self._tensors):
            raise LengthError(f"injected noise has {len(self._tensors)} tensors; step {step} needs one more")
        return self._tensors[step]
