"""umT5 against recorded numbers of the reference implementation (float32, CPU)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from lingbot_core.models.text import TextEncoder, build_umt5, load_umt5, umt5_config_from_shapes

FILES = ("t5.safetensors",)
TOLERANCE = 1e-4  # the format's own limit


@pytest.fixture(scope="module")
def golden(golden_dir):
    return load_file(golden_dir / "t5.safetensors")


@pytest.fixture(scope="module")
def model(golden):
    prefix = "state_dict."
    weights = {name.removeprefix(prefix): t for name, t in golden.items() if name.startswith(prefix)}
    return load_umt5(build_umt5(umt5_config_from_shapes(weights)), weights, dtype=torch.float32)


def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    error = (got - want).abs().max().item()
    print(f"t5.safetensors {what}: max abs error {error:.2e} (limit {TOLERANCE:.0e})")
    assert error <= TOLERANCE


def test_hidden_states_of_a_padded_batch(golden, model):
    blocks: list[torch.Tensor] = []
    handles = [
        block.register_forward_hook(
            lambda module, inputs, output: blocks.append(output[0] if isinstance(output, tuple) else output)
        )
        for block in model.encoder.block
    ]
    with torch.no_grad():
        hidden = model(input_ids=golden["in.ids"], attention_mask=golden["in.mask"]).last_hidden_state
    for handle in handles:
        handle.remove()
    for index, block in enumerate(blocks):
        check(f"mid.block{index}_out", block, golden[f"mid.block{index}_out"])
    check("out.hidden", hidden, golden["out.hidden"])


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_text_encoder_returns_the_states_of_true_length(golden, model, row):
    ids = golden["in.ids"][row][golden["in.mask"][row].bool()].tolist()

    class Recorded:
        eos_token_id = ids[-1]

        def __call__(self, text, **options):
            return {"input_ids": ids}

    encoded = TextEncoder(model, Recorded()).encode("recorded")
    assert (encoded.tokens, encoded.truncated) == (len(ids), False)
    check(f"out.trimmed{row}", encoded.states, golden[f"out.trimmed{row}"])


def test_relative_positions_fall_into_the_recorded_buckets(golden, model):
    attention = model.encoder.block[0].layer[0].SelfAttention
    buckets = attention._relative_position_bucket(golden["rel_bucket.distance_key_minus_query"])
    assert torch.equal(buckets, golden["rel_bucket.bucket"])
