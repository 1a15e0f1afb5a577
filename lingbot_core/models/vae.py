"""The Wan 2.1 video VAE with streaming encoder and decoder.

Parameter names are those of ``Wan2.1_VAE.pth`` (ComfyUI's ``wan_2.1_vae.safetensors`` uses the same). What a running
encode or decode remembers is an object in the caller's hands, never on the module, so any number of worlds can share
one VAE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from ..errors import CacheError, ImageError, LengthError, LingBotError, WeightsError
from .tiny_decoder import TinyDecoder
from .vae_blocks import Downsample, ResidualBlock, Tape, Upsample, head, middle, through
from .vae_plane_decoder import PlaneDecoder, Weights, own_weights, pieces_for
from .vae_planes import PlanePieces

# Per-channel statistics of the latents, published with Wan 2.1.
LATENT_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
LATENT_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip

TEMPORAL_STRIDE = 4
SPATIAL_STRIDE = 8

# Latents a fresh decoder must be fed until its state, and every later frame, is that of a decoder which saw all of the
# past: `VAEConfig().decoder_span`.
DECODER_SPAN = 38


# Latents that a GPU decodes together where it can; memory.DECODE_COPIES has room for so many.
LATENTS_AT_ONCE = 4


def frames_for(latents: int, *, first: bool) -> int:
    """Video frames that ``latents`` latent frames decode to; ``first``: they start a clip, whose first gives one."""
    return TEMPORAL_STRIDE * latents - (TEMPORAL_STRIDE - 1 if first and latents else 0)


@dataclass(frozen=True)
class VAEConfig:
    """Widths and strides. ``temporal_downsample[i]``: whether level i of the encoder also halves the frame rate."""

    dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)

    def __post_init__(self) -> None:
        if self.z_dim != len(LATENT_MEAN):
            raise WeightsError(f"a Wan 2.1 VAE has {len(LATENT_MEAN)} latent channels, this one has {self.z_dim}")
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise WeightsError(
                f"temporal_downsample={self.temporal_downsample} must have one entry less than dim_mult={self.dim_mult}"
            )
        stride = (2 ** sum(self.temporal_downsample), 2 ** (len(self.dim_mult) - 1))
        if stride != (TEMPORAL_STRIDE, SPATIAL_STRIDE):
            raise WeightsError(
                f"a Wan 2.1 VAE shrinks time by {TEMPORAL_STRIDE} and space by {SPATIAL_STRIDE}, this one by "
                f"{stride[0]} and {stride[1]}"
            )

    @classmethod
    def from_state_dict(cls, shapes: Mapping[str, Any]) -> VAEConfig:
        """Reads every field from names and shapes.

        shapes: name -> shape, or name -> anything with a ``shape``. Raises WeightsError naming the tensor that does
        not fit a Wan 2.1 VAE.
        """

        def size(name: str, axis: int = 0) -> int:
            if name not in shapes:
                raise WeightsError(f"not a Wan 2.1 VAE: there is no tensor {name!r}")
            shape: Sequence[int] = getattr(shapes[name], "shape", shapes[name])
            return int(shape[axis])

        dim, z_dim = size("encoder.conv1.weight"), size("conv2.weight")
        pattern = re.compile(r"encoder\.downsamples\.(\d+)\.")
        layers = {int(found[1]) for name in shapes if (found := pattern.match(name))}
        widths: list[set[int]] = [set()]
        blocks, temporal = [0], []
        for i in sorted(layers):
            layer = f"encoder.downsamples.{i}"
            if f"{layer}.resample.1.weight" in shapes:
                temporal.append(f"{layer}.time_conv.weight" in shapes)
                widths.append(set())
                blocks.append(0)
            else:
                widths[-1].add(size(f"{layer}.residual.6.weight"))
                blocks[-1] += 1
        if len(set(blocks)) != 1 or any(len(level) != 1 or next(iter(level)) % dim for level in widths):
            raise WeightsError(
                f"not a Wan 2.1 VAE: encoder.downsamples has levels of {blocks} residual blocks and "
                f"{[sorted(level) for level in widths]} channels for a base width of {dim}"
            )
        return cls(
            dim=dim,
            z_dim=z_dim,
            dim_mult=tuple(level.pop() // dim for level in widths),
            num_res_blocks=blocks[0],
            temporal_downsample=tuple(temporal),
        )

    @property
    def decoder_span(self) -> int:
        """Latents that reach one frame of output or one cached feature of the decoder.

        Every causal convolution of three taps looks two steps back at the frame rate of its level.
        """
        convs = 1 + 2 * 2 + 2 * (self.num_res_blocks + 1)  # conv1, the middle, the first level
        rate, invalid = 1, 2 * convs
        for upsampled in reversed(self.temporal_downsample):
            if upsampled:
                invalid, rate = (invalid + 2) * 2, rate * 2
            invalid += 2 * 2 * (self.num_res_blocks + 1)
        # The first frame the head's cache may hold is one that all convolutions before it got right, twice over.
        return -(-(invalid + 2) // rate)


_State = TypeVar("_State", bound="_StreamState")


@dataclass
class _StreamState:
    """The feature caches of a running clip.

    latents: latent frames seen so far. slots: one tensor per temporal convolution in order of execution; None where
    a convolution has not run yet. size: latent height and width, fixed by the first step.

    A step replaces cached tensors and never writes into them. `copy` may therefore share them: a copy is a snapshot
    that costs nothing, and both sides can go on independently.
    """

    latents: int = 0
    slots: tuple[Tensor | None, ...] = ()
    size: tuple[int, int] | None = None

    def copy(self) -> Self:
        """An independent snapshot; shares the cached tensors, which are never written again."""
        return type(self)(self.latents, self.slots, self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all cached tensors, shared ones included."""
        return sum(slot.nbytes for slot in self.slots if slot is not None)

    def equals(self, other: _StreamState) -> bool:
        """Whether both hold bitwise the same caches, so that the same input gives the same output from either.

        ``latents`` is not compared: an encoder fed with a constant becomes steady while it goes on counting. A fresh
        state equals only a fresh state.
        """
        if type(self) is not type(other) or self.size != other.size or len(self.slots) != len(other.slots):
            return False
        return all(_same_bits(a, b) for a, b in zip(self.slots, other.slots, strict=True))

    def _become(self, other: _StreamState) -> None:
        self.latents, self.slots, self.size = other.latents, other.slots, other.size


