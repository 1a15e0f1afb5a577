"""The decoder over planes: its steps against PyTorch's layers, our kernels against its steps, both against the VAE.

Kernels run on a GPU where there is one, and through Triton's interpreter elsewhere (tests/conftest.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lingbot_core.models import vae_plane_decoder
from lingbot_core.models.vae import DecoderState, VAEConfig, WanVAE
from lingbot_core.models.vae_blocks import RMSNorm
from lingbot_core.models.vae_plane_decoder import PlaneDecoder, pieces_for, usable, working
from lingbot_core.models.vae_planes import PLAIN, SPACE, TIME, Kernel, PlanePieces, Planes

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# Triton's interpreter multiplies the bits of bfloat16, not its numbers.
HALVES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
COMPUTED = torch.float32 if INTERPRETED else torch.bfloat16
SMALL = VAEConfig(dim=16, dim_mult=(1, 2, 2, 2), num_res_blocks=1)
PYTORCH = PlanePieces()


@pytest.fixture(autouse=True)
def exact_sums(monkeypatch):
    """PyTorch's own convolutions of float32 are TF32 on a GPU unless they are told not to be."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def fused() -> PlanePieces:
    pytest.importorskip("triton", reason="Triton is not made for this system")
    return importlib.import_module("lingbot_core.models.vae_kernels").FusedPlanePieces(DEVICE)


