"""Compares the two renderers on a GPU and times the fast one.

    python -m training.render_check [--frames 8192]

Exits with 1 when they differ.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from .clips import sample_clips
from .scene import clear_path, random_scenes, render


def main(frames: int) -> int:
    """Prints the difference and the speed; returns the exit code."""
    if not torch.cuda.is_available():
        print("there is no GPU: nothing to compare")
        return 1
    clips = sample_clips(5, 24, latents=9)
    scenes = clear_path(random_scenes(range(24)), clips.c2w)
    on_cpu = render(scenes, clips.c2w[:, ::11], clips.palette()[:, ::11])
    on_gpu = render(scenes.to("cuda"), clips.c2w[:, ::11], clips.palette()[:, ::11]).cpu()
    difference = (on_cpu.int() - on_gpu.int()).abs()
    share = (difference > 3).float().mean().item()
    print(f"{len(on_cpu) * on_cpu.shape[1]} frames: largest difference {difference.max().item()} of 255, mean "
          f"{difference.float().mean().item():.5f}, {100 * share:.4f} % of values differ by more than 3")  # fmt: skip

    latents = 15
    count = max(1, frames // (4 * latents - 3))
    clips = sample_clips(6, count, latents=latents)
    palette = clips.palette().cuda()
    c2w = clips.c2w.cuda()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        made = clear_path(random_scenes(range(count), "cuda"), c2w)
        render(made, c2w, palette)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    total = count * c2w.shape[1]
    print(
        f"{total} frames of 96x160 with their scenes in {1e3 * min(seconds):.2f} ms: {total / min(seconds):.0f} per s"
    )
    # Edges of things may fall on the other side of a ray by rounding.
    return int(share > 2e-3 or difference.float().mean().item() > 0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="compare and time the renderers")
    parser.add_argument("--frames", type=int, default=8192)
    sys.exit(main(parser.parse_args().frames))
