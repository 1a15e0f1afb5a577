"""Whatever happens once in a process, before the first chunk has to wait for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..camera.rays import action_rays, camera_rays
from ..models.dit import ChunkContext
from ..models.kv_cache import KVCache
from ..models.vae import SPATIAL_STRIDE, DecoderState
from .chunk import COMMIT_TIME
from .timing import undisturbed
from .world import World

SIDE = 128
FRAMES = 3

Report = Callable[[int, int], None]


def warm_up(world: World, report: Report | None = None) -> None:
    """Has every kernel compiled (PyTorch and Triton keep them on disk: ten seconds on the first run, then one) and
    every library set up, by a tiny chunk that nobody sees. Does nothing on a CPU.

    report: called with passes done and in all.
    """
    if world.device.type != "cuda":
        return
    dit, device = world.dit, world.device
    size = SIDE // SPATIAL_STRIDE
    steps = torch.eye(4, dtype=torch.float64).expand(FRAMES, 4, 4).numpy()
    lens = (float(SIDE), float(SIDE), SIDE / 2, SIDE / 2)
    with undisturbed(device):
        if dit.config.control == "act":
            rays = action_rays(steps, lens, torch.zeros(FRAMES, 4).numpy(), SIDE, SIDE, device=device)
        else:
            rays = camera_rays(steps, lens, SIDE, SIDE, device=device)
        states = torch.zeros(1, dit.config.text_dim, device=device)
        cache = KVCache(
            dit.cache_shape(size, size), window=None, capacity=FRAMES, dtype=world.cache_dtype, device=device
        )
        cache.begin(0, FRAMES)
        channels = dit.config.in_dim - dit.config.out_dim
        x = torch.zeros(dit.config.out_dim, FRAMES, size, size, device=device)
        context = ChunkContext(
            0,
            torch.zeros(channels, FRAMES, size, size, device=device),
            dit.encode_camera(rays),
            dit.rope(0, FRAMES, size, size, device),
            dit.encode_prompt(states),
            cache,
        )
        decoder = DecoderState()
        passes: tuple[Callable[[], object], ...] = (
            lambda: dit(x, 1.0, context),
            lambda: dit.remember(x, COMMIT_TIME, context),
            lambda: world.vae.decode(x, decoder),  # a clip's first frame takes another way than all others
            lambda: world.vae.decode(x, decoder),
        )
        for number, run in enumerate(passes, start=1):
            run()
            torch.cuda.synchronize(device)
            if report is not None:
                report(number, len(passes))
