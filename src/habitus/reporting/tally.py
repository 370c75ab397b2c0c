"""What the Records of a store have in common, counted as they are read: 10⁴ of them are not kept."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from habitus.record import Record
from habitus.reporting.format import plural


@dataclass
class Tally:
    """How often each setting, machine and version stands in the Records, and what they cost together."""

    num_records: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        self.num_records += 1
        self.flops += record.flops_nominal or 0.0
        if record.seconds is not None:
            self.seconds += record.seconds.warmup + record.seconds.train + record.seconds.evaluate
        for name, value in _describe(record).items():
            if value:
                self.values.setdefault(name, Counter())[value] += 1

    def __getitem__(self, name: str) -> str:
        """'adamw' or 'adamw (40 runs), muon (2 runs)'; '' where no Record says."""
        counts = self.values.get(name, Counter())
        if len(counts) == 1:
            return next(iter(counts))
        # Equal counts in alphabetical order, whatever order the Records were read in.
        first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:6]
        texts = [f"{value} ({plural(n, 'run')})" for value, n in first]
        return ", ".join(texts) + (f" and {len(counts) - 6} others" if len(counts) > 6 else "")


RECIPE_FACTS = (
    "optimizer", "schedule", "weight decay", "gradient clipping", "precision", "initialisation", "window", "text",
    "loss", "evaluation",
)  # fmt: skip


def _describe(record: Record) -> dict[str, str]:
    """A Record's settings in words; '' for what it does not say."""
    model, train, evaluate = record.recipe.model, record.recipe.train, record.recipe.evaluate
    warmup = f"{100 * train.warmup:g}%" if train.warmup_steps is None else f"{train.warmup_steps:,} steps"
    loss = "cross-entropy over the unique targets of the global batch"
    if train.stage == 2:
        loss = f"mean of in-batch and {train.extra_pool} channel" + (", log q corrected" if train.log_q else "")
    if record.unique_targets is not None and record.slots_seen:
        loss += f"; {100 * record.queries_seen / record.slots_seen:.0f}% of slots hold a target ([targets])"
    return {
        "optimizer": str(train.optimizer),
        "schedule": f"{train.schedule}, warm-up {warmup}",
        "weight decay": f"{train.weight_decay:g}",
        "gradient clipping": f"{train.clip:g}",
        "precision": str(train.precision),
        "initialisation": str(model.init),
        "window": f"{record.recipe.data.seq_len} events",
        "text": f"{model.text_len} tokens",
        "loss": loss,
        "evaluation": (
            f"{evaluate.queries:,} queries, {evaluate.batch_sequences} windows per batch-local pool, "
            f"catalogue of {evaluate.catalogue_items} items, seed {evaluate.seed}"
        ),
        "dataset checksum": record.dataset_checksum,
        "query sets": "" if record.evaluation is None else record.evaluation.query_set_checksum,
        "hardware": _flat(record.hardware),
        "versions": _flat(record.versions),
    }


def _flat(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
