"""What the host does during a chunk: its own work, its waits, what it compiles and captures.

Two figures, because neither is the truth alone:

* ``host_ms``: the clock's time of the driving thread minus its time inside calls that wait (``WAITS``). A launch that
  blocks because the device's queue is full counts as work, so it is an upper bound; with few launches it is exact.
* ``cpu_ms``: processor time of the driving thread (``time.thread_time``). It leaves waits out only where a wait sleeps.
  CUDA's default is to spin; ``sleeping_waits`` asks for sleep, and ``waits_cost`` says what became of it: the share of
  a wait that was spent computing, about 0 or about 1. At 1 ``cpu_ms`` says nothing.

On a CPU the host is the device, so both are all of the work.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lingbot_core.engine.session import WorldSession

from .worlds import controls

WAITS: tuple[tuple[Any, str], ...] = (
    (Tensor, "cpu"),
    (Tensor, "item"),
    (Tensor, "tolist"),
    (Tensor, "__bool__"),
    (Tensor, "to"),  # only where it leaves or enters the device
    (Tensor, "copy_"),
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (threading.Condition, "wait"),  # of queues, events and futures
)
"""What the engine may call that returns only when the device, or another thread, has come so far."""

SYNCED = "called a synchronizing CUDA operation"
"""PyTorch's words. The mode's own notice, once a process, speaks of synchronizing operations too and is none."""

SLEEP = 4  # CU_CTX_SCHED_BLOCKING_SYNC
SCHEDULE = 7  # CU_CTX_SCHED_MASK


class HostTimer:
    """Milliseconds of one thread: by the clock, outside of waits, and of processor time."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._waited, self._depth = 0.0, 0
        self.reset()

    def reset(self) -> None:
        """Begins a new lap."""
        self._waited = 0.0
        self._at, self._cpu = time.perf_counter(), time.thread_time()

    def lap(self) -> dict[str, float]:
        """Since the last lap: ``wall_ms``, ``host_ms``, ``cpu_ms``."""
        wall, cpu = time.perf_counter() - self._at, time.thread_time() - self._cpu
        row = {"wall_ms": wall, "host_ms": wall - self._waited, "cpu_ms": cpu}
        self.reset()
        return {name: round(1000 * seconds, 2) for name, seconds in row.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, the time inside ``WAITS`` is counted."""
        with ExitStack() as stack:
            for owner, name in WAITS:
                stack.enter_context(self._timed(owner, name))
            self.reset()
            yield

    @contextmanager
    def _timed(self, owner: Any, name: str) -> Iterator[None]:
        original, own = getattr(owner, name), name in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._depth += 1
            begin = time.perf_counter()
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if not kwargs.get("non_blocking") and _waits(name, args, result):
                self._waited += time.perf_counter() - begin
            return result

        setattr(owner, name, timed)
        try:
            yield
        finally:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def _waits(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a call may have waited: copies and conversions do so only between host and device."""
    if name == "copy_":
        return isinstance(args[1], Tensor) and args[0].is_cuda != args[1].is_cuda
    if name == "to":
        return isinstance(result, Tensor) and args[0].is_cuda != result.is_cuda
    return not isinstance(args[0] if args else None, Tensor) or args[0].is_cuda


@contextmanager
def sleeping_waits(device: torch.device, *, wanted: bool = True) -> Iterator[float | None]:
    """While entered, the host sleeps where it waits for the device, if the driver grants that; gives ``waits_cost``.

    wanted: False leaves the driver as it is. Waking up takes some microseconds more than spinning.
    """
    if device.type != "cuda":
        yield None
        return
    torch.cuda.synchronize(device)  # the context exists
    before = _schedule(SLEEP) if wanted else None
    try:
        yield waits_cost(device)
    finally:
        if before is not None:
            _schedule(before)


def _schedule(flags: int) -> int | None:
    """Sets how this thread's CUDA context waits; returns what it was, None where the driver cannot do that."""
    with suppress(OSError, AttributeError):
        driver, now = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(0)
        if driver.cuCtxGetFlags(ctypes.byref(now)) == 0:
            others = now.value & ~SCHEDULE
            if driver.cuCtxSetFlags(ctypes.c_uint(others | flags)) == 0:
                return now.value & SCHEDULE
    return None


def waits_cost(device: torch.device, cycles: int = 50_000_000) -> float:
    """Processor time per time of a wait for the device: 0 asleep, 1 spinning."""
    torch.cuda._sleep(cycles)  # about 30 ms
    begin, cpu = time.perf_counter(), time.thread_time()
    torch.cuda.synchronize(device)
    return round((time.thread_time() - cpu) / max(1e-9, time.perf_counter() - begin), 3)


def captures(session: WorldSession) -> int | None:
    """CUDA graphs that the engine has recorded for this session; None where it records none."""
    recorded = session._derived.recorded
    return None if recorded is None else recorded.captures


class Captured:
    """Counts the CUDA graphs that anybody captures through PyTorch while it is entered."""

    def __init__(self) -> None:
        self.count = 0
        self._begin: Callable[..., Any] = torch.cuda.CUDAGraph.capture_begin

    def __enter__(self) -> Captured:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._begin(*args, **kwargs)

        torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.CUDAGraph.capture_begin = self._begin  # type: ignore[method-assign]


def compiled() -> int:
    """Variants compiled so far: of our Triton kernels, and graphs of torch.compile."""
    import sys

    kernels: Any = sys.modules.get("lingbot_core.models.kernels")
    functions = [] if kernels is None else vars(kernels).values()
    caches = [cache for function in functions for cache in getattr(function, "device_caches", {}).values()]
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    graphs = 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
    return sum(len(cache[0]) for cache in caches) + int(graphs)


def implicit_waits(session: WorldSession) -> dict[str, Any] | None:
    """Makes one more chunk and counts where the host waits for the device without being told to; None on a CPU.

    while_denoising: between the first step and the last. in_advance: in all of the call, with the lines that did it;
    the last forward, the check for NaN and the copy of the latents to the host are in the latter only. PyTorch notices
    copies and streams that it waits for itself; it neither sees libraries that wait nor events, which are on purpose.
    """
    if session.world.device.type != "cuda":
        return None
    wanted, early = controls(session), 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def found() -> list[str]:
            return [f"{_tail(w.filename)}:{w.lineno}" for w in caught if SYNCED in str(w.message)]

        before = 0

        def on_step(step: int, total: int) -> None:
            nonlocal before, early
            if step == 0:
                before = len(found())
            elif step == total - 1:
                early = len(found()) - before

        torch.cuda.set_sync_debug_mode("warn")
        try:
            session.advance(wanted, on_step=on_step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {"while_denoising": early, "in_advance": dict(Counter(found()))}


def _tail(path: str) -> str:
    return "/".join(path.replace("\\", "/").split("/")[-2:])
