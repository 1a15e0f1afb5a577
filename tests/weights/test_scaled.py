"""fp8 with a scale, in both of ComfyUI's spellings. Expected values follow its QUANTIZATION.md: stored * scale."""

from __future__ import annotations

import json

import pytest
import torch

from lingbot_core.errors import WeightsError
from lingbot_core.weights.checkpoint import Checkpoint
from lingbot_core.weights.keys import TEXT, TRANSFORMER
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.load import load_dit

LAYERS = ("blocks.0.ffn.0", "blocks.39.self_attn.q", "blocks.5.cam_scale_layer")
E4M3_MAX = 448.0


def quantise(weight, dtype=torch.float8_e4m3fn, limit=E4M3_MAX):
    """(stored, scale): absolute maximum over the whole tensor."""
    scale = weight.abs().max() / limit
    return (weight / scale).to(dtype), scale


def quantised(state, layers=LAYERS):
    """The state without its weights of some layers, their fp8 form, and what they must read as."""
    rest = {name: tensor for name, tensor in state.items() if name.removesuffix(".weight") not in layers}
    pairs = {layer: quantise(state[f"{layer}.weight"]) for layer in layers}
    expected = {f"{layer}.weight": stored.float() * scale for layer, (stored, scale) in pairs.items()}
    return rest, pairs, expected


