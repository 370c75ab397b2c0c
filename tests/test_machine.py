"""Memory and cores within the limits of containers, read from trees of files as Linux shows them."""

import os
from pathlib import Path

import pytest

from habitus.machine import available_memory, idle_cores, slowdown_now, usable_cores


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_without_containers_is_what_is_free(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {})) == 1000 * 1024
    assert available_memory(tmp_path / "nothing is said here") is None


def test_memory_is_what_the_tightest_group_leaves(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": "900\n",
        "sys/fs/cgroup/outer/memory.max": "500000\n",
        "sys/fs/cgroup/outer/memory.current": "200000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 50000\n",
    }
    assert available_memory(machine(tmp_path, files)) == 500_000 - 200_000 + 50_000


def test_memory_of_a_version_1_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/\n0::/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "300000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
    }
    assert available_memory(machine(tmp_path, files)) == 200_000


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "150000 100000\n"},
        {
            "proc/self/cgroup": "1:cpu:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "60000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_a_quota_of_less_than_two_cores_is_one(tmp_path: Path, files: dict[str, str]) -> None:
    assert usable_cores(machine(tmp_path, files)) == 1


def test_idle_cores_are_those_whose_ticks_nobody_took(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/stat": "cpu 100 0 100 700 100 0 0 0 0 0\n"})

    def wait(_: float) -> None:  # of 100 ticks, 30 are idle and 20 wait for a disk
        (root / "proc/stat").write_text("cpu 140 0 110 730 120 0 0 0 0 0\n")

    assert idle_cores(root=root, wait=wait) == pytest.approx(min(usable_cores(root), 0.5 * (os.cpu_count() or 1)))
    assert idle_cores(0.0, root=tmp_path / "nothing is said here") == usable_cores()


def test_one_more_thread_takes_longer_where_others_want_to_run(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/stat": f"cpu 1 0 0 1\nprocs_running {3 * usable_cores()}\n"})
    assert slowdown_now(0.0, root=root) == pytest.approx(3.0)
    (root / "proc/stat").write_text("cpu 1 0 0 1\nprocs_running 1\n")
    assert slowdown_now(0.0, root=root) == 1.0
    assert slowdown_now(0.0, root=tmp_path / "nothing is said here") == 1.0
