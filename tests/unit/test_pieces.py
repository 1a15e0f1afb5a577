"""The pieces between matrix products: fused kernels against PyTorch's own, and joined projections.

Kernels run on a GPU where there is one, and through Triton's interpreter elsewhere (tests/conftest.py).
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from lingbot_core.models.dit_blocks import LayerNorm
from lingbot_core.models.float8 import FLOAT8, Activations, Rows8
from lingbot_core.models.kv_cache import CacheShape, KVCache
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


def close(got: Activations, expected: Activations) -> None:
    if isinstance(expected, Rows8):
        assert isinstance(got, Rows8)
        assert got.scale.shape == expected.scale.shape
        assert ((got.scale / expected.scale - 1).abs() < 2e-2).all()
        # Neighbours in float8 are 1/8 apart. Triton's interpreter halves a number that rounds up to a power of two.
        assert INTERPRETED or (got.values.view(torch.uint8) != expected.values.view(torch.uint8)).float().mean() < 0.01
        got, expected = got.wide(), expected.wide()
        apart = (got - expected).abs() > 0.13 * expected.abs() + 0.01 * expected.abs().amax(1, keepdim=True)
        if INTERPRETED:
            apart &= (2 * got - expected).abs() > 0.02 * expected.abs()
        assert not apart.any()
        return
    assert isinstance(got, Tensor)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    error = (got.float() - expected.float()).abs() / (1 + expected.float().abs())
    if got.dtype == torch.float32:
        assert error.max() < 2e-6
        return
    # A sum in another order may round to the neighbour, rarely. Triton's interpreter cuts where a GPU rounds.
    assert error.max() <= (2**-5 if INTERPRETED else 2**-6)
    assert INTERPRETED or error.mean() < 1e-4


@pytest.mark.parametrize("kind", ["same", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_residual_pieces(fused, size, first, dtype, kind):
    tokens, dim = size[0], size[1] * size[2]
    taken = FLOAT8 if kind == "float8" else dtype
    x_kind = dtype if first else torch.float32
    x = rand(dim, tokens, dtype=x_kind).T if first else rand(tokens, dim)  # as the patch embedding leaves it
    y = rand(tokens, dim, dtype=dtype, seed=1)
    shift, scale, gate = (rand(1, dim, seed=2 + i) for i in range(3))
    modulation = 1 + rand(tokens, dim, dtype=dtype, seed=6), rand(tokens, dim, dtype=dtype, seed=7)
    norm = LayerNorm(dim, EPS, device=DEVICE, dtype=dtype)
    norm.weight.data, norm.bias.data = rand(dim, dtype=dtype, seed=8), rand(dim, dtype=dtype, seed=9)
    row = (shift, scale, EPS)

    def results(pieces: Pieces) -> list[Activations]:
        with torch.no_grad():
            return [
                pieces.modulated(x.clone(), *row, taken),
                *pieces.camera(x.clone(), y, gate, modulation, norm, taken),
                *pieces.added(x.clone().float(), y, *row, taken),
                *pieces.gated(x.clone(), y, gate, *row, taken),
                pieces.given(y, taken),
            ]

    for got, expected in zip(results(fused), results(PYTORCH), strict=True):
        close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_queries(fused, size, dtype):
    tokens, heads, head_dim = size
    dim = heads * head_dim
    rope = rope_for_chunk(5, 1, 1, tokens, head_dim, DEVICE)
    wide = rand(tokens, 3 * dim, dtype=dtype)
    weight = rand(dim, dtype=dtype, seed=1)
    for x in wide.chunk(3, dim=-1):  # rows of a joined projection
        for turn in (rope, None):
            close(fused.heads(x, weight, EPS, turn, heads), PYTORCH.heads(x, weight, EPS, turn, heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_keys_and_values_go_where_the_cache_has_room(fused, size, dtype):
    """Also when a window that does not divide has evicted, and a chunk's frames lie apart."""
    tokens, heads, head_dim = size
    dim, frames = heads * head_dim, 3
    shape = CacheShape(2, heads, head_dim, tokens)
    caches = [KVCache(shape, window=7, sink=1, dtype=dtype, device=DEVICE) for _ in range(2)]
    for cache in caches:
        for layer in range(2):
            for buffer in cache.buffers(layer):
                buffer.zero_()
    weight = rand(dim, dtype=dtype, seed=1)
    for chunk in range(5):
        joined = rand(frames * tokens, 3 * dim, dtype=dtype, seed=10 + chunk)
        _, keys, values = joined.chunk(3, dim=-1)
        rope = rope_for_chunk(frames * chunk, frames, 1, tokens, head_dim, DEVICE)
        for cache, pieces in zip(caches, (fused, PYTORCH), strict=True):
            cache.begin(frames * chunk, frames)
            pieces.keep(keys, values, weight, EPS, rope, cache, 1)
            cache.end()
        for got, expected in zip(caches[0].buffers(1), caches[1].buffers(1), strict=True):
            close(got, expected)
        assert torch.equal(caches[0].buffers(1)[1], caches[1].buffers(1)[1])
    assert not any(buffer.any() for buffer in caches[0].buffers(0))


@pytest.mark.parametrize("kind", ["same", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activation(fused, dtype, kind):
    layer = torch.nn.Linear(48, 80, device=DEVICE, dtype=dtype)
    x = 3 * rand(5, 48, dtype=dtype)
    taken = FLOAT8 if kind == "float8" else dtype
    with torch.no_grad():
        got, expected = fused.activated(layer, x, taken), PYTORCH.activated(layer, x, taken)
    if isinstance(expected, Tensor):
        # On a GPU the product's own last step does it: with another tanh, and before the sum is rounded.
        assert isinstance(got, Tensor)
        assert torch.allclose(got.float(), expected.float(), rtol=2**-6, atol=2e-3)
        return
    close(got, expected)


def test_the_device_decides():
    assert pieces_for(torch.zeros(1)) is PYTORCH


def test_kernels_are_tried_before_they_are_used(fused, monkeypatch, caplog):
    assert type(working(DEVICE)) is type(fused)
    kernels = importlib.import_module("lingbot_core.models.kernels")
    right = kernels.FusedPieces.gated

    def off_by_one(self, x, y, *rest):
        return right(self, x, y + 1, *rest)

    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler")

    for way, words in ((no_compiler, "Failed to find C compiler"), (off_by_one, "wrong")):
        caplog.clear()
        monkeypatch.setattr(kernels.FusedPieces, "gated", way)
        assert working(DEVICE) is None
        assert words in caplog.text
