"""What float8 linears cost in quality and gain in time, beside what chance alone does.

Every table has a yardstick: the transformer before it was changed, with PyTorch's own pieces and another attention,
which is the same function summed in another order. An error of float8 that is near the yardstick's is no error of
float8. A yardstick of exactly 0 says that its change had no effect (graphs that were captured before, or a CPU, where
the pieces are PyTorch's already). See walks.py for what random weights can and cannot show.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lingbot_core.models.attention import sdpa
from lingbot_core.models.dit import CausalWanDiT
from lingbot_core.models.pieces import PYTORCH
from lingbot_core.presets import Preset

from ..parity import Inputs, OurRun, walk_chunks
from .walks import Scene, Walk, errors, relative, walk
from .worlds import GIB, allocated, tidy

ToFloat8 = Callable[..., Any]
MODULE, FUNCTION = "lingbot_core.models.float8", "use_float8"


class MissingError(Exception):
    """This engine has no float8 linears; the message says what was looked for."""


def find() -> ToFloat8:
    """``use_float8(dit, exclude=...)`` of the engine. Raises MissingError."""
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            raise
        raise MissingError(f"there is no module {MODULE}") from None
    if not hasattr(module, FUNCTION):
        raise MissingError(f"{MODULE} has no function {FUNCTION}")
    function: ToFloat8 = getattr(module, FUNCTION)
    return function


def converted(dit: CausalWanDiT, to_fp8: ToFloat8, exclude: Sequence[str] = ()) -> CausalWanDiT:
    """The transformer with float8 linears: what ``to_fp8`` returns, or ``dit`` itself where it works in place."""
    made = to_fp8(dit, exclude=tuple(exclude)) if exclude else to_fp8(dit)
    result = made if isinstance(made, CausalWanDiT) else dit
    result.join()
    return result


@contextmanager
def otherwise(dit: CausalWanDiT) -> Iterator[str]:
    """The yardstick: while entered, other kernels compute the same. Gives their names."""
    attention, pieces = dit.attention, dit.pieces
    name = "flash" if next(dit.parameters()).is_cuda else "math"
    dit.attention, dit.pieces = sdpa(name), PYTORCH
    try:
        yield f"attention {name}, PyTorch's pieces"
    finally:
        dit.attention, dit.pieces = attention, pieces


@dataclass(frozen=True)
class Plan:
    """One free walk: in which scene, by which recipe, how far."""

    name: str
    scene: Scene
    preset: Preset
    chunks: int


def measure(
    dit: CausalWanDiT,
    to_fp8: ToFloat8,
    plans: Sequence[Plan],
    forced: tuple[Inputs, Preset] | None,
    exclude: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Rows of single forwards with the same inputs (``forced``), then one for each free walk, ms per chunk in it.

    All plans run on ``dit``, first as it is, then converted, which may be for good: it must not be used afterwards.
    """
    before = _run(dit, plans, forced, None)
    with otherwise(dit) as yardstick:
        other = _run(dit, plans, forced, before.inputs)
    device = next(dit.parameters()).device
    weights, held = sum(p.nbytes for p in dit.parameters()), allocated(device)
    eight = converted(dit, to_fp8, exclude)
    tidy(device)
    left = allocated(device)
    after = _run(eight, plans, forced, before.inputs)
    about = {"exclude": list(exclude), "yardstick": yardstick}
    yield {
        **about,
        "kind": "weights",
        "gib_before": round(weights / GIB, 3),
        "gib_parameters_after": round(sum(p.nbytes for p in eight.parameters()) / GIB, 3),
        "gib_buffers_after": round(sum(b.nbytes for b in eight.buffers()) / GIB, 3),
        "gib_on_card": None if held is None or left is None else [round(held / GIB, 3), round(left / GIB, 3)],
    }
    if forced is not None:
        yield {
            **about,
            "kind": "single forwards, same inputs",
            "forwards": len(before.flows),
            "float8": _spread(after.flows, before.flows),
            "by_yardstick": _spread(other.flows, before.flows),
        }
    for plan, exact, chance, got in zip(plans, before.walks, other.walks, after.walks, strict=True):
        yield {
            **about,
            "kind": "free walk",
            "walk": plan.name,
            "recipe": plan.preset.label,
            "ms_before": exact.ms,
            "ms_float8": got.ms,
            "gain": round(sum(exact.ms[1:]) / max(1e-9, sum(got.ms[1:])), 3),
            "float8": errors(got, exact),
            "by_yardstick": errors(chance, exact),
        }


@dataclass(frozen=True, eq=False)
class _Run:
    inputs: list[Tensor]
    flows: list[Tensor]
    walks: list[Walk]


def _run(
    dit: CausalWanDiT, plans: Sequence[Plan], forced: tuple[Inputs, Preset] | None, given: list[Tensor] | None
) -> _Run:
    """given: the inputs of every forward of an earlier run."""
    single: dict[str, Any] = {"inputs": [], "flows": []}
    if forced is not None:
        inputs, preset = forced
        with torch.inference_mode():
            single = walk_chunks(OurRun(dit, inputs, preset.window, preset.sink), inputs, preset, given)
    walks = [walk(plan.scene.with_dit(dit), plan.preset, plan.chunks) for plan in plans]
    return _Run(single["inputs"], single["flows"], walks)


def _spread(got: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    found = [relative(a, b) for a, b in zip(got, expected, strict=True)]
    return {"mean": float(f"{sum(found) / len(found):.3e}"), "worst": max(found)}
