"""What must not be loaded is refused, naming the tensor, the file, and what to do."""

from __future__ import annotations

import pytest
import torch

from lingbot_core.engine.world import World
from lingbot_core.errors import InputFileError, WeightsError
from lingbot_core.weights.checkpoint import Checkpoint
from lingbot_core.weights.keys import TEXT, TRANSFORMER, VAE
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.load import load_dit, load_text, load_vae

CPU = torch.device("cpu")
FAST = "lingbot_world_fast.safetensors"


@pytest.fixture
def load(checkpoints, tmp_path):
    """Writes a transformer as a single file and loads it."""

    def write_and_load(state, *, dtype=torch.float32, control=None, config=None, metadata=None):
        if config is None:
            layout = find_layout(checkpoints.write_file(tmp_path / FAST, state, metadata))
        else:
            folder = tmp_path / "lingbot_world_fast"
            checkpoints.write_shards(folder, state, 1)
            checkpoints.write_json(folder / "config.json", config)
            layout = find_layout(folder)
        return load_dit(layout, device=CPU, dtype=dtype, attention="math", control=control)

    return write_and_load


@pytest.mark.parametrize("name", ["low_noise_model", "high_noise_model"])
def test_the_experts_of_the_base_model_are_refused_by_name(name, checkpoints, tmp_path):
    root = tmp_path / "lingbot-world-base-cam"
    checkpoints.write_shards(root / name, checkpoints.dit)
    checkpoints.write_parts(root)
    for path in (root, root / name, root / name / "diffusion_pytorch_model-00001-of-00003.safetensors"):
        with pytest.raises(WeightsError, match=rf"{name} is an expert of the bidirectional Base.*lingbot_world_fast"):
            find_layout(path)
    file = checkpoints.write_file(tmp_path / f"lingbot_world_{name}_bf16.safetensors", checkpoints.dit)
    with pytest.raises(WeightsError, match="expert of the bidirectional Base"):
        find_layout(file)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_plain_wan_transformer_is_refused_naming_what_is_missing(prefix, checkpoints, tmp_path):
    plain = {prefix + k: v for k, v in checkpoints.dit.items() if "cam" not in k and "c2ws" not in k}
    checkpoints.write_file(tmp_path / FAST, plain)
    with pytest.raises(
        WeightsError, match=rf"{FAST} is a plain Wan .*{prefix}patch_embedding_wancamctrl\.weight and the cam_"
    ):
        find_layout(tmp_path / FAST)


def test_another_control_than_the_one_demanded_is_refused(load, checkpoints):
    with pytest.raises(
        WeightsError, match=r"patch_embedding_wancamctrl\.weight in .*1792 features.*'act'; 'cam' was asked"
    ):
        load(checkpoints.act, control="cam")
    with pytest.raises(WeightsError, match="1536 features, which is control 'cam'; 'act' was asked for"):
        load(checkpoints.dit, control="act")


def test_world_load_passes_the_demanded_control_on(checkpoints, tmp_path):
    with pytest.raises(WeightsError, match="'act' was asked for"):
        World.load(checkpoints.v1(tmp_path), control="act", device="cpu")


def test_a_missing_tensor_is_named(load, checkpoints):
    state = {k: v for k, v in checkpoints.dit.items() if k != "blocks.7.ffn.2.bias"}
    with pytest.raises(
        WeightsError, match=rf"{FAST} is not the .*1 tensors are missing, such as blocks\.7\.ffn\.2\.bias"
    ):
        load(state)


def test_an_unexpected_tensor_is_named_with_its_file(load, checkpoints):
    with pytest.raises(WeightsError, match=rf"1 tensors do not belong to it, such as img_emb\.proj in .*{FAST}"):
        load({**checkpoints.dit, "img_emb.proj": torch.zeros(3)})


