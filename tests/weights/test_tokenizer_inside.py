"""ComfyUI's text encoder files carry their tokenizer: a transformer, a VAE and such a file are a whole model."""

from __future__ import annotations

import io
import shutil

import pytest
import sentencepiece
import torch

from lingbot_core.engine.world import World
from lingbot_core.errors import InputFileError, WeightsError
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.tokenizer import read_tokenizer

PROMPTS = ("a cat walks through the tall grass", "", "  two   spaces", "naïve 世界, 3.5 m")


@pytest.fixture(scope="module")
def words():
    """A sentencepiece model with umT5's special tokens: padding 0, </s> 1, unknown 2."""
    sentences = [
        f"a {a} {b} through the {c} grass" for a in ("cat", "dog") for b in ("walks", "runs") for c in ["tall", "low"]
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=290, byte_fallback=True, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def test_the_tokenizer_inside_gives_the_tokens_of_sentencepiece(words, checkpoints, tmp_path):
    file = checkpoints.comfy(tmp_path)
    shutil.rmtree(tmp_path / "text_encoders" / "umt5-xxl")
    inside = torch.tensor(list(words), dtype=torch.uint8)
    text = tmp_path / "text_encoders" / "umt5_xxl_fp16.safetensors"
    checkpoints.write_file(text, {**checkpoints.hf_text, "spiece_model": inside})
    layout = find_layout(file)
    assert (layout.missing, layout.tokenizer) == ({}, text)
    (tmp_path / "spiece.model").write_bytes(words)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=words, add_eos=True)
    for path in (text, tmp_path / "spiece.model"):
        tokenizer = read_tokenizer(path)
        assert tokenizer.eos_token_id == 1
        for prompt in PROMPTS:
            assert tokenizer(prompt)["input_ids"] == oracle.encode(prompt)
    world = World.load(file, device="cpu")
    encoded = world.encode_prompt(PROMPTS[0])
    assert encoded.tokens == len(oracle.encode(PROMPTS[0]))
    assert encoded.states.shape == (encoded.tokens, 64)


def test_files_without_a_tokenizer_are_refused(checkpoints, tmp_path):
    file = checkpoints.comfy(tmp_path)
    shutil.rmtree(tmp_path / "text_encoders" / "umt5-xxl")
    assert set(find_layout(file).missing) == {"tokenizer"}
    with pytest.raises(WeightsError, match="carries no tokenizer"):
        read_tokenizer(tmp_path / "text_encoders" / "umt5_xxl_fp16.safetensors")
    (tmp_path / "spiece.model").write_bytes(b"\x00damaged")
    with pytest.raises(WeightsError, match=r"spiece\.model: the sentencepiece model cannot be read"):
        read_tokenizer(tmp_path / "spiece.model")
    with pytest.raises(InputFileError, match="does not exist"):
        find_layout(file, tokenizer=tmp_path / "nothing")
