"""A whole camera path on its way to a server that takes it slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ...camera import CameraTrajectory, translation_unit
from ...errors import LengthError

if TYPE_CHECKING:
    from numpy.typing import NDArray

S = TypeVar("S", bound=np.generic)


def slices(poses: NDArray[S], chunk: int) -> tuple[list[NDArray[S]], NDArray[S]]:
    """Cuts rows [N, ...], one per video frame, into one slice for each chunk; the second value is what is left over.

    chunk: latent frames of a chunk, c. The first slice has 1 + 4 (c - 1) rows and each later one 4 c (9, then 12 at
    chunk 3): only such slices give the latent frames that the whole path gives offline. Another first slice is accepted
    by servers, and resampled otherwise. Raises LengthError for rows that do not reach the end of one chunk.
    """
    if isinstance(chunk, bool) or chunk < 1:
        raise LengthError(f"a chunk of {chunk} latent frames does not exist; use at least 1")
    rows = np.asarray(poses)
    first, later = 1 + 4 * (chunk - 1), 4 * chunk
    if len(rows) < first:
        raise LengthError(
            f"{len(rows)} poses do not reach the end of the first chunk of {chunk} latent frames; give at least {first}"
        )
    chunks = 1 + (len(rows) - first) // later
    used = first + (chunks - 1) * later
    return np.split(rows[:used], np.arange(first, used, later)), rows[used:]


def clip_maximum(poses: ArrayLike | Any) -> float:
    """The translation unit ``clip`` of poses [N, 4, 4], one per video frame: the longest step of a latent frame.

    Give it the poses that are really sent: a step among those left over would count as well. 1 for a path that does not
    move. Raises CameraError.
    """
    latents = CameraTrajectory.from_arrays(poses).to_latent(1, mode="cut")
    return translation_unit("clip", latent_poses=latents.poses)
