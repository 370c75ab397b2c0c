"""The axes of a study: what each varies, what it reads of earlier ones, which tables its runs enter."""

from dataclasses import dataclass
from typing import Literal

from habitus.recipe import Regime

CorrelationStage = Literal["stage1", "stage2"]
# The regime whose metrics are compared: stage 2 is judged against the catalogue.
CORRELATED_REGIMES: dict[CorrelationStage, Regime] = {"stage1": "batch", "stage2": "catalogue"}


@dataclass(frozen=True)
class StudyAxis:
    """One axis of a study. A sweep runs its cells, a fit draws its laws."""

    name: str
    knob: str  # the column of laws.json that it varies
    needs: tuple[str, ...] = ()  # axes whose answers its cells are built from
    correlations: CorrelationStage | None = None  # the correlation tables that its runs enter
    on_request: bool = False  # a study runs it only where it is named, or where its preset has budgets for it


# Of runs on a log that ends before the compute does: passes, sizes and regularisation, chosen on validation.
LOG_AXIS = "passes"
# Of cells spread over size, share, batch and rate at once. `benchmarks/paper_range.py` runs them; `sweep` does not.
SURFACE_AXIS = "surface"
# How cells of the shape axis are called that no surface is fitted to.
HELD_OUT = "held-out"

# In the order of a study: each axis may use what those before it found.
AXES = {
    axis.name: axis
    for axis in (
        StudyAxis("share", "embedder_share", correlations="stage1"),
        StudyAxis("depth", "embedder_share", correlations="stage1"),
        StudyAxis("batch", "batch_sequences", needs=("share",)),
        # What the batch axis does not see: what more in-batch candidates are worth at equal compute.
        StudyAxis("batch_size", "batch_sequences", needs=("share",), on_request=True),
        # A later budget of the allocation is centred on what the earlier ones found.
        StudyAxis("allocation", "params", needs=("share", "allocation"), correlations="stage1"),
        StudyAxis("negatives", "num_negatives", needs=("allocation",), correlations="stage2"),
        StudyAxis("init", "learning_rate", needs=("share",)),
        StudyAxis("context", "seq_len", needs=("share", "allocation"), on_request=True),
        StudyAxis("shape", "params", needs=("share", "allocation"), on_request=True),
        StudyAxis("regularisation", "embedder_share", needs=("share",), on_request=True),
        StudyAxis(LOG_AXIS, "epochs"),
    )
}


def correlated_axes(stage: CorrelationStage) -> tuple[str, ...]:
    """The axes whose runs enter the correlation tables of a stage."""
    spread = (SURFACE_AXIS,) if stage == "stage1" else ()
    return (*(axis.name for axis in AXES.values() if axis.correlations == stage), *spread)
