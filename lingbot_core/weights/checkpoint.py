"""One part of a model on disk, under the names that our modules use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import WeightsError
from .files import Entry, TensorFile, open_file
from .keys import native_names, require_part, strip_prefix
from .metadata import FileMetadata, read_metadata
from .scaled import Scaled, as_scaled, dequantise, find_quantisation

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


class Checkpoint:
    """The weights of a transformer, a VAE or a text encoder; only headers are read until `read` is called.

    part: keys.TRANSFORMER, VAE or TEXT. Iterates over names. Raises WeightsError or InputFileError for files that are
    not this part.
    """

    def __init__(self, part: str, files: Sequence[Path]) -> None:
        self.part = part
        self.files = tuple(files)
        self._sources: dict[str, TensorFile] = {}
        self.metadata: dict[str, str] = {}
        for path in self.files:
            source = open_file(path)
            for name in source.entries:
                if name in self._sources:
                    raise WeightsError(f"{path}: tensor {name} is also in {self._sources[name].path.name}")
                self._sources[name] = source
            self.metadata.update(source.metadata)
        self.where = str(self.files[0] if len(self.files) == 1 else self.files[0].parent)
        self.prefix = require_part(part, self._sources, self.where)
        stripped = strip_prefix(self.prefix, self._sources)
        stored = {short: name for name, short in stripped.items()}
        if len(stored) < len(stripped):
            twice = next(name for name, short in stripped.items() if stored[short] != name)
            raise WeightsError(f"{self.where}: {twice} is there with and without the prefix {self.prefix!r}")
        self._quantisation = find_quantisation(
            stored, self.metadata, lambda short: self._raw(stored[short]), prefix=self.prefix, where=self.where
        )
        weights = [short for short in stored if short not in self._quantisation.helpers]
        self._short: dict[str, str] = {}
        for short, native in native_names(part, weights).items():
            if native in self._short:
                raise WeightsError(f"{self.where}: {short} and {self._short[native]} are the same tensor {native}")
            self._short[native] = short
        self._stored = stored

    @property
    def about(self) -> FileMetadata | None:
        """What the file says of itself, when it is one of ours."""
        return read_metadata(self.metadata, self.where)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as stored."""
        return sum(self.entry(name).nbytes for name in self)

    @property
    def dtypes(self) -> dict[str, int]:
        """Stored dtype -> bytes, the largest first."""
        counted: Counter[str] = Counter()
        for name in self:
            counted[self.entry(name).dtype] += self.entry(name).nbytes
        return dict(counted.most_common())

    @property
    def scaled(self) -> int:
        """Number of weights that are stored with a scale."""
        return sum(self._short[name] in self._quantisation.scales for name in self)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return {name: self.entry(name).shape for name in self}

    def entry(self, name: str) -> Entry:
        """Where and how a tensor is stored."""
        stored = self._stored[self._short[name]]
        return self._sources[stored].entries[stored]

    def place(self, name: str) -> str:
        """A tensor and its file, for messages: its own name there, when that is another one."""
        entry = self.entry(name)
        return f"{entry.name} in {entry.file}"

    def read(self, name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """One weight, a copy of its own: multiplied by its scale, cast (None: as stored), and known to be finite.

        Raises WeightsError naming tensor and file.
        """
        entry, short = self.entry(name), self._short[name]
        scale_name = self._quantisation.scales.get(short)
        if entry.dtype not in FLOATS and scale_name is None:
            raise WeightsError(
                f"{self.place(name)} has dtype {entry.dtype}; weights are {', '.join(FLOATS)}, or fp8 with a scale"
            )
        if scale_name is None:
            result = self._sources[entry.name].read(entry.name, dtype, device)
        else:
            try:
                result = dequantise(
                    self._raw(entry.name),
                    self._raw(self._stored[scale_name]),
                    format_=self._quantisation.formats.get(short),
                    dtype=dtype or torch.float32,
                ).to(device)
            except WeightsError as error:
                raise WeightsError(f"{self.place(name)} {error}") from None
        if not _finite(result):
            self._refuse(name, result.dtype)
        return result

    def read_scaled(self, name: str) -> Scaled | None:
        """A weight that is stored with a scale, not multiplied out; None for any other. Raises WeightsError."""
        entry, short = self.entry(name), self._short[name]
        scale_name = self._quantisation.scales.get(short)
        if scale_name is None:
            return None
        try:
            return as_scaled(
                self._raw(entry.name),
                self._raw(self._stored[scale_name]),
                format_=self._quantisation.formats.get(short),
                full_precision=short in self._quantisation.full_precision,
            )
        except WeightsError as error:
            raise WeightsError(f"{self.place(name)} {error}") from None

    def _refuse(self, name: str, dtype: torch.dtype) -> None:
        entry = self.entry(name)
        if _finite(self._raw(entry.name)) and dtype == torch.float16:
            raise WeightsError(f"{self.place(name)} holds values beyond the range of float16; load it as bfloat16")
        raise WeightsError(f"{self.place(name)} holds NaN or infinity; get the file again")

    def _raw(self, stored: str) -> Tensor:
        return self._sources[stored].read(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._short)

    def __len__(self) -> int:
        return len(self._short)

    def __contains__(self, name: object) -> bool:
        return name in self._short


def _finite(tensor: Tensor) -> bool:
    """Whether all elements are finite; without a copy for the dtypes that can be compared."""
    if not tensor.numel():
        return True
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.to(torch.bfloat16)
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
