"""What cheaper recipes gain and cost. None of them is the model's own recipe: they are options with a label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lingbot_core.presets import Preset

from .walks import Scene, errors, walk


def choices(exact: Preset) -> dict[str, Preset]:
    """Label -> recipe. Those of a window are left out where the exact recipe's own is no larger."""
    found = {
        "reuse_last_step_kv": exact.with_overrides(reuse_last_step_kv=True),
        "three steps (0, 358, 679)": exact.with_overrides(indices=(0, 358, 679)),
        "two steps (0, 679)": exact.with_overrides(indices=(0, 679)),
        "two steps (0, 358)": exact.with_overrides(indices=(0, 358)),
    }
    for window in (18, 12, 9):
        if exact.window is None or window < exact.window:
            found[f"window {window}, sink 3"] = exact.with_overrides(window=window, sink=3)
    return found


def measure(scene: Scene, exact: Preset, chunks: int) -> Iterator[dict[str, Any]]:
    """A row for the exact recipe and for each option: ms per chunk (no decode), gain, and distance to the exact walk.

    Free-running with the same noise: from the second chunk on a difference of the first is in it, too. ``again``: the
    exact recipe once more, for what the clock and the sums do by themselves. See walks.py for what random weights show;
    theirs is an x0 that is mostly the last step's noise, so that another last step is another x0.
    """
    walk(scene, exact, 1)  # kernels are compiled
    reference = walk(scene, exact, chunks, exact=exact)
    total = sum(reference.ms)
    yield {"scene": scene.name, "option": "exact", "recipe": exact.label, "ms": reference.ms, "sum_ms": round(total, 1)}
    for label, preset in ({"again": exact} | choices(exact)).items():
        got = walk(scene, preset, chunks, exact=exact)
        yield {
            "scene": scene.name,
            "option": label,
            "recipe": preset.label,
            "ms": got.ms,
            "sum_ms": round(sum(got.ms), 1),
            "gain": round(total / max(1e-9, sum(got.ms)), 3),
            **errors(got, reference),
        }
