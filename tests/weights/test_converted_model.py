"""A converted model is the same model: it says the same of itself, is found by its folder, makes the same video."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lingbot_core.cli import main
from lingbot_core.errors import InputFileError, WeightsError
from lingbot_core.models.text import load_tokenizer
from lingbot_core.weights import layout
from lingbot_core.weights.checkpoint import Checkpoint
from lingbot_core.weights.keys import TEXT
from lingbot_core.weights.layout import EMBEDDED_TINY, find_layout
from lingbot_core.weights.tokenizer import read_tokenizer

DIT = "diffusion_models/lingbot_world_tiny_fp16.safetensors"
TINY_TEXT = "text_encoders/tiny_text_encoder_fp16.safetensors"
TINY_VAE = "vae/tiny_vae.safetensors"
PROMPTS = ("a cat walks through the tall grass", "", "  two   spaces", "naïve 世界, 3.5 m </s> on")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The embedded model, converted without loss: it is stored as float16."""
    folder = tmp_path_factory.mktemp("models")
    assert main(["convert", "tiny", str(folder), "--dtype", "fp16"]) == 0
    return folder


@pytest.fixture
def own(models, tmp_path) -> Path:
    """A copy to change."""
    return shutil.copytree(models, tmp_path / "models")


def test_the_parts_have_names_of_their_own_and_are_found_by_them(own, checkpoints):
    assert {file.relative_to(own).as_posix() for file in own.rglob("*.*")} == {DIT, TINY_TEXT, TINY_VAE}
    # What a user of ComfyUI has there already.
    checkpoints.write_file(own / "vae" / "wan_2.1_vae.safetensors", checkpoints.vae)
    checkpoints.write_file(own / "text_encoders" / "umt5_xxl_fp16.safetensors", checkpoints.hf_text)
    shutil.copytree(EMBEDDED_TINY / "tokenizer", own / "text_encoders" / "umt5-xxl")
    found = find_layout(own / DIT)
    assert found.vae.files == (own / TINY_VAE,)
    assert found.text.files == (own / TINY_TEXT,)
    assert found.tokenizer == own / TINY_TEXT
    other = find_layout(checkpoints.write_file(own / "diffusion_models" / "lingbot_world_fast.sft", checkpoints.dit))
    assert (other.vae.files[0].name, other.text.files[0].name) == (
        "wan_2.1_vae.safetensors",
        "umt5_xxl_fp16.safetensors",
    )


@pytest.mark.parametrize("path", ["", "diffusion_models", DIT])
def test_it_says_of_itself_what_the_model_said(models, path, capsys):
    world = json.loads((EMBEDDED_TINY / "world.json").read_text())
    found = find_layout(models / path)
    assert found.about == {key: value for key, value in world.items() if key != "preset"}
    assert (found.name, found.native_area, found.preset.name) == ("tiny", world["native_area"], "tiny")
    assert found.missing == {}
    assert main(["inspect", str(models / path), "--json"]) == 0
    seen, real = json.loads(capsys.readouterr().out), inspected("tiny", capsys)
    for key in ("name", "preset", "licence", "control", "notes", "loads", "memory"):
        assert seen[key] == real[key], key


