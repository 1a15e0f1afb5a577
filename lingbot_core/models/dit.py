"""The causal, camera-controlled Wan 2.2 diffusion transformer of LingBot-World.

Parameter names are those of the published checkpoints. Precision follows the reference: Linears run in the compute
dtype, the residual stream is float32 from the first gate on, and time embedding, modulation, gates and head are
float32 throughout. All tokens of a forward share one timestep, so the time path has a single row.

What is constant for all forwards of a chunk is computed once and kept in a :class:`ChunkContext`: the camera's
scale and shift of every block (they do not depend on the timestep), the rotations and the condition latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PromptError
from .attention import Attention, sdpa
from .dit_blocks import After, Block, CameraModulation, ChunkContext, CrossKV, Head, TimeModulation, float32_linear
from .dit_config import DiTConfig
from .float8 import Activations
from .kv_cache import CacheShape
from .pieces import Pieces, pieces_for
from .rope import Rope, rope_for_chunk


class CausalWanDiT(nn.Module):
    """The transformer. Batch size is one throughout; tensors carry no batch dimension.

    operations: where Linear and Conv3d come from (torch.nn, or a host's own classes that cast, quantise or stream
    weights). dtype: of the parameters. compute_dtype: of the Linears' inputs and results. pieces: what runs between
    the matrix products; None takes what the device has.
    """

    def __init__(
        self,
        config: DiTConfig,
        *,
        operations: Any = nn,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype or dtype
        self.attention = attention or sdpa()
        self.pieces: Pieces | None = None
        factory = {"device": device, "dtype": dtype}
        dim = config.dim
        linear = operations.Linear
        self.patch_embedding = operations.Conv3d(
            config.in_dim, dim, kernel_size=config.patch_size, stride=config.patch_size, **factory
        )
        self.patch_embedding_wancamctrl = linear(config.control_features, dim, **factory)
        self.c2ws_hidden_states_layer1 = linear(dim, dim, **factory)
        self.c2ws_hidden_states_layer2 = linear(dim, dim, **factory)
        self.text_embedding = nn.Sequential(
            linear(config.text_dim, dim, **factory), nn.GELU(approximate="tanh"), linear(dim, dim, **factory)
        )
        self.time_embedding = nn.Sequential(
            linear(config.freq_dim, dim, **factory), nn.SiLU(), linear(dim, dim, **factory)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), linear(dim, dim * 6, **factory))
        self.blocks = nn.ModuleList(
            Block(config, operations, factory, self.compute_dtype) for _ in range(config.num_layers)
        )
        self.head = Head(config, operations, factory)

    def join(self) -> None:
        """Makes queries, keys and values of a block with one matrix product, where its weights are plain ones."""
        for block in self._layers:
            block.self_attn.join()

    @property
    def _layers(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.blocks)

    def cache_shape(self, height: int, width: int) -> CacheShape:
        """K/V geometry for latents of height x width."""
        _, ph, pw = self.config.patch_size
        tokens = (height // ph) * (width // pw)
        return CacheShape(self.config.num_layers, self.config.num_heads, self.config.head_dim, tokens)

    def encode_prompt(self, states: Tensor) -> CrossKV:
        """states: [L, text_dim] of the prompt's true length, 1 <= L <= text_len. Keys and values of every layer.

        The states are zero-padded before the text embedding and all rows are attended, as the model was trained.
        Raises PromptError for states of any other shape.
        """
        length, features = self.config.text_len, self.config.text_dim
        if states.ndim != 2 or states.shape[1] != features:
            raise PromptError(
                f"text states of shape {list(states.shape)} do not fit this model, which takes [L, {features}]; use "
                "the text encoder that belongs to it"
            )
        if not 1 <= states.shape[0] <= length:
            raise PromptError(
                f"text states of {states.shape[0]} tokens do not fit this model, which takes 1 to {length}; cut them, "
                "or shorten the prompt"
            )
        padded = F.pad(states, (0, 0, 0, length - states.shape[0])).to(self.compute_dtype)
        embedded = self.text_embedding(padded)
        pairs = [block.cross_attn.encode(embedded) for block in self._layers]
        return CrossKV(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))

    def encode_camera(self, rays: Tensor) -> CameraModulation:
        """rays: [1, channels * 64, frames, h, w] of one chunk (camera/rays.py), any float dtype."""
        pt, ph, pw = self.config.patch_size
        _, c, f, h, w = rays.shape
        folded = rays.to(self.compute_dtype).view(c, f // pt, pt, h // ph, ph, w // pw, pw)
        tokens = folded.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, c * pt * ph * pw)
        embedding = self.patch_embedding_wancamctrl(tokens)
        embedding = embedding + self.c2ws_hidden_states_layer2(F.silu(self.c2ws_hidden_states_layer1(embedding)))
        pairs = [block.camera(embedding) for block in self._layers]
        return CameraModulation(tuple(scale for scale, _ in pairs), tuple(shift for _, shift in pairs))

    def encode_time(self, t: float, device: torch.device) -> TimeModulation:
        """t: any float in 0..1000. Runs for a single row, whatever the number of tokens."""
        half = self.config.freq_dim // 2
        # float64 and on the device from the start: nothing has to be copied or waited for.
        exponents = torch.arange(half, dtype=torch.float64, device=device) / half
        angles = t * torch.pow(10000.0, -exponents)
        sinusoid = torch.cat([angles.cos(), angles.sin()]).float().unsqueeze(0)
        first, activation, second = self.time_embedding
        embedding = float32_linear(second, activation(float32_linear(first, sinusoid)))
        silu, projection = self.time_projection
        rows = float32_linear(projection, silu(embedding)).view(6, self.config.dim)
        return TimeModulation(embedding, rows)

    def rope(self, first_frame: int, frames: int, height: int, width: int, device: torch.device) -> Rope:
        """Rotations of a chunk of latents height x width starting at an absolute latent frame."""
        _, ph, pw = self.config.patch_size
        return rope_for_chunk(first_frame, frames, height // ph, width // pw, self.config.head_dim, device)

    def forward(self, x: Tensor, t: float, context: ChunkContext) -> Tensor:
        """x: float32 [out_dim, frames, h, w], t: the time. Returns the flow, float32, of the same shape.

        The chunk's keys and values replace those of the previous forward in the cache; nothing waits for the device.
        """
        return self.denoised(x, self.encode_time(t, x.device), context)

    def denoised(self, x: Tensor, time: TimeModulation, context: ChunkContext) -> Tensor:
        """`forward` with its time encoded."""
        pieces = self.pieces or pieces_for(x)
        _, hidden = self._through(x, time, context, pieces, len(self._layers))
        assert isinstance(hidden, Tensor)
        return self._unpatchify(self.head(hidden), x.shape)

    def remember(self, x: Tensor, t: float, context: ChunkContext) -> None:
        """A forward for the sake of the cache only: of the last block just keys and values are computed."""
        self.remembered(x, self.encode_time(t, x.device), context)

    def remembered(self, x: Tensor, time: TimeModulation, context: ChunkContext) -> None:
        """`remember` with its time encoded."""
        pieces = self.pieces or pieces_for(x)
        last = len(self._layers) - 1
        _, hidden = self._through(x, time, context, pieces, last)
        self._layers[last].remember(hidden, last, context, pieces)

    def _through(
        self, x: Tensor, time: TimeModulation, context: ChunkContext, pieces: Pieces, count: int
    ) -> tuple[Tensor, Activations]:
        """The residual after the first ``count`` blocks, and what comes next reads of it."""
        layers, dtype = self._layers, self.compute_dtype
        rows = time.rows + torch.stack([block.modulation[0].to(x.device) for block in layers]).float()
        after = [
            After(row[:1], row[1:2], block.self_attn.takes(dtype)) for row, block in zip(rows, layers, strict=True)
        ]
        after.append(self.head.after(time))
        tokens = self._embed(x, context)
        hidden = layers[0].begin(tokens, rows[0], pieces)
        for layer, block in enumerate(layers[:count]):
            tokens, hidden = block(
                tokens, hidden, rows[layer], after[layer + 1], layer, context, self.attention, pieces
            )
        return tokens, hidden

    def _embed(self, x: Tensor, context: ChunkContext) -> Tensor:
        """[tokens, dim] in the compute dtype from noisy latents and condition."""
        stacked = torch.cat([x, context.condition.to(x)]).to(self.compute_dtype)
        return self.patch_embedding(stacked.unsqueeze(0)).flatten(2).transpose(1, 2).squeeze(0)

    def _unpatchify(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        """[tokens, pt * ph * pw * c] -> [c, frames, h, w]."""
        channels, frames, height, width = shape
        pt, ph, pw = self.config.patch_size
        grid = tokens.view(frames // pt, height // ph, width // pw, pt, ph, pw, channels)
        return grid.permute(6, 0, 3, 1, 4, 2, 5).reshape(channels, frames, height, width)
