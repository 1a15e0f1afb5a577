"""Sizes of the transformer, given or read off a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import WeightsError

CONTROL_CHANNELS = {"cam": 6, "act": 7}
LATENT_STRIDE = 8  # image pixels per latent pixel; the rays of 8 x 8 pixels are folded into channels


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of the transformer. The defaults are those of LingBot-World-Fast (18.5e9 parameters)."""

    dim: int = 5120
    ffn_dim: int = 13824
    num_layers: int = 40
    num_heads: int = 40
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    in_dim: int = 36
    out_dim: int = 16
    control: str = "cam"
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.num_heads

    @property
    def control_features(self) -> int:
        """Input features of the control patch embedding."""
        return CONTROL_CHANNELS[self.control] * LATENT_STRIDE**2 * math.prod(self.patch_size)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]], *, num_heads: int, text_len: int = 512) -> DiTConfig:
        """Reads every size off the tensor shapes of a checkpoint; heads and text length leave no trace in them.

        Raises WeightsError naming the missing keys when this is not a camera-controlled model.
        """
        needed = ("patch_embedding.weight", "patch_embedding_wancamctrl.weight", "blocks.0.ffn.0.weight",
                  "blocks.0.cam_scale_layer.weight", "text_embedding.0.weight", "time_embedding.0.weight",
                  "head.head.weight")  # fmt: skip
        missing = [key for key in needed if key not in shapes]
        if missing:
            raise WeightsError(
                f"not a LingBot-World transformer: {', '.join(missing)} missing. A plain Wan checkpoint has no camera "
                "layers (cam_*, patch_embedding_wancamctrl) and cannot be used"
            )
        dim, in_dim, *patch = shapes["patch_embedding.weight"]
        area = math.prod(patch)
        features = shapes["patch_embedding_wancamctrl.weight"][1]
        controls = {channels * LATENT_STRIDE**2 * area: name for name, channels in CONTROL_CHANNELS.items()}
        if features not in controls:
            raise WeightsError(
                f"patch_embedding_wancamctrl takes {features} features; known are {controls} (features: control)"
            )
        if dim % num_heads or (dim // num_heads) % 2:
            raise WeightsError(f"a width of {dim} cannot be split over {num_heads} heads of even size")
        layers = {int(key.split(".")[1]) for key in shapes if key.startswith("blocks.")}
        return cls(
            dim=dim,
            ffn_dim=shapes["blocks.0.ffn.0.weight"][0],
            num_layers=len(layers),
            num_heads=num_heads,
            freq_dim=shapes["time_embedding.0.weight"][1],
            text_dim=shapes["text_embedding.0.weight"][1],
            text_len=text_len,
            in_dim=in_dim,
            out_dim=shapes["head.head.weight"][0] // area,
            control=controls[features],
            patch_size=(patch[0], patch[1], patch[2]),
        )