def inspected(model: str, capsys) -> dict:
    assert main(["inspect", model, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("trained", [True, False])
def test_generate_makes_the_same_latents_size_and_warning_as_the_model_before(trained, models, untrained, tmp_path):
    source: str | Path = "tiny"
    if not trained:
        source, models = untrained, tmp_path / "models"
        assert main(["convert", str(source), str(models), "--dtype", "fp16"]) == 0
    Image.new("RGB", (96, 64), (90, 120, 60)).save(tmp_path / "image.png")
    made = {}
    for name, model in (("tiny", source), ("folder", models)):
        options = ["--image", tmp_path / "image.png", "--output", tmp_path / f"{name}.mp4", "--device", "cpu"]
        options += ["--prompt", "a trail", "--action-string", "w-9", "--save-latents", tmp_path / name]
        assert main(["generate", "--model", str(model), *map(str, options)]) == 0
        made[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert made["tiny"]["model"]["trained"] is trained
    assert any("random weights" in warning for warning in made["tiny"]["warnings"]) is not trained
    for key in ("preset", "warnings", "image", "length", "prompts"):
        assert made["folder"][key] == made["tiny"][key], key
    for key in ("name", "trained"):
        assert made["folder"]["model"][key] == made["tiny"]["model"][key], key
    latents = {name: sorted((tmp_path / name).glob("*.safetensors")) for name in made}
    assert latents["tiny"]
    for one, other in zip(latents["tiny"], latents["folder"], strict=True):
        ours, theirs = load_file(one), load_file(other)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_it_converts_again_without_losing_anything(models, tmp_path):
    again = tmp_path / "again"
    assert main(["convert", str(models), str(again), "--dtype", "fp16", "--preset", "v1-fast"]) == 0
    assert {file.relative_to(again).as_posix() for file in again.rglob("*.*")} == {DIT, TINY_TEXT, TINY_VAE}
    for name in (TINY_TEXT, TINY_VAE):
        assert about_and_tensors(again / name) == about_and_tensors(models / name)
    assert find_layout(again).about == find_layout(models).about
    assert find_layout(again).preset.name == "v1-fast"


def about_and_tensors(file: Path) -> tuple[dict[str, str], bytes]:
    """All that a file holds but for the checksum of what it was made from."""
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    assert header["__metadata__"].pop("lingbot_world.made_from")
    return header, data[length:]


def test_hints_of_later_versions_travel(tmp_path):
    shutil.copytree(EMBEDDED_TINY, tmp_path / "m")
    world = {"name": "m", "preset": "tiny", "default_intrinsics": [1.5, 2, 3, 4]}
    (tmp_path / "m" / "world.json").write_text(json.dumps(world))
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "out"), "--only", "dit"]) == 0
    assert find_layout(tmp_path / "out").about == {"name": "m", "default_intrinsics": [1.5, 2, 3, 4]}


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("[1]", "about must hold a JSON object"),
        ("{", "about is not JSON"),
        ('{"native_area": "big"}', "native_area 'big' must be"),
        ('{"native_area": 0}', "native_area 0 must be"),
        ('{"native_area": true}', "native_area True must be"),
    ],
)
def test_what_a_file_says_of_itself_is_checked(own, about, message):
    with safe_open(own / DIT, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(own / DIT), own / DIT, {**metadata, "lingbot_world.about": about})
    with pytest.raises(WeightsError, match=message):
        find_layout(own)


def test_the_tokenizer_inside_gives_the_tokens_of_its_folder(models, tmp_path):
    folder = EMBEDDED_TINY / "tokenizer"
    inside = bytes(load_file(models / TINY_TEXT)["tokenizer_json"].tolist())
    assert inside == (folder / "tokenizer.json").read_bytes()
    (tmp_path / "broken.json").write_bytes(inside[:-9])
    expected = load_tokenizer(folder)
    for path in (models / TINY_TEXT, folder / "tokenizer.json"):
        tokenizer = read_tokenizer(path)
        assert tokenizer.eos_token_id == expected.eos_token_id
        for prompt in PROMPTS:
            options = {"padding": False, "truncation": False, "verbose": False}
            assert tokenizer(prompt, **options)["input_ids"] == expected(prompt, **options)["input_ids"]
    with pytest.raises(WeightsError, match=r"broken\.json: the tokenizer\.json cannot be read"):
        read_tokenizer(tmp_path / "broken.json")
    (tmp_path / "broken.json").write_bytes(inside.replace(b"</s>", b"<end>"))
    with pytest.raises(WeightsError, match="no end token </s>"):
        read_tokenizer(tmp_path / "broken.json")


def test_what_is_said_at_the_end_can_be_passed_on(tmp_path, capsys):
    command = ["convert", "tiny", str(tmp_path / "my models"), "--dtype", "fp16"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert f"to use it: --model '{tmp_path}/my models'\n" in said.err
    assert "CLIPLoader cannot use this one; its tokenizer.json is inside" in said.err
    assert "google/umt5-xxl" not in said.err
    assert said.out.splitlines() == [f"{tmp_path}/my models/{name}" for name in (DIT, TINY_TEXT, TINY_VAE)]
    # With a second one beside it, the folder is not enough.
    shutil.copy(tmp_path / "my models" / DIT, tmp_path / "my models" / "diffusion_models" / "b.safetensors")
    assert main(command) == 0
    assert f"to use it: --model '{tmp_path}/my models/{DIT}'\n" in capsys.readouterr().err
    assert main(["convert", "tiny", str(tmp_path / "vae"), "--only", "vae"]) == 0
    assert "--model" not in capsys.readouterr().err


# ComfyUI's folder of models.


def test_models_of_other_kinds_are_passed_over(own, checkpoints):
    folder = own / "diffusion_models"
    plain = {k: v for k, v in checkpoints.dit.items() if "cam" not in k and "c2ws" not in k}
    checkpoints.write_file(folder / "wan2.1_i2v_14B_fp16.safetensors", plain)
    checkpoints.write_file(folder / "flux" / "flux.safetensors", {"double_blocks.0.weight": torch.zeros(2)})
    checkpoints.write_file(folder / "lingbot_world_low_noise.safetensors", checkpoints.dit)
    (folder / "broken.safetensors").write_bytes(b"half a download")
    (folder / "put_diffusion_model_files_here").touch()
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "again").symlink_to(folder)
    assert find_layout(own).transformer.files == (own / DIT,)