def test_a_misshapen_tensor_is_named_with_both_shapes(load, checkpoints):
    with pytest.raises(WeightsError, match=rf"blocks\.3\.norm3\.bias in .*{FAST}: \[79\] instead of \[80\]"):
        load({**checkpoints.dit, "blocks.3.norm3.bias": torch.zeros(79)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_non_finite_value_is_found_wherever_it_is(value, dtype, load, checkpoints):
    broken = checkpoints.dit["blocks.39.ffn.0.weight"].clone()
    broken[17, 3] = value
    state = {**checkpoints.dit, "blocks.39.ffn.0.weight": broken}
    with pytest.raises(WeightsError, match=rf"blocks\.39\.ffn\.0\.weight in .*{FAST} holds NaN or infinity"):
        load({name: tensor.to(dtype) for name, tensor in state.items()}, dtype=torch.bfloat16)


def test_values_that_float16_cannot_hold_are_told_from_broken_ones(load, checkpoints):
    state = {**checkpoints.dit, "head.head.bias": torch.full((64,), 1e6)}
    with pytest.raises(WeightsError, match=r"head\.head\.bias .* beyond the range of float16; load it as bfloat16"):
        load(state, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
def test_weights_of_a_dtype_without_meaning_are_refused(dtype, load, checkpoints):
    state = {**checkpoints.dit, "head.head.bias": torch.zeros(64, dtype=dtype)}
    with pytest.raises(WeightsError, match=r"head\.head\.bias in .* has dtype (I8|I32|BOOL); weights are F64, F32"):
        load(state)


def test_complex_weights_in_a_pth_file_are_refused(checkpoints, tmp_path):
    state = {**checkpoints.vae, "conv1.bias": torch.zeros(32, dtype=torch.complex64)}
    checkpoint = Checkpoint(VAE, [checkpoints.write_file(tmp_path / "a.pth", state)])
    with pytest.raises(WeightsError, match=r"conv1\.bias in .*a\.pth has dtype complex64"):
        checkpoint.read("conv1.bias", dtype=torch.float32)


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 41), ("dim", 5120), ("ffn_dim", 13824), ("control_type", "act"), ("in_dim", 16)]
)
def test_a_config_that_contradicts_the_tensors_is_refused(field, value, load, checkpoints):
    with pytest.raises(WeightsError, match=rf"config says {field} = {value}, the tensors say "):
        load(checkpoints.dit, config={**checkpoints.config, field: value})


@pytest.mark.parametrize("heads", [7, 0.5, "forty", True])
def test_a_number_of_heads_that_cannot_be_is_refused(heads, load, checkpoints):
    with pytest.raises(WeightsError, match="heads"):
        load(checkpoints.dit, config={**checkpoints.config, "num_heads": heads})


