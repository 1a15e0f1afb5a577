"""What the model knows of the start image: mask and image latents for any chunk, encoded as far as asked for."""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from ..models.vae import TEMPORAL_STRIDE, EncoderState, WanVAE
from .image import PreparedImage
from .transfer import to_device

MASK_CHANNELS = 4


class Condition(Protocol):
    """The part of an ImageCondition that sessions use."""

    digest: str
    height: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes held on the device now."""
        ...

    def latents(self, first: int, count: int) -> Tensor:
        """float32 [4 + 16, count, height / 8, width / 8] of the latent frames first .. first + count - 1."""
        ...

    def release(self) -> None:
        """Frees what can be worked out again."""
        ...


class ImageCondition:
    """Encodes [image, grey, grey, ...] (grey is zero) as one causal video, one latent frame at a time, when needed.

    The encoder looks back a finite number of frames and its input is constant after the first, so at some point its
    whole state stops changing, bit for bit; from there on every latent equals the last one and nothing runs any more.
    The sequence depends on the image and its size alone: an instance may be shared by any number of sessions, and is
    safe to use from several threads.
    """

    def __init__(self, vae: WanVAE, image: PreparedImage, *, device: torch.device | None = None) -> None:
        self.image = image
        self.digest = image.digest
        self.height, self.width = image.height, image.width
        self._vae, self._device = vae, device or torch.device("cpu")
        self._state = EncoderState()
        self._latents: list[Tensor] = []
        self._steady = False
        self._lock = threading.Lock()

    @property
    def steady_from(self) -> int | None:
        """Latent frame from which on all latents are the same, once that is known."""
        return len(self._latents) - 1 if self._steady else None

    def uses(self, vae: WanVAE) -> bool:
        """Whether this VAE encodes the image."""
        return self._vae is vae

    @property
    def encoded(self) -> int:
        """Latent frames encoded so far."""
        return len(self._latents)

    @property
    def nbytes(self) -> int:
        """Bytes of the latents and of the encoder's state."""
        return sum(t.nbytes for t in self._latents) + self._state.nbytes

    def latents(self, first: int, count: int) -> Tensor:
        """See Condition: four mask channels (1 on latent frame 0), then the image latents; on the compute device."""
        with self._lock, torch.inference_mode():
            while len(self._latents) < first + count and not self._steady:
                self._encode_next()
            last = len(self._latents) - 1
            frames = torch.cat([self._latents[min(i, last)] for i in range(first, first + count)], dim=1)
        mask = torch.zeros(MASK_CHANNELS, *frames.shape[1:], dtype=torch.float32, device=frames.device)
        if first == 0:
            mask[:, 0] = 1
        return torch.cat([mask, frames])

    def release(self) -> None:
        """Frees latents and encoder state; whoever asks next has the image encoded again, with the same result."""
        with self._lock:
            self._latents, self._state, self._steady = [], EncoderState(), False

    def _encode_next(self) -> None:
        state = self._state.copy()
        if self._latents:
            size = (3, TEMPORAL_STRIDE, self.height, self.width)
            video = torch.zeros(size, dtype=torch.float32, device=self._device)
        else:
            video = to_device(self.image.pixels, self._device).unsqueeze(1)
        latent = self._vae.encode(video, state)
        # Same state, same input: this latent and all that follow are the same tensor for ever.
        steady = len(self._latents) > 1 and state.equals(self._state)
        if steady:
            state = EncoderState()  # its caches are as large as several frames of activations
        # One statement: interrupted between two, every later latent would be one place off.
        self._latents, self._state, self._steady = [*self._latents, latent], state, steady
