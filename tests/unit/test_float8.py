"""Float8 linears: what is rounded, how far off that is, which layers stay; files are taken as they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lingbot_core import World, WorldSession
from lingbot_core.camera.controls import KeyMotion
from lingbot_core.camera.keys import PER_LATENT
from lingbot_core.cli import main
from lingbot_core.errors import WeightsError
from lingbot_core.models.dit import CausalWanDiT, DiTConfig
from lingbot_core.models.float8 import FLOAT8, LARGEST, Linear8, Rows8, float8_names, quantise_rows, takes, use_float8

SMALL = DiTConfig(dim=48, ffn_dim=64, num_layers=2, num_heads=2, freq_dim=16, text_dim=16)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small() -> CausalWanDiT:
    dit = CausalWanDiT(SMALL).eval().requires_grad_(False)
    for number, parameter in enumerate(dit.parameters()):
        parameter.copy_(rand(*parameter.shape, seed=number) / 8)
    return dit


def test_rows_fill_the_range_and_lose_at_most_a_sixteenth():
    x = rand(7, 64) * torch.logspace(-6, 6, 7)[:, None]
    rows = quantise_rows(x)
    assert rows.values.dtype == FLOAT8
    assert (rows.values.float().abs().amax(1) == LARGEST).all()
    error = (rows.wide() - x).abs()
    # Half of the distance of neighbours, or of the smallest number that float8 has.
    assert (error <= torch.maximum(x.abs() / 16, rows.scale * 2**-10) * 1.001).all()


def test_zeros_and_large_numbers_stay_finite():
    x = torch.zeros(3, 16)
    x[1] = 1e30
    wide = quantise_rows(x).wide()
    assert torch.isfinite(wide).all()
    assert torch.equal(wide[0], x[0])
    assert torch.allclose(wide[1], x[1])


def test_a_product_is_that_of_the_rounded_numbers():
    linear = nn.Linear(64, 40)
    layer = Linear8.of(linear)
    x = rand(5, 64)
    rows = quantise_rows(x)
    exact = rows.wide() @ (layer.weight.float() * layer.scale).t() + linear.bias
    for given in (x, rows):
        torch.testing.assert_close(layer(given), exact, rtol=1e-5, atol=1e-5)
    plain = linear(x)
    assert 1e-3 < (exact - plain).norm() / plain.norm() < 6e-2


def test_which_layers_become_float8():
    dit = small()
    chosen = use_float8(dit)
    for i in range(SMALL.num_layers):
        block = dit.blocks[i]
        for layer in (block.self_attn.q, block.self_attn.o, block.cross_attn.q, block.cross_attn.o, block.ffn[0]):
            assert isinstance(layer, Linear8)
        for layer in (block.cross_attn.k, block.cross_attn.v, block.cam_scale_layer, block.cam_injector_layer1):
            assert type(layer) is nn.Linear
    assert type(dit.head.head) is type(dit.time_projection[1]) is type(dit.text_embedding[0]) is nn.Linear
    assert len(chosen) == SMALL.num_layers * 8
    assert use_float8(dit) == chosen  # once more changes nothing


def test_exclusions_are_names_or_patterns_and_a_wrong_one_is_named():
    names = [name for name, layer in small().named_modules() if isinstance(layer, nn.Linear)]
    assert "blocks.1.ffn.2" not in float8_names(names, ["blocks.*.ffn.2"])
    assert "blocks.0.cam_scale_layer" in float8_names(names, [])
    dit = small()
    with pytest.raises(WeightsError, match=r"blocks\.\*\.fnn"):
        use_float8(dit, ["blocks.*.fnn"])
    assert type(dit.blocks[0].ffn[0]) is nn.Linear


def test_an_input_is_rounded_early_only_where_all_take_it():
    dit = small()
    use_float8(dit, ["blocks.*.self_attn.v"])
    attention = dit.blocks[0].self_attn
    assert takes(torch.float32, attention.q, attention.k) == FLOAT8
    assert attention.takes(torch.float32) == torch.float32
    assert isinstance(attention.q(rand(3, SMALL.dim)), torch.Tensor)


def test_joined_projections_give_the_same_bits():
    dit = small()
    use_float8(dit)
    attention = dit.blocks[0].self_attn
    x = quantise_rows(rand(6, SMALL.dim))
    apart = attention._project(x)
    attention.join()
    assert attention._joined is not None
    for got, expected in zip(attention._project(x), apart, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def worlds() -> tuple[World, World]:
    return World.load("tiny"), World.load("tiny", dtype="float8")


def walk(world: World, chunks: int) -> list[torch.Tensor]:
    image = torch.linspace(0, 1, 32 * 48 * 3).view(32, 48, 3).numpy()
    session = WorldSession.start(world, (255 * image).astype("uint8"), "a field")
    held = ("w", "wl", "w")
    return [session.advance(session.controls(KeyMotion(held, PER_LATENT))).latents for _ in range(chunks)]


def test_a_world_in_float8_is_smaller_and_walks_nearly_the_same(worlds):
    exact, rounded = worlds
    assert exact.fingerprint != rounded.fingerprint
    sizes = [world.estimate(world.preset, 96, 160).transformer for world in worlds]
    assert sizes[1] < 0.6 * sizes[0]
    for a, b in zip(walk(exact, 3), walk(rounded, 3), strict=True):
        assert 1e-3 < (a - b).norm() / a.norm() < 0.2


def test_files_in_float8_are_taken_as_they_are_stored(tmp_path, worlds):
    assert main(["convert", "tiny", str(tmp_path), "--dtype", "fp8"]) == 0
    [file] = [path for path in tmp_path.rglob("*.safetensors") if "fp8" in path.name]
    layer = World.load(file, dtype="float8").dit.blocks[0].ffn[0]
    assert isinstance(layer, Linear8)
    assert len(layer.scale.unique()) == 1, "one scale for the whole weight, as ComfyUI has it"
    again = Rows8(layer.weight, layer.scale).wide()
    plain = worlds[0].dit.blocks[0].ffn[0].weight
    assert (again - plain).norm() / plain.norm() < 5e-2
