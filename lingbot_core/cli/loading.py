"""A command's model, and how far its loading is: a bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    import argparse

    from ..engine.world import World

GB = 10**9


class LoadingBar:
    """Called with bytes read so far and in all. Small models are loaded before there is anything to say."""

    name = "loading"

    def __init__(self, stream: TextIO | None = None, every: float = 5.0) -> None:
        self._stream, self._every = stream or sys.stderr, every
        self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        if self._stream.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc=self.name, leave=False, file=self._stream, **self._units())
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            print(f"{self.name}: {self._shown(done, total)}", file=self._stream, flush=True)

    def _units(self) -> dict[str, Any]:
        return {"unit": "B", "unit_scale": True}

    def _shown(self, done: int, total: int) -> str:
        return f"{done / GB:.1f} of {total / GB:.1f} GB"


class WarmingBar(LoadingBar):
    """Called with passes done and in all, while a GPU's kernels are compiled for the first time on this machine."""

    name = "preparing the GPU's kernels"

    def _units(self) -> dict[str, Any]:
        return {"unit": ""}

    def _shown(self, done: int, total: int) -> str:
        return f"{done} of {total}"


def load_world(args: argparse.Namespace) -> World:
    """What the arguments of a model and of the machine name, ready to make its first chunk. Raises as World.load."""
    from ..engine.warm import warm_up
    from ..engine.world import World

    with LoadingBar() as loading:
        world = World.load(
            args.model,
            vae=args.vae,
            text_encoder=args.text_encoder,
            tokenizer=args.tokenizer,
            preset=args.preset,
            device=args.device,
            dtype=args.dtype,
            vae_dtype=args.vae_dtype,
            decoder=args.decoder,
            attention=args.attention,
            progress=loading,
        )
    with WarmingBar() as warming:
        warm_up(world, warming)
    return world
