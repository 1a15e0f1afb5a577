"""For every test: one torch thread, so that two processes do not fight and sums stay the same; an untrained model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Before triton is imported, by whomever: its interpreter then runs our kernels (tests/unit/test_pieces.py).
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with random weights: noisy pictures, a transformer whose file says nothing of itself,
    and no lens."""
    from training import make_random_tiny

    folder = tmp_path_factory.mktemp("untrained") / "tiny"
    make_random_tiny.main(folder)
    return folder
