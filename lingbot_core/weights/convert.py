"""From any layout to the single files that ComfyUI's own loaders and this pack read.

DST is a ComfyUI ``models`` folder or looks like one: ``diffusion_models``, ``text_encoders`` and ``vae`` are made in
it. One tensor at a time is in memory, in the dtype it is written in.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import InputFileError, PresetError, WeightsError
from ..models.dit import CausalWanDiT
from ..models.vae import VAEConfig, WanVAE
from ..presets import PRESETS, Preset, get_preset
from .checkpoint import Checkpoint
from .files import DTYPES as STORED_DTYPES
from .files import names_the_path
from .folder import existing
from .keys import TEXT, TRANSFORMER, VAE
from .layout import (
    EMBEDDED_TINY,
    SINGLE,
    TEXT_NAMES,
    TINY,
    TOKENIZER_FOLDERS,
    VAE_NAMES,
    Layout,
    Part,
    find_layout,
    part_of_file,
    searched_folders,
    text_name,
    vae_name,
    vocabulary,
)
from .load import dit_config, problems, text_config, text_model, vae_config
from .metadata import MADE_FROM, FileMetadata, file_name, write_metadata
from .quantise import streamed_fp8
from .stream import StreamedFile, StreamedTensor, gigabytes
from .tokenizer import JSON, SPIECE, UMT5_VOCABULARY, locate, read_bytes, size_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_LABELS = {dtype: label for label, dtype in DTYPES.items()}
FP8_SCALED = "fp8"
"""The transformer's large matrices in fp8 with scales, and everything else in bfloat16."""
PARTS = {"dit": TRANSFORMER, "text": TEXT, "vae": VAE}
FOLDERS = {"dit": "diffusion_models", "text": "text_encoders", "vae": "vae"}

