"""Loading needs little more memory than the loaded model, however large the shards and their dtype are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lingbot_core.models.dit import CausalWanDiT, DiTConfig

ROOT = Path(__file__).parents[2]
CONFIG = DiTConfig(dim=2048, ffn_dim=8192, num_layers=6, num_heads=16)
GIB = 2**30
# Pieces of the tensor in flight, and what the allocator holds on to.
SLACK = GIB // 4

# The peak of the process itself: ru_maxrss of a child also counts what its parent held when it started it.
CHILD = """
import re, sys, torch
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.load import load_dit
torch.set_num_threads(1)
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
layout = find_layout(sys.argv[1])
before = peak()
dit = load_dit(layout, device=torch.device("cpu"), dtype=torch.bfloat16, attention="math")
print(before, peak(), sum(p.nbytes for p in dit.parameters()))
"""


@pytest.fixture(params=["sparse shards", "pth"])
def model(request, checkpoints, tmp_path):
    """Over 2 GiB of float32: one shard of nearly all of it and a small one; deleted after the test."""
    shapes = {name: tuple(p.shape) for name, p in CausalWanDiT(CONFIG, device="meta").named_parameters()}
    folder = tmp_path / "lingbot_world_fast"
    if request.param == "pth":
        # Half the size: this one is really written.
        folder.mkdir()
        path = folder / "diffusion_pytorch_model.pth"
        torch.save({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, path)
    else:
        names = list(shapes)
        for number, part in enumerate((names[:-8], names[-8:]), 1):
            path = folder / f"diffusion_pytorch_model-{number:05}-of-00002.safetensors"
            checkpoints.write_sparse(path, {name: shapes[name] for name in part})
    yield folder
    for file in folder.iterdir():
        file.unlink()


def test_peak_memory_stays_near_the_size_of_the_loaded_model(model):
    stored = sum(file.stat().st_size for file in model.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(model)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, peak, target = map(int, done.stdout.split())
    if any(model.glob("*.pth")):
        # PyTorch maps the file, and the mapping is given back after every half GiB read.
        assert abs(target - stored) < 2**20
        assert peak - before < target + SLACK + GIB // 2
    else:
        assert stored > 2 * GIB
        assert abs(target - stored / 2) < 2**20
        assert peak - before < target + SLACK
