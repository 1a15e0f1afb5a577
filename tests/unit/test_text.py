"""umT5: prompts in, states of true length out; weights under both names; tokenizer folders."""

from __future__ import annotations

import io
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from lingbot_core.errors import InputFileError, NumericsError, PromptError, WeightsError
from lingbot_core.models.text import (
    Encoded,
    TextEncoder,
    build_umt5,
    clean_text,
    convert_umt5_keys,
    load_tokenizer,
    load_umt5,
    umt5_config_from_shapes,
)

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "fox", "walks", "by", "the", "lake", "at", "dawn"]
CONFIG = {"vocab_size": 16, "d_model": 24, "d_kv": 4, "d_ff": 40, "num_layers": 2, "num_heads": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    path = tmp_path_factory.mktemp("tokenizer") / "umt5"
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def native_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the names of Wan's own file, written out here rather than derived from the table."""
    generator = torch.Generator().manual_seed(seed)
    dim, inner, hidden = 24, 12, 40
    shapes = {"token_embedding.weight": (16, dim), "norm.weight": (dim,)}
    for i in range(2):
        block = f"blocks.{i}."
        shapes |= {block + f"attn.{x}.weight": (inner, dim) for x in "qkv"}
        shapes |= {
            block + "attn.o.weight": (dim, inner),
            block + "norm1.weight": (dim,),
            block + "norm2.weight": (dim,),
            block + "pos_embedding.embedding.weight": (32, 3),
            block + "ffn.gate.0.weight": (hidden, dim),
            block + "ffn.fc1.weight": (hidden, dim),
            block + "ffn.fc2.weight": (dim, hidden),
        }
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def model():
    return load_umt5(build_umt5(CONFIG), native_weights())


@pytest.fixture(scope="module")
def encoder(model, tokenizer) -> TextEncoder:
    return TextEncoder(model, tokenizer, max_tokens=6)


def test_a_prompt_gives_the_states_of_its_tokens_and_the_end(encoder, model):
    encoded = encoder.encode("  a red\tfox ")
    assert isinstance(encoded, Encoded)
    assert (encoded.tokens, encoded.truncated) == (4, False)
    assert encoded.states.shape == (4, encoder.dim) == (4, 24)
    # The reference pads to the full length and masks: the padding must not be felt.
    ids = torch.tensor([[3, 4, 5, 1, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    torch.testing.assert_close(encoded.states, padded[0, :4], atol=1e-5, rtol=0)
    assert not encoded.states.requires_grad


@pytest.mark.parametrize("prompt", ["", "  \n "])
def test_an_empty_prompt_gives_the_end_token_alone(encoder, model, prompt):
    encoded = encoder.encode(prompt)
    assert (encoded.tokens, encoded.truncated, encoded.states.shape) == (1, False, (1, 24))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[1]])).last_hidden_state[0]
    torch.testing.assert_close(encoded.states, expected)


def test_a_long_prompt_is_cut_before_its_end_token_and_says_so(encoder):
    long = encoder.encode("a red fox walks by the lake at dawn")
    assert (long.tokens, long.truncated, long.states.shape[0]) == (10, True, 6)
    assert encoder.count_tokens("a red fox walks by the lake at dawn") == 10
    exact = encoder.encode("a red fox walks by")
    assert (exact.tokens, exact.truncated) == (6, False)
    assert torch.equal(long.states, exact.states)


def test_600_tokens_are_cut_to_512_by_default(model, tokenizer):
    encoded = TextEncoder(model, tokenizer).encode("fox " * 599)
    assert (encoded.tokens, encoded.truncated, encoded.states.shape) == (600, True, (512, 24))


def test_a_tokenizer_without_post_processor_still_ends_its_prompts(model, tokenizer, encoder):
    class Bare:
        eos_token_id = 1

        def __call__(self, text, **options):
            return {"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}

    bare = TextEncoder(model, Bare())
    assert torch.equal(bare.encode("a fox").states, encoder.encode("a fox").states)
    assert bare.encode("").tokens == 1


def test_states_come_in_the_dtype_asked_for(tokenizer):
    model = load_umt5(build_umt5(CONFIG, dtype=torch.bfloat16), native_weights())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert TextEncoder(model, tokenizer).encode("a fox").states.dtype == torch.bfloat16
    assert TextEncoder(model, tokenizer, dtype=torch.float32).encode("a fox").states.dtype == torch.float32


def test_threads_share_an_encoder(encoder):
    prompts = [" ".join(WORDS[3 : 3 + n]) for n in range(9)]
    expected = [encoder.encode(prompt).states for prompt in prompts]
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(3):
                for prompt, want in zip(prompts, expected, strict=True):
                    if not torch.equal(encoder.encode(prompt).states, want):
                        wrong.append(prompt)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_not_text_is_refused(encoder):
    with pytest.raises(PromptError, match="must be text, not NoneType"):
        encoder.encode(None)


@pytest.mark.parametrize(
    "prompt", ["fox \ud800 walks", "fox &#xD800; walks", "fox \x00\ufffe walks", "fox \U0010ffff walks"]
)
def test_broken_characters_are_tokens_like_any_other(encoder, prompt):
    assert encoder.encode(prompt).tokens in (3, 4)


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    weights = native_weights()
    weights["token_embedding.weight"] = weights["token_embedding.weight"][:5]
    small = TextEncoder(load_umt5(build_umt5({**CONFIG, "vocab_size": 5}), weights), tokenizer)
    with pytest.raises(WeightsError, match="token 8 but this text encoder knows 5"):
        small.encode("the red fox")


def test_an_overflow_is_reported_and_not_passed_on(tokenizer):
    weights = native_weights()
    weights["norm.weight"] = torch.full((24,), float("inf"))
    broken = TextEncoder(load_umt5(build_umt5(CONFIG), weights), tokenizer)
    with pytest.raises(NumericsError, match="NaN or infinity"):
        broken.encode("a fox")


def test_cleaning_removes_what_entities_bring_in():
    assert clean_text("a&nbsp;&nbsp;b &amp;#32; &#28;c") == "a b c"
    assert clean_text("\u00a0\u3000x\u2028y\r\n\x0cz ") == "x y z"


def test_both_namings_load_to_the_same_model(model):
    weights = convert_umt5_keys(native_weights())
    reference = UMT5EncoderModel(UMT5Config(**CONFIG))
    assert weights.keys() == reference.state_dict().keys() - {"encoder.embed_tokens.weight"}
    again = load_umt5(build_umt5(UMT5Config(**CONFIG)), {**weights, "encoder.embed_tokens.weight": torch.zeros(16, 24)})
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert again.encoder.embed_tokens.weight is again.shared.weight
    ids = torch.tensor([[3, 4, 5, 1]])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).last_hidden_state, model(input_ids=ids).last_hidden_state)


