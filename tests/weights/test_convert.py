"""``lingbot-world convert``: what it writes, bit by bit, and that nothing that ends it early loses or spoils anything.

The sources have the published names (checkpoint_layout.json) and small random float32 values.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lingbot_core.cli import main
from lingbot_core.cli.convert import ByteProgress
from lingbot_core.errors import InputFileError, PresetError, WeightsError
from lingbot_core.weights import convert, load, stream
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.stream import StreamedFile, StreamedTensor

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((ROOT / "tests" / "goldens" / "data" / "checkpoint_layout.json").read_text(encoding="utf-8"))

DIT_SIZES = {5120: 64, 13824: 96, 30720: 384, 4096: 16, 256: 32}
VAE_SIZES = {96: 4, 192: 8, 384: 16, 768: 32, 1152: 48}
TEXT_SIZES = {256384: 40, 4096: 16, 10240: 24, 64: 4}
CONFIG = {"num_heads": 2, "text_len": 12}
WORDS = bytes(range(256)) + b"odd"

DIT = "diffusion_models/lingbot_world_fast_bf16.safetensors"
TEXT = "text_encoders/model_text_encoder_bf16.safetensors"
VAE = "vae/model_vae.safetensors"


def made_up(
    shapes: Mapping[str, list[int]], sizes: Mapping[int, int], seed: int, blocks: int = 99
) -> dict[str, Tensor]:
    """Random float32 tensors with the published names; the sizes shrunk, and only the first blocks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        block = re.match(r"blocks\.(\d+)\.", name)
        if block is None or int(block[1]) < blocks:
            tensors[name] = torch.randn([sizes.get(size, size) for size in shape], generator=generator)
    return tensors


def dit(control: str = "cam") -> dict[str, Tensor]:
    layout = PUBLISHED["lingbot_world_act" if control == "act" else "lingbot_world_fast_cam"]
    return made_up(layout["shapes"], DIT_SIZES, seed=1, blocks=12)


def vae() -> dict[str, Tensor]:
    return made_up(PUBLISHED["wan21_vae_pth"]["shapes"], VAE_SIZES, seed=2)


def text() -> dict[str, Tensor]:
    return made_up(PUBLISHED["umt5_xxl_enc_pth"]["shapes"], TEXT_SIZES, seed=3, blocks=2)


def hf_names(wan: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The text encoder under transformers' names, the tied copy of the embedding left out."""
    names = PUBLISHED["diffusers_format"]["text_encoder"]["from_pth"]
    return {names[name][0]: tensor for name, tensor in wan.items()}


def save_sharded(folder: Path, tensors: Mapping[str, Tensor], count: int) -> None:
    folder.mkdir(parents=True)
    names = sorted(tensors)
    table = {}
    for i in range(count):
        file = f"diffusion_pytorch_model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, folder / file)
        table.update(dict.fromkeys(names[i::count], file))
    index = {"metadata": {}, "weight_map": table}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def v1_folder(root: Path, control: str = "cam") -> Path:
    """The published layout: float32 shards, and beside them .pth files and the tokenizer."""
    save_sharded(root / "lingbot_world_fast", dit(control), 3)
    torch.save(vae(), root / "Wan2.1_VAE.pth")
    torch.save(text(), root / "models_t5_umt5-xxl-enc-bf16.pth")
    (root / "google" / "umt5-xxl").mkdir(parents=True)
    (root / "google" / "umt5-xxl" / "spiece.model").write_bytes(WORDS)
    return root


def diffusers_folder(root: Path) -> Path:
    """The same weights in the manner of diffusers and transformers."""
    save_sharded(root / "transformer", dit(), 2)
    for part, tensors in (("vae", diffusers_vae()), ("text_encoder", hf_names(text()))):
        (root / part).mkdir()
        if part == "text_encoder":
            tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
        save_file(
            tensors,
            root / part / ("model.safetensors" if part == "text_encoder" else "diffusion_pytorch_model.safetensors"),
        )
        (root / part / "config.json").write_text("{}")
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "spiece.model").write_bytes(WORDS)
    return root