@pytest.fixture(scope="module")
def tiles():
    pytest.importorskip("triton", reason="Triton is not made for this system")
    return importlib.import_module("lingbot_core.models.vae_convolution")


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: Tensor, expected: Tensor) -> None:
    """Equal up to the order of float32 sums (Triton's are TF32 on a GPU), or to a neighbour in 16 bits now and then."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    error = (got.float() - expected.float()).abs() / (1 + expected.float().abs())
    exact = 1e-5 if INTERPRETED else 4e-3
    # Triton's interpreter cuts where a GPU rounds.
    assert error.max() <= (exact if got.dtype == torch.float32 else 2**-5 if INTERPRETED else 2**-6)


def small_vae(dtype: torch.dtype = torch.float32, operations: object = nn) -> WanVAE:
    torch.manual_seed(1)
    vae = WanVAE(SMALL, operations=operations).requires_grad_(False)
    for name, parameter in vae.decoder.named_parameters():
        if "gamma" in name:
            parameter.data.normal_(1, 0.2)
    vae.to(DEVICE)
    vae.decode_in(dtype)
    return vae


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return rand(16, 5, 2, 3, seed=3)


@pytest.fixture(scope="module")
def few() -> Tensor:
    """As few and small as show everything: the interpreter takes its time."""
    return rand(16, 2 if INTERPRETED else 6, 1, 1, seed=3)


# Planes


def test_planes_hold_frames_with_zeros_between():
    x = rand(1, 4, 2, 3, 5)
    planes = Planes.of(x)
    assert (planes.count, planes.area) == (2, 24)
    assert torch.equal(planes.volume, x)
    lines = planes.rows.view(2, 4, 6, 4)
    assert not lines[:, 3].any()
    assert not lines[:, :, 5].any()


def test_a_convolution_before_a_nearest_upsampling_is_the_one_behind_it():
    conv = nn.Conv2d(8, 6, 3, padding=1, device=DEVICE, dtype=torch.float64)
    x = rand(1, 8, 2, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        large = F.interpolate(x[0].transpose(0, 1), scale_factor=2.0, mode="nearest-exact")
        expected = conv(large).transpose(0, 1).unsqueeze(0)
        weight = _folded_in_full(conv.weight)
        got = PYTORCH.convolved(Planes.of(x), Kernel(weight, conv.bias), SPACE).volume
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def _folded_in_full(weight: Tensor) -> Tensor:
    """`Kernel.folded` adds in float32; here two halves of the weights that float32 holds exactly, added afterwards."""
    high = weight.float()
    low = (weight - high).float()
    parts = [Kernel.folded(part.double().float(), None).weight.double() for part in (high, low)]
    exact = torch.stack([sum_of_taps(weight, y, x) for y in (0, 1) for x in (0, 1)]).flatten(0, 1)
    folded = (parts[0] + parts[1])[:, 0]
    torch.testing.assert_close(folded, exact, rtol=1e-6, atol=1e-6)
    return exact.unsqueeze(1)


def sum_of_taps(weight: Tensor, y: int, x: int) -> Tensor:
    """[outer, 2, 2, inner]: which of three taps fall on which of two pixels, for one corner of a doubled pixel."""
    joined = {0: ((0,), (1, 2)), 1: ((0, 1), (2,))}
    rows = torch.stack([sum(weight[:, :, tap] for tap in taps) for taps in joined[y]], dim=2)
    columns = [sum(rows[..., tap] for tap in taps) for taps in joined[x]]
    return torch.stack(columns, dim=3).permute(0, 2, 3, 1)


def test_folding_costs_no_more_than_rounding_weights_to_16_bits_does():
    conv = nn.Conv2d(64, 32, 3, padding=1, device=DEVICE)
    x = rand(1, 64, 1, 8, 8)
    with torch.no_grad():
        large = F.interpolate(x[0].transpose(0, 1), scale_factor=2.0, mode="nearest-exact")
        exact = conv(large).transpose(0, 1).unsqueeze(0)
        rounded = conv.weight.bfloat16().float()
        plain = F.conv2d(large, rounded, conv.bias, padding=1).transpose(0, 1).unsqueeze(0)
        folded = Kernel.folded(conv.weight.bfloat16(), conv.bias)
        folded = Kernel(folded.weight.float(), folded.bias)
        got = PYTORCH.convolved(Planes.of(x), folded, SPACE).volume
    error, usual = (got - exact).norm() / exact.norm(), (plain - exact).norm() / exact.norm()
    assert usual < 2**-8
    assert error < 1.5 * usual


# Kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("frames", [1, 3])
def test_what_a_convolution_reads(fused, frames, dtype):
    x, past = Planes.of(rand(1, 48, frames, 3, 5, dtype=dtype)), rand(1, 48, 2, 3, 5, dtype=dtype, seed=1)
    norm = RMSNorm(48, 3, device=DEVICE, dtype=dtype)
    norm.gamma.data = rand(48, 1, 1, 1, dtype=dtype, seed=2)
    with torch.no_grad():
        for before in (None, past, past.contiguous(memory_format=torch.channels_last_3d)):
            for how in (None, norm):
                got, expected = (pieces.prepared(x, before, how) for pieces in (fused, PYTORCH))
                close(got[0].rows, expected[0].rows)  # zeros between the frames, too
                close(got[1], expected[1])
        close(fused.normed(x, norm).volume, PYTORCH.normed(x, norm).volume)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("outer", "taps", "place"),
    [
        (48, (3, 3, 3), PLAIN),
        (96, (1, 1, 1), PLAIN),
        (96, (3, 1, 1), TIME),
        (64, (1, 2, 2), SPACE),
        (384, (1, 2, 2), SPACE),
    ],
)
def test_convolutions(fused, outer, taps, place, dtype):
    x = Planes.of(rand(1, 32, 3, 3, 5, dtype=dtype))
    weight = rand(outer, *taps, 32, dtype=dtype, seed=1) / 32
    kernel = Kernel(weight, rand(outer // (4 if place == SPACE else 1), dtype=dtype, seed=2))
    with torch.no_grad():
        got, expected = (pieces.convolved(x, kernel, place) for pieces in (fused, PYTORCH))
        close(got.volume, expected.volume)
        if place != PLAIN:
            return
        close(got.rows, expected.rows)
        add = Planes.of(rand(*expected.volume.shape, dtype=dtype, seed=3))
        expected = PYTORCH.convolved(x, kernel, add=add)
        got = fused.convolved(x, kernel, add=Planes(add.rows.clone(), 3, 5))
        close(got.volume, expected.volume)


def test_frames_taken_together_or_one_by_one_are_bitwise_the_same(fused):
    x, norm = rand(1, 32, 4, 3, 5), RMSNorm(32, 3, device=DEVICE)
    three = Kernel(rand(48, 3, 3, 3, 32, seed=1) / 32, rand(48, seed=2))
    twice = Kernel(rand(64, 3, 1, 1, 32, seed=3) / 32, rand(64, seed=4))
    larger = Kernel(rand(64, 1, 2, 2, 32, seed=5) / 32, rand(16, seed=6))

    def steps(part: Tensor, past: Tensor | None) -> tuple[list[Tensor], Tensor]:
        with torch.no_grad():
            ready, slot = fused.prepared(Planes.of(part), past, norm)
            found = [fused.convolved(ready, three), fused.convolved(ready, twice, TIME)]
            found.append(fused.convolved(Planes.of(part), larger, SPACE))
        return [planes.volume for planes in found], slot

    together, last = steps(x, None)
    past, parts = None, []
    for part in x.split([1, 2, 1], dim=2):
        got, past = steps(part, past)
        parts.append(got)
    for whole, pieces in zip(together, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(pieces, dim=2), whole)
    assert torch.equal(past, last)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_picture_is_clamped_float32(fused, dtype):
    x = Planes.of(rand(1, 32, 4, 3, 130, dtype=dtype))
    kernel = Kernel(rand(3, 3, 3, 3, 32, dtype=dtype, seed=1) / 16, rand(3, dtype=dtype, seed=2))
    got, expected = torch.empty(2, 3, 7, 3, 130, device=DEVICE)
    fused.picture(x, kernel, got[:, 1:3])  # a part of a longer clip
    PYTORCH.picture(x, kernel, expected[:, 1:3])
    assert (got[:, 1:3] - expected[:, 1:3]).abs().max() <= (1e-5 if dtype == torch.float32 and INTERPRETED else 2**-7)
    assert got[:, 1:3].abs().max() == 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"more": 16},
        {"described": False},
        {"described": False, "more": 16, "cached": True},
    ],
)
def test_every_kind_of_tile_gives_the_same_sums(tiles, settings):
    tile = tiles.Tile(64, 32, depth=16, stages=2, warps=4, **settings)
    x = Planes.of(rand(1, 32, 6, 3, 4))
    weight, bias = rand(48, 3, 3, 3, 32, seed=1) / 32, rand(48, seed=2)
    add = Planes.of(rand(1, 48, 4, 3, 4, seed=3))
    expected = PYTORCH.convolved(x, Kernel(weight, bias), add=add).rows
    got = torch.full_like(expected, 7.0)
    tiles.convolve(x.rows, weight, bias, got, size=(3, 4), taps=(3, 3, 3), tile=tile, add=add.rows)
    close(got, expected)
    assert len(tile.name) < 40


def test_tiles_that_do_not_fit_are_refused(tiles):
    x, out = torch.zeros(24, 32), torch.zeros(24, 48)
    weight = torch.zeros(96, 1, 1, 1, 32)
    with pytest.raises(ValueError, match="depth of 64"):
        tiles.convolve(x, weight[:48], None, out, size=(3, 5), taps=(1, 1, 1), tile=tiles.Tile())
    with pytest.raises(ValueError, match="strips of 128"):
        tiles.convolve(x, weight, None, out, size=(3, 5), taps=(1, 1, 1), tile=tiles.Tile(depth=32), place=TIME)


# The decoder


def decode(vae: WanVAE, pieces: PlanePieces | None, parts: list[Tensor], state: DecoderState | None = None) -> Tensor:
    vae.pieces = pieces
    state = state or DecoderState()
    return torch.cat([vae.decode(part, state) for part in parts], dim=1)


def test_planes_give_what_the_modules_give(latents):
    vae = small_vae()
    states = DecoderState(), DecoderState()
    expected = decode(vae, None, [latents], states[0])
    got = decode(vae, PYTORCH, [latents], states[1])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert states[0].latents == states[1].latents == 5
    assert states[0].nbytes == states[1].nbytes
    for a, b in zip(states[0].slots, states[1].slots, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    # Either goes on where the other stopped.
    rest = rand(16, 2, 2, 3, seed=4)
    torch.testing.assert_close(
        decode(vae, PYTORCH, [rest], states[0]), decode(vae, None, [rest], states[1]), rtol=0, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # sums with rubbish that nobody reads
def test_our_kernels_give_what_the_modules_give(fused, few):
    vae = small_vae()
    states = DecoderState(), DecoderState()
    expected = decode(vae, None, [few])
    together = decode(vae, fused, [few], states[0])
    assert (together - expected).abs().max() < (1e-4 if INTERPRETED else 2e-2)
    if not INTERPRETED:
        assert torch.equal(decode(vae, fused, few.split(1, dim=1), states[1]), together)
        assert states[0].equals(states[1])
    assert states[0].nbytes == sum(slot.untyped_storage().nbytes() for slot in states[0].slots)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_in_16_bits_our_kernels_err_no_more_than_the_modules(fused, few):
    exact = decode(small_vae(), None, [few[:, :2]])
    for dtype in HALVES:
        vae = small_vae(dtype)
        usual, ours = ((decode(vae, how, [few[:, :2]]) - exact).norm() for how in (None, fused))
        assert ours < 1.2 * usual
        assert usual < 0.1 * exact.norm()


@pytest.mark.parametrize(("at_once", "groups"), [(1, [1, 1, 1, 1, 1]), (2, [1, 2, 2]), (3, [1, 3, 1]), (9, [1, 4])])
def test_latents_are_decoded_in_groups_and_the_first_alone(latents, at_once, groups, monkeypatch):
    vae = small_vae()
    expected = decode(vae, None, [latents])
    vae.latents_at_once = at_once
    found = []
    step = PlaneDecoder.decode

    def noted(self, group, tape, out):
        found.append(group.shape[2])
        return step(self, group, tape, out)

    monkeypatch.setattr(PlaneDecoder, "decode", noted)
    got = decode(vae, PYTORCH, [latents])
    assert found == groups
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_copies_fork_and_a_failure_leaves_the_state(latents, monkeypatch):
    vae = small_vae()
    state = DecoderState()
    decode(vae, PYTORCH, [latents[:, :3]], state)
    before = state.copy()
    expected = decode(vae, PYTORCH, [latents[:, 3:]], before.copy())
    branch = decode(vae, PYTORCH, [latents[:, 4:]], before.copy())
    assert not torch.equal(branch, expected[:, 4:])

    def cancelled(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlanePieces, "picture", cancelled)
        with pytest.raises(KeyboardInterrupt):
            vae.decode(latents[:, 3:], state)
    assert state.latents == 3
    assert state.equals(before)
    assert torch.equal(decode(vae, PYTORCH, [latents[:, 3:]], state), expected)


# Which way is taken


def modules_of(vae: WanVAE) -> list[nn.Module]:
    return [vae.conv2, *vae.decoder.modules()]


def test_only_16_bits_and_widths_that_fit_are_for_our_kernels():
    assert usable(modules_of(small_vae(torch.bfloat16)), DEVICE)
    assert usable(modules_of(small_vae(torch.float16)), DEVICE)
    assert not usable(modules_of(small_vae()), DEVICE)
    narrow = WanVAE(dataclasses.replace(SMALL, dim=8), dtype=torch.bfloat16, device=DEVICE)
    assert not usable(modules_of(narrow), DEVICE)
    assert not usable(modules_of(small_vae(torch.bfloat16)), torch.device("meta"))


def test_weights_that_a_host_patches_in_use_are_left_to_it_unless_it_tells_how_to_get_them():
    class Patched(nn.Conv3d):
        weight_function = (lambda weight: weight,)

    @contextlib.contextmanager
    def weights_of(conv, x):
        yield conv.weight.to(x), None if conv.bias is None else conv.bias.to(x)

    operations = types.SimpleNamespace(Conv2d=nn.Conv2d, Conv3d=Patched)
    vae = small_vae(torch.bfloat16, operations)
    assert not usable(modules_of(vae), DEVICE)
    assert usable(modules_of(vae), DEVICE, weights_of)


def test_a_hosts_way_to_its_weights_is_the_one_taken(latents):
    asked = []

    @contextlib.contextmanager
    def weights_of(conv, x):
        asked.append(conv)
        yield 2 * conv.weight, conv.bias

    operations = types.SimpleNamespace(Conv2d=nn.Conv2d, Conv3d=nn.Conv3d, weights_of=weights_of)
    vae, other = small_vae(operations=operations), small_vae()
    for module in modules_of(other):
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.weight.data *= 2
    got, expected = (decode(each, PYTORCH, [latents[:, :2]]) for each in (vae, other))
    torch.testing.assert_close(got, expected)
    assert set(asked) == {m for m in modules_of(vae) if isinstance(m, nn.Conv2d | nn.Conv3d)}


def test_a_cpu_goes_through_the_modules():
    assert pieces_for(modules_of(small_vae(torch.bfloat16)), torch.device("cpu")) is None


def test_kernels_are_tried_before_they_are_used(fused, monkeypatch, caplog):
    assert type(working(DEVICE, COMPUTED)) is type(fused)
    right = type(fused).convolved

    def no_compiler(*_, **__):
        raise RuntimeError("Failed to find C compiler")

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return Planes(found.rows + 1, found.height, found.width)

    for way, words in ((no_compiler, "Failed to find C compiler"), (wrong, "wrong")):
        caplog.clear()
        monkeypatch.setattr(type(fused), "convolved", way)
        assert vae_plane_decoder.working(DEVICE, COMPUTED) is None
        assert words in caplog.text
