"""RecTools' SASRec on given sequences, run by peers.py in an environment of RecTools' own.

    VENV/bin/python benchmarks/peers_rectools.py SEQUENCES.npz STEPS BATCH LIMIT_GB

Its own model and Lightning trainer, softmax over the whole catalogue, one thread. The first step is left out of the
time unless it is the only one. Ends with one JSON line; one that failed for memory says so.
"""

import json
import resource
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, Trainer
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

CLOCK: list[float] = []  # CPU seconds at the end of every step; the trainer copies its callbacks


class Stopwatch(Callback):
    """Notes the CPU time after every step."""

    def on_train_batch_end(self, *_: Any) -> None:
        CLOCK.append(time.process_time())


def trainer(steps: int) -> Trainer:
    return Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Stopwatch()],
    )


def main() -> None:
    """Print events per CPU second and the peak memory."""
    warnings.filterwarnings("ignore")
    steps, batch = int(sys.argv[2]), int(sys.argv[3])
    limit = int(float(sys.argv[4]) * 1e9)
    torch.set_num_threads(1)
    sequences = np.load(sys.argv[1])["sequences"]
    users, length = sequences.shape
    table = pd.DataFrame(
        {
            Columns.User: np.repeat(np.arange(users), length),
            Columns.Item: sequences.ravel(),
            Columns.Weight: 1.0,
            Columns.Datetime: pd.Timestamp("2026-01-01") + pd.to_timedelta(np.tile(np.arange(length), users), "h"),
        }
    )
    dataset = Dataset.construct(table)
    model = SASRecModel(
        n_blocks=2,
        n_heads=2,
        n_factors=64,
        dropout_rate=0.0,
        session_max_len=length - 1,
        loss="softmax",
        batch_size=batch,
        get_trainer_func=trainer,
        get_trainer_func_kwargs={"steps": steps},
    )
    result: dict[str, Any] = {
        "version": version("rectools"),
        "batch_sequences": batch,
        "items": dataset.item_id_map.size,
    }
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    began = time.process_time()
    try:
        model.fit(dataset)
    except (RuntimeError, MemoryError) as error:
        result["failed"] = str(error).strip().splitlines()[0][:200]
    if len(CLOCK) > 1:
        result["events_per_cpu_second"] = (len(CLOCK) - 1) * batch * (length - 1) / (CLOCK[-1] - CLOCK[0])
    elif CLOCK:
        result["events_per_cpu_second"] = batch * (length - 1) / (CLOCK[0] - began)
    result["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps(result))


if __name__ == "__main__":
    main()
