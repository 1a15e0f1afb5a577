"""Timesteps and sigmas of the recipes, computed here with exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from lingbot_core.presets import PRESETS, LabelSteps, Preset, TableSteps
from lingbot_core.schedule import distilled_steps, flow_table, flow_to_x0, renoise


def exact_sigma(index: int, shift: int, count: int = 1000) -> Fraction:
    """Entry of the table: 0.999 falling to 0 in ``count`` equal steps, shifted."""
    base = Fraction(999, 1000) * (count - index) / count
    return shift * base / (1 + (shift - 1) * base)


@pytest.mark.parametrize("shift", [1, 5, 10])
@pytest.mark.parametrize("count", [6, 40, 1000])
def test_the_table_is_the_shifted_line_with_truncated_timesteps(shift, count):
    table = flow_table(count, float(shift))
    exact = [exact_sigma(i, shift, count) for i in range(count)]
    assert table.sigmas.dtype == np.float32
    assert table.timesteps.dtype == np.int64
    assert table.sigmas.tolist() == pytest.approx([float(s) for s in exact] + [0.0], abs=1e-7)
    # A sigma that is a whole timestep but for rounding may be truncated to either side.
    off = [i for i, s in enumerate(exact) if table.timesteps[i] != int(1000 * s)]
    assert all(abs(1000 * exact[i] - round(1000 * exact[i])) < 1e-9 for i in off)
    assert not table.sigmas.flags.writeable
    assert not table.timesteps.flags.writeable


@pytest.mark.parametrize(
    ("preset", "times"),
    [
        ("v1-fast", [999, 978, 947, 825]),
        ("v2-causal-fast", [999, 967, 908, 768]),
    ],
)
def test_the_native_presets_give_the_model_their_published_integers(preset, times):
    steps = distilled_steps(PRESETS[preset])
    assert [step.t for step in steps] == times


def test_v2_diffusers_takes_sigma_and_time_from_the_shifted_label():
    steps = distilled_steps(PRESETS["v2-diffusers"])
    exact = [5 * Fraction(x, 1000) / (1 + 4 * Fraction(x, 1000)) for x in (1000, 750, 500, 250)]
    assert [float(x) for x in exact] == pytest.approx([1.0, 0.9375, 5 / 6, 0.625])
    assert [step.sigma for step in steps] == pytest.approx([float(x) for x in exact], abs=1e-15)
    assert [step.t for step in steps] == pytest.approx([float(1000 * x) for x in exact], abs=1e-12)
    assert [step.renoise for step in steps[:-1]] == [step.sigma for step in steps[1:]]
    assert steps[-1].renoise is None


@pytest.mark.parametrize("preset", ["v1-fast", "v1-fast-shift5", "v2-causal-fast", "tiny"])
def test_x0_takes_the_first_entry_of_an_integer_and_renoising_the_second(preset):
    recipe = PRESETS[preset]
    assert isinstance(recipe.selection, TableSteps)
    shift = Fraction(recipe.shift)
    by_time: dict[int, list[float]] = {}
    for i in range(1000):
        sigma = exact_sigma(i, shift)
        by_time.setdefault(int(1000 * sigma), []).append(float(sigma))
    times = [int(1000 * exact_sigma(i, shift)) for i in recipe.selection.indices]
    steps = distilled_steps(recipe)
    assert [step.t for step in steps] == times
    assert [step.sigma for step in steps] == pytest.approx([by_time[t][0] for t in times], abs=1e-7)
    second = [by_time[t][min(1, len(by_time[t]) - 1)] for t in times]
    assert [step.renoise for step in steps[:-1]] == pytest.approx(second[1:], abs=1e-7)
    assert steps[-1].renoise is None


def test_at_shift_10_entries_do_share_integers():
    """Otherwise the rule above would decide nothing."""
    table = flow_table(1000, 10.0)
    shared = np.flatnonzero(table.timesteps == 978)
    assert len(shared) > 1
    assert table.first_sigma(978) == table.sigmas[shared[0]]
    assert table.second_sigma(978) == table.sigmas[shared[1]]
    assert table.first_sigma(978) > table.second_sigma(978)
    alone = next(t for t in table.timesteps.tolist() if (table.timesteps == t).sum() == 1)
    assert table.first_sigma(alone) == table.second_sigma(alone)


def test_custom_steps_follow_the_same_rules():
    (step,) = distilled_steps(Preset("one", chunk=3, selection=LabelSteps((400.0,)), shift=3.0))
    assert (step.sigma, step.renoise) == (pytest.approx(1.2 / 1.8), None)
    assert step.t == pytest.approx(1000 * 1.2 / 1.8)
    assert len(distilled_steps(Preset("two", chunk=3, selection=TableSteps((0, 999)), shift=1.0))) == 2


def test_a_solver_recipe_has_no_distilled_steps():
    with pytest.raises(TypeError, match="UniPC"):
        distilled_steps(PRESETS["v2-causal-pretrain"])


def test_x0_is_computed_in_float64_and_returned_as_the_flow():
    x, flow = torch.tensor([1.0, 3e8]), torch.tensor([0.5, 1.0])
    assert torch.equal(flow_to_x0(flow, x, 0.9), torch.tensor([1 - 0.9 * 0.5, 3e8 - 0.9], dtype=torch.float64).float())
    # 1 - 0.1 * x differs between the two precisions for some of these.
    generator = torch.Generator().manual_seed(0)
    x, flow = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    exact = np.float32(x.numpy().astype(np.float64) - 0.937 * flow.numpy().astype(np.float64))
    assert np.array_equal(flow_to_x0(flow, x, 0.937).numpy(), exact)
    assert not np.array_equal((x - 0.937 * flow).numpy(), exact)
    assert flow_to_x0(flow.bfloat16(), x, 0.5).dtype == torch.bfloat16


def test_renoising_mixes_in_float32_with_a_float32_sigma():
    generator = torch.Generator().manual_seed(1)
    x0, noise = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    sigma = np.float32(0.9375001)
    expected = (np.float32(1) - sigma) * x0.numpy() + sigma * noise.numpy()
    assert np.array_equal(renoise(x0, noise, float(sigma)).numpy(), expected)
    assert torch.equal(renoise(x0, noise, 0.0), x0)
    assert torch.equal(renoise(x0, noise, 1.0), noise)
