"""Whether the models of a study hear the past: as asked for, or as the log suggests."""

import numpy as np

from habitus.data import Dataset
from habitus.studies.options import StudyOptions
from habitus.sweeps import Preset

_WORTH = 0.05  # of the next items in the visible past, from which copying is taken unasked on a log of one's own
_WINDOWS = 64  # looked at


def with_copying(preset: Preset, dataset: Dataset, options: StudyOptions) -> tuple[Preset, list[str]]:
    """The preset with or without copying, and what was decided, in words."""
    chosen, why = preset.common.copying, []
    if options.copying is not None:
        chosen = options.copying
    elif options.data is not None and not chosen:
        share = repeat_share(dataset)
        chosen = share >= _WORTH
        if chosen:
            why = [f"{share:.0%} of the next items are in the visible past: models copy (--no-copying: they do not)"]
    # Without log_q scores are right among a batch's targets only, and the past is too quiet in the whole catalogue.
    common = preset.common.model_copy(update={"copying": chosen, "log_q": preset.common.log_q or chosen})
    return preset.model_copy(update={"common": common}), why


def repeat_share(dataset: Dataset) -> float:
    """The share of next items that the same window has shown before, over some training windows."""
    batch = dataset.batch("train", min(_WINDOWS, dataset.counts("train").windows))
    seen = (batch.segments[:, :, None] == batch.segments[:, None, :]) & np.tri(batch.items.shape[1], dtype=bool)
    again = ((batch.targets[:, :, None] == batch.items[:, None, :]) & seen).any(-1)
    return float(again[batch.targets >= 0].mean())
