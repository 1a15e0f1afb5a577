"""The draft decoder: a clip in pieces, which latents it takes, its files, and how a world says that it has one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lingbot_core.engine.world import World
from lingbot_core.errors import WeightsError
from lingbot_core.models.tiny_decoder import PREFIX, TinyDecoder
from lingbot_core.models.vae import LATENT_MEAN, LATENT_STD, DecoderState, VAEConfig, WanVAE
from lingbot_core.weights.draft import load_draft

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return torch.randn(16, 6, 1, 2, generator=torch.Generator().manual_seed(1))


def draft(name: str = "taew2_1", *, raw: bool = False) -> TinyDecoder:
    torch.manual_seed(2)
    return TinyDecoder(name, raw=raw)


def with_draft(decoder: TinyDecoder) -> WanVAE:
    torch.manual_seed(3)
    vae = WanVAE(VAEConfig(dim=4, num_res_blocks=1))
    vae.draft = decoder
    return vae


def write(path, decoder: TinyDecoder, **changes: Tensor):
    tensors = {PREFIX + name: value for name, value in decoder.layers.state_dict().items()}
    save_file({**tensors, "encoder.0.weight": torch.zeros(64, 3, 3, 3), **changes}, path)
    return path


def test_a_clip_in_pieces_is_the_whole_clip(latents):
    vae = with_draft(draft())
    whole = vae.decode(latents)
    state = DecoderState()
    pieces = [vae.decode(part, state) for part in latents.split([1, 2, 3], dim=1)]
    assert whole.shape == (3, 21, 8, 16)
    assert [piece.shape[1] for piece in pieces] == [1, 8, 12]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-5)
    assert whole.dtype == torch.float32
    assert whole.abs().max() <= 1
    assert state.latents == 6
    assert len(state.slots) == 9
    assert state.nbytes == sum(slot.untyped_storage().nbytes() for slot in state.slots)


def test_copies_of_a_state_go_on_independently(latents):
    vae = with_draft(draft())
    state = DecoderState()
    vae.decode(latents[:, :2], state)
    before = state.copy()
    straight = vae.decode(latents[:, 2:4], state)
    vae.decode(latents[:, 4:], state)
    assert torch.equal(vae.decode(latents[:, 2:4], before), straight)


def test_latents_are_normalised_for_one_kind_and_not_for_the_other(latents):
    mean, std = (torch.tensor(table).view(-1, 1, 1, 1) for table in (LATENT_MEAN, LATENT_STD))
    plain, light = with_draft(draft()), with_draft(draft("lighttaew2_1", raw=True))
    torch.testing.assert_close(light.decode(latents), plain.decode(latents * std + mean))
    assert not torch.allclose(light.decode(latents), plain.decode(latents))


def test_a_draft_is_no_part_of_the_vaes_weights():
    vae = with_draft(draft())
    assert not [name for name, _ in vae.named_parameters() if "draft" in name]
    assert vae.decoder_name == "taew2_1 (draft)"
    vae.draft = None
    assert vae.decoder_name == "VAE"


def test_files_are_read_and_their_name_says_which_latents(tmp_path, latents):
    made = draft()
    for name, raw in (("taew2_1.safetensors", False), ("lighttaew2_1_bf16.safetensors", True)):
        read = load_draft(write(tmp_path / name, made), device=CPU, dtype=torch.float32)
        assert read.raw is raw
        assert read.label == f"{name.removesuffix('.safetensors')} (draft)"
        assert torch.equal(read.decode(latents, (), first=True)[0], made.decode(latents, (), first=True)[0])


def test_other_files_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="taew2_1 or lighttaew2_1"):
        load_draft(write(tmp_path / "draft.safetensors", draft()), device=CPU, dtype=torch.float32)
    other = {f"{PREFIX}1.weight": torch.zeros(256, 48, 3, 3)}
    with pytest.raises(WeightsError, match=r"decoder\.1\.weight must be \[256, 16, 3, 3\] and is \[256, 48, 3, 3\]"):
        load_draft(write(tmp_path / "taew2_1.safetensors", draft(), **other), device=CPU, dtype=torch.float32)
    broken = {f"{PREFIX}1.bias": torch.full((256,), float("nan"))}
    with pytest.raises(WeightsError, match="NaN"):
        load_draft(write(tmp_path / "taew2_1.safetensors", draft(), **broken), device=CPU, dtype=torch.float32)


def test_a_world_with_a_draft_is_the_same_world(tmp_path):
    file = write(tmp_path / "taew2_1.safetensors", draft())
    plain = World.load("tiny", device="cpu")
    drafting = World.load("tiny", device="cpu", decoder=file)
    assert drafting.vae.decoder_name == "taew2_1 (draft)"
    assert drafting.fingerprint == plain.fingerprint


def test_the_decoders_dtype_is_no_part_of_a_worlds_identity():
    plain, low = World.load("tiny", device="cpu"), World.load("tiny", device="cpu", vae_dtype="bfloat16")
    assert plain.vae.decoder_dtype == torch.float32
    assert low.vae.decoder_dtype == low.vae.conv2.weight.dtype == torch.bfloat16
    assert {p.dtype for half in (low.vae.encoder, low.vae.conv1) for p in half.parameters()} == {torch.float32}
    assert low.fingerprint == plain.fingerprint
    sizes = [world.estimate(world.preset, 96, 160) for world in (plain, low)]
    assert sizes[1].vae < sizes[0].vae
    assert sizes[1].vae_states < sizes[0].vae_states
