"""One learning rate per cell, chosen by training loss; and who is left out, and why."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from habitus.laws.runs import MeasuredRun
from habitus.store import LOG_AXIS, Exclusion, RateChoice, RateLoss

TAIL_LOSS = "train/loss"  # mean of the last 100 steps


@dataclass(frozen=True)
class Selection:
    """The runs that laws are fitted to, and everything that was decided on the way."""

    runs: tuple[MeasuredRun, ...]  # at each cell's chosen rate, every seed
    everything: tuple[MeasuredRun, ...]  # all usable runs, at every rate
    choices: tuple[RateChoice, ...]
    exclusions: tuple[Exclusion, ...]

    @cached_property
    def by_axis(self) -> dict[str, list[MeasuredRun]]:
        """All usable runs, at every rate."""
        axes: dict[str, list[MeasuredRun]] = {}
        for run in self.everything:
            axes.setdefault(run.axis, []).append(run)
        return axes


def select(runs: Iterable[MeasuredRun], allow_repeats: bool = False) -> Selection:
    """Usable runs at the best learning rate of their cell, by tail training loss, never by validation.

    Left out with a reason: failed or missing runs, runs without a training loss, off-diagonal cells of the
    depth axis, and runs of more than one epoch unless `allow_repeats`.
    """
    usable, exclusions = [], []
    for run in runs:
        reason = _why_not(run, allow_repeats)
        if reason:
            exclusions.append(_excluded(run, reason))
        else:
            usable.append(run)
    chosen: list[MeasuredRun] = []
    choices = []
    for cell in _cells(usable).values():
        if cell[0].axis in ("init", LOG_AXIS):
            chosen += cell  # there the learning rate is what is swept, or chosen on validation
            continue
        choice = choose_rate(cell)
        choices.append(choice)
        chosen += [run for run in cell if run.learning_rate == choice.learning_rate]
    return Selection(tuple(chosen), tuple(usable), tuple(choices), tuple(exclusions))


def of_group(selection: Selection, group: str) -> Selection:
    """The runs of one optimizer and init; of the init axis, those of the optimizer."""

    def belongs(run: MeasuredRun) -> bool:
        if run.axis == "init":
            return run.optimizer == group.partition("/")[0] or not run.optimizer
        return run.group == group

    runs = tuple(run for run in selection.runs if belongs(run))
    cells = {(run.axis, run.budget, run.cell_id) for run in runs}
    return Selection(
        runs,
        tuple(run for run in selection.everything if belongs(run)),
        tuple(c for c in selection.choices if (c.axis, c.budget, c.cell_id) in cells),
        selection.exclusions,
    )


def choose_rate(cell: list[MeasuredRun]) -> RateChoice:
    """The rate with the lowest tail training loss, averaged over seeds."""
    rates = sorted({run.learning_rate for run in cell})
    tried = []
    for rate in rates:
        losses = [run.metrics[TAIL_LOSS] for run in cell if run.learning_rate == rate]
        tried.append(RateLoss(learning_rate=rate, loss=float(np.mean(losses)), num_seeds=len(losses)))
    at = int(np.argmin([t.loss for t in tried]))
    first = cell[0]
    return RateChoice(
        axis=first.axis,
        budget=first.budget,
        cell_id=first.cell_id,
        learning_rate=tried[at].learning_rate,
        tried=tuple(tried),
        at_edge=len(tried) > 1 and at in (0, len(tried) - 1),
    )


def _cells(runs: Iterable[MeasuredRun]) -> dict[tuple[str, float, str, str], list[MeasuredRun]]:
    cells: dict[tuple[str, float, str, str], list[MeasuredRun]] = {}
    for run in runs:
        cells.setdefault((run.axis, run.budget, run.cell_id, run.group), []).append(run)
    return cells


def _why_not(run: MeasuredRun, allow_repeats: bool) -> str:
    if run.status != "done":
        return f"{run.status}: {run.reason}" if run.reason and run.reason != run.status else run.status
    if TAIL_LOSS not in run.metrics:
        return "no tail training loss, so its learning rate cannot be judged"
    if run.axis == "depth" and not run.on_diagonal:
        return "off the depth-sum diagonal"
    epochs = run.knobs.get("epochs", 0.0)
    # A rounded-up last window is no second pass, hence the small allowance.
    if epochs > 1.001 and not allow_repeats and run.axis != LOG_AXIS:
        return f"{epochs:.2f} epochs: repeated events follow another law (--allow-repeats takes them in)"
    return ""


def _excluded(run: MeasuredRun, reason: str) -> Exclusion:
    return Exclusion(
        axis=run.axis,
        budget=run.budget,
        cell_id=run.cell_id,
        learning_rate=run.learning_rate,
        seed=run.seed,
        reason=reason,
    )
