"""Tests that need a CUDA device: ``pytest -m gpu``. Where there is none they are left out, and a last line says so."""

from __future__ import annotations

import pytest
import torch

LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[LEFT_OUT] = len(here)
    config.hook.pytest_deselected(items=here)
    items[:] = [item for item in items if item not in here]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} tests need a CUDA device and were not run: there is none")