def as_bytes(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def spell(style, pairs, prefix=""):
    """Tensors and metadata of a quantised file."""
    tensors, metadata = {}, {}
    table = {layer: {"format": "float8_e4m3fn", "full_precision_matrix_mult": True} for layer in pairs}
    for layer, (stored, scale) in pairs.items():
        tensors[f"{prefix}{layer}.weight"] = stored
        if style == "older":
            tensors[f"{prefix}{layer}.scale_weight"] = scale.reshape(1)
            tensors[f"{prefix}{layer}.scale_input"] = torch.ones(1)
        else:
            tensors[f"{prefix}{layer}.weight_scale"] = scale
            tensors[f"{prefix}{layer}.input_scale"] = torch.ones(())
        if style == "tensors":
            tensors[f"{prefix}{layer}.comfy_quant"] = as_bytes(json.dumps(table[layer]))
        if style == "bytes":
            tensors[f"{prefix}{layer}.weight"] = stored.view(torch.uint8)
    if style == "older":
        tensors[f"{prefix}scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    if style in ("metadata", "bytes"):
        metadata["_quantization_metadata"] = json.dumps(
            {"format_version": "1.0", "layers": {f"{prefix}{layer}": about for layer, about in table.items()}}
        )
    return tensors, metadata


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("style", ["older", "metadata", "tensors", "bytes"])
def test_scaled_weights_of_every_spelling_are_multiplied_out(style, prefix, checkpoints, tmp_path):
    rest, pairs, expected = quantised(checkpoints.dit)
    tensors, metadata = spell(style, pairs, prefix)
    state = {**{prefix + name: tensor for name, tensor in rest.items()}, **tensors}
    file = checkpoints.write_file(tmp_path / "lingbot_world_fast_fp8_scaled.safetensors", state, metadata)
    layout = find_layout(file)
    dit = load_dit(layout, device=torch.device("cpu"), dtype=torch.float32, attention="math")
    for name, parameter in dit.named_parameters():
        assert torch.equal(parameter, expected.get(name, checkpoints.dit[name])), name
    assert layout.transformer.open().scaled == len(LAYERS)
    # Rounding to three bits of mantissa, no more: the scale is not applied twice or left out.
    assert all(torch.allclose(expected[n], checkpoints.dit[n], rtol=0.07, atol=1e-3) for n in expected)


def test_a_scaled_text_encoder_is_read_under_both_of_its_namings(checkpoints, tmp_path):
    for state, layer, name in (
        (checkpoints.hf_text, "encoder.block.3.layer.1.DenseReluDense.wo", None),
        (checkpoints.text, "blocks.3.ffn.fc2", "encoder.block.3.layer.1.DenseReluDense.wo.weight"),
    ):
        rest, pairs, expected = quantised({k: v.float() for k, v in state.items()}, (layer,))
        tensors, _ = spell("older", pairs)
        extra = {"spiece_model": as_bytes("a sentencepiece model")}
        file = checkpoints.write_file(tmp_path / "umt5.safetensors", {**rest, **tensors, **extra})
        checkpoint = Checkpoint(TEXT, [file])
        assert len(checkpoint) == 242
        got = checkpoint.read(name or f"{layer}.weight", dtype=torch.bfloat16)
        assert torch.equal(got, expected[f"{layer}.weight"].to(torch.bfloat16))


def test_a_scale_for_each_row_is_applied_to_rows(checkpoints, tmp_path):
    weight = checkpoints.dit["blocks.0.ffn.0.weight"]
    for shape in ([-1], [-1, 1]):
        scale = weight.abs().amax(1) / E4M3_MAX
        stored = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        state = {
            **checkpoints.dit,
            "blocks.0.ffn.0.weight": stored,
            "blocks.0.ffn.0.weight_scale": scale.reshape(shape),
        }
        checkpoint = Checkpoint(TRANSFORMER, [checkpoints.write_file(tmp_path / "a.safetensors", state)])
        got = checkpoint.read("blocks.0.ffn.0.weight", dtype=torch.float32)
        assert torch.equal(got, stored.float() * scale[:, None])


def test_fp8_without_a_scale_is_a_plain_cast(checkpoints, tmp_path):
    state = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in checkpoints.dit.items()}
    layout = find_layout(checkpoints.write_file(tmp_path / "lingbot_world_fast.safetensors", state))
    dit = load_dit(layout, device=torch.device("cpu"), dtype=torch.bfloat16, attention="math")
    assert all(torch.equal(p, state[name].to(torch.bfloat16)) for name, p in dit.named_parameters())


@pytest.mark.parametrize("style", ["older", "metadata", "tensors", "bytes"])
def test_scaled_weights_of_every_spelling_can_be_had_as_they_are_stored(style, checkpoints, tmp_path):
    rest, pairs, _ = quantised(checkpoints.dit)
    tensors, metadata = spell(style, pairs)
    checkpoint = Checkpoint(
        TRANSFORMER, [checkpoints.write_file(tmp_path / "a.safetensors", {**rest, **tensors}, metadata)]
    )
    for layer, (stored, scale) in pairs.items():
        found = checkpoint.read_scaled(f"{layer}.weight")
        assert torch.equal(found.values.view(torch.uint8), stored.view(torch.uint8))
        assert found.values.dtype == torch.float8_e4m3fn
        assert torch.equal(found.scale.reshape(()), scale)
        assert (found.format, found.full_precision) == ("float8_e4m3fn", True)
    assert checkpoint.read_scaled("blocks.0.self_attn.q.weight") is None


@pytest.mark.parametrize("style", ["older", "metadata"])
def test_a_file_that_does_not_ask_for_full_precision_may_be_multiplied_in_fp8(style, checkpoints, tmp_path):
    rest, pairs, _ = quantised(checkpoints.dit)
    tensors, metadata = spell(style, pairs)
    if style == "older":
        tensors["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    else:
        metadata = {"_quantization_metadata": json.dumps({"layers": {k: {"format": "float8_e4m3fn"} for k in pairs}})}
    file = checkpoints.write_file(tmp_path / "a.safetensors", {**rest, **tensors}, metadata)
    assert not Checkpoint(TRANSFORMER, [file]).read_scaled(f"{LAYERS[0]}.weight").full_precision


def test_nan_in_a_weight_that_stays_fp8_is_found(checkpoints, tmp_path):
    rest, pairs, _ = quantised(checkpoints.dit)
    pairs[LAYERS[0]][0].view(torch.uint8)[3, 5] = 0x7F
    tensors, metadata = spell("metadata", pairs)
    file = checkpoints.write_file(tmp_path / "a.safetensors", {**rest, **tensors}, metadata)
    with pytest.raises(WeightsError, match=r"blocks\.0\.ffn\.0\.weight in .*a\.safetensors holds NaN"):
        Checkpoint(TRANSFORMER, [file]).read_scaled(f"{LAYERS[0]}.weight")


def test_nan_in_fp8_is_found(checkpoints, tmp_path):
    rest, pairs, _ = quantised(checkpoints.dit)
    stored, _ = pairs[LAYERS[0]]
    stored.view(torch.uint8)[3, 5] = 0x7F
    tensors, metadata = spell("metadata", pairs)
    file = checkpoints.write_file(tmp_path / "a.safetensors", {**rest, **tensors}, metadata)
    with pytest.raises(WeightsError, match=r"blocks\.0\.ffn\.0\.weight in .*a\.safetensors holds NaN"):
        Checkpoint(TRANSFORMER, [file]).read(f"{LAYERS[0]}.weight", dtype=torch.bfloat16)


def broken(checkpoints, path, change, metadata=None):
    rest, pairs, _ = quantised(checkpoints.dit)
    tensors, about = spell("metadata", pairs)
    state = {**rest, **tensors}
    change(state)
    return checkpoints.write_file(path, state, about if metadata is None else metadata)


def test_a_missing_scale_and_formats_we_do_not_have_are_refused_by_name(checkpoints, tmp_path):
    key = f"{LAYERS[0]}.weight_scale"
    file = broken(checkpoints, tmp_path / "a.safetensors", lambda state: state.pop(key))
    with pytest.raises(
        WeightsError, match=r"a\.safetensors: blocks\.0\.ffn\.0\.weight is quantised, but .*weight_scale is"
    ):
        Checkpoint(TRANSFORMER, [file])
    for format_ in ("nvfp4", "mxfp8", "int8_tensorwise"):
        table = {"_quantization_metadata": json.dumps({"layers": {LAYERS[0]: {"format": format_}}})}
        file = broken(checkpoints, tmp_path / "b.safetensors", lambda state: None, table)
        with pytest.raises(WeightsError, match=rf"is quantised as '{format_}', which is not supported"):
            Checkpoint(TRANSFORMER, [file])


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": 3}', '{"layers": {"blocks.0.ffn.0": {}}}'])
def test_a_table_that_cannot_be_read_is_refused(text, checkpoints, tmp_path):
    file = broken(checkpoints, tmp_path / "a.safetensors", lambda state: None, {"_quantization_metadata": text})
    with pytest.raises(WeightsError, match=r"a\.safetensors"):
        Checkpoint(TRANSFORMER, [file])


@pytest.mark.parametrize(
    ("leaf", "tensor", "message"),
    [
        ("weight_scale", torch.ones(3), r"a scale of shape \[3\] for a weight of shape \[96, 80\]"),
        ("weight_scale", torch.ones(1, 96), r"a scale of shape \[1, 96\]"),
        ("weight", torch.ones(96, 80, dtype=torch.int8), "is int8 with a scale"),
        ("weight_scale", torch.tensor(float("inf")), "holds NaN or infinity"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(leaf, tensor, message, checkpoints, tmp_path):
    file = broken(checkpoints, tmp_path / "a.safetensors", lambda state: state.update({f"{LAYERS[0]}.{leaf}": tensor}))
    with pytest.raises(WeightsError, match=rf"blocks\.0\.ffn\.0\.weight in .*{message}"):
        Checkpoint(TRANSFORMER, [file]).read(f"{LAYERS[0]}.weight", dtype=torch.float32)