def test_a_missing_shard_is_named_with_and_without_an_index(checkpoints, tmp_path):
    folder = checkpoints.v1(tmp_path) / "lingbot_world_fast"
    (folder / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(WeightsError, match="1 of 3 shards are missing, the first is diffusion_pytorch_model-00002"):
            find_layout(tmp_path)
        (folder / "diffusion_pytorch_model.safetensors.index.json").unlink(missing_ok=True)


def test_a_tensor_in_two_shards_is_refused(checkpoints, tmp_path):
    files = [checkpoints.write_file(tmp_path / f"{name}.safetensors", checkpoints.vae) for name in "ab"]
    with pytest.raises(WeightsError, match=r"b\.safetensors: tensor .* is also in a\.safetensors"):
        Checkpoint(VAE, files)


def test_files_without_an_index_are_not_joined_by_guess(checkpoints, tmp_path):
    for name in ("one", "two"):
        checkpoints.write_file(tmp_path / "x" / f"{name}.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(WeightsError, match="2 files of tensors and no index that joins them; give one of them: one"):
        find_layout(tmp_path / "x")


def test_a_part_given_as_another_is_told_what_it_is(checkpoints, tmp_path):
    checkpoints.v1(tmp_path)
    vae, text = tmp_path / "Wan2.1_VAE.pth", tmp_path / "models_t5_umt5-xxl-enc-bf16.pth"
    with pytest.raises(WeightsError, match="is a VAE, not a transformer; give it as the VAE"):
        find_layout(vae)
    with pytest.raises(WeightsError, match="is a text encoder, not a VAE"):
        load_vae(find_layout(tmp_path, vae=text), device=CPU, dtype=torch.float32)
    with pytest.raises(WeightsError, match="is a VAE, not a text encoder"):
        load_text(find_layout(tmp_path, text_encoder=vae), max_tokens=512, device=CPU, dtype=torch.float32)
    with pytest.raises(WeightsError, match="not a transformer that is known here; it holds 1 tensors, such as lora_A"):
        find_layout(checkpoints.write_file(tmp_path / "l.safetensors", {"lora_A": torch.zeros(1)}))


def test_another_vae_is_refused_with_its_file(checkpoints, tmp_path):
    wide = {**checkpoints.vae, "conv2.weight": torch.zeros(48, 48, 1, 1, 1)}
    checkpoints.v1(tmp_path)
    file = checkpoints.write_file(tmp_path / "wan2.2_vae.safetensors", wide)
    with pytest.raises(WeightsError, match=r"wan2\.2_vae\.safetensors: a Wan 2\.1 VAE has 16 latent channels.* 48"):
        load_vae(find_layout(tmp_path, vae=file), device=CPU, dtype=torch.float32)


def test_gguf_and_git_lfs_pointers_are_refused_by_name(tmp_path):
    (tmp_path / "lingbot_world_fast-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=r"Q4_0\.gguf: GGUF files are not supported; use the bf16 or fp8"):
        find_layout(tmp_path / "lingbot_world_fast-Q4_0.gguf")
    pointer = tmp_path / FAST
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(WeightsError, match="Git LFS pointer"):
        find_layout(pointer)
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(InputFileError, match=r"\.onnx is not known"):
        find_layout(tmp_path / "model.onnx")


def test_a_tensor_with_and_without_the_prefix_is_refused(checkpoints, tmp_path):
    state = {f"diffusion_model.{name}": tensor for name, tensor in checkpoints.dit.items()}
    state["head.head.bias"] = torch.zeros(64)
    with pytest.raises(WeightsError, match=r"head\.head\.bias is there with and without the prefix"):
        Checkpoint(TRANSFORMER, [checkpoints.write_file(tmp_path / "a.safetensors", state)])


def test_a_tokenizer_that_is_missing_is_asked_for_before_anything_is_loaded(checkpoints, tmp_path):
    checkpoints.v1(tmp_path)
    (tmp_path / "google" / "umt5-xxl" / "tokenizer.json").unlink()
    with pytest.raises(WeightsError, match=r"no tokenizer: .* a vocabulary of its own.*called tokenizer.*--tokenizer"):
        World.load(tmp_path, device="cpu")


def test_a_text_encoder_of_another_width_is_refused(checkpoints, tmp_path):
    checkpoints.v1(tmp_path)
    narrow = {**checkpoints.dit, "text_embedding.0.weight": torch.zeros(80, 4)}
    checkpoints.write_shards(tmp_path / "lingbot_world_fast", narrow)
    (tmp_path / "lingbot_world_fast" / "config.json").unlink()
    with pytest.raises(WeightsError, match="the text encoder gives 64 features, the transformer takes 4"):
        World.load(tmp_path, device="cpu")


def test_a_state_dict_inside_another_dict_is_refused(checkpoints, tmp_path):
    torch.save({"model": checkpoints.vae}, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"a\.pth: 'model' is dict instead of a tensor"):
        Checkpoint(VAE, [tmp_path / "a.pth"])


def test_code_in_a_pth_file_does_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    torch.save({"a": Harmful()}, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match="holds more than tensors"):
        Checkpoint(TEXT, [tmp_path / "a.pth"])
    assert not (tmp_path / "harm").exists()
