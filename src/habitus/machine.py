"""What this process may use of its machine: memory and cores, within the limits of its containers (cgroups)."""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_READINGS = 10
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still take: what is free, within every limit above it. None where nobody says."""
    rooms = [_free_memory(root), *(room for group in _cgroups(root, "memory") for room in _room_in(group))]
    known = [room for room in rooms if room is not None]
    return max(0, min(known)) if known else None


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on; a quota of two and a half counts as two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _cgroups(root, "cpu"):
        quota = _quota(group)
        if quota is not None:
            cores = min(cores, max(1, math.floor(quota)))
    return cores


def idle_cores(seconds: float = 0.2, root: Path = Path("/"), wait: Callable[[float], None] = time.sleep) -> float:
    """Cores that nobody used while this process waited; all of them where the system does not say."""
    before = _processor_ticks(root)
    wait(seconds)
    after = _processor_ticks(root)
    cores = usable_cores(root)
    if before is None or after is None or after[1] <= before[1]:
        return float(cores)
    return min(float(cores), (after[0] - before[0]) / (after[1] - before[1]) * (os.cpu_count() or 1))


def slowdown_now(seconds: float = 0.2, root: Path = Path("/"), wait: Callable[[float], None] = time.sleep) -> float:
    """How many times longer one more thread would take now than alone: others that want to run share the cores."""
    readings = []
    for _ in range(_READINGS):
        wait(seconds / _READINGS)
        lines = _read(root / "proc/stat").splitlines()
        readings += [int(line.split()[1]) for line in lines if line.startswith("procs_running ")]
    if not readings:
        return 1.0
    return max(1.0, sum(readings) / len(readings) / usable_cores(root))  # this process counts among those running


def wait_passively() -> None:
    """Let idle threads of OpenMP sleep instead of spin; to be called before PyTorch is imported.

    Spinning threads keep the cores from whoever has work, the other threads of the same process included.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _free_memory(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that limit this process, from its own up to the root; version 2 or 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        relative = Path(path.lstrip("/"))
        if ".." in relative.parts:  # a group outside of this namespace: its limits are not visible
            relative = Path()
        for folder in (relative, *relative.parents):
            yield top / folder


def _room_in(group: Path) -> Iterator[int]:
    """Bytes left below a memory limit; the cache of files counts as free, since the system gives it back."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            cached = [line.split() for line in _read(group / "memory.stat").splitlines()]
            inactive = next((int(value) for name, value in cached if name.endswith("inactive_file")), 0)
            yield int(limit) - int(usage) + inactive


def _quota(group: Path) -> float | None:
    words = _read(group / "cpu.max").split() or [
        _read(group / "cpu.cfs_quota_us").strip(),
        _read(group / "cpu.cfs_period_us").strip(),
    ]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def _processor_ticks(root: Path) -> tuple[int, int] | None:
    """Ticks of all processors so far: idle, and altogether."""
    words = _read(root / "proc/stat").partition("\n")[0].split()
    if len(words) < 5 or words[0] != "cpu":
        return None
    ticks = [int(word) for word in words[1:9]]
    return ticks[3] + (ticks[4] if len(ticks) > 4 else 0), sum(ticks)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