class EncoderState(_StreamState):
    """What a running encode remembers; see `WanVAE.encode`."""


class DecoderState(_StreamState):
    """What a running decode remembers; see `WanVAE.decode`."""


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is b:
        return True
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


class Encoder(nn.Module):
    """One frame, or four, [1, 3, T, H, W] -> moments of one latent [1, 2 * z_dim, 1, H / 8, W / 8]."""

    def __init__(self, config: VAEConfig, operations: Any, **where: Any) -> None:
        super().__init__()
        width = config.dim
        self.conv1 = operations.Conv3d(3, width, 3, padding=(0, 1, 1), **where)
        layers: list[nn.Module] = []
        for level, mult in enumerate(config.dim_mult):
            for _ in range(config.num_res_blocks):
                layers.append(ResidualBlock(width, config.dim * mult, operations, **where))
                width = config.dim * mult
            if level < len(config.temporal_downsample):
                layers.append(Downsample(width, config.temporal_downsample[level], operations, **where))
        self.downsamples = nn.Sequential(*layers)
        self.middle = middle(width, operations, **where)
        self.head = head(width, 2 * config.z_dim, operations, **where)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        return through(self.conv1, (*self.downsamples, *self.middle), self.head, x, tape)


class Decoder(nn.Module):
    """One latent [1, z_dim, 1, h, w] -> one frame, or four, [1, 3, T, 8 * h, 8 * w]."""

    def __init__(self, config: VAEConfig, operations: Any, **where: Any) -> None:
        super().__init__()
        width = config.dim * config.dim_mult[-1]
        self.conv1 = operations.Conv3d(config.z_dim, width, 3, padding=(0, 1, 1), **where)
        self.middle = middle(width, operations, **where)
        temporal_upsample = config.temporal_downsample[::-1]
        layers: list[nn.Module] = []
        for level, mult in enumerate(reversed(config.dim_mult)):
            for _ in range(config.num_res_blocks + 1):
                layers.append(ResidualBlock(width, config.dim * mult, operations, **where))
                width = config.dim * mult
            if level < len(temporal_upsample):
                layers.append(Upsample(width, temporal_upsample[level], operations, **where))
                width //= 2
        self.upsamples = nn.Sequential(*layers)
        self.head = head(width, 3, operations, **where)

    def forward(self, x: Tensor, tape: Tape) -> Tensor:
        return through(self.conv1, (*self.middle, *self.upsamples), self.head, x, tape)