def diffusers_vae() -> dict[str, Tensor]:
    names = PUBLISHED["diffusers_format"]["vae"]["from_pth"]
    return {names[name]: tensor for name, tensor in vae().items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return v1_folder(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that an uninterrupted run makes of the source."""
    target = tmp_path_factory.mktemp("whole")
    assert main(["convert", str(source), str(target)]) == 0
    return contents(target)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("label", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_a_v1_folder_becomes_three_files_of_exactly_the_cast_weights(source, tmp_path, label, dtype):
    assert main(["convert", str(source), str(tmp_path), "--dtype", label]) == 0
    assert contents(tmp_path).keys() == {path.replace("bf16", label) for path in (DIT, TEXT, VAE)}
    assert_same(load_file(tmp_path / DIT.replace("bf16", label)), cast(dit(), dtype))
    words = torch.tensor(list(WORDS), dtype=torch.uint8)
    expected = cast(hf_names(text()), dtype) | {"spiece_model": words}
    assert_same(load_file(tmp_path / TEXT.replace("bf16", label)), expected)
    # Float32 as stored: the VAE's encoder makes what the transformer starts from.
    assert_same(load_file(tmp_path / VAE), vae())


def test_the_vae_can_be_cast_when_it_is_asked_for(source, tmp_path):
    assert main(["convert", str(source), str(tmp_path), "--only", "vae", "--vae-dtype", "fp16"]) == 0
    assert contents(tmp_path).keys() == {VAE}
    assert_same(load_file(tmp_path / VAE), cast(vae(), torch.float16))


@pytest.mark.parametrize("control", ["cam", "act"])
def test_the_transformer_says_preset_control_and_what_its_shapes_do_not_show(tmp_path, control):
    source = v1_folder(tmp_path / "model", control)
    assert main(["convert", str(source), str(tmp_path / "out"), "--only", "dit"]) == 0
    [file] = (tmp_path / "out" / "diffusion_models").iterdir()
    assert file.name == {"cam": Path(DIT).name, "act": "lingbot_world_fast_act_bf16.safetensors"}[control]
    about = metadata(file)
    assert about["lingbot_world.preset"] == "v1-fast"
    assert about["lingbot_world.control"] == control
    assert json.loads(about["lingbot_world.config"]) == CONFIG
    assert_same(load_file(file), cast(dit(control), torch.bfloat16))
    layout = find_layout(file)
    assert (layout.preset.name, layout.preset_reason) == ("v1-fast", "the file's metadata names v1-fast")


def test_the_preset_of_the_command_line_is_the_one_that_is_noted(source, tmp_path):
    assert main(["convert", str(source), str(tmp_path), "--only", "dit", "--preset", "v1-fast-shift5"]) == 0
    assert find_layout(tmp_path / DIT).preset.name == "v1-fast-shift5"


def test_a_transformer_of_unknown_recipe_is_refused_until_a_preset_is_named(tmp_path, capsys):
    save_sharded(tmp_path / "my" / "transformer", dit(), 1)
    with pytest.raises(PresetError, match=r"--preset.*v2-causal-fast"):
        convert.plan(tmp_path / "my", tmp_path / "out")
    assert main(["convert", str(tmp_path / "my"), str(tmp_path / "out"), "--preset", "v2-causal-fast"]) == 0
    assert contents(tmp_path / "out").keys() == {"diffusion_models/lingbot_world_v2-causal-fast_bf16.safetensors"}
    notes = capsys.readouterr().err
    assert "no text encoder" in notes
    assert "no VAE" in notes


def test_diffusers_folders_give_the_same_files_as_the_published_ones(whole, tmp_path):
    source = diffusers_folder(tmp_path / "lingbot-world-fast")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    made = contents(tmp_path / "out")
    assert made.keys() == {
        DIT.replace("lingbot_world_fast", "lingbot-world-fast"),
        TEXT.replace("model", "lingbot-world-fast"),
        VAE.replace("model", "lingbot-world-fast"),
    }
    for name, path in zip(sorted(whole), sorted(made), strict=True):
        assert data_of(made[path]) == data_of(whole[name])


def data_of(file: bytes) -> tuple[dict[str, object], bytes]:
    """Everything but the metadata."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    del header["__metadata__"]
    return header, file[8 + length :]


def test_converted_files_convert_again_without_loss(whole, source, tmp_path):
    models = tmp_path / "models"
    assert main(["convert", str(source), str(models)]) == 0
    again = ["convert", str(models / DIT), str(tmp_path / "again"), "--dtype", "fp32"]
    assert main(again) == 0
    made = tmp_path / "again" / DIT.replace("bf16", "fp32")
    assert_same(load_file(made), cast(cast(dit(), torch.bfloat16), torch.float32))
    assert (metadata(made)["lingbot_world.preset"], json.loads(metadata(made)["lingbot_world.config"])) == (
        "v1-fast",
        CONFIG,
    )
    assert contents(models) == whole


def test_a_vae_alone_can_be_the_source(source, tmp_path):
    assert main(["convert", str(source / "Wan2.1_VAE.pth"), str(tmp_path), "--only", "vae"]) == 0
    # Of small sizes, so not under a name that is taken for the published one.
    assert contents(tmp_path).keys() == {"vae/other_wan2.1_vae.safetensors"}
    assert_same(load_file(tmp_path / "vae" / "other_wan2.1_vae.safetensors"), vae())
    with pytest.raises(WeightsError, match="is a VAE, not a text encoder"):
        convert.plan(source / "Wan2.1_VAE.pth", tmp_path, only="text")


def test_a_missing_tokenizer_file_is_said(source, tmp_path, capsys):
    alone = tmp_path / "t5.pth"
    torch.save(text(), alone)
    assert main(["convert", str(alone), str(tmp_path), "--only", "text"]) == 0
    said = capsys.readouterr().err
    assert "no spiece.model beside" in said
    assert "a vocabulary of its own" in said
    assert "google/umt5-xxl" not in said
    made = load_file(tmp_path / "text_encoders" / "t5_text_encoder_bf16.safetensors")
    assert_same(made, cast(hf_names(text()), torch.bfloat16))


def test_a_text_encoder_of_umt5s_sizes_has_its_name_and_is_told_where_the_tokenizer_is(tmp_path, monkeypatch):
    usage = convert.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda folder: usage._replace(free=10**12))
    full = sparse(tmp_path / "t5.safetensors", PUBLISHED["umt5_xxl_enc_pth"]["shapes"])
    planned = convert.plan(full, tmp_path, only="text")
    assert planned.outputs[0].path.name == "umt5_xxl_bf16.safetensors"
    assert "get it (google/umt5-xxl has it)" in planned.notes[0]
    full = sparse(tmp_path / "v.safetensors", PUBLISHED["wan21_vae_pth"]["shapes"])
    assert convert.plan(full, tmp_path, only="vae").outputs[0].path.name == "wan_2.1_vae.safetensors"


def sparse(path: Path, shapes: Mapping[str, list[int]]) -> Path:
    """A file of bfloat16 that takes no room."""
    end, header = 0, {}
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    return path


@pytest.mark.parametrize("place", ["beside", "inside"])
def test_the_tokenizer_of_a_whole_model_comes_along_wherever_it_is(source, whole, tmp_path, place):
    model = source
    if place == "inside":
        assert main(["convert", str(source), str(tmp_path / "models")]) == 0
        model = tmp_path / "models"
        assert find_layout(model).tokenizer == model / TEXT
    assert main(["convert", str(model), str(tmp_path / "again"), "--only", "text"]) == 0
    [made] = (tmp_path / "again").rglob("*.safetensors")
    assert bytes(load_file(made)["spiece_model"].tolist()) == WORDS


@pytest.mark.parametrize("place", ["inside", "given"])
def test_the_tokenizer_of_a_single_file_comes_along(source, whole, tmp_path, place):
    models = tmp_path / "models"
    assert main(["convert", str(source), str(models), "--only", "text"]) == 0
    command = ["convert", str(models / TEXT), str(tmp_path / "again"), "--only", "text"]
    if place == "given":
        (tmp_path / "other.model").write_bytes(b"other")
        command += ["--tokenizer", str(tmp_path / "other.model")]
    assert main(command) == 0
    words = load_file(tmp_path / "again" / TEXT)["spiece_model"]
    assert bytes(words.tolist()) == (b"other" if place == "given" else WORDS)


def test_converted_files_load_as_exactly_the_cast_weights(source, tmp_path):
    assert main(["convert", str(source), str(tmp_path)]) == 0
    layout = find_layout(tmp_path / DIT)
    loaded = load.load_dit(layout, device=torch.device("cpu"), dtype=torch.bfloat16, attention="auto")
    assert_same(loaded.state_dict(), cast(dit(), torch.bfloat16))
    assert (loaded.config.num_heads, loaded.config.text_len) == (2, 12)
    assert_same(load.load_vae(layout, device=torch.device("cpu"), dtype=torch.float32).state_dict(), vae())


# What must not be converted.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("blocks.3.ffn.2.bias"), "1 tensors are missing, such as blocks.3.ffn.2.bias"),
        (
            lambda w: w.update({"blocks.3.extra.weight": torch.ones(2)}),
            r"do not belong to it, such as blocks\.3\.extra\.weight in .*safetensors",
        ),
        (
            lambda w: w.update({"blocks.3.ffn.2.bias": torch.ones(65)}),
            r"blocks\.3\.ffn\.2\.bias in .*: \[65\] instead of \[64\]",
        ),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, change, message):
    weights = dit()
    change(weights)
    save_sharded(tmp_path / "lingbot_world_fast", weights, 1)
    with pytest.raises(WeightsError, match=message):
        convert.plan(tmp_path / "lingbot_world_fast", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "NaN or infinity"), (7e4, "range of float16")])
