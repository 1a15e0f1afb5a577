"""Recipes: what they hold, what may be changed, what is refused, and which lengths they can make."""

from __future__ import annotations

import dataclasses

import pytest

from lingbot_core.errors import LengthError, PresetError
from lingbot_core.presets import (
    PRESETS,
    V2_NEGATIVE_PROMPT,
    LabelSteps,
    Preset,
    TableSteps,
    UniPCSteps,
    get_preset,
)


def test_the_published_recipes_are_there():
    v1, v2, served = PRESETS["v1-fast"], PRESETS["v2-causal-fast"], PRESETS["v2-diffusers"]
    assert (v1.chunk, v1.shift, v1.window, v1.sink, v1.steps) == (3, 10.0, None, 0, 4)
    assert v1.selection == TableSteps((0, 179, 358, 679))
    assert (v2.chunk, v2.shift, v2.window, v2.sink, v2.steps) == (4, 10.0, 18, 6, 4)
    assert v2.selection == TableSteps((0, 250, 500, 750))
    assert (served.chunk, served.shift, served.window, served.sink, served.steps) == (3, 5.0, 18, 9, 4)
    assert served.selection == LabelSteps((1000.0, 750.0, 500.0, 250.0))
    assert dataclasses.replace(PRESETS["v1-fast-shift5"], name="v1-fast", shift=10.0) == v1
    pretrain = PRESETS["v2-causal-pretrain"]
    assert (pretrain.chunk, pretrain.shift, pretrain.window, pretrain.steps) == (4, 10.0, None, 40)
    assert (pretrain.guidance_scale, pretrain.guided) == (5.0, True)
    assert pretrain.negative_prompt == V2_NEGATIVE_PROMPT
    assert not any(p.guided or p.negative_prompt for p in PRESETS.values() if p is not pretrain)
    assert not any(p.reuse_last_step_kv or p.overridden for p in PRESETS.values())
    assert all(name == preset.name for name, preset in PRESETS.items())


def test_an_unknown_name_lists_those_that_exist():
    assert get_preset("v1-fast") is PRESETS["v1-fast"]
    with pytest.raises(PresetError) as error:
        get_preset("v3")
    assert "'v3'" in str(error.value)
    assert all(name in str(error.value) for name in PRESETS)


def test_presets_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["v1-fast"].shift = 5.0


# Overrides


def test_an_override_changes_the_field_and_shows_in_the_label():
    base = PRESETS["v2-causal-fast"]
    changed = base.with_overrides(shift=7.5, window=22)
    assert (changed.shift, changed.window, changed.sink) == (7.5, 22, 6)
    assert changed.overridden == ("shift", "window")
    assert changed.label == "v2-causal-fast (shift=7.5, window=22)"
    assert base.label == "v2-causal-fast"
    again = changed.with_overrides(sink=3)
    assert again.overridden == ("shift", "sink", "window")
    assert again.label == "v2-causal-fast (shift=7.5, sink=3, window=22)"


@pytest.mark.parametrize(
    ("preset", "changes", "label"),
    [
        ("v1-fast", {"indices": [0, 500]}, "v1-fast (selection=indices [0, 500])"),
        ("v2-diffusers", {"labels": [1000, 500]}, "v2-diffusers (selection=labels [1000, 500])"),
        ("v2-causal-pretrain", {"steps": 20}, "v2-causal-pretrain (selection=20 UniPC steps)"),
        ("v2-causal-pretrain", {"negative_prompt": "ugly"}, "v2-causal-pretrain (negative_prompt='ugly')"),
        (
            "v2-causal-pretrain",
            {"negative_prompt": "x" * 50},
            f"v2-causal-pretrain (negative_prompt='{'x' * 21}...')",
        ),
        ("v1-fast", {"reuse_last_step_kv": True}, "v1-fast (reuse_last_step_kv=True)"),
        ("v2-causal-fast", {"window": 0}, "v2-causal-fast (sink=0, window=none)"),
        ("v2-causal-fast", {"window": -1}, "v2-causal-fast (sink=0, window=none)"),
        ("v1-fast", {"window": 18, "sink": 3}, "v1-fast (sink=3, window=18)"),
    ],
)
def test_the_label_spells_every_override_out(preset, changes, label):
    assert PRESETS[preset].with_overrides(**changes).label == label


def test_what_is_not_changed_is_no_override():
    base = PRESETS["v1-fast"]
    assert base.with_overrides() is base
    assert base.with_overrides(shift=None, window=None) is base
    assert base.with_overrides(shift=10.0, indices=(0, 179, 358, 679), window=0) is base
    assert base.with_overrides(shift=10.0, chunk=4).overridden == ("chunk",)