def test_a_file_with_only_the_tied_embedding_or_with_extra_parts_loads(model):
    weights = convert_umt5_keys(native_weights())
    weights["encoder.embed_tokens.weight"] = weights.pop("shared.weight")
    weights["decoder.final_layer_norm.weight"] = torch.ones(24)
    weights["lm_head.weight"] = torch.ones(16, 24)
    weights["spiece_model"] = torch.zeros(100, dtype=torch.uint8)
    assert torch.equal(load_umt5(build_umt5(CONFIG), weights).shared.weight, model.shared.weight)


def test_weights_that_already_fit_are_not_copied():
    weights = native_weights()
    model = load_umt5(build_umt5(CONFIG), weights)
    assert model.shared.weight.data_ptr() == weights["token_embedding.weight"].data_ptr()
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_an_allocated_model_is_filled_too(model):
    filled = load_umt5(build_umt5(CONFIG, device="cpu"), native_weights(), dtype=torch.bfloat16)
    torch.testing.assert_close(filled.shared.weight, model.shared.weight.bfloat16())


def test_weights_that_do_not_fit_are_named_and_change_nothing(tokenizer):
    model = load_umt5(build_umt5(CONFIG), native_weights())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = native_weights(seed=1)
    del weights["blocks.1.attn.q.weight"]
    weights["blocks.0.attn.rope"] = torch.zeros(1)
    weights["norm.weight"] = torch.zeros(23)
    with pytest.raises(WeightsError) as caught:
        load_umt5(model, weights)
    message = str(caught.value)
    assert "missing encoder.block.1.layer.0.SelfAttention.q.weight" in message
    assert "unexpected blocks.0.attn.rope" in message
    assert "encoder.final_layer_norm.weight [23] instead of [24]" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_configuration_is_read_from_either_naming():
    native = {name: list(tensor.shape) for name, tensor in native_weights().items()}
    for shapes in (native, convert_umt5_keys(native), native_weights()):
        config = umt5_config_from_shapes(shapes)
        assert {key: config[key] for key in CONFIG} == CONFIG
        assert config["relative_attention_num_buckets"] == 32
    with pytest.raises(WeightsError, match=r"shared\.weight"):
        umt5_config_from_shapes({k: v for k, v in native.items() if k != "token_embedding.weight"})
    with pytest.raises(WeightsError, match="12 attention features do not divide into 5 heads"):
        umt5_config_from_shapes({**native, "blocks.0.pos_embedding.embedding.weight": [32, 5]})


