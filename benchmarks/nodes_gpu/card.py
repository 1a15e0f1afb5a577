"""The card's memory: what is allocated, a card made smaller than it is, and one that gives nothing more.

Other programs may share the card, so nothing here fills it: PyTorch is told to allow this process no more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MIB, GIB = 2**20, 2**30


def allocated() -> int:
    """Bytes of living tensors on the card."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@contextmanager
def small_card(size: int) -> Iterator[None]:
    """For the body, the card has ``size`` bytes: ComfyUI and this pack read it, and PyTorch allocates no more."""
    real = torch.cuda.mem_get_info

    def info(device: Any = None) -> tuple[int, int]:
        free, _ = real(device)
        return min(free, max(0, size - torch.cuda.memory_reserved(device))), size

    torch.cuda.empty_cache()
    torch.cuda.mem_get_info = info
    allow(size)
    try:
        yield
    finally:
        torch.cuda.mem_get_info = real
        allow_all()


def allow(size: int) -> None:
    """PyTorch allocates no more than ``size`` bytes from now on."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))


def allow_all() -> None:
    """Takes back ``allow``."""
    torch.cuda.set_per_process_memory_fraction(1.0)


def allow_no_more(spare: int = MIB) -> None:
    """PyTorch allocates no more than it has now, and ``spare`` bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # The two allocators compare the limit with different numbers.
    on_demand = torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    allow((torch.cuda.memory_allocated() if on_demand else torch.cuda.memory_reserved()) + spare)


@contextmanager
def out_of_memory_at(owner: Any, name: str, call: int, *, on_gpu: bool) -> Iterator[None]:
    """From the given call of ``owner.name`` on (the first is 1) the card gives nothing more; without a GPU that call
    raises what a GPU would.
    """
    import comfy.model_management

    function, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and on_gpu:
            allow_no_more()
        elif calls == call:
            raise comfy.model_management.OOM_EXCEPTION("out of memory")
        return function(*args, **kwargs)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        delattr(owner, name)
        if on_gpu:
            allow_all()
