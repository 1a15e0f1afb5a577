"""How alike two pictures look: the structural similarity index."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ImageError

SIGMA, RADIUS = 1.5, 5  # the window: a Gaussian of 11 x 11 pixels, its weights add up to 1
K1, K2, RANGE = 0.01, 0.03, 255.0


def ssim(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """The mean structural similarity of two pictures, uint8 [H, W, 3]: 1 for equal ones, about 0 for unrelated ones.

    Z. Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE Transactions on
    Image Processing 13(4), 2004, equation 13 and the constants of its section III-C: Gaussian window of 11 x 11 with
    sigma 1.5, K1 = 0.01, K2 = 0.03, L = 255. Only windows that lie inside the picture count, so that both sides must
    have 11 pixels. The paper's index is for grey pictures; this is the mean of R, G and B, so that a change of colour
    alone counts too. float64. Raises ImageError.
    """
    from scipy.ndimage import gaussian_filter

    _check(first, second)
    x, y = first.astype(np.float64), second.astype(np.float64)

    def local_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        # What the filter makes up beyond the edge is cut off with the windows that reach it.
        blurred = gaussian_filter(values, (SIGMA, SIGMA, 0), truncate=RADIUS / SIGMA)
        return blurred[RADIUS:-RADIUS, RADIUS:-RADIUS]

    mean_x, mean_y = local_mean(x), local_mean(y)
    variance_x = local_mean(x * x) - mean_x**2
    variance_y = local_mean(y * y) - mean_y**2
    covariance = local_mean(x * y) - mean_x * mean_y
    c1, c2 = (K1 * RANGE) ** 2, (K2 * RANGE) ** 2
    brightness = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return float((brightness * structure).mean())


def _check(first: Any, second: Any) -> None:
    for picture in (first, second):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise ImageError(f"pictures to compare must be uint8 [H, W, 3], not {picture.dtype} {list(picture.shape)}")
    if first.shape != second.shape:
        sizes = " and ".join(f"{picture.shape[0]}x{picture.shape[1]}" for picture in (first, second))
        raise ImageError(f"pictures of {sizes} cannot be compared; both must have the same size")
    window = 2 * RADIUS + 1
    if min(first.shape[:2]) < window:
        raise ImageError(
            f"pictures of {first.shape[0]}x{first.shape[1]} cannot be compared; both sides must have at least {window}"
        )