def test_values_that_fp16_cannot_hold_are_refused_naming_tensor_and_file(tmp_path, capsys, value, message):
    weights = dit()
    weights["blocks.3.ffn.2.bias"][5] = value
    save_sharded(tmp_path / "lingbot_world_fast", weights, 1)
    assert main(["convert", str(tmp_path / "lingbot_world_fast"), str(tmp_path / "out"), "--dtype", "fp16"]) == 1
    error = capsys.readouterr().err
    assert re.search(rf"blocks\.3\.ffn\.2\.bias in .*00001-of-00001.safetensors.*{message}", error)
    assert not list((tmp_path / "out").rglob("*fp16.safetensors"))


def test_a_file_that_is_there_is_replaced_only_when_asked(source, tmp_path, capsys):
    (tmp_path / "vae").mkdir()
    (tmp_path / VAE).write_bytes(b"precious")
    command = ["convert", str(source), str(tmp_path), "--only", "vae"]
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / VAE).read_bytes() == b"precious"
    assert main([*command, "--overwrite"]) == 0
    assert_same(load_file(tmp_path / VAE), vae())


def test_a_file_that_is_finished_is_kept_by_the_same_command(source, whole, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path)]) == 0
    before = (tmp_path / DIT).stat().st_mtime_ns
    capsys.readouterr()
    assert main(["convert", str(source), str(tmp_path)]) == 0
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / DIT).stat().st_mtime_ns == before
    assert contents(tmp_path) == whole


