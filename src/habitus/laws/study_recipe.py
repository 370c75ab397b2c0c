"""One law over the recipe from the runs of a study that sweeps one knob at a time: what its plan may forecast by.

The runs of the share, the batch size and the allocation axis are cells of one surface (recipe_surface.py). None alone
says what a planned run measures that differs from all of them in size, share, data, batch and rate at once; together
they do. Left out are depth rows, since the law does not know how parameters are spread over layers, and the batch axis,
whose runs have a constant rate. Optima are not read from it: sweeps of one knob leave most corners empty.
"""

from collections.abc import Sequence

from habitus.errors import FitError
from habitus.laws.axes import AxisLaws
from habitus.laws.checks import sign_of
from habitus.laws.law_builders import law_without_values
from habitus.laws.recipe_form import FORM
from habitus.laws.runs import MeasuredRun
from habitus.laws.surface_axis import NEEDED_KNOBS, SurfaceRuns, recipe_of
from habitus.store import STUDY_RECIPE, TRAIN, LawEntry, NamedRollout, Rollout, direction_of

RECIPE_AXES = ("share", "batch_size", "allocation")
_MOST_RUNS = 300  # the best of each budget: no form holds far from them, and refits take their time
_DRAWS = 100
# Not what a plan forecasts: the loss in other units, and what says nothing of how good answers are.
_UNASKED = ("perplexity", "entropy", "coverage")


def fit_study_recipe(runs: Sequence[MeasuredRun], metric: str) -> AxisLaws:
    """The law over all runs of these axes, at every rate, and its roll-outs; nothing without sizes."""
    name = metric.split("/")[1].partition("@")[0]
    cells = [] if metric.startswith(f"{TRAIN}/") or name in _UNASKED else study_cells(runs, metric)
    if "allocation" not in {run.axis for run in cells}:
        return AxisLaws()
    surface = SurfaceRuns(cells, metric, _DRAWS, sized="allocation")
    try:
        law = surface.law()
    except FitError as error:  # as where a ranking metric is zero: the other laws stand without it
        law = law_without_values("recipe_surface", FORM, "not_identified", len(cells), error.problem)
    entry = LawEntry(name=STUDY_RECIPE, axis="allocation", metric=metric, law=law)
    forecasts = tuple(surface.forecasts()) if law.values else ()
    if not forecasts:
        return AxisLaws((entry,))
    told = Rollout(law=law.law, forecasts=forecasts)
    rollout = NamedRollout(
        name=STUDY_RECIPE, metric=metric, rollout=told, leave_one_out=Rollout(law=law.law, forecasts=())
    )
    return AxisLaws((entry,), (rollout,))


def study_cells(runs: Sequence[MeasuredRun], metric: str) -> list[MeasuredRun]:
    """The runs that are cells of one surface: of the sizes' text depth, with all that the law asks for, best first."""
    cells = [
        run
        for run in runs
        if run.axis in RECIPE_AXES and metric in run.metrics and run.knobs.keys() >= set(NEEDED_KNOBS)
    ]
    depths = [run.knobs.get("text_depth", 0.0) for run in cells if run.axis == "allocation"]
    common = max(sorted(set(depths)), key=depths.count, default=0.0)
    # A run that both axes asked for is one run.
    once = {
        (*recipe_of(run), run.seed, run.metrics[metric]): run
        for run in sorted(cells, key=lambda run: run.axis == "allocation")
        if run.knobs.get("text_depth", 0.0) == common
    }
    by_budget: dict[float, list[MeasuredRun]] = {}
    for run in sorted(once.values(), key=lambda run: sign_of(direction_of(metric)) * run.metrics[metric]):
        by_budget.setdefault(run.budget, []).append(run)
    most = _MOST_RUNS // max(1, len(by_budget))
    return [run for at in by_budget.values() for run in at[:most]]
