"""The same sweep on a Ray cluster of two nodes on this machine."""

import time
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.sweeps.cells import DatasetFacts
from habitus.sweeps.preset import Preset
from habitus.sweeps.ray_tasks import run_on_ray
from habitus.sweeps.worker import Worker, WorkerOptions
from tests.sweeps.cells_of_tests import assert_equal_stores, quick_cells, store_with

ray = pytest.importorskip("ray")


@pytest.mark.slow
def test_two_nodes_give_the_same_records_and_a_killed_node_loses_nothing(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    from ray.cluster_utils import Cluster

    cells = quick_cells(tiny, facts, 12)
    alone, jobs = store_with(tmp_path / "alone", dataset, tiny, cells)
    Worker(alone, dataset, WorkerOptions(device="cpu")).work(jobs)
    store, jobs = store_with(tmp_path / "store", dataset, tiny, cells)
    options = WorkerOptions(device="cpu", lease_seconds=3.0, save_every=4)
    # The head runs no task, so that both tasks are on the two nodes.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
        ray.init(address=cluster.address, log_to_driver=False)
        killed = []

        def kill_one() -> None:
            """Once both nodes are at work, one of their raylets goes, with all that runs on it."""
            workers = {event["worker"] for event in store.events() if event["event"] == "claimed"}
            if len(workers) == 2 and not killed:
                cluster.remove_node(nodes[1], allow_graceful=False)
                cluster.add_node(num_cpus=1)
                killed.append(time.monotonic())

        run_on_ray(store, dataset, jobs, options, 2, watch=kill_one, note=lambda _text: None)
        assert killed
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert_equal_stores(store, alone, cells)