def test_no_tensor_is_read_to_pass_models_over(own, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("lingbot_core.weights.files._read_into", refuse)
    assert find_layout(own).transformer.files == (own / DIT,)


def test_a_model_in_a_folder_of_its_own_finds_its_parts(own):
    (own / "diffusion_models" / "worlds").mkdir()
    (own / DIT).rename(own / "diffusion_models" / "worlds" / "mine.safetensors")
    found = find_layout(own)
    assert (found.transformer.files[0].name, found.missing) == ("mine.safetensors", {})


def test_of_several_one_has_to_be_named(own):
    other = shutil.copy(own / DIT, own / "diffusion_models" / "b.safetensors")
    with pytest.raises(
        InputFileError, match=rf"holds 2 LingBot-World transformers; name one of them: {other}, {own / DIT}"
    ):
        find_layout(own)
    assert find_layout(other).name == "tiny"


def test_a_folder_without_one_says_where_it_belongs(own, checkpoints):
    (own / DIT).unlink()
    with pytest.raises(WeightsError, match=rf"no \*\.safetensors file in {own}/diffusion_models is a LingBot-World"):
        find_layout(own)
    (own / DIT).write_bytes(b"half")
    with pytest.raises(WeightsError, match=r"\(lingbot_world_tiny_fp16\.safetensors cannot be read\)"):
        find_layout(own)
    checkpoints.write_file(own / "diffusion_models" / "lingbot_high_noise.safetensors", checkpoints.dit)
    with pytest.raises(WeightsError, match="expert of the bidirectional Base model"):
        find_layout(own)


# Paths and files that are not what they seem.


@pytest.mark.parametrize("verb", ["inspect", "generate", "convert"])
def test_a_loop_of_links_is_one_clear_error(verb, tmp_path, capsys):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    loop = tmp_path / "a"
    rest = {
        "inspect": [],
        "convert": [tmp_path / "out"],
        "generate": ["--image", "i.png", "--prompt", "", "--output", tmp_path / "o.mp4", "--action-string", "w-9"],
    }
    model = ["--model", loop] if verb == "generate" else [loop]
    assert main([verb, *map(str, [*model, *rest[verb]])]) == 2
    error = f"error: model {str(loop)!r} is a loop of symbolic links; mend the link\n"
    assert capsys.readouterr().err == error
    for part in ("vae", "text_encoder", "tokenizer"):
        with pytest.raises(InputFileError, match="is a loop of symbolic links"):
            layout.find_layout("tiny", **{part: loop / "x"})
    assert main(["convert", "tiny", str(loop / "out")]) == 2
    assert f"{loop} is not a folder" in capsys.readouterr().err


def test_other_paths_that_cannot_be_are_errors_too(tmp_path):
    for path in ("~nobody-of-this-name/model", "a\0b", "x" * 5000, "/dev/null/model"):
        with pytest.raises(InputFileError, match=r"^model .*(cannot be|does not exist)"):
            find_layout(path)


class Harmful:
    def __reduce__(self):
        return (exec, ("raise SystemExit(9)",))


class Unknown:
    pass


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_a_pth_file_that_holds_more_than_tensors_is_refused_without_advice_to_run_it(tmp_path):
    torch.save({"a": Harmful()}, tmp_path / "harm.pth")
    torch.save({"a": Unknown()}, tmp_path / "class.pth")
    torch.save({"a": Harmful()}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pth")
    for name in ("harm", "class", "old", "script"):
        said = refusal(tmp_path / f"{name}.pth")
        assert f"{name}.pth was refused: it holds more than tensors" in said
        assert said.endswith("nothing in it was run; get the original file from the publisher of the model")
    assert "(it asks for exec)" in refusal(tmp_path / "harm.pth")


@pytest.mark.parametrize(
    "data", [b"", b"P", b"no pickle at all", b"\x80\x02}q\x00.", b"\x80\x02\x8a", b"PK\x03\x04" * 9]
)
def test_a_pth_file_that_is_broken_is_refused_without_advice_to_run_it(data, tmp_path):
    (tmp_path / "a.pth").write_bytes(data)
    assert "a.pth cannot be read: it is truncated, damaged, or no file of tensors" in refusal(tmp_path / "a.pth")


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as error:
        Checkpoint(TEXT, [path])
    said = str(error.value)
    assert "weights_only" not in said
    assert "safe_globals" not in said
    assert "docs" not in said
    return said
