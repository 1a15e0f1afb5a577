"""Rotary positions against complex numbers computed with forty digits, as far out as a world may ever get."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from lingbot_core.models.rope import Rope, axis_angles, rope_for_chunk, rotate

CPU = torch.device("cpu")
BEYOND_INT32 = 2**31 + 5


def exact_turn(position: int, pair: int, pairs: int) -> complex:
    """exp(i * position * 10000 ** (-pair / pairs)), computed with forty digits."""
    with mpmath.workdps(40):
        return complex(mpmath.expj(position * mpmath.power(10000, -mpmath.mpf(pair) / pairs)))


def expected_rotation(x: np.ndarray, first: int, frames: int, rows: int, columns: int) -> np.ndarray:
    """x: complex [tokens, heads, pairs]; rotates each pair by its axis's position."""
    pairs = x.shape[-1]
    spatial = pairs // 3
    sizes = (pairs - 2 * spatial, spatial, spatial)
    out = x.copy()
    tokens = [(f, r, c) for f in range(frames) for r in range(rows) for c in range(columns)]
    for token, (f, r, c) in enumerate(tokens):
        turns = [
            exact_turn(position, pair, size)
            for position, size in zip((first + f, r, c), sizes, strict=True)
            for pair in range(size)
        ]
        out[token] *= np.array(turns)
    return out


@pytest.mark.parametrize("head_dim", [128, 32, 8])
@pytest.mark.parametrize("first", [0, 1023, 2**20 - 1, 2**20 + 7, BEYOND_INT32])
def test_rotation_equals_exact_complex_numbers_at_any_frame(head_dim, first):
    """1023..1026 cross the size of the reference's table; nothing ends at 2**20 or at 2**31."""
    frames, rows, columns = 4, 2, 3
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(frames * rows * columns, 2, head_dim, generator=generator)
    complexes = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))).numpy()
    expected = expected_rotation(complexes, first, frames, rows, columns)
    got = rotate(x, rope_for_chunk(first, frames, rows, columns, head_dim, CPU))
    assert got.dtype == torch.float32
    turned = torch.view_as_complex(got.double().unflatten(-1, (-1, 2))).numpy()
    # float64 keeps an angle of 2**31 to about 5e-7.
    assert np.abs(turned - expected).max() < 2e-6


def test_each_frame_of_the_first_two_thousand_has_a_rotation_of_its_own():
    angles = axis_angles(0, 2048, 22, CPU)
    assert angles.shape == (2048, 22)
    assert angles.dtype == torch.float64
    assert torch.equal(axis_angles(1020, 8, 22, CPU), angles[1020:1028])
    for position in (1023, 1024, 1025, 1026):
        exact = np.array([exact_turn(position, pair, 22) for pair in range(22)])
        assert np.abs(np.exp(1j * angles[position].numpy()) - exact).max() < 1e-12


def test_pairs_are_split_between_time_height_and_width():
    """22, 21 and 21 of the 64 pairs of a head of 128: each axis turns its own pairs only."""
    still = rope_for_chunk(0, 1, 1, 1, 128, CPU)
    assert torch.equal(still.cos, torch.ones(1, 1, 64))
    turned = {
        "time": rope_for_chunk(5, 1, 1, 1, 128, CPU).sin[0, 0],
        "height": rope_for_chunk(0, 1, 6, 1, 128, CPU).sin[5, 0],
        "width": rope_for_chunk(0, 1, 1, 6, 128, CPU).sin[5, 0],
    }
    spans = {"time": range(22), "height": range(22, 43), "width": range(43, 64)}
    for axis, sines in turned.items():
        assert torch.nonzero(sines).flatten().tolist() == list(spans[axis])


def test_more_than_a_million_tokens_have_rotations():
    columns = 2**18 + 1
    rope = rope_for_chunk(0, 4, 1, columns, 8, CPU)
    assert rope.cos.shape == (4 * columns, 1, 4)
    last = [complex(c, s) for c, s in zip(rope.cos[-1, 0].tolist(), rope.sin[-1, 0].tolist(), strict=True)]
    exact = [exact_turn(3, 0, 2), exact_turn(3, 1, 2), exact_turn(0, 0, 1), exact_turn(columns - 1, 0, 1)]
    assert np.abs(np.array(last) - exact).max() < 1e-6


def test_attention_scores_depend_on_the_distance_between_frames_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 128, generator=generator) for _ in range(2))

    def score(first: int) -> float:
        query = rotate(q, rope_for_chunk(first + 9, 1, 1, 1, 128, CPU))
        key = rotate(k, rope_for_chunk(first, 1, 1, 1, 128, CPU))
        return float((query * key).sum())

    assert score(2**20) == pytest.approx(score(0), abs=1e-4)
    assert score(0) != pytest.approx(float((q * k).sum()), abs=1e-2)


def test_low_precision_input_is_turned_in_float32_and_comes_back_in_its_dtype():
    x = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    rope = rope_for_chunk(1000, 4, 1, 1, 8, CPU)
    got = rotate(x, rope)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), rope).bfloat16())


def test_a_rotation_keeps_lengths():
    x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(2))
    rope: Rope = rope_for_chunk(77, 1, 2, 3, 32, CPU)
    assert torch.allclose(rotate(x, rope).norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