def test_an_overridden_selection_is_what_is_sampled():
    assert PRESETS["v1-fast"].with_overrides(indices=[0, 500]).selection == TableSteps((0, 500))
    assert PRESETS["v2-causal-pretrain"].with_overrides(steps=6).steps == 6
    assert PRESETS["v2-causal-pretrain"].with_overrides(guidance_scale=1.0, negative_prompt="").guided is False


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("v1-fast", {"guidance_scale": 5.0}, "guidance_scale=5.0 cannot be honoured: a distilled model"),
        ("v2-diffusers", {"guidance_scale": 3.0}, "a distilled model has guidance built in"),
        ("v2-causal-pretrain", {"guidance_scale": 0.5}, "guidance_scale=0.5 must be between 1"),
        ("v2-diffusers", {"indices": [0, 500]}, r"cannot honour indices=\[0, 500\]: its steps are set by 'labels'"),
        ("v1-fast", {"steps": 8}, "v1-fast cannot honour steps=8: its steps are set by 'indices'"),
        ("v1-fast", {"labels": [1000.0]}, r"cannot honour labels=\[1000.0\]"),
        ("v2-causal-pretrain", {"indices": [0]}, "its steps are set by 'steps' \\(40 UniPC steps\\)"),
        ("v1-fast", {"sink": 3}, "sink=3 has no effect without a window"),
        ("v2-causal-fast", {"window": 0, "sink": 6}, "sink=6 has no effect without a window"),
        (
            "v2-causal-fast",
            {"window": 9},
            r"window=9 cannot hold its sink \(6\) and the current chunk \(4\).*at least 10",
        ),
        ("v2-causal-fast", {"sink": -1}, "sink=-1 must not be negative"),
        ("v2-causal-fast", {"window": 18.5}, "window=18.5 must be a whole number"),
        ("v1-fast", {"negative_prompt": "ugly"}, "a negative prompt has no effect at guidance 1"),
        ("v1-fast", {"chunk": 0}, "chunk=0 must be between 1 and 64"),
        ("v1-fast", {"chunk": 65}, "chunk=65"),
        ("v1-fast", {"chunk": 4.0}, "chunk=4.0 must be a whole number"),
        ("v1-fast", {"chunk": True}, "chunk=True must be a whole number"),
        ("v1-fast", {"shift": 0.0}, "shift=0.0 must be a number between"),
        ("v1-fast", {"shift": float("nan")}, "shift=nan"),
        ("v1-fast", {"indices": []}, r"indices=\[\] must be whole numbers"),
        ("v1-fast", {"indices": [0, 1000]}, "must rise strictly and lie within 0..999"),
        ("v1-fast", {"indices": [5, 5]}, "must rise strictly"),
        ("v1-fast", {"indices": [500, 0]}, "must rise strictly"),
        ("v1-fast", {"indices": [0.5]}, "must be whole numbers"),
        ("v2-diffusers", {"labels": [500, 1000]}, "must fall strictly"),
        ("v2-diffusers", {"labels": [1001]}, r"lie within \(0, 1000\]"),
        ("v2-diffusers", {"labels": [0]}, r"lie within \(0, 1000\]"),
        ("v2-causal-pretrain", {"steps": 0}, "steps=0 must be a whole number between 1 and 1000"),
        ("v2-causal-pretrain", {"steps": 6.5}, "steps=6.5 must be a whole number"),
        ("v2-causal-pretrain", {"reuse_last_step_kv": True}, "the UniPC recipe always commits"),
        ("v1-fast", {"colour": 3}, "there is no field 'colour'; use one of"),
        ("v1-fast", {"name": "mine"}, "there is no field 'name'"),
        ("v1-fast", {"overridden": ()}, "there is no field 'overridden'"),
    ],
)
def test_an_override_that_cannot_be_honoured_is_refused_by_name(preset, changes, message):
    with pytest.raises(PresetError, match=message) as error:
        PRESETS[preset].with_overrides(**changes)
    assert preset in str(error.value)


def test_a_window_may_be_exactly_sink_and_chunk():
    assert PRESETS["v2-causal-fast"].with_overrides(window=10).window == 10


# Lengths


@pytest.mark.parametrize(("chunk", "totals"), [(3, [0, 9, 21, 33, 45]), (4, [0, 13, 29, 45, 61])])
def test_frames_of_n_chunks(chunk, totals):
    """The first latent frame is one video frame, every later one four."""
    preset = Preset("x", chunk=chunk, selection=UniPCSteps(1), shift=1.0)
    assert [preset.frames(n) for n in range(5)] == totals
    for n in range(1, 5):
        assert preset.frames(n) == 1 + 4 * (chunk * n - 1)


@pytest.mark.parametrize("preset", ["v1-fast", "v2-causal-fast"])
def test_a_wish_is_snapped_down_or_up_to_a_length_that_exists(preset):
    recipe = PRESETS[preset]
    totals = [recipe.frames(n) for n in range(1, 60)]
    for wish in range(1, 533):
        assert recipe.frames(recipe.chunks_for(wish, snap="up")) == min(t for t in totals if t >= wish)
        if wish >= totals[0]:
            assert recipe.frames(recipe.chunks_for(wish)) == max(t for t in totals if t <= wish)


def test_long_wishes_are_never_cut():
    assert PRESETS["v1-fast"].frames(PRESETS["v1-fast"].chunks_for(129)) == 129
    assert PRESETS["v1-fast"].frames(PRESETS["v1-fast"].chunks_for(533)) == 525
    assert PRESETS["v1-fast"].chunks_for(4 * 3 * 10**6 - 3) == 10**6


@pytest.mark.parametrize("frames", [1, 5, 9, 12])
def test_less_than_one_chunk_is_refused_or_snapped_up(frames):
    preset = PRESETS["v2-causal-fast"]
    with pytest.raises(LengthError, match=rf"{frames} frames are less than one chunk of 13 .*13 \+ 16k \(13, 29, 45"):
        preset.chunks_for(frames)
    assert preset.chunks_for(frames, snap="up") == 1


@pytest.mark.parametrize("frames", [0, -5])
def test_no_frames_at_all_are_refused(frames):
    for snap in ("down", "up"):
        with pytest.raises(LengthError, match=f"{frames} frames were asked for; valid totals are 9"):
            PRESETS["v1-fast"].chunks_for(frames, snap=snap)
