"""Tensors between the host and the device, without the host waiting for more than it has to.

They are small (a chunk's latents are a megabyte), so NumPy copies them inside the host: waking a pool of threads for
such a copy takes longer than the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy there, or the tensor itself if it is there. The host goes on at once; what the device is queued to do
    before is not waited for, as it would be with a copy from ordinary memory."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.numpy()[...] = tensor.numpy()
    return pinned.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in main memory; the host waits until it is made, and sleeps meanwhile."""
    if not tensor.is_cuda:
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()
    arrived.synchronize()
    # Pinned memory is scarce, and a history keeps its latents.
    return torch.from_numpy(pinned.numpy().copy())
