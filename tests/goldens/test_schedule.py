"""The sampler's tables, flow -> x0 and re-noising against the reference's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lingbot_core.presets import Preset, TableSteps
from lingbot_core.schedule import distilled_steps, flow_table, flow_to_x0, renoise
from lingbot_core.solver import UniPC

FILES = ("schedule.json",)


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> dict:
    return json.loads((golden_dir / "schedule.json").read_text())


def test_table_has_the_reference_sigmas_and_truncated_timesteps(golden: dict) -> None:
    worst = 0.0
    for shift, expected in golden["shifts"].items():
        table = flow_table(golden["num_train_timesteps"], float(shift))
        assert len(table.timesteps) == expected["len_timesteps"]
        assert len(table.sigmas) == expected["len_sigmas"]
        for part, key in ((table.sigmas[:8], "sigmas_first8"), (table.sigmas[-8:], "sigmas_last8")):
            worst = max(worst, np.abs(part - np.array(expected[key])).max())
        if expected["timesteps_all_int64"] is not None:
            assert table.timesteps.tolist() == expected["timesteps_all_int64"]
    print(f"\nachieved sigmas {worst:.1e}")
    assert worst <= 1e-6


def test_steps_take_the_first_sigma_for_x0_and_the_second_for_noise(golden: dict) -> None:
    worst = 0.0
    for shift, sets in golden["shifts"].items():
        for expected in sets["index_sets"].values():
            indices = TableSteps(tuple(expected["timesteps_index"]))
            steps = distilled_steps(Preset("golden", chunk=3, selection=indices, shift=float(shift)))
            assert [step.t for step in steps] == expected["timesteps"]
            for i, (step, facts) in enumerate(zip(steps, expected["steps"], strict=True)):
                worst = max(worst, abs(step.sigma - facts["x0_sigma"]))
                if i:
                    assert steps[i - 1].renoise is not None
                    worst = max(worst, abs(steps[i - 1].renoise - facts["add_noise_sigma"]))
            assert steps[-1].renoise is None
    print(f"\nachieved sigmas {worst:.1e}")
    assert worst <= 1e-6


def test_x0_and_renoising_give_the_reference_numbers(golden: dict) -> None:
    worst = 0.0
    for sets in golden["shifts"].values():
        for expected in sets["index_sets"].values():
            for facts in expected["steps"]:
                pair = facts["add_noise"]
                noisy = renoise(torch.tensor(pair["x0"]), torch.tensor(pair["noise"]), facts["add_noise_sigma"])
                worst = max(worst, (noisy - torch.tensor(pair["noisy"])).abs().max().item())
                pair = facts["x0_from_flow"]
                x0 = flow_to_x0(torch.tensor(pair["flow"]), torch.tensor(pair["x_t"]), facts["x0_sigma"])
                worst = max(worst, (x0 - torch.tensor(pair["x0"])).abs().max().item())
    print(f"\nachieved x0 and noise {worst:.1e}")
    assert worst <= 1e-6


def test_unipc_schedules_equal_the_reference(golden: dict) -> None:
    worst = 0.0
    for name, expected in golden["cfg_schedules"].items():
        count, shift = (int("".join(filter(str.isdigit, part))) for part in name.split("_"))
        solver = UniPC(count, float(shift))
        assert list(solver.timesteps) == expected["timesteps"]
        worst = max(worst, np.abs(np.array(solver.sigmas) - np.array(expected["sigmas"])).max())
    print(f"\nachieved sigmas {worst:.1e}")
    assert worst <= 1e-6
