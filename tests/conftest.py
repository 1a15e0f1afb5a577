"""Settings for every test: one torch thread, so that two test processes do not fight and sums stay the same."""

from __future__ import annotations

import os

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
