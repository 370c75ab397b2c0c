"""The files of examples/cluster: Ray takes the YAML; the Slurm script trains, stops, is queued again and resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import habitus as hb
from habitus.record import Record

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
SCRIPT = CLUSTER / "train.slurm"
RECIPE = """
[data]
seq_len = 16
[model]
joint_dim = 8
text_len = 8
text_depth = 1
width = 16
depth = 1
head_dim = 16
[train]
batch_sequences = 4
steps = 800
learning_rate = 0.003
precision = "fp32"
[evaluate]
queries = 100
regimes = ["batch"]
"""
# Stand-ins for Slurm's commands on one machine: srun starts its command once for every node of the job.
STUBS = {
    "srun": """
        while [[ $1 == -* ]]; do shift; done
        for node in $(seq "$SLURM_NNODES"); do "$@" & echo $! >> "$STUBS/tasks"; done
        code=0
        for task in $(jobs -p); do wait "$task" || code=1; done
        exit $code""",
    "scontrol": """
        if [[ $1 == show ]]; then echo localhost; else echo "scontrol $*" >> "$STUBS/calls"; fi""",
    "scancel": """
        echo "scancel $*" >> "$STUBS/calls"
        kill -TERM $(cat "$STUBS/tasks")""",
}


def test_the_ray_cluster_is_what_ray_takes() -> None:
    config = yaml.safe_load((CLUSTER / "ray.yaml").read_text())
    assert {"cluster_name", "provider", "auth", "available_node_types", "head_node_type"} <= config.keys()
    types = config["available_node_types"]
    assert config["head_node_type"] in types
    assert all({"node_config", "resources"} <= kind.keys() for kind in types.values())
    assert sum(kind.get("max_workers", 0) for kind in types.values()) <= config["max_workers"]
    assert types["head"]["resources"]["CPU"] == 0 < types["gpu"]["resources"]["GPU"]
    assert any("ray start --head" in command for command in config["head_start_ray_commands"])
    assert any("$RAY_HEAD_IP" in command for command in config["worker_start_ray_commands"])
    assert any("/shared" in command for command in config["setup_commands"])


def test_the_ray_cluster_fits_rays_own_schema() -> None:
    ray = pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    config = yaml.safe_load((CLUSTER / "ray.yaml").read_text())
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"provider": None}, schema)


def test_the_slurm_script_parses_and_asks_for_what_it_uses() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    asked = [line.split(maxsplit=1)[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--ntasks-per-node=1", "--open-mode=append"} <= set(asked)
    assert any(option.startswith("--signal=B:USR1@") for option in asked)


@pytest.mark.slow
def test_a_job_that_is_preempted_saves_is_queued_again_and_ends_the_run(tmp_path: Path) -> None:
    hb.world(tmp_path / "dataset", num_users=200, num_items=60, events_per_user=16, seq_len=16)
    (tmp_path / "stage1.toml").write_text(RECIPE)
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, body in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {
        "PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs), "HABITUS_PYTHON": sys.executable,
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "nodes[1-2]",
        "HABITUS_PROCESSES": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = ["bash", SCRIPT, "stage1.toml", "--data", "dataset", "--out", "run", "--device", "cpu"]
    journal, calls = tmp_path / "run" / "journal.jsonl", stubs / "calls"

    with (tmp_path / "first.log").open("w") as log:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        until = time.monotonic() + 240
        while not (journal.exists() and len(journal.read_text().splitlines()) > 20):
            assert job.poll() is None and time.monotonic() < until, (tmp_path / "first.log").read_text()[-3000:]
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=120) == 0, (tmp_path / "first.log").read_text()[-3000:]
    job_id = environment["SLURM_JOB_ID"]
    assert calls.read_text().splitlines() == [f"scancel --signal=TERM {job_id}", f"scontrol requeue {job_id}"]
    assert not (tmp_path / "run" / "record.json").exists()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert 20 <= int(saved.name.removeprefix("step-")) < 800

    # Slurm starts the script again, under the same number.
    (stubs / "tasks").unlink()
    again = environment | {"SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=again, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"going on from {Path('run') / 'checkpoints' / saved.name}" in done.stderr
    record = Record.read(tmp_path / "run" / "record.json")
    assert (record.status, record.steps, record.hardware["processes"]) == ("done", 800, 2)
    steps = [json.loads(line)["step"] for line in journal.read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(800))
    assert len(calls.read_text().splitlines()) == 2  # nothing was queued again
