"""The pieces between matrix products: fused kernels against PyTorch's own, and joined projections.

Kernels run on a GPU where there is one, and through Triton's interpreter elsewhere (tests/conftest.py).
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from lingbot_core.models.dit_blocks import LayerNorm
from lingbot_core.models.pieces import PYTORCH, Pieces, pieces_for, working
from lingbot_core.models.rope import rope_for_chunk

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZES = [(6, 2, 128), (4, 5, 32), (3, 40, 128)]  # tokens, heads, head_dim
EPS = 1e-6


@pytest.fixture
def fused() -> Pieces:
    pytest.importorskip("triton", reason="Triton is not made for this system")
    return importlib.import_module("lingbot_core.models.kernels").FusedPieces()


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    error = (got.float() - expected.float()).abs() / (1 + expected.float().abs())
    if got.dtype == torch.float32:
        assert error.max() < 2e-6
        return
    # A sum in another order may round to the neighbour, rarely. Triton's interpreter cuts where a GPU rounds.
    assert error.max() <= (2**-5 if INTERPRETED else 2**-6)
    assert INTERPRETED or error.mean() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_residual_pieces(fused, size, first, dtype):
    tokens, dim = size[0], size[1] * size[2]
    kind = dtype if first else torch.float32
    x = rand(dim, tokens, dtype=kind).T if first else rand(tokens, dim)  # as the patch embedding leaves it
    y = rand(tokens, dim, dtype=dtype, seed=1)
    shift, scale, gate = (rand(1, dim, seed=2 + i) for i in range(3))
    modulation = 1 + rand(tokens, dim, dtype=dtype, seed=6), rand(tokens, dim, dtype=dtype, seed=7)
    norm = LayerNorm(dim, EPS, affine=True, device=DEVICE, dtype=dtype)
    norm.weight.data, norm.bias.data = rand(dim, dtype=dtype, seed=8), rand(dim, dtype=dtype, seed=9)

    def results(pieces: Pieces) -> list[Tensor]:
        with torch.no_grad():
            return [
                pieces.modulated(x.clone(), shift, scale, EPS, dtype),
                *pieces.camera(x.clone(), y, gate, modulation, norm, dtype),
                *pieces.added(x.clone().float(), y, shift, scale, EPS, dtype),
                pieces.gated(x.clone(), y, gate),
            ]

    for got, expected in zip(results(fused), results(PYTORCH), strict=True):
        close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_queries_and_keys(fused, size, dtype):
    tokens, heads, head_dim = size
    dim = heads * head_dim
    rope = rope_for_chunk(5, 1, 1, tokens, head_dim, DEVICE)
    wide = rand(tokens, 3 * dim, dtype=dtype)
    weight = rand(dim, dtype=dtype, seed=1)
    for x in wide.chunk(3, dim=-1):  # rows of a joined projection
        for turn in (rope, None):
            expected = PYTORCH.heads(x, weight, EPS, turn, heads, None)
            close(fused.heads(x, weight, EPS, turn, heads, None), expected)
            slots = torch.zeros(tokens + 4, heads, head_dim, dtype=dtype, device=DEVICE)
            assert fused.heads(x, weight, EPS, turn, heads, slots[2:-2]).data_ptr() == slots[2:].data_ptr()
            close(slots[2:-2], expected)
            assert not slots[:2].any()
            assert not slots[-2:].any()


def test_the_device_decides():
    assert pieces_for(torch.zeros(1)) is PYTORCH


def test_kernels_are_tried_before_they_are_used(fused, monkeypatch, caplog):
    assert type(working(DEVICE)) is type(fused)
    kernels = importlib.import_module("lingbot_core.models.kernels")
    right = kernels.FusedPieces.gated

    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler")

    for way, words in ((no_compiler, "Failed to find C compiler"), (lambda s, x, y, g: right(s, x, y, g) + 1, "wrong")):
        caplog.clear()
        monkeypatch.setattr(kernels.FusedPieces, "gated", way)
        assert working(DEVICE) is None
        assert words in caplog.text