def test_a_missing_or_broken_tokenizer_folder_is_named(tmp_path, folder):
    with pytest.raises(InputFileError, match=r"there is no tokenizer folder .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(InputFileError, match=r"neither tokenizer\.json nor spiece\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(InputFileError, match="cannot be read"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(str(folder)).eos_token_id == 1


@pytest.mark.parametrize("config", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("answer", ["y\n", "", None])
def test_code_in_a_tokenizer_folder_is_refused_without_a_question(tmp_path, folder, monkeypatch, config, answer):
    def asked(*_: object) -> str:
        questions.append(config)
        return "y"

    questions: list[str] = []
    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("sys.stdin", None if answer is None else io.StringIO(answer))
    copy = shutil.copytree(folder, tmp_path / "copy")
    harm = tmp_path / "harm"
    code = f"open({str(harm)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
    (copy / "own.py").write_text(code + "class Own(PreTrainedTokenizerFast): pass\n")
    classes = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own"}
    about = {"auto_map": classes, "tokenizer_class": "Own", "model_type": "own", "eos_token": "</s>"}
    (copy / config).write_text(json.dumps(about))
    with pytest.raises(InputFileError, match=rf"{config} asks for code of its own \(auto_map\), which is never run"):
        load_tokenizer(copy)
    assert not questions
    assert not harm.exists()


def test_transformers_is_told_to_run_no_code(folder, monkeypatch):
    given = {}
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **options: given.update(options))
    load_tokenizer(folder)
    assert given == {"local_files_only": True, "trust_remote_code": False}


def test_a_configuration_cannot_name_code_on_a_server():
    """transformers fetches the attention that a configuration names as OWNER/NAME."""
    model = build_umt5({**CONFIG, "attn_implementation": "someone/kernels", "_attn_implementation": "someone/kernels"})
    assert "/" not in str(model.config._attn_implementation)
    assert not hasattr(model.config, "auto_map")


@pytest.mark.parametrize(
    "wrong",
    [{"num_heads": "x"}, {"feed_forward_proj": 3}, {"relative_attention_num_buckets": -1}, {"d_model": -4}],
)
def test_sizes_of_which_no_encoder_can_be_made_are_refused(wrong):
    with pytest.raises(WeightsError, match="no umT5 encoder can be made of this configuration: "):
        build_umt5({**CONFIG, **wrong})


def test_shapes_without_heads_are_refused():
    shapes = {name: list(tensor.shape) for name, tensor in native_weights().items()}
    with pytest.raises(WeightsError, match="do not divide into 0 heads"):
        umt5_config_from_shapes({**shapes, "blocks.0.pos_embedding.embedding.weight": [32, 0]})


def test_a_tokenizer_folder_that_may_not_be_read_is_named(folder, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputFileError, match=r"tokenizer folder .*umt5 cannot be read: Permission denied"):
        load_tokenizer(folder)


def test_a_tokenizer_without_an_end_token_is_refused(model):
    class Endless:
        eos_token_id = None

    with pytest.raises(WeightsError, match="no end token"):
        TextEncoder(model, Endless())
