"""RePlay's SasRec on given sequences, run by peers.py in an environment of RePlay's own.

    VENV/bin/python benchmarks/peers_replay.py SEQUENCES.npz STEPS BATCH LIMIT_GB

Its own model, loss (cross-entropy over the whole catalogue), optimizer and Lightning module, on batches that lie ready
in memory, one thread. The first step is left out of the time unless it is the only one. Ends with one JSON line; one
that failed for memory says so.
"""

import json
import resource
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import lightning
import numpy as np
import torch
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.nn.lightning import LightningModule
from replay.nn.sequential import SasRec

CLOCK: list[float] = []  # CPU seconds at the end of every step


class Stopwatch(lightning.Callback):
    """Notes the CPU time after every step."""

    def on_train_batch_end(self, *_: Any) -> None:
        CLOCK.append(time.process_time())


def batches(sequences: torch.Tensor, batch: int) -> list[dict[str, Any]]:
    """Batches as the model's forward takes them; every slot is filled."""
    loaded = []
    for rows in sequences.split(batch):
        if len(rows) == batch:
            inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:, None].contiguous()
            loaded.append(
                {
                    "feature_tensors": {"item_id": inputs},
                    "padding_mask": torch.ones_like(inputs, dtype=torch.bool),
                    "positive_labels": labels,
                    "target_padding_mask": torch.ones_like(labels, dtype=torch.bool),
                }
            )
    return loaded


def main() -> None:
    """Print events per CPU second and the peak memory."""
    warnings.filterwarnings("ignore")
    steps, batch = int(sys.argv[2]), int(sys.argv[3])
    limit = int(float(sys.argv[4]) * 1e9)
    torch.set_num_threads(1)
    sequences = torch.from_numpy(np.load(sys.argv[1])["sequences"])
    length, items = sequences.shape[1], int(sequences.max()) + 1
    schema = TensorSchema(
        [
            TensorFeatureInfo(
                "item_id",
                is_seq=True,
                feature_type=FeatureType.CATEGORICAL,
                embedding_dim=64,
                padding_value=items,
                cardinality=items,
                feature_hint=FeatureHint.ITEM_ID,
                feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
            )
        ]
    )
    model = SasRec.from_params(
        schema, embedding_dim=64, num_heads=2, num_blocks=2, max_sequence_length=length - 1, dropout=0.0
    )
    result: dict[str, Any] = {"version": version("replay-rec"), "batch_sequences": batch, "items": items}
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Stopwatch()],
    )
    loader = torch.utils.data.DataLoader(batches(sequences, batch), batch_size=None)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    began = time.process_time()
    try:
        trainer.fit(LightningModule(model), loader)
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
