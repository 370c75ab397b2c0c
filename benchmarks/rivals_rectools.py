"""RecTools' SASRec and HSTU as rivals: their modules, initial weights, optimizer and softmax loss.

The loop is ours: with RecTools' own, Lightning and a loader in Python, a pass over 800,000 events took 7 s with fifteen
trainings on one H200. That the loss is theirs is checked on the first sequences of a dataset by

    VENV/bin/python benchmarks/rivals_rectools.py DATASET

Where `implicit` is not installed, which RecTools imports for models that are not used here, an empty one takes its
place. HSTU has cosine scores at its authors' temperature of 0.05, and its time bias where the log has times.
"""

import importlib.util
import sys
import types
import warnings
from typing import Any

import numpy as np
import torch
from rivals_scoring import LEARNING_RATE, Course, Rival, Setting, TrainingLog, fit_in_passes
from torch import Tensor
from torch.nn import functional as F

TEMPERATURE = 0.05


def sasrec(log: TrainingLog, setting: Setting, device: torch.device, seed: int) -> Rival:
    """RecTools' SASRec."""
    return RecToolsRival("SASRecModel", log, setting, device, seed, {})


def hstu(log: TrainingLog, setting: Setting, device: torch.device, seed: int) -> Rival:
    """RecTools' HSTU."""
    extra = {"relative_time_attention": log.times is not None, "lightning_module_kwargs": {"logits_t": TEMPERATURE}}
    return RecToolsRival("HSTUModel", log, setting, device, seed, extra)


class RecToolsRival:
    """A transformer of RecTools on sequences as if each were a user."""

    def __init__(
        self, name: str, log: TrainingLog, setting: Setting, device: torch.device, seed: int, extra: dict[str, Any]
    ) -> None:
        provide_implicit()
        warnings.filterwarnings("ignore")
        import pandas as pd
        import rectools.models
        from rectools import Columns
        from rectools.dataset import Dataset

        torch.manual_seed(seed)
        self.batch, self.length = log.batch, log.length
        self.model = getattr(rectools.models, name)(
            n_blocks=setting.depth, n_heads=setting.heads, n_factors=setting.width, dropout_rate=setting.dropout,
            session_max_len=log.length, loss="softmax", lr=LEARNING_RATE, batch_size=log.batch, **extra,
        )  # fmt: skip
        # Its model is built from the items alone: two users who have each of them once, so that ids are ours.
        items = np.tile(np.arange(1, len(log.items) + 1), 2)
        table = {Columns.User: np.repeat([0, 1], len(log.items)), Columns.Item: items, Columns.Weight: 1.0}
        days = pd.to_datetime(np.arange(len(items)), unit="s")
        self.model.data_preparator.session_max_len = len(items)
        self.model._build_model_from_dataset(Dataset.construct(pd.DataFrame(table | {Columns.Datetime: days})))
        self.model.data_preparator.session_max_len = log.length
        self.model.lightning_model._xavier_normal_init()
        self.module = self.model.torch_model.to(device)
        internal = self.model.data_preparator.item_id_map.convert_to_internal(np.arange(1, len(log.items) + 1))
        if not np.array_equal(internal, np.arange(1, len(log.items) + 1)):
            raise ValueError("RecTools numbers items otherwise than in their order")
        self.ids, self.sequences = log.numbered()
        self.times = self.sequences if log.times is None else padded_times(log)
        self.temperature = self.model.lightning_model.logits_t
        self.cosine = self.module.similarity_module.distance.value == "cosine"

    def fit(self, course: Course) -> None:
        fit_in_passes(self, self.sequences, self.times, self.batch, course)

    def hidden(self, items: Tensor, times: Tensor) -> Tensor:
        embeddings = self.module.item_model.get_all_embeddings()
        vectors = self.module.encode_sessions({"x": items, "unix_ts": times}, embeddings)
        return F.normalize(vectors, dim=-1, eps=1e-8) if self.cosine else vectors

    def output_vectors(self) -> Tensor:
        vectors = self.module.item_model.get_all_embeddings()
        return (F.normalize(vectors, dim=-1, eps=1e-8) if self.cosine else vectors) / self.temperature

    def encode(self, items: Tensor, times: Tensor) -> Tensor:
        return self.hidden(items, times)[:, -1]

    def item_vectors(self) -> Tensor:
        return self.output_vectors().detach()[1:]


def padded_times(log: TrainingLog) -> np.ndarray:
    """Times [n, L + 1] as RecTools pads them: before the first event its own."""
    assert log.times is not None
    matrix = np.zeros((len(log.times), log.length + 1), np.int64)
    for row, times in zip(matrix, log.times, strict=True):
        row[:] = times[0]
        row[len(row) - len(times) :] = times
    return matrix


def provide_implicit() -> None:
    """Put an empty `implicit` in place where there is none: any name of it is an empty class."""
    if "implicit" in sys.modules or importlib.util.find_spec("implicit"):
        return
    names = "als bpr cpu cpu.als cpu.bpr cpu.matrix_factorization_base gpu gpu.als gpu.bpr nearest_neighbours utils"
    for name in ["implicit", *(f"implicit.{part}" for part in names.split())]:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = _missing  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["implicit.gpu"].HAS_CUDA = False  # type: ignore[attr-defined]


def _missing(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def check_losses(path: str) -> None:
    """Print RecTools' loss and ours, of the same weights and sequences; they must be equal."""
    import rivals_scoring

    from habitus.data import Dataset

    log = TrainingLog.of(Dataset.open(path, verify=False))
    for build in (sasrec, hstu):
        rival = build(log, Setting(64, 2, 0.0), torch.device("cpu"), 0)
        assert isinstance(rival, RecToolsRival)
        ids, times = (torch.from_numpy(matrix[:16]) for matrix in (rival.sequences, rival.times))
        inputs, targets = ids[:, :-1], ids[:, 1:] * (ids[:, :-1] > 0)
        lightning = rival.model.lightning_model
        logits = lightning.get_batch_logits({"x": inputs, "y": targets, "unix_ts": times})
        theirs = lightning._calc_softmax_loss(logits, targets, torch.ones(targets.shape)).item()
        losses = []
        for held in (rivals_scoring.HELD_SCORES, 0):  # scores held, and not
            rivals_scoring.HELD_SCORES = held
            losses.append(rivals_scoring.next_item_loss(rival, ids, times).item())
        print(f"{build.__name__:8} RecTools {theirs:.6f}  ours {losses[0]:.6f}  without holding scores {losses[1]:.6f}")
        assert np.allclose(losses, theirs, rtol=1e-5)


if __name__ == "__main__":
    check_losses(sys.argv[1])
