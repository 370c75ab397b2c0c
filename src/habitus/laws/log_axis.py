"""The law of a finite log from the runs of the axis of passes: the best settings of each cell, then the law."""

from collections.abc import Sequence

import numpy as np

from habitus.errors import FitError
from habitus.laws.axes import AxisLaws
from habitus.laws.checks import sign_of
from habitus.laws.finite_log import NAME, finite_log
from habitus.laws.runs import MeasuredRun
from habitus.store import LOG_AXIS, TRAIN, LawEntry, direction_of

_NOT_FITTED = ("perplexity", "entropy", "coverage", "coverage_union")  # the loss again, or no measure of quality
_KNOBS = ("params", "unique_events", "epochs")


def fit_log_axis(runs: Sequence[MeasuredRun], metric: str, *_error: object) -> AxisLaws:
    """One law per metric over size, unique events and passes; its own parts and seeds judge it."""
    if metric.startswith(f"{TRAIN}/") or metric.split("/")[1].split("@")[0] in _NOT_FITTED:
        return AxisLaws()
    rows = [
        run for run in runs
        if metric in run.metrics and all(run.knobs.get(k, 0) > 0 for k in _KNOBS) and not run.knobs.get("num_negatives")
    ]  # fmt: skip
    if not rows:
        raise FitError(f"no run has {', '.join(_KNOBS)} and {metric!r}", expected="stage-1 runs that measured it")
    rows = best_settings(rows, metric)
    N, U, R = (np.array([run.knobs[knob] for run in rows]) for knob in _KNOBS)
    share = np.array([run.knobs.get("user_share", 1.0) for run in rows])
    parts = [f"{s:g}/{run.knobs.get('user_part', 0):g}" for s, run in zip(share, rows, strict=True)]
    loss_name = f"{metric.split('/')[0]}/loss"
    loss = [run.metrics.get(loss_name, np.nan) for run in rows]
    law = finite_log(
        N, U, R,
        [run.metrics[metric] for run in rows],
        share=share,
        part=parts,
        loss=loss if metric != loss_name and np.isfinite(loss).all() else None,
        direction=direction_of(metric),
    )  # fmt: skip
    flops = np.array([run.knobs.get("flops_nominal", np.nan) for run in rows])
    if np.isfinite(flops).all():
        details = {**law.details, "flops_per_param_event": float(np.median(flops / (N * U * R)))}
        law = law.model_copy(update={"details": details})
    return AxisLaws((LawEntry(name=NAME, axis=LOG_AXIS, metric=metric, law=law),))


def best_settings(runs: Sequence[MeasuredRun], metric: str) -> list[MeasuredRun]:
    """The runs of each size, share and number of passes whose dropout, rates and the rest are best on average."""
    sign = sign_of(direction_of(metric))
    cells: dict[tuple[float, ...], dict[str, list[MeasuredRun]]] = {}
    for run in runs:
        knobs = run.knobs
        cell = (knobs["params"], knobs.get("user_share", 1.0), round(np.log(knobs["epochs"]) / 0.15))
        # Parts of the users and seeds are repetitions of the same settings.
        settings = ", ".join(f"{knobs.get(k, 0.0):g}" for k in _SETTINGS) + f", {run.learning_rate:.3g}"
        cells.setdefault(cell, {}).setdefault(settings, []).append(run)
    chosen = []
    for by_settings in cells.values():
        means = {s: float(np.mean([sign * run.metrics[metric] for run in same])) for s, same in by_settings.items()}
        chosen += by_settings[min(means, key=lambda s: means[s])]
    return chosen


_SETTINGS = ("dropout", "token_dropout", "field_dropout", "item_dropout", "weight_decay", "depth", "width", "joint_dim")
