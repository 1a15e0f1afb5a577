"""How many threads PyTorch should take on a CPU.

Its own default is one for every core. Threads of one operation wait for each other, so that a single busy process
beside ours makes a small model about ten times slower: one core is left to the rest of the machine. The number
depends on the machine alone and not on its load, because sums depend on it.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CPU_FOLDER = Path("/sys/devices/system/cpu")


def logical_cpus() -> set[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def usable_cores(
    cpus: set[int] | None = None, *, cpu_folder: Path = CPU_FOLDER, quota_file: Path = CGROUP_QUOTA
) -> int:
    """Physical cores among ``cpus``, and no more than a container's quota of CPU time.

    Two threads on one core slow each other down in matrix products. Where the system does not say which CPUs share a
    core, every CPU counts.
    """
    cpus = logical_cpus() if cpus is None else cpus
    cores = {_read(cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota(quota_file) or len(cores)))


def limit_threads() -> int:
    """Lowers PyTorch's threads to the usable cores but one, unless somebody chose a number; returns those in force."""
    import torch

    # PyTorch itself says whether OMP_NUM_THREADS or MKL_NUM_THREADS decided.
    chosen = re.search(r"_NUM_THREADS : \d", torch.__config__.parallel_info())
    wanted = max(1, usable_cores() - 1)
    if not chosen and torch.get_num_threads() > wanted:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def _quota(file: Path) -> int | None:
    limit, _, period = _read(file).partition(" ")
    return math.ceil(int(limit) / int(period)) if limit.isdigit() and period.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
