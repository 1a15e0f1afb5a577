"""What config.json says is checked against the tensors; code that a model folder brings along is never run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from lingbot_core.cli import main
from lingbot_core.engine.world import World
from lingbot_core.errors import InputFileError, WeightsError
from lingbot_core.weights import convert
from lingbot_core.weights.layout import EMBEDDED_TINY, find_layout
from lingbot_core.weights.load import load_dit, load_text

CPU = torch.device("cpu")


@pytest.fixture
def own(tmp_path):
    """A copy of the embedded model to change."""
    return shutil.copytree(EMBEDDED_TINY, tmp_path / "own")


@pytest.fixture
def bare(untrained, tmp_path):
    """A model whose transformer has its numbers in config.json only, as published ones do."""
    return shutil.copytree(untrained, tmp_path / "bare")


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def text(folder):
    return load_text(find_layout(folder), max_tokens=8, device=CPU, dtype=torch.float32)


def dit(folder):
    return load_dit(find_layout(folder), device=CPU, dtype=torch.float32, attention="math")


def test_code_in_the_tokenizer_of_a_model_is_never_run(own, tmp_path):
    (own / "tokenizer" / "evil.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\nclass Evil: pass\n")
    about = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (own / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(
        InputFileError, match=r"tokenizer_config\.json asks for code of its own .*never run; use umT5's"
    ):
        World.load(own, device="cpu")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("num_heads", "x", "the tensors say 4"),
        ("num_heads", 0, "the tensors say 4"),
        ("num_heads", True, "the tensors say 4"),
        ("num_layers", 3, "the tensors say 2"),
        ("relative_attention_num_buckets", -1, "the tensors say 32"),
        ("vocab_size", [259], "the tensors say 259"),
        ("d_kv", 1e999, "the tensors say 16"),
        ("feed_forward_proj", 3, "umT5 has gated-gelu"),
        ("feed_forward_proj", "relu", "umT5 has gated-gelu"),
        ("dense_act_fn", "nope", "umT5 has gelu_new"),
        ("is_gated_act", 1, "umT5 has True"),
        ("relative_attention_max_distance", 0, "umT5 has 128"),
        ("layer_norm_epsilon", "small", "umT5 has 1e-06"),
    ],
)
def test_a_text_encoder_whose_config_is_wrong_is_refused_by_field(own, field, value, right, capsys):
    change(own / "text_encoder", **{field: value})
    with pytest.raises(WeightsError, match=rf"text_encoder/config\.json says {field} = .*, {right}; get the config"):
        text(own)
    with pytest.raises(WeightsError, match=f"says {field} = "):
        convert.plan(own, own.parent / "out", preset="v1-fast")
    assert main(["inspect", str(own), "--json"]) == 0
    assert any(
        f"says {field} = " in said for part in json.loads(capsys.readouterr().out)["parts"] for said in part["problems"]
    )


def test_what_a_config_says_besides_does_not_matter(own):
    expected = text(EMBEDDED_TINY).encode("a cat").states
    junk = {
        "attn_implementation": "someone/kernels",
        "dtype": 7,
        "id2label": 3,
        "quantization_config": [],
        "use_cache": "?",
    }
    change(own / "text_encoder", **junk, num_decoder_layers="x", auto_map={"AutoModel": "a.B"})
    assert torch.equal(text(own).encode("a cat").states, expected)
    (own / "text_encoder" / "config.json").unlink()
    assert torch.equal(text(own).encode("a cat").states, expected)


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("num_heads", 0, "above 0"),
        ("num_heads", -4, "above 0"),
        ("num_heads", [], "above 0"),
        ("num_heads", False, "above 0"),
        ("text_len", 0, "from 1 to 4096"),
        ("text_len", 4097, "from 1 to 4096"),
        ("text_len", 999999999999, "from 1 to 4096"),
        ("text_len", 512.0, "from 1 to 4096"),
    ],
)
def test_a_transformer_whose_config_is_absurd_is_refused_by_field(bare, field, value, limits):
    change(bare / "transformer", **{field: value})
    with pytest.raises(WeightsError, match=rf"transformer.*: config says {field} = .* a whole number {limits}; get"):
        dit(bare)


def test_the_longest_text_and_an_absent_one_are_taken(bare):
    change(bare / "transformer", text_len=4096)
    assert dit(bare).config.text_len == 4096
    change(bare / "transformer", text_len=None)
    assert dit(bare).config.text_len == 512
