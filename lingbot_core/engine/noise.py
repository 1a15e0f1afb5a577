"""Where a chunk's noise comes from. Step 0 is the chunk's first latent, step i > 0 the noise added before step i."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import LengthError

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
        return torch.randn(self.shape, generator=generator)


class ReferenceNoise:
    """The reference implementation's order of draws, for side-by-side runs of a declared length.

    One generator on the compute device first draws the whole clip, then one tensor per re-noising in chunk order.
    Going back in time starts the generator again and skips what lies before.
    """

    name = "reference"

    def __init__(self, seed: int, shape: Sequence[int], *, chunks: int, steps: int, device: torch.device) -> None:
        self.seed, self.shape, self.chunks, self.steps, self.device = seed, tuple(shape), chunks, steps, device
        self._restart()

    def draw(self, chunk: int, step: int) -> Tensor:
        """See NoiseSource; on the compute device. Raises LengthError beyond the declared length."""
        if chunk >= self.chunks:
            raise LengthError(
                f"this session was declared to have {self.chunks} chunks (noise='reference'); chunk {chunk} lies "
                "beyond. Declare more at the start, or use noise='seeded'"
            )
        frames = self.shape[1]
        if step == 0:
            return self._clip[:, chunk * frames : (chunk + 1) * frames]
        wanted = chunk * (self.steps - 1) + step - 1
        if wanted < self._drawn - 1:
            self._restart()
        while self._drawn <= wanted:
            self._last = torch.randn(self.shape, generator=self._generator, device=self.device)
            self._drawn += 1
        return self._last

    def _restart(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)
        channels, frames, height, width = self.shape
        clip = (channels, frames * self.chunks, height, width)
        self._clip = torch.randn(clip, generator=self._generator, device=self.device)
        self._last = self._clip
        self._drawn: int = 0


class InjectedNoise:
    """Noise given by the caller for one chunk: ``initial`` and one tensor per re-noising."""

    name = "injected"

    def __init__(self, initial: Tensor, renoise: Sequence[Tensor] = ()) -> None:
        self._tensors = (initial, *renoise)

    def draw(self, chunk: int, step: int) -> Tensor:
        """See NoiseSource; the chunk's number does not matter."""
        if step >= len(self._tensors):
            raise LengthError(f"injected noise has {len(self._tensors)} tensors; step {step} needs one more")
        return self._tensors[step]
