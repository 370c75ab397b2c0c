"""RePlay's SasRec as a rival: its own model, cross-entropy over the catalogue, optimizer and Lightning module."""

import logging
import warnings
from typing import Any

import torch
from rivals_scoring import LEARNING_RATE, Course, Rival, Setting, TrainingLog
from torch import Tensor


def sasrec(log: TrainingLog, setting: Setting, device: torch.device, seed: int) -> Rival:
    """RePlay's SasRec."""
    return RePlayRival(log, setting, device, seed)


class RePlayRival:
    """SasRec on sequences that lie ready in memory. Its ids are ours less one; the empty slot comes last."""

    def __init__(self, log: TrainingLog, setting: Setting, device: torch.device, seed: int) -> None:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        from replay.data import FeatureHint, FeatureSource, FeatureType
        from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
        from replay.nn.lightning import LightningModule
        from replay.nn.lightning.optimizer import OptimizerFactory
        from replay.nn.sequential import SasRec

        torch.manual_seed(seed)
        self.device, self.batch, self.empty = device, log.batch, len(log.items)
        self.ids, sequences = log.numbered()
        self.sequences = torch.from_numpy(sequences)
        schema = TensorSchema(
            [
                TensorFeatureInfo(
                    "item_id",
                    is_seq=True,
                    feature_type=FeatureType.CATEGORICAL,
                    embedding_dim=setting.width,
                    padding_value=self.empty,
                    cardinality=self.empty,
                    feature_hint=FeatureHint.ITEM_ID,
                    feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
                )
            ]
        )
        self.module = SasRec.from_params(
            schema, embedding_dim=setting.width, num_heads=setting.heads, num_blocks=setting.depth,
            max_sequence_length=log.length, dropout=setting.dropout,
        ).to(device)  # fmt: skip
        self.lightning = LightningModule(self.module, OptimizerFactory(learning_rate=LEARNING_RATE))

    def fit(self, course: Course) -> None:
        """Lightning's loop, with a callback that asks the course after every step and pass."""
        import lightning

        class CourseCallback(lightning.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.should_stop = trainer.should_stop or course.expired()

            def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
                trainer.should_stop = course.after_pass()

        loader: Any = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(self.sequences), self.batch, shuffle=True, collate_fn=self.collate
        )
        trainer = lightning.Trainer(
            max_epochs=100_000, accelerator="gpu" if self.device.type == "cuda" else "cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[CourseCallback()],
        )  # fmt: skip
        trainer.fit(self.lightning, loader)
        self.module.to(self.device)

    def collate(self, rows: list[tuple[Tensor]]) -> dict[str, Any]:
        """A batch as the model's forward takes it."""
        sequences = torch.stack([row for (row,) in rows])
        inputs, labels = self.inputs(sequences[:, :-1]), sequences[:, 1:, None]
        mask = (labels > 0) & (sequences[:, :-1, None] > 0)
        return inputs | {
            "positive_labels": torch.where(labels > 0, labels - 1, self.empty).contiguous(),
            "target_padding_mask": mask,
        }

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """Histories and their masks."""
        items = torch.where(ids > 0, ids - 1, self.empty).contiguous()
        return {"feature_tensors": {"item_id": items}, "padding_mask": ids > 0}

    def encode(self, items: Tensor, times: Tensor) -> Tensor:
        del times
        return self.module.body(**self.inputs(items))[:, -1]

    def item_vectors(self) -> Tensor:
        return self.module.body.embedder.get_item_weights(None).detach()[: self.empty]
