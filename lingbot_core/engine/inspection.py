"""What a model on disk is, whether it would load, and what it needs; only headers are read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import LingBotError, WeightsError
from ..models.dit import CausalWanDiT, DiTConfig
from ..models.vae import VAEConfig, WanVAE
from ..presets import PRESETS, Preset
from ..weights.folder import existing
from ..weights.keys import TEXT, TRANSFORMER, VAE
from ..weights.layout import TINY, Layout, Part, find_layout, part_of_file
from ..weights.load import dit_config, problems, text_model, vae_config
from .memory import MemoryEstimate, estimate

SIZES = {"480p": (480, 832), "720p": (720, 1280)}
# Without a window memory grows with the video; this many chunks is the reference's own example length.
CHUNKS = 7


@dataclass(frozen=True)
class PartReport:
    """One part. dtypes: stored dtype -> bytes. scaled: weights stored with a scale. config: sizes, for people.

    problems: why it would not load; empty when it would.
    """

    kind: str
    files: tuple[str, ...]
    bytes: int
    dtypes: dict[str, int]
    scaled: int
    parameters: int
    config: dict[str, Any]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes for one size: the estimate's fields, session, weights and total."""

    size: str
    height: int
    width: int
    chunks: int
    bytes: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """A model, or a part alone (then only ``parts`` says something).

    preset: the label of the recipe that the files point to, or that was asked for. missing: absent part -> what to put
    where. loads: whether `World.load` would take it as it is. memory: for bfloat16 weights and cache; of the VAE
    the decoder is bfloat16, too.
    """

    path: str
    name: str
    what: str
    control: str | None
    preset: str | None
    preset_reason: str | None
    window: int | None
    licence: str | None
    parts: tuple[PartReport, ...]
    tokenizer: str | None
    missing: dict[str, str]
    notes: tuple[str, ...]
    loads: bool | None
    memory: tuple[MemoryReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def inspect_model(
    path: str | Path,
    *,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    tokenizer: str | Path | None = None,
    preset: Preset | None = None,
) -> Inspection:
    """Looks at a model, or at a VAE or text encoder alone.

    preset: for the memory, instead of the one the files point to. Raises InputFileError or WeightsError for paths that
    are nothing we know, and for the models that are refused.
    """
    alone = _part_alone(path)
    if alone is not None:
        report, _ = _report(alone)
        return Inspection(
            path=str(path), name=Path(path).name, what=f"a {alone.kind} alone", control=None, preset=None,
            preset_reason=None, window=None, licence=None, parts=(report,), tokenizer=None, missing={}, notes=(),
            loads=None, memory=(),
        )  # fmt: skip
    layout = find_layout(path, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
    reports, configs = [], {}
    for part in (layout.transformer, layout.vae, layout.text):
        if part is not None:
            report, configs[part.kind] = _report(part)
            reports.append(report)
    chosen = preset or layout.preset
    dit = configs.get(TRANSFORMER)
    reports = _check_text(reports, configs)
    return Inspection(
        path=str(path),
        name=layout.name,
        what=layout.what,
        control=None if dit is None else dit.control,
        preset=None if chosen is None else chosen.label,
        preset_reason=_reason(layout, preset),
        window=None if chosen is None else chosen.window,
        licence=layout.evidence.licence,
        parts=tuple(reports),
        tokenizer=None if layout.tokenizer is None else str(layout.tokenizer),
        missing=layout.missing,
        notes=_notes(layout),
        loads=_loads(layout, reports),
        memory=_memory(dit, configs.get(VAE) or VAEConfig(), chosen, _text_bytes(reports)),
    )


def _part_alone(path: str | Path) -> Part | None:
    """The part that a path is, when it is no transformer and no model."""
    if str(path) == TINY:
        return None
    try:
        part = part_of_file(existing(path, "model"))
    except LingBotError:
        return None
    return part if part is not None and part.kind != TRANSFORMER else None


def _report(part: Part) -> tuple[PartReport, Any]:
    """The report, and the configuration when there is one that fits."""
    checkpoint = part.open()
    config: Any = None
    found: list[str] = []
    sizes: dict[str, Any] = {}
    try:
        if part.kind == TRANSFORMER:
            config = dit_config(checkpoint, part.config)
            module: Any = CausalWanDiT(config, device="meta")
        elif part.kind == VAE:
            config = vae_config(checkpoint)
            module = WanVAE(config, device="meta")
        else:
            module = text_model(checkpoint, part.config, dtype=torch.float32)
            config = module.config
        found = problems(module, checkpoint)
    except WeightsError as error:
        found = [str(error)]
    if part.kind == TEXT and config is not None:
        sizes = {name: getattr(config, name) for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")}
    elif config is not None:
        sizes = dataclasses.asdict(config)
    report = PartReport(
        kind=part.kind,
        files=tuple(str(file) for file in part.files),
        bytes=checkpoint.nbytes,
        dtypes=checkpoint.dtypes,
        scaled=checkpoint.scaled,
        parameters=sum(torch.Size(shape).numel() for shape in checkpoint.shapes().values()),
        config=sizes,
        problems=tuple(found),
    )
    return report, config


def _check_text(reports: list[PartReport], configs: dict[str, Any]) -> list[PartReport]:
    """Adds the problem of a text encoder of another width than the transformer's text input."""
    dit, text = configs.get(TRANSFORMER), configs.get(TEXT)
    if dit is None or text is None or dit.text_dim == text.d_model:
        return reports
    problem = f"it gives {text.d_model} features, the transformer takes {dit.text_dim}"
    return [
        dataclasses.replace(report, problems=(*report.problems, problem)) if report.kind == TEXT else report
        for report in reports
    ]


def _reason(layout: Layout, preset: Preset | None) -> str:
    if preset is not None:
        return "chosen by the user"
    if layout.preset is None:
        return f"{layout.preset_reason}; choose one with --preset: {', '.join(PRESETS)}"
    return layout.preset_reason


def _notes(layout: Layout) -> tuple[str, ...]:
    notes = list(layout.notes)
    if layout.text is None:
        notes.append("without a text encoder only text states that were made elsewhere can be used")
    if layout.about.get("note"):
        notes.append(str(layout.about["note"]))
    return tuple(notes)


def _loads(layout: Layout, reports: list[PartReport]) -> bool:
    """Names, shapes and the parts that must be there; the preset may still have to be named."""
    try:
        layout.require(VAE, *(["tokenizer"] if layout.text else []))
    except WeightsError:
        return False
    return not any(report.problems for report in reports)


def _text_bytes(reports: list[PartReport]) -> int:
    """Of the text encoder in bfloat16, as it is loaded."""
    return sum(torch.bfloat16.itemsize * report.parameters for report in reports if report.kind == TEXT)


def _memory(
    dit: DiTConfig | None, vae: VAEConfig, preset: Preset | None, text_encoder: int
) -> tuple[MemoryReport, ...]:
    if dit is None or preset is None:
        return ()
    reports = []
    for size, (height, width) in SIZES.items():
        needed = estimate(
            dit,
            vae,
            preset,
            height=height,
            width=width,
            chunks=CHUNKS,
            dtype=torch.bfloat16,
            vae_dtype=torch.bfloat16,
            text_encoder=text_encoder,
        )
        reports.append(MemoryReport(size, height, width, CHUNKS, _counted(needed)))
    return tuple(reports)


def _counted(needed: MemoryEstimate) -> dict[str, int]:
    return {
        **dataclasses.asdict(needed),
        "weights": needed.weights,
        "session": needed.session,
        "total": needed.total,
    }