def test_a_source_is_never_its_own_target(source, tmp_path):
    assert main(["convert", str(source), str(tmp_path)]) == 0
    with pytest.raises(InputFileError, match="is the source itself"):
        convert.plan(tmp_path / DIT, tmp_path, only="dit", overwrite=True)


def test_a_disk_without_room_is_noticed_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = convert.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda folder: usage._replace(free=1_000_000))
    with pytest.raises(InputFileError, match=r"2\.9 MB are needed and 1\.0 MB are free"):
        convert.plan(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Ends in the middle.


def test_a_killed_run_goes_on_and_the_result_is_bitwise_that_of_a_whole_one(source, whole, tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from lingbot_core.cli import main
from lingbot_core.cli.convert import ByteProgress
seen = 0
def advance(self, count):
    global seen
    seen += count
    if seen > 900_000:
        os.kill(os.getpid(), signal.SIGKILL)
ByteProgress.advance = advance
main(["convert", {str(source)!r}, {str(tmp_path)!r}])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == -signal.SIGKILL
    left = contents(tmp_path)
    assert left.keys() == {DIT + ".part", DIT + ".part.jsonl"}
    kept = left[DIT + ".part.jsonl"].count(b"\n") - 1
    assert 0 < kept < len(dit()), "some of the tensors were finished"
    read = spy_on_reads()
    with read as names:
        assert main(["convert", str(source), str(tmp_path)]) == 0
    assert sum(name in dit() for name in names) == len(dit()) - kept
    assert contents(tmp_path) == whole


class spy_on_reads:
    """Notes the names of the tensors that are read from the source."""

    def __enter__(self) -> list[str]:
        self.names: list[str] = []
        self.read = convert.Checkpoint.read

        def read(checkpoint, name, **options):
            self.names.append(name)
            return self.read(checkpoint, name, **options)

        convert.Checkpoint.read = read
        return self.names

    def __exit__(self, *_: object) -> None:
        convert.Checkpoint.read = self.read


@pytest.mark.parametrize("after", [0, 700_000, 1_900_000, 2_400_000])
def test_ctrl_c_leaves_what_the_next_run_goes_on_from(source, whole, tmp_path, monkeypatch, capsys, after):
    interrupt_after(monkeypatch, after)
    command = ["convert", str(source), str(tmp_path)]
    assert main(command) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert contents(tmp_path) != whole
    monkeypatch.undo()
    assert main(command) == 0
    assert contents(tmp_path) == whole


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen = 0

    def advance(self: ByteProgress, done: int) -> None:
        nonlocal seen
        seen += done
        if seen > count:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ByteProgress, "advance", advance)


def test_a_disk_that_fills_up_is_said_and_the_next_run_goes_on(source, whole, tmp_path, monkeypatch, capsys):
    written, write_all = 0, stream._write_all

    def write(file, data):
        nonlocal written
        written += len(data)
        if written > 600_000:
            write_all(file, memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    monkeypatch.setattr(stream, "_write_all", write)
    assert main(["convert", str(source), str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "the disk is full" in error
    assert "run the same command again" in error
    monkeypatch.undo()
    assert main(["convert", str(source), str(tmp_path)]) == 0
    assert contents(tmp_path) == whole


# The part file.


def numbers(count: int, seed: int = 0) -> list[StreamedTensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(3, 5, generator=generator) for _ in range(count)]
    return [StreamedTensor(f"t{i}", (3, 5), torch.float32, lambda i=i: values[i]) for i in range(count)]


def stop_at(index: int) -> list[StreamedTensor]:
    """Eight tensors of which the one with this index cannot be read."""

    def fail() -> Tensor:
        raise KeyboardInterrupt

    tensors = numbers(8)
    tensors[index] = StreamedTensor(f"t{index}", (3, 5), torch.float32, fail)
    return tensors


def interrupted(path: Path, at: int = 5, about: Mapping[str, str] | None = None) -> StreamedFile:
    file = StreamedFile(path, stop_at(at), about or {})
    with pytest.raises(KeyboardInterrupt), file:
        file.make()
    return file


def expected_bytes(path: Path) -> bytes:
    """What safetensors' own writer would put there, but for the order."""
    tensors = {tensor.name: tensor.read() for tensor in numbers(8)}
    assert_same(load_file(path), tensors)
    return path.read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda part, record: part.write_bytes(flip(part.read_bytes(), -150)),
        lambda part, record: part.write_bytes(flip(part.read_bytes(), 40)),
        lambda part, record: part.write_bytes(part.read_bytes()[:-100]),
        lambda part, record: part.write_bytes(part.read_bytes() + b"half a tensor"),
        lambda part, record: part.unlink(),
        lambda part, record: record.write_bytes(record.read_bytes() + b'["t5", "01'),
        lambda part, record: record.write_bytes(record.read_bytes()[:-7]),
        lambda part, record: record.write_bytes(flip(record.read_bytes(), 30)),
        lambda part, record: record.write_bytes(record.read_bytes() + b"17\n[]\nnull\n"),
        lambda part, record: record.unlink(),
    ],
)
def test_whatever_happened_to_the_unfinished_files_the_result_is_right(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    file = interrupted(path)
    damage(file.part, file.record)
    with StreamedFile(path, numbers(8), {}) as again:
        again.make()
    assert set(tmp_path.iterdir()) == {path}
    expected_bytes(path)


def flip(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 16
    return bytes(changed)


def test_a_part_of_other_sources_is_not_continued(tmp_path):
    path = tmp_path / "x.safetensors"
    file = interrupted(path, about={"source": "older"})
    file.part.write_bytes(file.part.read_bytes())
    reads: list[str] = []

    def noting(tensor: StreamedTensor) -> StreamedTensor:
        def read() -> Tensor:
            reads.append(tensor.name)
            return tensor.read()

        return StreamedTensor(tensor.name, tensor.shape, tensor.dtype, read)

    with StreamedFile(path, [noting(tensor) for tensor in numbers(8)], {"source": "newer"}) as again:
        again.make()
    assert reads == [f"t{i}" for i in range(8)]


def test_bytes_that_read_back_differently_are_noticed_and_written_again(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    calls, write_all = 0, stream._write_all

    def write(file, data):
        nonlocal calls
        calls += 1
        write_all(file, flip(bytes(data), 7) if calls == 8 else data)

    monkeypatch.setattr(stream, "_write_all", write)
    file = StreamedFile(path, numbers(8), {})
    with file, pytest.raises(WeightsError, match="t3 reads back with other bytes"):
        file.make()
    assert not path.exists()
    with file:
        file.make()
    expected_bytes(path)


def test_one_file_is_never_made_by_two_at_once(tmp_path):
    path = tmp_path / "x.safetensors"
    with (
        StreamedFile(path, numbers(8), {}),
        pytest.raises(InputFileError, match="another process"),
        StreamedFile(path, numbers(8), {}),
    ):
        pass


def test_the_metadata_and_odd_lengths_read_back_as_they_were_given(tmp_path):
    odd = torch.arange(7, dtype=torch.uint8)
    half = torch.tensor(1.5, dtype=torch.float16)
    tensors = [
        StreamedTensor("scalar", (), torch.float16, lambda: half),
        StreamedTensor("empty", (0, 4), torch.float32, lambda: torch.empty(0, 4)),
        StreamedTensor("odd", (7,), torch.uint8, lambda: odd),
    ]
    path = tmp_path / "x.safetensors"
    with StreamedFile(path, tensors, {"a.b": 'ü " {', "none": ""}) as file:
        file.make()
    assert_same(load_file(path), {"scalar": half, "empty": torch.empty(0, 4), "odd": odd})
    assert metadata(path) == {"a.b": 'ü " {', "none": ""}


# Memory.


def test_memory_does_not_grow_with_the_model(tmp_path):
    """260 MB of float32 become 130 MB of bf16 in a process that may take 90 MB more than it has after its imports."""
    sizes = DIT_SIZES | {5120: 1024, 13824: 2048, 30720: 6144}
    shapes = {
        n: s
        for n, s in PUBLISHED["lingbot_world_fast_cam"]["shapes"].items()
        if not re.match(r"blocks\.([3-9]|\d\d)\.", n)
    }
    weights = {name: torch.full([sizes.get(size, size) for size in shape], 0.5) for name, shape in shapes.items()}
    assert sum(tensor.nbytes for tensor in weights.values()) > 190e6
    (tmp_path / "lingbot_world_fast").mkdir()
    save_file(weights, tmp_path / "lingbot_world_fast" / "model.safetensors")
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
from lingbot_core.cli import main
import lingbot_core.weights.convert
data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 90_000_000, data + 90_000_000))
sys.exit(main(["convert", {str(tmp_path / "lingbot_world_fast")!r}, {str(tmp_path / "out")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(load_file(tmp_path / "out" / DIT), cast(weights, torch.bfloat16))
