"""The streaming VAE: what a piece-wise run must share with a whole one, and what it refuses."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import nn

from lingbot_core.errors import CacheError, ImageError, LengthError, LingBotError, WeightsError
from lingbot_core.models.vae import (
    DECODER_SPAN,
    LATENT_MEAN,
    LATENT_STD,
    DecoderState,
    EncoderState,
    VAEConfig,
    WanVAE,
    frames_for,
)
from lingbot_core.models.vae_blocks import RMSNorm

TINY = VAEConfig(dim=4)


def make_vae(dtype: torch.dtype = torch.float32, operations: object = nn) -> WanVAE:
    torch.manual_seed(1)
    return WanVAE(TINY, operations=operations, dtype=dtype)


@pytest.fixture(scope="module")
def vae() -> WanVAE:
    return make_vae()


@pytest.fixture(scope="module")
def video() -> torch.Tensor:
    return torch.rand(3, 25, 16, 24, generator=torch.Generator().manual_seed(2)) * 2 - 1


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(16, 7, 2, 3, generator=torch.Generator().manual_seed(3))


def test_encoding_in_pieces_is_bitwise_the_whole_encode(vae, video):
    whole = vae.encode(video)
    state = EncoderState()
    pieces = [vae.encode(piece, state) for piece in video.split([9, 4, 12], dim=1)]
    assert whole.shape == (16, 7, 2, 3)
    assert [piece.shape[1] for piece in pieces] == [3, 1, 3]
    assert torch.equal(torch.cat(pieces, dim=1), whole)
    assert state.latents == 7


def test_decoding_in_pieces_is_bitwise_the_whole_decode(vae, latents):
    whole = vae.decode(latents)
    state = DecoderState()
    pieces = [vae.decode(piece, state) for piece in latents.split([3, 1, 3], dim=1)]
    assert whole.shape == (3, 25, 16, 24)
    assert [piece.shape[1] for piece in pieces] == [9, 4, 12]
    assert torch.equal(torch.cat(pieces, dim=1), whole)


def test_interleaved_clips_do_not_touch_each_other(vae, latents):
    other = latents.flip(1)
    expected = vae.decode(latents), vae.decode(other)
    a, b = DecoderState(), DecoderState()
    mixed = []
    for x, y in zip(latents.split([3, 4], dim=1), other.split([3, 4], dim=1), strict=True):
        mixed.append((vae.decode(x, a), vae.decode(y, b)))
    for got, want in zip(zip(*mixed, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(got, dim=1), want)


def test_a_copied_state_forks_and_rolls_back(vae, latents):
    state = DecoderState()
    vae.decode(latents[:, :3], state)
    snapshot = state.copy()
    straight = vae.decode(latents[:, 3:5], state)
    vae.decode(latents[:, 5:], state)
    assert snapshot.latents == 3
    assert torch.equal(vae.decode(latents[:, 3:5], snapshot.copy()), straight)
    branch = vae.decode(latents[:, 6:], snapshot.copy())
    whole = vae.decode(torch.cat((latents[:, :3], latents[:, 6:]), dim=1))
    assert torch.equal(branch, whole[:, -4:])


@pytest.mark.parametrize("kind", ["decode", "encode"])
def test_a_failed_call_leaves_the_state_and_can_be_repeated(kind, latents, video, monkeypatch):
    vae = make_vae()
    if kind == "decode":
        state, call, stack, first, rest = DecoderState(), vae.decode, vae.decoder, latents[:, :3], latents[:, 3:]
    else:
        state, call, stack, first, rest = EncoderState(), vae.encode, vae.encoder, video[:, :9], video[:, 9:]
    call(first, state)
    before = state.copy()
    expected = call(rest, state.copy())

    head = type(stack).forward
    calls = []

    def cancelled(self, x, tape):
        calls.append(1)
        out = head(self, x, tape)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patch:
        patch.setattr(type(stack), "forward", cancelled)
        with pytest.raises(KeyboardInterrupt):
            call(rest, state)
    assert state.latents == before.latents == 3
    assert state.equals(before)
    assert torch.equal(call(rest, state), expected)


def test_the_last_38_latents_rebuild_the_decoder_and_37_do_not(vae):
    latents = torch.randn(16, 48, 1, 2, generator=torch.Generator().manual_seed(4))
    past, future = latents[:, :45], latents[:, 45:]
    state = DecoderState()
    frames = vae.decode(past, state)

    rebuilt = DecoderState()
    replayed = vae.decode(past[:, -DECODER_SPAN:], rebuilt)
    assert rebuilt.equals(state)
    # Only the second half of the very last latent's frames is right already.
    assert torch.equal(replayed[:, -2:], frames[:, -2:])
    assert not torch.equal(replayed[:, -3], frames[:, -3])
    assert torch.equal(vae.decode(future, rebuilt), vae.decode(future, state.copy()))

    short = DecoderState()
    vae.decode(past[:, -(DECODER_SPAN - 1) :], short)
    assert not short.equals(state)


def test_the_decoder_span_follows_the_number_of_residual_blocks():
    assert VAEConfig().decoder_span == DECODER_SPAN
    config = dataclasses.replace(TINY, num_res_blocks=1)
    torch.manual_seed(5)
    vae = WanVAE(config)
    latents = torch.randn(16, 32, 1, 1)
    state = DecoderState()
    vae.decode(latents, state)
    for fed, same in ((config.decoder_span, True), (config.decoder_span - 1, False)):
        rebuilt = DecoderState()
        vae.decode(latents[:, -fed:], rebuilt)
        assert rebuilt.equals(state) is same


def test_the_encoder_becomes_exactly_steady_on_a_constant(vae):
    state = EncoderState()
    latents = [vae.encode(torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(6)), state)]
    steady = None
    for index in range(1, 34):
        before = state.copy()
        latents.append(vae.encode(torch.zeros(3, 4, 8, 8), state))
        if steady is None and state.equals(before):
            steady = index
    # From then on every latent repeats the one that left the state as it was.
    assert steady is not None
    assert 12 < steady <= 30
    assert all(torch.equal(later, latents[steady]) for later in latents[steady + 1 :])
    assert not torch.equal(latents[12], latents[steady])


def test_equal_means_bitwise_equal(vae, latents):
    a, b = DecoderState(), DecoderState()
    assert a.equals(b)
    vae.decode(latents[:, :1], a)
    assert not a.equals(b)
    vae.decode(latents[:, :1], b)
    assert a.equals(b)
    assert not a.equals(EncoderState())
    zero, minus = DecoderState(1, (torch.zeros(2),), (2, 3)), DecoderState(1, (-torch.zeros(2),), (2, 3))
    assert not zero.equals(minus)
    nan = torch.full((2,), float("nan"))
    assert DecoderState(1, (nan,), (2, 3)).equals(DecoderState(5, (nan.clone(),), (2, 3)))


def test_a_state_counts_its_bytes_and_keeps_nothing_else_alive(vae, latents):
    state = DecoderState()
    vae.decode(latents[:, :3], state)
    d, area = TINY.dim, 2 * 3
    # Channels times positions of each convolution's input, level by level, two frames of float32 each.
    low = 16 + 11 * 4 * d
    level1 = (2 * d + 5 * 4 * d + 4 * d) * 4
    level2 = (6 * 2 * d) * 16
    level3 = (7 * d) * 64
    assert state.nbytes == (low + level1 + level2 + level3) * area * 2 * 4
    assert state.nbytes == sum(slot.untyped_storage().nbytes() for slot in state.slots)
    assert DecoderState().nbytes == 0


def test_the_meta_device_tells_a_states_size_without_computing(vae, latents):
    state, estimate = DecoderState(), DecoderState()
    vae.decode(latents[:, :2], state)
    WanVAE(TINY, device="meta").decode(torch.empty(16, 2, 2, 3, device="meta"), estimate)
    assert estimate.nbytes == state.nbytes


def test_nothing_is_kept_on_the_module(latents, video):
    vae = make_vae()
    before = {name: set(vars(module)) for name, module in vae.named_modules()}
    vae.decode(latents, DecoderState())
    vae.encode(video, EncoderState())
    assert {name: set(vars(module)) for name, module in vae.named_modules()} == before
    assert not list(vae.buffers())


def test_mean_latents_are_normalised_with_the_published_statistics():
    vae = make_vae()
    bias = torch.linspace(-2, 2, 32)
    with torch.no_grad():
        vae.conv1.weight.zero_()
        vae.conv1.bias.copy_(bias)
    expected = (bias[:16] - torch.tensor(LATENT_MEAN)) / torch.tensor(LATENT_STD)
    latent = vae.encode(torch.zeros(3, 1, 8, 8))
    torch.testing.assert_close(latent[:, 0, 0, 0], expected)


def test_latents_are_denormalised_before_they_are_decoded(monkeypatch):
    vae = make_vae()
    seen = []
    vae.conv2.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    vae.decode(torch.ones(16, 1, 1, 1))
    torch.testing.assert_close(seen[0].flatten(), torch.tensor(LATENT_MEAN) + torch.tensor(LATENT_STD))


def test_frames_are_clamped():
    vae = make_vae()
    with torch.no_grad():
        vae.decoder.head[2].weight.zero_()
        vae.decoder.head[2].bias.copy_(torch.tensor([5.0, -5.0, 0.25]))
    frames = vae.decode(torch.zeros(16, 2, 1, 1))
    assert torch.equal(frames[0], torch.ones(5, 8, 8))
    assert torch.equal(frames[1], -torch.ones(5, 8, 8))
    assert torch.equal(frames[2], torch.full((5, 8, 8), 0.25))


def test_rms_norm_scales_channels_to_the_root_of_their_number():
    norm = RMSNorm(2, 3)
    with torch.no_grad():
        norm.gamma.copy_(torch.tensor([1.0, 10.0]).view(2, 1, 1, 1))
    out = norm(torch.tensor([3.0, 4.0]).view(1, 2, 1, 1, 1)).flatten()
    torch.testing.assert_close(out, torch.tensor([0.6, 8.0]) * 2**0.5)


def test_a_bfloat16_vae_computes_in_bfloat16_and_returns_float32(latents, video):
    vae = make_vae(torch.bfloat16)
    full = make_vae()
    full.load_state_dict(vae.state_dict())
    encoder, decoder = EncoderState(), DecoderState()
    codes, frames = vae.encode(video[:, :5], encoder), vae.decode(latents[:, :2], decoder)
    assert codes.dtype == frames.dtype == torch.float32
    assert {slot.dtype for state in (encoder, decoder) for slot in state.slots if slot is not None} == {torch.bfloat16}
    for low, high in (codes, full.encode(video[:, :5])), (frames, full.decode(latents[:, :2])):
        assert 0 < (low - high).norm() < 0.05 * high.norm()


def test_results_carry_no_gradient(vae, latents, video):
    assert not vae.encode(video[:, :1]).requires_grad
    assert not vae.decode(latents[:, :1]).requires_grad


def test_every_convolution_comes_from_the_injected_operations():
    class Conv2d(nn.Conv2d):
        pass

    class Conv3d(nn.Conv3d):
        pass

    vae = make_vae(operations=types.SimpleNamespace(Conv2d=Conv2d, Conv3d=Conv3d))
    plain = [name for name, module in vae.named_modules() if type(module) in (nn.Conv2d, nn.Conv3d, nn.Linear)]
    assert plain == []
    assert vae.state_dict().keys() == make_vae().state_dict().keys()


@pytest.mark.parametrize(
    "config",
    [
        VAEConfig(),
        TINY,
        VAEConfig(dim=8, dim_mult=(1, 1, 3, 2), num_res_blocks=1, temporal_downsample=(True, True, False)),
    ],
)
def test_the_configuration_is_recovered_from_names_and_shapes(config):
    state_dict = WanVAE(config, device="meta").state_dict()
    assert VAEConfig.from_state_dict(state_dict) == config
    assert VAEConfig.from_state_dict({name: list(tensor.shape) for name, tensor in state_dict.items()}) == config


def test_other_checkpoints_are_refused_by_name():
    shapes = {name: tensor.shape for name, tensor in WanVAE(TINY, device="meta").state_dict().items()}
    with pytest.raises(WeightsError, match=r"encoder\.conv1\.weight"):
        VAEConfig.from_state_dict({"decoder.conv_in.weight": (3, 3)})
    with pytest.raises(WeightsError, match=r"encoder\.downsamples\.0\.residual\.6\.weight"):
        VAEConfig.from_state_dict({k: v for k, v in shapes.items() if k != "encoder.downsamples.0.residual.6.weight"})
    with pytest.raises(WeightsError, match="16 latent channels, this one has 48"):
        VAEConfig.from_state_dict({**shapes, "conv2.weight": (48, 48, 1, 1, 1)})
    with pytest.raises(WeightsError, match="shrinks time by 4"):
        VAEConfig.from_state_dict({k: v for k, v in shapes.items() if "downsamples.8.time_conv" not in k})
    with pytest.raises(WeightsError, match="residual blocks"):
        VAEConfig.from_state_dict({k: v for k, v in shapes.items() if "encoder.downsamples.10" not in k})


@pytest.mark.parametrize("frames", [0, 2, 4, 8])
def test_a_clip_starts_with_one_and_four_times_k_frames(vae, frames):
    state = EncoderState()
    with pytest.raises(LengthError, match=rf"not {frames}$"):
        vae.encode(torch.zeros(3, frames, 8, 8), state)
    assert state.equals(EncoderState())


@pytest.mark.parametrize("frames", [0, 1, 3, 9])
def test_a_running_clip_takes_multiples_of_four_frames(vae, frames):
    state = EncoderState()
    vae.encode(torch.zeros(3, 1, 8, 8), state)
    with pytest.raises(LengthError, match=rf"multiple of 4 frames, not {frames}$"):
        vae.encode(torch.zeros(3, frames, 8, 8), state)


def test_wrong_shapes_and_kinds_are_named(vae):
    with pytest.raises(ImageError, match=r"uint8 \[3, 1, 8, 8\]"):
        vae.encode(torch.zeros(3, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(ImageError, match=r"\[1, 3, 1, 8, 8\]"):
        vae.encode(torch.zeros(1, 3, 1, 8, 8))
    with pytest.raises(ImageError, match="multiples of 8, not 20x16"):
        vae.encode(torch.zeros(3, 1, 16, 20))
    with pytest.raises(LingBotError, match=r"float32 \[4, 1, 2, 2\]"):
        vae.decode(torch.zeros(4, 1, 2, 2))
    with pytest.raises(LengthError, match="no latents"):
        vae.decode(torch.zeros(16, 0, 2, 2))


def test_a_state_belongs_to_one_direction_and_one_size(vae):
    state = DecoderState()
    vae.decode(torch.zeros(16, 1, 2, 3), state)
    with pytest.raises(CacheError, match="3x2 latents and cannot go on at 2x2"):
        vae.decode(torch.zeros(16, 1, 2, 2), state)
    with pytest.raises(CacheError, match="EncoderState, not a DecoderState"):
        vae.encode(torch.zeros(3, 4, 16, 24), state)


def test_the_first_latent_of_a_clip_is_one_frame():
    assert [frames_for(n, first=True) for n in (0, 1, 3, 4)] == [0, 1, 9, 13]
    assert [frames_for(n, first=False) for n in (0, 1, 3, 4)] == [0, 4, 12, 16]
