"""Many runs at once: two processes work on one sweep and share nothing but the store's folder.

On a cluster the same command is started on every machine, with the store on a file system that all see.

python examples/cluster.py
"""

import argparse
import subprocess
import sys
from pathlib import Path

import habitus as hb


def main() -> None:
    parser = argparse.ArgumentParser(description="Two workers on one store.")
    parser.add_argument("--out", type=Path, default=Path("out/cluster"))
    parser.add_argument("--preset", default="tiny", help="tiny, quick, standard, paper, or a .toml file")
    options = parser.parse_args()

    dataset, store = options.out / "dataset", options.out / "store"
    if not dataset.exists():
        hb.world(dataset, num_users=1_500, num_items=150, events_per_user=24, seq_len=32)
    sweep = f"sweep allocation --data {dataset} --store {store} --preset {options.preset} --workers 1 --device cpu"
    command = [sys.executable, "-m", "habitus", *sweep.split()]
    machines = [subprocess.Popen(command) for _ in range(2)]
    codes = [machine.wait() for machine in machines]
    if any(codes):
        raise SystemExit(f"a sweep failed: exit codes {codes}")
    print(f"{len(hb.runs(store).runs)} runs in {store}")
    print(hb.fit(store, ["batch/loss"]))


if __name__ == "__main__":
    main()