# Sizes of the published umT5-xxl. Only a text encoder and a VAE of the published sizes get the published names.
UMT5_XXL = {"vocab_size": UMT5_VOCABULARY, "d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64}

# Room that a file system wants for itself beyond the bytes of the files.
SPARE_BYTES = 16 << 20

# How much of every source file is looked at to tell it from another one of the same name, size and time.
SAMPLES, SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class Output:
    """One file to be made. part: ``dit``, ``text`` or ``vae``.

    done: it is there already, made from the same source; its values are not read again.
    """

    part: str
    file: StreamedFile
    dtype: str
    done: bool

    @property
    def path(self) -> Path:
        """Where it will lie."""
        return self.file.path


@dataclass(frozen=True)
class Conversion:
    """What `plan` decided. notes: what the user should know, such as parts that the source does not have."""

    outputs: tuple[Output, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are still to be made."""
        return sum(output.file.nbytes for output in self.outputs if not output.done)

    def run(self, begin: Callable[[Output], None], advance: Callable[[int], None]) -> None:
        """Makes the files, one after the other.

        begin: called before each. advance: called with bytes as they are written (or found written by an earlier run),
        and again as they are read back, 2 * nbytes in all. Interrupted in any way, the same conversion goes on where
        this one was. Raises InputFileError and WeightsError.
        """
        for output in self.outputs:
            if output.done:
                continue
            begin(output)
            try:
                output.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputFileError(f"the folder {output.path.parent} cannot be made: {error}") from error
            with output.file as file:
                file.make(advance)


@names_the_path
def plan(
    source: str | Path,
    target: Path,
    *,
    dtype: str = "bf16",
    vae_dtype: str | None = None,
    preset: str | None = None,
    only: str | None = None,
    overwrite: bool = False,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> Conversion:
    """Decides and checks everything that can be known without reading weights.

    source: whatever `find_layout` takes, or with ``only`` the file of that part alone. dtype: of transformer and text
    encoder; ``fp8`` is of the transformer's large matrices, and bfloat16 of all the rest. vae_dtype: of the VAE; None
    keeps the stored one, because the VAE is small and its encoder makes what the transformer starts from. preset: the
    recipe to note in the transformer's file; None for the one the source points to. only: ``dit``, ``text`` or
    ``vae``. overwrite: replace files that are there, finished or not.
    vae, text_encoder, tokenizer: as for `find_layout`. Raises InputFileError, PresetError, WeightsError.
    """
    model = _open(source, only, vae, text_encoder, tokenizer)
    outputs: list[Output] = []
    notes: list[str] = []
    if only is None:
        notes += [f"there is no {PARTS[part]} in {source}: not made" for part in PARTS if part not in model.parts]
    for name, part in model.parts.items():
        if only not in (None, name):
            continue
        checkpoint = part.open()
        rest = DTYPES["bf16" if dtype == FP8_SCALED else dtype]
        torch_dtype = _vae_dtype(checkpoint, vae_dtype) if name == "vae" else rest
        label = DTYPE_LABELS[torch_dtype]
        if name == "dit":
            label = dtype
            planned = _plan_dit(model, part, checkpoint, dtype, preset)
        elif name == "text":
            planned = _plan_text(model, part, checkpoint, torch_dtype, notes)
        else:
            planned = _plan_vae(model, checkpoint, torch_dtype, notes)
        path = target / FOLDERS[name] / f"{planned.name}.safetensors"
        files = [*part.files, *planned.extra_files]
        if any(os.path.realpath(path) == os.path.realpath(file) for file in files):
            raise InputFileError(f"{path} is the source itself; give another folder")
        _require_apart(path, name, model, (source, vae, text_encoder))
        metadata = {**planned.metadata, MADE_FROM: _signature(files)}
        streamed = StreamedFile(path, planned.tensors, metadata)
        outputs.append(Output(name, streamed, label, _already_made(streamed, overwrite)))
    conversion = Conversion(tuple(outputs), tuple(notes))
    _require_room(target, conversion)
    return conversion


@dataclass(frozen=True)
class _Model:
    """What there is to convert. parts: in the order of PARTS. tokenizers: places in which one may be, in groups, the
    likeliest first. layout: None when the source is a single part alone."""

    name: str
    parts: dict[str, Part]
    tokenizers: tuple[tuple[Path, ...], ...]
    layout: Layout | None


def _open(
    source: str | Path,
    only: str | None,
    vae: str | Path | None,
    text_encoder: str | Path | None,
    tokenizer: str | Path | None,
) -> _Model:
    """Looks at the source. With ``only``, it may be that part alone. Raises InputFileError or WeightsError."""
    if only in ("text", "vae") and source != TINY and (path := existing(source, "source")).is_file():
        alone = part_of_file(path)
        if alone is None or alone.kind != PARTS[only]:
            raise WeightsError(f"{path} is {f'a {alone.kind}' if alone else 'no part of a model'}, not a {PARTS[only]}")
        beside = [folder / name for folder in (path.parent, path.parent.parent) for name in TOKENIZER_FOLDERS]
        places = ((path,), tuple(beside)) if tokenizer is None else ((existing(tokenizer, "tokenizer"),),)
        about = alone.open().about
        return _Model((about.source if about else None) or path.stem, {only: alone}, places, None)
    layout = find_layout(source, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
    found = {"dit": layout.transformer, "text": layout.text, "vae": layout.vae}
    parts = {name: part for name, part in found.items() if part is not None}
    if only is not None and only not in parts:
        layout.require(PARTS[only])
    return _Model(layout.name, parts, () if layout.tokenizer is None else ((layout.tokenizer,),), layout)


@dataclass(frozen=True)
class _Planned:
    """One file to be: its name without suffix, and what goes in. extra_files: read besides those of the part."""

    name: str
    tensors: list[StreamedTensor]
    metadata: dict[str, str]
    extra_files: tuple[Path, ...] = ()


def _plan_dit(model: _Model, part: Part, checkpoint: Checkpoint, dtype: str, chosen: str | None) -> _Planned:
    assert model.layout is not None
    preset = get_preset(chosen) if chosen is not None else model.layout.preset
    if preset is None:
        raise PresetError(
            f"{model.name}: {model.layout.preset_reason}, and the new file has to; say it with --preset "
            f"({', '.join(PRESETS)})"
        )
    config = dit_config(checkpoint, part.config)
    _require_fit(CausalWanDiT(config, device="meta"), checkpoint)
    metadata = write_metadata(
        FileMetadata(
            preset=preset.name,
            control=config.control,
            config={"num_heads": config.num_heads, "text_len": config.text_len},
            source=model.name,
            # The preset has an entry of its own, and may have been chosen anew.
            about={key: value for key, value in model.layout.about.items() if key != "preset"},
        )
    )
    metadata["config"] = json.dumps(NOT_A_PLAIN_WAN, sort_keys=True)
    name = _model_name(model.layout, preset, config.control)
    if dtype != FP8_SCALED:
        return _Planned(f"{name}_{dtype}", _streamed(checkpoint, DTYPES[dtype]), metadata)
    names = sorted(checkpoint.shapes(), key=_natural)
    tensors, about = streamed_fp8(checkpoint, names, torch.bfloat16)
    # The name that such files have elsewhere.
    return _Planned(f"{name}_fp8_e4m3fn_scaled", tensors, {**metadata, **about})


# ComfyUI's Load Diffusion Model would take the file for Wan 2.2 image to video, because the names of that are all
# there, drop the camera layers with a line in its log, and sample something else. It lets the entry ``config`` of the
# metadata override what it detects (comfy/model_detection.py), finds no model of this kind, and says so.
NOT_A_PLAIN_WAN = {
    "transformer": {
        "image_model": "lingbot_world",
        "note": "a LingBot-World transformer; load it with the LingBot World nodes",
    }
}


def _plan_text(model: _Model, part: Part, checkpoint: Checkpoint, dtype: torch.dtype, notes: list[str]) -> _Planned:
    sizes = text_config(checkpoint, part.config)
    _require_fit(text_model(checkpoint, part.config, dtype=dtype), checkpoint)
    tensors = _streamed(checkpoint, dtype)
    found = _find_tokenizer(model.tokenizers)
    if found is not None:
        # Last, because its length is odd and the tensors after it would not be aligned.
        tensors.append(_tokenizer_tensor(*found))
    if found is None or found[1] != SPIECE:
        looked = f"in {model.tokenizers[0][0]}" if model.layout and model.tokenizers else f"beside {checkpoint.where}"
        notes.append(_tokenizer_note(looked, found is not None, vocabulary(part) == UMT5_VOCABULARY))
    published = _trained(model) and all(sizes[name] == size for name, size in UMT5_XXL.items())
    name = "umt5_xxl" if published else _other_name(text_name(model.name), TEXT_NAMES)
    metadata = write_metadata(FileMetadata(source=model.name))
    return _Planned(f"{name}_{DTYPE_LABELS[dtype]}", tensors, metadata, () if found is None else (found[0],))


def _plan_vae(model: _Model, checkpoint: Checkpoint, dtype: torch.dtype, notes: list[str]) -> _Planned:
    config = vae_config(checkpoint)
    # ComfyUI takes only the width of the first level from the file.
    if config != dataclasses.replace(VAEConfig(), dim=config.dim):
        notes.append(
            "this VAE is not built like the Wan 2.1 VAE, and ComfyUI's VAELoader knows no other, so that VAELoader "
            "cannot use it; LingBot World can"
        )
    _require_fit(WanVAE(config, device="meta"), checkpoint)
    published = _trained(model) and config == VAEConfig()
    name = "wan_2.1_vae" if published else _other_name(vae_name(model.name), VAE_NAMES)
    return _Planned(name, _streamed(checkpoint, dtype), write_metadata(FileMetadata(source=model.name)))


def _trained(model: _Model) -> bool:
    """Unless the model says that its weights are random."""
    return model.layout is None or model.layout.about.get("trained") is not False


def _other_name(name: str, published: Sequence[str]) -> str:
    """A name that is not taken for a published one."""
    names = (f"{name}.safetensors", f"{name}_bf16.safetensors")
    taken = any(fnmatch.fnmatch(own, pattern.lower()) for own in names for pattern in published)
    return f"other_{name}" if taken else name


def _tokenizer_note(looked: str, inside: bool, umt5: bool) -> str:
    """What to know of a text encoder's file that has no spiece.model inside. inside: it has a tokenizer.json."""
    lacking = f"there is no spiece.model {looked}, and ComfyUI's CLIPLoader needs it inside the text encoder's file"
    ours = "; its tokenizer.json is inside, and LingBot World needs no more" if inside else ""
    if umt5:
        return (
            f"{lacking}{ours}; get it (google/umt5-xxl has it) and convert again with --only text --overwrite "
            "--tokenizer PATH"
        )
    if inside:
        return f"{lacking}, so that CLIPLoader cannot use this one{ours}"
    return (
        f"{lacking}; this one has a vocabulary of its own, which umT5's does not fit: convert again with --only text "
        "--overwrite --tokenizer PATH of the tokenizer that belongs to it"
    )


def _streamed(checkpoint: Checkpoint, dtype: torch.dtype) -> list[StreamedTensor]:
    """All tensors in their natural order, so that one model gives one file however its source was cut up."""

    def reader(name: str) -> Callable[[], torch.Tensor]:
        return lambda: checkpoint.read(name, dtype=dtype)

    shapes = checkpoint.shapes()
    return [StreamedTensor(name, shapes[name], dtype, reader(name)) for name in sorted(shapes, key=_natural)]


def _find_tokenizer(groups: Sequence[Sequence[Path]]) -> tuple[Path, str] | None:
    """The file that holds the tokenizer, and its kind. Of one group, a spiece.model is better, because ComfyUI needs
    it; but what is in an earlier group belongs to the text encoder more surely."""
    for group in groups:
        for name in (SPIECE, JSON):
            for path in group:
                if (file := locate(path, name)) is not None:
                    return file, name
    return None


def _tokenizer_tensor(file: Path, name: str) -> StreamedTensor:
    def read() -> torch.Tensor:
        return torch.frombuffer(bytearray(read_bytes(file, name)), dtype=torch.uint8)

    return StreamedTensor(name, (size_of(file, name),), torch.uint8, read)


def _require_fit(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Raises WeightsError unless the checkpoint has exactly the module's parameters."""
    if found := problems(module, checkpoint):
        raise WeightsError(f"{checkpoint.where} is no whole {checkpoint.part}: {'; '.join(found)}. Get the files again")


def _vae_dtype(checkpoint: Checkpoint, asked: str | None) -> torch.dtype:
    """The dtype asked for, or else the one most of the VAE is stored in."""
    if asked is not None:
        return DTYPES[asked]
    stored = STORED_DTYPES[next(iter(checkpoint.dtypes))]
    return stored if stored in DTYPE_LABELS else torch.float32


def _model_name(layout: Layout, preset: Preset, control: str) -> str:
    """A file name that says which model it is: the published one where a file or folder has it, else the recipe's."""
    files = layout.transformer.files
    names = (files[0].stem if len(files) == 1 else "", files[0].parent.name, layout.name)
    name = next((name for name in names if "lingbot" in name.lower()), f"lingbot_world_{preset.name}")
    name = file_name(name)
    return name if control == "cam" or control in re.split(r"[_.-]", name) else f"{name}_{control}"


def _signature(files: Sequence[Path]) -> str:
    """Changes when the source files do: by names, sizes and times, and by samples of what is in them."""
    digest = hashlib.sha256()
    for path in files:
        about = path.stat()
        digest.update(json.dumps([path.name, about.st_size, about.st_mtime_ns]).encode())
        # Times alone may all be the same, as in an archive that was made to be reproducible.
        with path.open("rb", buffering=0) as file:
            for i in range(SAMPLES):
                file.seek(max(0, about.st_size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _require_apart(path: Path, name: str, model: _Model, given: Sequence[str | Path | None]) -> None:
    """Raises InputFileError for a file that would be taken for a part of its source the next time that is read.

    name: ``dit``, ``text`` or ``vae``. given: the paths of model, VAE and text encoder. A source that is a single file
    has a name of its own, which nothing beside it can be mistaken for.
    """
    folders: list[Path] = []
    within: list[Path] = []
    root = EMBEDDED_TINY if str(given[0]) == TINY else existing(given[0] or "", "source")
    if model.layout is not None and model.layout.what != SINGLE:
        if os.path.realpath(path.parent.parent) == os.path.realpath(root if root.is_dir() else root.parent):
            folders.append(path.parent)
        transformer, others = searched_folders(model.layout)
        within = transformer if name == "dit" else []
        folders += [] if name == "dit" else others
    for part, place in zip(("vae", "text"), given[1:], strict=True):
        if place is not None and existing(place, part).is_dir():
            folders += [file.parent for file in model.parts[part].files]
    folder = Path(os.path.realpath(path.parent))
    if folder in map(_real, folders) or any(folder.is_relative_to(_real(tree)) for tree in within):
        raise InputFileError(
            f"{path} would lie where the parts of {given[0]} are looked for, and be taken for one of them; give "
            "another folder as target"
        )


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _already_made(file: StreamedFile, overwrite: bool) -> bool:
    """Whether nothing has to be done. Raises InputFileError for a file that would have to be replaced unasked."""
    if overwrite or not file.path.exists():
        return False
    if file.finished:
        return True
    raise InputFileError(f"{file.path} exists and is another file than this would make; --overwrite replaces it")


def _require_room(target: Path, conversion: Conversion) -> None:
    """Raises InputFileError when the disk cannot take what is still to be written, or the target is no folder."""
    folder = next(parent for parent in (target.absolute(), *target.absolute().parents) if os.path.lexists(parent))
    if not folder.is_dir():
        raise InputFileError(f"{folder} is not a folder, or is a link that leads nowhere; give another target")
    needed = sum(output.file.missing_bytes for output in conversion.outputs if not output.done)
    free = shutil.disk_usage(folder).free
    if needed and needed + SPARE_BYTES > free:
        raise InputFileError(
            f"{folder}: {gigabytes(needed)} are needed and {gigabytes(free)} are free; make room, give another folder, "
            "or convert one part at a time with --only"
        )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts block 2 before block 10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]
