"""The description of this machine, and how many workers it carries.

Functions that read the system take `root`, the file system's root, so that a test can hand in made-up `proc` and `sys`
trees.
"""

import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiebreak.backends.levels import PROCESSOR, current
from tiebreak.backends.provenance import commit, wheel

GIB = 2**30

_X86 = (
    "sse4_1 avx avx2 fma f16c avx_vnni avx_ne_convert"
    " avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_fp16"
)
_ARM = "neon asimd asimdhp bf16 sve sve2 svebf16 sme"
NUMERIC_FEATURES = frozenset(f"{_X86} {_ARM}".split())

# In the auxiliary vector an emulator describes the emulated processor: word and bit of each feature
# (Linux, arch/arm64/include/uapi/asm/hwcap.h).
_HWCAP, _HWCAP2 = 16, 26
_BITS = {
    "asimd": (_HWCAP, 1),
    "asimdhp": (_HWCAP, 10),
    "sve": (_HWCAP, 22),
    "sve2": (_HWCAP2, 1),
    "svebf16": (_HWCAP2, 12),
    "bf16": (_HWCAP2, 14),
    "sme": (_HWCAP2, 23),
}
QEMU = "TIEBREAK_QEMU"  # QEMU's version, told to what runs under it, which can't ask


def describe(root: Path = Path("/")) -> dict[str, Any]:
    """Return properties of the machine and of this process's software that can change bits of a result.

    Facts that a system does not report are empty or None, never an exception. `root` is the file system's.
    """
    # Not at the top of the module: the level list and the worker count answer without loading torch.
    import numpy as np
    import torch

    limits = [limit for limit, _ in _memory_limits(root)]
    return {
        "machine": platform.machine(),  # architecture, as uname names it: x86_64, aarch64
        "cpu": cpu_name(root),
        "cpu_features": list(cpu_features(root)),
        "cores": _affinity(),  # that this process may run on
        "memory_gib": round(min([_memory(root)[0], *limits]) / GIB, 1),  # or its control group's limit, if lower
        "aten_cpu_capability": torch.backends.cpu.get_cpu_capability(),  # vector code of PyTorch's own kernels
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA") or None,  # the limit set on oneDNN
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "os": f"{platform.system()} {platform.release()}",
        "commit": (checkout := commit()),  # of the suite
        "wheel": None if checkout else wheel(),  # that the suite is installed from, where it is no checkout
        "level": current(os.environ),  # of instructions (see tiebreak.backends.levels)
        "emulated": emulated(root),
    }


def emulated(root: Path = Path("/")) -> str | None:
    """Return what emulates this process's instructions, in words; None on a real processor.

    Under QEMU's user mode uname is the emulated machine's, but `/proc/cpuinfo` is the host's: an x86's has "flags".
    """
    version = os.environ.get(QEMU)
    if platform.machine() != "aarch64" or not (version or "flags" in _cpuinfo(root)):
        return None
    return f"instructions emulated by {f'QEMU {version}' if version else 'QEMU'}, as the architecture defines them"


def cpu_name(root: Path = Path("/")) -> str:
    """Return the model name of the first processor; uname's where the system gives none, as on Arm."""
    if emulated(root):
        return f"{os.environ.get(PROCESSOR) or platform.machine()} (emulated processor)"
    return _cpuinfo(root).get("model name") or platform.processor() or platform.machine()


def cpu_features(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the instruction sets of the first processor that change numerics, by Linux's names, sorted.

    Empty without `/proc/cpuinfo`. That file is the host's: an emulated processor's are in the auxiliary vector.
    """
    if emulated(root):
        vector = root / "proc/self/auxv"  # pairs of 64 bits
        words = dict(struct.iter_unpack("<QQ", vector.read_bytes())) if vector.exists() else {}
        return tuple(sorted(name for name, (word, bit) in _BITS.items() if words.get(word, 0) >> bit & 1))
    cpuinfo = _cpuinfo(root)
    flags = cpuinfo.get("flags") or cpuinfo.get("Features") or ""
    return tuple(sorted(NUMERIC_FEATURES.intersection(flags.split())))


def worker_count(memory_per_worker_gib: float = 2.0, root: Path = Path("/")) -> int:
    """Return how many test processes this machine carries at a time.

    It is the lesser of the usable cores and of the workers that the available memory holds, within the limits of the
    control group (version 1 or 2) that a container or a batch system sets; at least 1.
    """
    cores = min([float(_affinity()), *_cpu_quotas(root)])
    free = min([_memory(root)[1], *(limit - used for limit, used in _memory_limits(root))])
    return max(1, int(min(cores, free / (memory_per_worker_gib * GIB))))


def _affinity() -> int:
    """Return the number of cores that the scheduler gives this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory(root: Path) -> tuple[float, float]:
    """Return total and available bytes of memory; the total twice where the system does not tell what is available."""
    fields = dict(line.split(":", 1) for line in read(root / "proc/meminfo").splitlines() if ":" in line)
    try:
        total, available = (1024.0 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError):
        total = available = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return total, available


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the cores' worth of time that each control group around this process allows, if it has a limit."""
    for folder in _control_groups(root, "cpu"):
        # Version 2 writes "quota period" or "max period" in one file; version 1 has two, with -1 for no limit.
        first = [read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quota, period = (int(word) if word.isdigit() else 0 for word in read(folder / "cpu.max").split() or first)
        if quota and period:
            yield quota / period


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the bytes allowed and in use for each control group around this process that has a limit."""
    for folder in _control_groups(root, "memory"):
        limit = read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")
        used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")
        if limit.strip().isdigit() and used.strip().isdigit():
            # The kernel gives up file cache before it refuses memory.
            fields = dict(line.split() for line in read(folder / "memory.stat").splitlines())
            cache = fields.get("total_inactive_file", fields.get("inactive_file", 0))
            yield int(limit), int(used) - int(cache)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, from the innermost outwards.

    Any of them may have a limit. In a container the path may name folders that are visible only outside it; the mounted
    folder, which is yielded last, is then the container's own group.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mounts = [root / "sys/fs/cgroup"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (controller, controllers)]
        else:
            continue
        mount = next((mount for mount in mounts if mount.is_dir()), None)
        if mount is not None:
            inner = mount / path.strip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount))


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the fields that `/proc/cpuinfo` gives for its first processor."""
    first = read(root / "proc/cpuinfo").strip().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def read(path: Path) -> str:
    """Return the text of a system file, empty if there is none or it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
