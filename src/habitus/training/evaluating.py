"""Evaluations during a run and at its end, through the same pipeline as `habitus evaluate`."""

import shutil
from pathlib import Path

from habitus.data import Dataset
from habitus.evaluation import Evaluation, ModelScorer, Ranks, evaluate
from habitus.model import BehaviorModel, Bundle, BundleManifest, EmbeddingCache, bundle_in_memory
from habitus.progress import Progress
from habitus.recipe import Recipe
from habitus.record import TrajectoryPoint
from habitus.training.checks import evaluate_options
from habitus.training.vectors import catalogue_of


def evaluate_now(
    model: BehaviorModel, recipe: Recipe, dataset: Dataset, out: Path, cache: EmbeddingCache | None, report: Progress
) -> Evaluation:
    """The evaluation of a model in the middle of its training; `cache` is that of a frozen embedder."""
    bundle = bundle_in_memory(model, recipe, dataset, out / "bundle")
    scratch = out / ".catalogue-now"  # a learning embedder's vectors are worth nothing afterwards
    if cache is None and "catalogue" in recipe.evaluate.regimes:
        if Ranks().is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        cache = catalogue_of(bundle, dataset, scratch, None, report)
    try:
        return _evaluated(bundle, dataset, cache, report)
    finally:
        if Ranks().is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def evaluate_finished(
    model: BehaviorModel, recipe: Recipe, dataset: Dataset, out: Path, cache: EmbeddingCache | None, report: Progress
) -> Evaluation:
    """The evaluation of a run whose bundle is written; the catalogue's vectors are kept beside it if it needs them."""
    manifest = BundleManifest.read(out / "bundle" / "bundle.json")
    bundle = Bundle(out / "bundle", manifest, recipe, dataset.schema, dataset.encoders, model)
    if cache is None and "catalogue" in recipe.evaluate.regimes:
        cache = catalogue_of(bundle, dataset, out / "catalogue", None, report)
    return _evaluated(bundle, dataset, cache, report)


def trajectory_points(found: Evaluation, step: int) -> list[TrajectoryPoint]:
    """An evaluation's metrics over all queries; slices are left to the Record's own metrics."""
    return [
        TrajectoryPoint(step=step, metric=name, value=metric.value)
        for name, metric in found.metrics.items()
        if name.count("/") == 1
    ]


def _evaluated(bundle: Bundle, dataset: Dataset, cache: EmbeddingCache | None, report: Progress) -> Evaluation:
    model = bundle.model
    was_training = model.training
    model.eval()
    try:
        scorer = ModelScorer(bundle, dataset, cache, ranks=Ranks())
        return evaluate(dataset, scorer, evaluate_options(bundle.recipe), progress=report)
    finally:
        model.train(was_training)
