"""A Ray cluster whose network is cut in two while a sweep runs: every cell still ends with one Record, the same one.

Head and one node live in a network namespace, the other node in a second one; the cable between them is pulled and
put back. The store, which stands for a file server, stays in sight of both.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.sweeps.cells import DatasetFacts
from habitus.sweeps.preset import Preset
from habitus.sweeps.worker import Worker, WorkerOptions
from tests.sweeps.cells_of_tests import assert_equal_stores, quick_cells, store_with

pytest.importorskip("ray")

HEAD, FAR, PORT = "10.77.24.1", "10.77.24.2", 6397
# The head is to notice within seconds, not after half a minute.
IMPATIENT = {
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "2",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip

DRIVER = """
import json, subprocess, sys, time
import ray
from pathlib import Path
from habitus.data import Dataset
from habitus.sweeps.ray_tasks import run_on_ray
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job, WorkerOptions
address, store, dataset, cable, out = sys.argv[1:]
store = Store.open(store)
jobs = [Job(digest, 4e7, steps=12) for digest in store.digests()]
ray.init(address=address, log_to_driver=False, _node_ip_address=address.split(":")[0])
seen = {}

def alive():
    return sum(node["Alive"] for node in ray.nodes())

def watch():
    if "cut" not in seen:
        if len({e["worker"] for e in store.events() if e["event"] == "claimed"}) == 2:
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            seen["cut"], seen["nodes"] = time.monotonic(), alive()
    elif "healed" not in seen and (alive() < seen["nodes"] or time.monotonic() - seen["cut"] > 30):
        seen["left"] = alive()
        subprocess.run(["ip", "link", "set", cable, "up"], check=True)
        seen["healed"] = time.monotonic()

options = WorkerOptions(device="cpu", lease_seconds=3.0, save_every=4)
tally = run_on_ray(store, Dataset.open(Path(dataset), verify=False), jobs, options, 2, watch=watch, note=print)
Path(out).write_text(json.dumps({**seen, **tally.counts()}))
"""


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces and the near end of the cable between them; skipped where they cannot be made."""
    near, far = (f"habitus-{side}-{os.getpid()}" for side in ("near", "far"))
    cable, other_end = f"hb{os.getpid()}a", f"hb{os.getpid()}b"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    made = []
    try:
        try:
            for name in (near, far):
                ip("netns", "add", name)
                made.append(name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", near, "link", "add", cable, "type", "veth", "peer", "name", other_end, "netns", far)
            for name, device, address in ((near, cable, HEAD), (far, other_end, FAR)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs network namespaces: {getattr(error, 'stderr', '') or error}")
        yield near, far, cable
    finally:
        for name in made:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            ip("netns", "del", name)


@pytest.mark.soak
def test_a_node_that_is_cut_off_loses_nothing_and_repeats_nothing(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    cells = quick_cells(tiny, facts, 60)
    alone, jobs = store_with(tmp_path / "alone", dataset, tiny, cells)
    Worker(alone, dataset, WorkerOptions(device="cpu")).work(jobs)
    store, _ = store_with(tmp_path / "store", dataset, tiny, cells)
    environment = os.environ | IMPATIENT | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def inside(network: str, *command: str) -> None:
        whole = ["ip", "netns", "exec", network, *command]
        subprocess.run(whole, check=True, env=environment, timeout=300)

    ray_command = str(Path(sys.executable).with_name("ray"))
    small = ["--num-gpus", "0", "--object-store-memory", str(100 << 20), "--disable-usage-stats"]
    with two_networks() as (near, far, cable):
        head = [
            "--head",
            "--node-ip-address",
            HEAD,
            "--port",
            str(PORT),
            "--num-cpus",
            "0",
            "--include-dashboard",
            "false",
        ]
        inside(near, ray_command, "start", *head, *small)
        for network, address in ((near, HEAD), (far, FAR)):
            joined = ["--address", f"{HEAD}:{PORT}", "--node-ip-address", address, "--num-cpus", "1"]
            inside(network, ray_command, "start", *joined, *small)
        out = tmp_path / "seen.json"
        arguments = [f"{HEAD}:{PORT}", str(store.path), str(dataset.path), cable, str(out)]
        inside(near, sys.executable, "-c", DRIVER, *arguments)
    seen = json.loads(out.read_text())
    assert seen["healed"] > seen["cut"]
    assert seen["left"] == seen["nodes"] - 1  # the head gave the far node up
    events = list(store.events())
    assert all(event["equal"] for event in events if event["event"] == "duplicate")
    assert_equal_stores(store, alone, cells)