class WanVAE(nn.Module):
    """The VAE of Wan 2.1.

    operations: the namespace whose ``Conv2d`` and ``Conv3d`` are used, and its ``weights_of``, if it has one, to get at
    their weights where a kernel of ours stands in for a call (`vae_plane_decoder.Weights`). compute_device: where it
    computes; by default wherever its parameters are, and a host that keeps them elsewhere until they are needed says
    where instead. The dtype is that of the parameters of encoder and decoder, which may differ. Latents are normalised
    in float32 with `LATENT_MEAN` and `LATENT_STD`. Pictures are in [-1, 1].

    latents_at_once: how many a decoder of 16 bits on a GPU decodes together; fewer take less memory and more time.
    pieces: what `decode` uses there: "auto" for the kernels that fit the device, None for the plain modules. draft:
    decodes instead of this VAE's own decoder.
    """

    latents_at_once = LATENTS_AT_ONCE
    pieces: PlanePieces | Literal["auto"] | None = "auto"
    draft: TinyDecoder | None = None

    def __init__(
        self,
        config: VAEConfig | None = None,
        *,
        operations: Any = nn,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        compute_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config = config or VAEConfig()
        self.compute_device = compute_device
        self._weights: Weights = getattr(operations, "weights_of", own_weights)
        where = {"device": device, "dtype": dtype}
        self.encoder = Encoder(config, operations, **where)
        self.conv1 = operations.Conv3d(2 * config.z_dim, 2 * config.z_dim, 1, **where)
        self.conv2 = operations.Conv3d(config.z_dim, config.z_dim, 1, **where)
        self.decoder = Decoder(config, operations, **where)
        # Plain tensors, not buffers: they stay float32 on the CPU whatever the module is cast or moved to, and are not
        # left behind on the meta device when weights are assigned.
        self._mean = torch.tensor(LATENT_MEAN, dtype=torch.float32, device="cpu").view(1, -1, 1, 1, 1)
        self._std = torch.tensor(LATENT_STD, dtype=torch.float32, device="cpu").view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def encode(self, video: Tensor, state: EncoderState | None = None) -> Tensor:
        """Encodes a clip, or continues one, to the mean latents.

        video: [3, T, H, W] in [-1, 1], H and W multiples of 8; T = 1 + 4k where a clip starts (no state, or a fresh
        one) and 4k where ``state`` continues it. Returns float32 [16, t, H / 8, W / 8], normalised; t = k + 1 or k.
        Clips cut into pieces give bitwise what one call gives. ``state`` moves on only when the call succeeds.
        Raises ImageError (shape), LengthError (T), CacheError (a state of another kind or size).
        """
        if video.ndim != 4 or video.shape[0] != 3 or not video.is_floating_point():
            raise ImageError(f"a video to encode must be floating point [3, T, H, W], not {_shown(video)}")
        frames, height, width = video.shape[1:]
        if height % SPATIAL_STRIDE or width % SPATIAL_STRIDE or not height or not width:
            raise ImageError(f"a video to encode must have sides that are multiples of 8, not {width}x{height}")
        size = (height // SPATIAL_STRIDE, width // SPATIAL_STRIDE)
        work = _start(EncoderState, state, size)
        first = work.latents == 0
        if first and frames % TEMPORAL_STRIDE != 1:
            raise LengthError(f"a clip to encode must start with 1 + 4k frames (1, 5, 9, ...), not {frames}")
        if not first and (frames == 0 or frames % TEMPORAL_STRIDE):
            raise LengthError(f"a running clip goes on with a multiple of 4 frames, not {frames}")

        mean, std = self._statistics()
        where = self._where(self.encoder)
        latents = []
        begin = 0
        while begin < frames:
            end = begin + (TEMPORAL_STRIDE if work.latents else 1)
            group = video[None, :, begin:end].to(**where)
            moments = self.conv1(_advance(self.encoder, group, work))
            latents.append((moments[:, : self.config.z_dim].float() - mean) / std)
            begin = end
        result = torch.cat(latents, dim=2)[0]
        if state is not None:
            state._become(work)
        return result

    @torch.no_grad()
    def decode(self, latents: Tensor, state: DecoderState | None = None) -> Tensor:
        """Decodes a clip, or continues one.

        latents: normalised [16, t, h, w]. Returns float32 [3, T, 8h, 8w] clamped to [-1, 1]; T = `frames_for` (t,
        first = no state or a fresh one). Clips cut into pieces give bitwise what one call gives, in float32 on a CPU
        and with our kernels on a GPU. ``state`` moves on only when the call succeeds, so a failed or cancelled decode
        can simply be repeated.
        Raises LingBotError (shape), LengthError (t = 0), CacheError (a state of another kind or size).
        """
        if latents.ndim != 4 or latents.shape[0] != self.config.z_dim or not latents.is_floating_point():
            raise LingBotError(
                f"latents to decode must be floating point [{self.config.z_dim}, t, h, w], not {_shown(latents)}"
            )
        if latents.shape[1] == 0:
            raise LengthError("there are no latents to decode; give at least one latent frame")
        work = _start(DecoderState, state, (latents.shape[2], latents.shape[3]))

        if self.draft is not None:
            result = self._decode_draft(self.draft, latents, work)
            if state is not None:
                state._become(work)
            return result
        mean, std = self._statistics()
        where = self._where(self.decoder)
        raw = (latents.unsqueeze(0).to(device=where["device"], dtype=torch.float32) * std + mean).to(where["dtype"])
        pieces = self._pieces(where["device"])
        if pieces is None:
            frames = []
            for latent in raw.split(1, dim=2):
                frames.append(_advance(self.decoder, self.conv2(latent), work).float().clamp(-1.0, 1.0))
            result = torch.cat(frames, dim=2)[0]
        else:
            result = self._decode_planes(pieces, raw, work)
        if state is not None:
            state._become(work)
        return result

    @property
    def decoder_name(self) -> str:
        """For reports: "VAE", or the draft's label."""
        return "VAE" if self.draft is None else self.draft.label

    @property
    def decoder_dtype(self) -> torch.dtype:
        """What `decode` computes in."""
        return next(self.decoder.parameters()).dtype

    def decode_in(self, dtype: torch.dtype) -> None:
        """Casts what `decode` uses, and nothing of the encoder. On a GPU 16 bits are laid out as our kernels read them.

        Not for a VAE whose parameters a host keeps: they are replaced.
        """
        for part in (self.conv2, self.decoder):
            part.to(dtype)
            if dtype == torch.float32 or next(part.parameters()).device.type != "cuda":
                continue
            for module in part.modules():
                if isinstance(module, nn.Conv2d | nn.Conv3d):
                    flat = module.weight.ndim == 4
                    layout = torch.channels_last if flat else torch.channels_last_3d
                    module.weight.data = module.weight.data.contiguous(memory_format=layout)

    def _pieces(self, device: torch.device) -> PlanePieces | None:
        if self.pieces == "auto":
            return pieces_for((self.conv2, *self.decoder.modules()), device, self._weights)
        return self.pieces

    def _decode_draft(self, draft: TinyDecoder, latents: Tensor, work: DecoderState) -> Tensor:
        if draft.raw:
            mean, std = (table[0].to(latents.device) for table in self._statistics())
            latents = latents.float() * std + mean
        frames = []
        for group in latents.split(self.latents_at_once, dim=1):
            shown, work.slots = draft.decode(group, work.slots, first=work.latents == 0)
            work.latents += group.shape[1]
            frames.append(shown)
        return frames[0] if len(frames) == 1 else torch.cat(frames, dim=1)

    def _decode_planes(self, pieces: PlanePieces, raw: Tensor, work: DecoderState) -> Tensor:
        """The rest of `decode`, several latents at once; the first of a clip stays alone, for it gives one frame."""
        count, height, width = raw.shape[2:]
        total = frames_for(count, first=work.latents == 0)
        decoder = PlaneDecoder(self.decoder, self.conv2, pieces, self._weights)
        result = raw.new_empty(3, total, SPATIAL_STRIDE * height, SPATIAL_STRIDE * width, dtype=torch.float32)
        begin = shown = 0
        while begin < count:
            end = min(count, begin + (self.latents_at_once if work.latents else 1))
            until = shown + frames_for(end - begin, first=work.latents == 0)
            tape = Tape(work.slots)
            work.slots = ()  # what nobody else holds goes as it is read
            with torch.cuda.device_of(raw):  # Triton launches on the current device
                decoder.decode(raw[:, :, begin:end], tape, result[:, shown:until])
            work.slots = tape.slots
            work.latents += end - begin
            begin, shown = end, until
        return result

    def _where(self, half: Encoder | Decoder) -> dict[str, Any]:
        """Device and dtype that one half computes on and in."""
        parameter = next(half.parameters())
        return {"device": self.compute_device or parameter.device, "dtype": parameter.dtype}

    def _statistics(self) -> tuple[Tensor, Tensor]:
        device = self.compute_device or next(self.parameters()).device
        # A blocking copy would make the host wait for all queued work.
        return self._mean.to(device, non_blocking=True), self._std.to(device, non_blocking=True)


def _advance(stack: Encoder | Decoder, group: Tensor, state: _StreamState) -> Tensor:
    """Runs one group and moves ``state`` on by one latent. Where it fails ``state`` is of no more use."""
    tape = Tape(state.slots)
    state.slots = ()  # what nobody else holds goes as it is read
    out = stack(group, tape)
    state.slots = tape.slots
    state.latents += 1
    return out


def _start(kind: type[_State], state: _State | None, size: tuple[int, int]) -> _State:
    """The state to work on: a copy, so that a failure leaves the caller's as it was."""
    if state is None:
        return kind(size=size)
    if not isinstance(state, kind):
        raise CacheError(f"this needs a {kind.__name__}, not a {type(state).__name__}")
    if state.size is not None and state.size != size:
        raise CacheError(
            f"this clip runs at {state.size[1]}x{state.size[0]} latents and cannot go on at {size[1]}x{size[0]}; "
            "start with a fresh state"
        )
    work = state.copy()
    work.size = size
    return work


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
