"""RecTools' SASRec and HSTU as rivals: their own model, data preparation, softmax loss and Lightning trainer.

Where `implicit` is not installed, which RecTools imports for models that are not used here, an empty one takes its
place. HSTU has cosine scores at its authors' temperature of 0.05, and its time bias where the log has times.
"""

import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rivals_scoring import LEARNING_RATE, Course, Rival, Setting, TrainingLog
from torch import Tensor

TEMPERATURE = 0.05


def sasrec(log: TrainingLog, setting: Setting, device: torch.device, seed: int) -> Rival:
    """RecTools' SASRec."""
    return RecToolsRival("SASRecModel", log, setting, device, seed, {})


def hstu(log: TrainingLog, setting: Setting, device: torch.device, seed: int) -> Rival:
    """RecTools' HSTU."""
    extra = {"relative_time_attention": log.times is not None, "lightning_module_kwargs": {"logits_t": TEMPERATURE}}
    return RecToolsRival("HSTUModel", log, setting, device, seed, extra)


class RecToolsRival:
    """A transformer of RecTools, fitted on sequences as if each were a user."""

    def __init__(
        self, name: str, log: TrainingLog, setting: Setting, device: torch.device, seed: int, extra: dict[str, Any]
    ) -> None:
        provide_implicit()
        warnings.filterwarnings("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        import pandas as pd
        import rectools.models
        from pytorch_lightning import seed_everything
        from rectools import Columns
        from rectools.dataset import Dataset

        seed_everything(seed, verbose=False)
        self.device = device
        lengths = [len(sequence) for sequence in log.sequences]
        order = [np.arange(length) for length in lengths]  # days: an order is no time
        seconds = [days * 86_400 for days in order] if log.times is None else log.times
        self.dataset = Dataset.construct(
            pd.DataFrame(
                {
                    Columns.User: np.repeat(np.arange(len(lengths)), lengths),
                    Columns.Item: np.concatenate(log.sequences),
                    Columns.Weight: 1.0,
                    Columns.Datetime: pd.to_datetime(np.concatenate(seconds), unit="s").astype("datetime64[ns]"),
                }
            )
        )
        self.model = getattr(rectools.models, name)(
            n_blocks=setting.depth, n_heads=setting.heads, n_factors=setting.width, dropout_rate=setting.dropout,
            session_max_len=log.length, loss="softmax", lr=LEARNING_RATE, batch_size=log.batch, **extra,
        )  # fmt: skip
        self.model._build_model_from_dataset(self.dataset)
        self.module = self.model.torch_model.to(device)
        to_internal = self.model.data_preparator.item_id_map.convert_to_internal
        self.ids = np.zeros(log.num_items, np.int64)
        self.ids[log.items] = to_internal(log.items)
        self.item_ids = torch.from_numpy(self.ids[log.items]).to(device)

    def fit(self, course: Course) -> None:
        """What `model.fit` does, with a trainer that asks the course after every step and pass."""
        from pytorch_lightning import Trainer

        trainer = Trainer(
            max_epochs=100_000, accelerator="gpu" if self.device.type == "cuda" else "cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[course_callback(course)],
        )  # fmt: skip
        trainer.fit(self.model.lightning_model, self.model.data_preparator.get_dataloader_train())
        self.module.to(self.device)

    def encode(self, items: Tensor, times: Tensor) -> Tensor:
        batch = {"x": items, "unix_ts": times}
        return self.module.encode_sessions(batch, self.module.item_model.get_all_embeddings())[:, -1]

    def item_vectors(self) -> Tensor:
        vectors = self.module.item_model.get_all_embeddings().detach()[self.item_ids]
        cosine = self.module.similarity_module.distance.value == "cosine"
        return torch.nn.functional.normalize(vectors, dim=1) if cosine else vectors


def course_callback(course: Course) -> Any:
    """A Lightning callback that asks the course whether to stop."""
    from pytorch_lightning import Callback

    class CourseCallback(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or course.expired()

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = course.after_pass()

    return CourseCallback()


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


BUILDERS: dict[str, Callable[[TrainingLog, Setting, torch.device, int], Rival]] = {"sasrec": sasrec, "hstu": hstu}
