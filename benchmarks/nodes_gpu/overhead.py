"""What the nodes add to a chunk on this device."""

from __future__ import annotations

from ..nodes import measure
from .report import Report
from .rig import Rig

LARGEST = 1.05
ROUNDS = 5


def overhead(rig: Rig, report: Report) -> None:
    """Advance World against the session alone, in turn."""
    rig.empty()
    report.facts |= measure(rig.parts, rig.image, rig.size.chunks, ROUNDS if rig.on_gpu else 2)
    if rig.on_gpu:
        # Other programs on the card only ever slow a round down, so the fastest ones are compared.
        report.check(f"at most {LARGEST}", report.facts["ratio_of_fastest"] <= LARGEST)
