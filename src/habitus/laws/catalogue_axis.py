"""The loss over the catalogue as that of a batch and what the rest of the catalogue adds: its law and its roll-outs.

The same cells as the law of a recipe, whose own reading of catalogue/loss this stands beside: a plan takes the one
that foresaw budgets better.
"""

from collections.abc import Sequence

from habitus.laws.axes import AxisLaws
from habitus.laws.catalogue_gap import catalogue_gap, predict_gap
from habitus.laws.recipe_value import RunValue, add_values
from habitus.laws.runs import MeasuredRun
from habitus.laws.study_recipe import study_cells
from habitus.laws.surface_axis import NEEDED_KNOBS, Reading, SurfaceRuns
from habitus.laws.told_knobs import why_untold
from habitus.store import CATALOGUE_GAP, SURFACE_AXIS, Law, LawEntry, NamedRollout, Rollout

_BATCH, _CATALOGUE = "batch/loss", "catalogue/loss"
_DRAWS = 100


def fit_catalogue_gap(runs: Sequence[MeasuredRun], metric: str) -> AxisLaws:
    """The law of the difference and the roll-outs of both together, for catalogue/loss; nothing for other metrics."""
    if metric != _CATALOGUE:
        return AxisLaws()
    both = [run for run in runs if {_BATCH, _CATALOGUE} <= run.metrics.keys()]
    spread = [run for run in both if run.axis == SURFACE_AXIS and run.knobs.keys() >= set(NEEDED_KNOBS)]
    sized = [] if spread else study_cells(both, metric)
    if not spread and "allocation" not in {run.axis for run in sized}:
        return AxisLaws()
    cells = CatalogueRuns(spread or sized, metric, _DRAWS, "" if spread else "allocation")
    law = cells.gap()
    axis = SURFACE_AXIS if spread else "allocation"
    entry = LawEntry(name=CATALOGUE_GAP, axis=axis, metric=metric, law=law)
    forecasts = tuple(cells.forecasts()) if law.values else ()
    if not forecasts:
        return AxisLaws((entry,))
    told = Rollout(law=law.law, forecasts=forecasts)
    rollout = NamedRollout(
        name=CATALOGUE_GAP, metric=metric, rollout=told, leave_one_out=Rollout(law=law.law, forecasts=())
    )
    return AxisLaws((entry,), (rollout,))


class CatalogueRuns(SurfaceRuns):
    """Runs that measured both losses."""

    def gap(self) -> Law:
        batch = [run.metrics[_BATCH] for run in self.runs]
        return catalogue_gap(self.table, self.values, batch, self.cells, draws=self.draws)

    def reading(self) -> Reading | None:
        """By the law of batch/loss and that of the difference."""
        batch, gap = SurfaceRuns(self.runs, _BATCH, self.draws, self.sized).reading(), self.gap()
        if batch is None or not gap.values:
            return None

        def tell(row: dict[str, list[float]]) -> RunValue | None:
            local = batch.tell(row)
            if local is None or why_untold(gap, row):
                return None
            return add_values(local, RunValue(*(float(column[0]) for column in predict_gap(gap, row))))

        return Reading(tell, batch.r2)
