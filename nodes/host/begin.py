"""Starting a world: the recipe with its overrides, the unit, prompts as text states, room in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...lingbot_core.camera.keys import KEY_STEPS
from ...lingbot_core.camera.units import translation_unit
from ...lingbot_core.engine.history import StartRecord
from ...lingbot_core.engine.memory import GIB
from ...lingbot_core.engine.registry import WorldHandle
from ...lingbot_core.engine.route import Route, unit_rule
from ...lingbot_core.engine.session import WorldSession
from ...lingbot_core.engine.start import make_start
from ...lingbot_core.errors import PresetError, PromptError
from ...lingbot_core.presets import LabelSteps, Preset, TableSteps, UniPCSteps, get_preset
from .memory import out_of_memory_explained
from .progress import stop_if_cancelled
from .run import WORLDS
from .source import HostRoom, WorldSource
from .text import states_of

AUTO = "auto"
STANDING = KEY_STEPS["per-latent"]


@dataclass(frozen=True, eq=False)
class StartWish:
    """Settings of a new world. overrides: fields of the preset, None where unchanged. steps: a number, indices or
    labels, as the preset counts them; '' where unchanged. translation_unit, first_delta: 'auto' takes them from the
    route. chunks: the declared length, for noise 'reference'.
    """

    positive: Any
    negative: Any = None
    preset: str = AUTO
    overrides: dict[str, Any] | None = None
    steps: str = ""
    seed: int = 0
    noise: str = "seeded"
    chunks: int | None = None
    translation_unit: str = AUTO
    first_delta: str = AUTO
    fps: float = 16.0
    rewind_depth: int = 0


def choose_preset(source: WorldSource, wish: StartWish) -> Preset:
    """The preset that was named, or that of the model, with the overrides. Raises PresetError."""
    world = source.host.world
    base = world.preset if wish.preset == AUTO else get_preset(wish.preset)
    return base.with_overrides(**(wish.overrides or {}), **_steps(base, wish.steps))


def _steps(preset: Preset, text: str) -> dict[str, Any]:
    """The override of a preset's steps that a text means."""
    if not text.strip():
        return {}
    field, number = {TableSteps: ("indices", int), LabelSteps: ("labels", float), UniPCSteps: ("steps", int)}[
        type(preset.selection)
    ]
    try:
        values = [number(part) for part in text.replace(",", " ").split()]
    except ValueError:
        values = []
    if not values or (field == "steps" and len(values) > 1):
        example = {"indices": "0,179,358,679", "labels": "1000,750,500,250", "steps": "40"}[field]
        raise PresetError(f"steps={text!r}: preset {preset.name} takes {field} such as {example}")
    return {field: values[0] if field == "steps" else values}


def start_record(source: WorldSource, wish: StartWish, route: Route | None = None) -> StartRecord:
    """What a world started with these settings would fix; nothing is started or allocated."""
    settings, _ = _settings(source, wish, route)
    return make_start(source.host.world, source.picture.condition, **settings)


def start_world(source: WorldSource, wish: StartWish, route: Route | None = None) -> WorldHandle:
    """Begins a world; the registry has charge of its session. route: what it is to be steered with first."""
    world = source.host.world
    settings, states = _settings(source, wish, route)
    room = HostRoom(
        source, settings["preset"], chunks=wish.chunks or 1, rewind_depth=wish.rewind_depth, noise=wish.noise
    )

    def explain() -> str:
        return (
            f"the memory of {world.device} ran out while the world was started; it needs "
            f"{room.estimate.session / GIB:.2f} GiB beside the weights, in all {room.estimate.describe()}. Use a "
            "smaller picture or a window, or close other worlds"
        )

    with out_of_memory_explained(explain, lambda: None), WORLDS.lease(world.device, on_wait=stop_if_cancelled):
        room.ready(None)
        session = WorldSession.start(
            world,
            source.picture.condition,
            rewind_depth=wish.rewind_depth,
            prompt_states=states["positive"],
            negative_states=states["negative"],
            **settings,
        )
        handle = WORLDS.add(session, source)
    living = WORLDS.living(handle)
    assert living is not None
    room.settle(living)
    return handle


def _settings(
    source: WorldSource, wish: StartWish, route: Route | None
) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """The arguments that make_start and WorldSession.start share, and the text states."""
    preset = choose_preset(source, wish)
    unit, rule = _unit(wish, route)
    first_delta = wish.first_delta
    if first_delta == AUTO:
        first_delta = "from_rest" if route is None else route.first_delta
    positive = states_of(wish.positive, source.host.world.dit.config.text_dim)
    negative_prompt, negative = _negative(source, wish, preset)
    settings = {
        "prompt": name_of(positive),
        "preset": preset,
        "negative_prompt": negative_prompt,
        "seed": wish.seed,
        "noise": wish.noise,
        "chunks": wish.chunks,
        "translation_unit": unit,
        "unit_rule": rule,
        "first_delta": first_delta,
        "intrinsics": None if route is None else route.intrinsics(source.picture.image),
        "fps": wish.fps,
    }
    return settings, {"positive": positive, "negative": negative}


def name_of(states: Tensor) -> str:
    """A name for a prompt of which only the text states are known: the same states, the same name."""
    digest = hashlib.sha256(states.float().cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"conditioning {digest[:12]} ({len(states)} tokens)"


def _unit(wish: StartWish, route: Route | None) -> tuple[float, str]:
    rule = wish.translation_unit.strip() or AUTO
    if route is not None:
        return route.translation_unit(None if rule == AUTO else rule)
    # Nothing says how far a path will go: a held key is the measure.
    rule = "key" if rule == AUTO else rule
    return translation_unit(rule, steps=STANDING), unit_rule(rule)


def _negative(source: WorldSource, wish: StartWish, preset: Preset) -> tuple[str | None, Tensor | None]:
    """Name and text states of the negative prompt; a preset without guidance has none."""
    if wish.negative is not None:
        if not preset.guided:
            raise PresetError(
                f"preset {preset.name}: a negative prompt has no effect at guidance 1; disconnect negative, or use the "
                "preset v2-causal-pretrain"
            )
        states = states_of(wish.negative, source.host.world.dit.config.text_dim)
        return name_of(states), states
    if not preset.guided:
        return None, None
    if source.clip is None:
        raise PromptError(
            f"preset {preset.name} is guided and needs a negative prompt: connect negative, or clip to encode its own"
        )
    return None, source.encode((preset.negative_prompt,))[preset.negative_prompt]
