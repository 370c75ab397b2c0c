"""The cells of the shape and regularisation axes: six knobs at once; shares with dropout in the embedder. No torch."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from habitus.errors import ConfigError
from habitus.recipe import ModelRecipe
from habitus.sizing import Cell, cell_of
from habitus.store import HELD_OUT, LeftOut
from habitus.sweeps.context_cells import centre_cell
from habitus.sweeps.draft import Draft
from habitus.sweeps.request import rate_grid

_DRAWS = 1024  # points of the sequence looked at, in their order, until enough can be built and paid for


def add_shapes(draft: Draft) -> None:
    """At each budget the centre, then points of a space-filling sequence around it; the last ones are held out."""
    settings, share = draft.preset.shape, draft.share()
    if draft.request.learning_rates is not None:
        raise ConfigError(
            "learning rates were given to the shape axis",
            expected="none: the rate is one of its six knobs",
            next_step="omit --learning-rates, or change wide_span in [shape] of a preset of your own (--print-preset)",
        )
    for budget in draft.budgets():
        centre = centre_cell(draft, budget, share)
        if centre is None:
            continue
        rate = draft.preset.rule_rate(centre.batch_sequences, budget)
        if _add_point(draft, budget, "centre", centre.model, centre.batch_sequences, rate):
            planned = draft.cells[-1]
            seeds = range(planned.row.seed + 1, settings.centre_seeds)  # beyond those that every cell has
            draft.cells += [planned.with_seed(seed, draft.facts) for seed in seeds]
        else:
            why = "the centre cannot be paid for, so that nothing will be compared with it; raise the budget"
            draft.left_out.append(LeftOut(flops_budget=budget, wanted={"point": "centre"}, reason=why))
        wanted, placed = settings.points + settings.held_out, 0
        for model, batch, at in _points(draft, centre, rate):
            label = f"{HELD_OUT if placed >= settings.points else 'point'}-{placed + 1}"
            placed += _add_point(draft, budget, label, model, batch, at)
            if placed == wanted:
                break
        if placed < wanted:
            why = f"{placed} of {wanted} points can be built and paid for; raise the budget, or narrow span in [shape]"
            draft.left_out.append(LeftOut(flops_budget=budget, wanted={"points": wanted}, reason=why))


def _points(draft: Draft, centre: Cell, rate: float) -> Iterator[tuple[ModelRecipe, int, float]]:
    """Models, batches and rates of a Sobol sequence in the logarithms of the knobs, each rounded to what is built."""
    from scipy.stats import qmc

    settings, model = draft.preset.shape, centre.model
    head = model.head_dim
    knobs = [
        _steps(model.joint_dim, settings.span, 4),
        _steps(model.width, settings.span, head),
        _steps(model.depth, settings.span, 1),
        _steps(model.text_depth, settings.span, 1),
        _steps(centre.batch_sequences, settings.wide_span, 1),
    ]
    for unit in qmc.Sobol(len(knobs) + 1, scramble=True, rng=0).random(_DRAWS):
        joint_dim, width, depth, text_depth, batch = (
            _nearest(values, u) for values, u in zip(knobs, unit[:-1], strict=True)
        )
        shape = {"joint_dim": joint_dim, "width": width, "depth": depth, "text_depth": text_depth}
        at = rate * math.sqrt(batch / centre.batch_sequences) * settings.wide_span ** (2 * unit[-1] - 1)
        yield model.model_copy(update=shape), batch, at


def _steps(centre: int, span: float, multiple: int) -> np.ndarray:
    """The buildable values from centre / span to centre · span: three or more, or no curvature could be seen."""
    low = max(1, round(centre / span / multiple))
    high = max(low + 2, round(centre * span / multiple))
    return multiple * np.arange(low, high + 1)


def _nearest(values: np.ndarray, unit: float) -> int:
    """The value at a place between the smallest and the largest, on a logarithmic scale."""
    logs = np.log(values)
    return int(values[np.argmin(np.abs(logs - (logs[0] + unit * (logs[-1] - logs[0]))))])


def _add_point(draft: Draft, budget: float, label: str, model: ModelRecipe, batch: int, rate: float) -> bool:
    """Add one point, unless it is too dear; points of the sequence that are left out are not listed one by one."""
    sizes: dict[str, Any] = {
        "batch_sequences": batch,
        "seq_len": draft.facts.seq_len,
        "inputs": draft.facts.inputs,
        "precision": draft.preset.common.precision,
        "optimizer": draft.preset.common.optimizer,
        "catalogue_items": draft.facts.num_items,
    }
    step = cell_of(model, steps=1, **sizes).flops_per_step
    cell = cell_of(model, steps=max(1, round(budget / step)), wanted={"flops": budget}, **sizes)
    listed = len(draft.left_out)
    if not draft.add_cell(cell, budget, label, {"point": label}, [float(f"{rate:.12g}")], {}):
        del draft.left_out[listed:]
        return False
    return True


def add_regularised(draft: Draft) -> None:
    """At each budget every share with every dropout in the embedder; none is one of them."""
    settings = draft.preset.regularisation
    if 0 not in settings.dropouts:
        raise ConfigError(f"[regularisation] dropouts {settings.dropouts}", expected="0 among them, to compare with")
    for budget in draft.budgets():
        for share in sorted(settings.shares):
            cell = draft.share_cell(budget, {"embedder_share": share}, share=share)
            if cell is None:
                continue
            rule = draft.preset.rule_rate(cell.batch_sequences, budget)
            rates = rate_grid(draft.request.learning_rates, settings.learning_rates, rule)
            for dropout in sorted(settings.dropouts):
                train = dict.fromkeys(("token_dropout", "field_dropout", "item_dropout"), dropout)
                wanted = {"embedder_share": share, "dropout": dropout}
                draft.add_cell(cell, budget, f"s={share:g}-dropout={dropout:g}", wanted, rates, train)
