"""The cells of the context axis: one model, windows of different lengths, equal compute and slots per step."""

from typing import Any

from habitus.errors import ConfigError
from habitus.recipe import ModelRecipe
from habitus.sizing import Cell, cell_of
from habitus.store import LeftOut
from habitus.sweeps.draft import Draft, centred_shapes
from habitus.sweeps.request import rate_grid


def add_contexts(draft: Draft) -> None:
    """At each budget the expected best model with every window length that its batch can hold."""
    contexts = _contexts(draft)
    share = draft.share()
    for budget in draft.budgets():
        centre = centre_cell(draft, budget, share)
        if centre is not None:
            for seq_len in sorted(draft.preset.context.seq_lens):
                _add_length(draft, budget, centre.model, seq_len, contexts)


def centre_cell(draft: Draft, budget: float, share: float) -> Cell | None:
    """The cell of the expected best size: the store's size law, its nearest optimum, or the preset's table."""
    shapes, centred = centred_shapes(draft.preset, draft.prior, budget, share)
    width, depth = shapes[len(shapes) // 2]
    draft.decided.append(f"model at {budget:.3g} FLOPs: {width}x{depth}, nearest to {centred}")
    batch = draft.preset.batch_sequences(budget)
    wanted = {"embedder_share": share, "width": width, "depth": depth}
    return draft.solve_cell(budget, batch, wanted, share=share, width=width, depth=depth)


def _contexts(draft: Draft) -> tuple[int, ...]:
    """The history lengths that the queries are shown: those that enough validation users have."""
    wanted, reach = sorted(draft.preset.context.histories), draft.facts.reach
    contexts = tuple(length for length in wanted if length <= reach)
    if not contexts:
        raise ConfigError(
            f"the shortest history of the context axis has {wanted[0]:,} events, and the validation users reach "
            f"{reach:,}",
            expected="20 validation users or more with that many events before one of theirs",
            next_step="prepare a longer log, or change [context] histories in a preset of your own (--print-preset)",
        )
    draft.decided.append(
        f"queries have {contexts[-1]:,} events before them, and are shown {', '.join(map(str, contexts))}"
    )
    return contexts


def _add_length(draft: Draft, budget: float, model: ModelRecipe, seq_len: int, contexts: tuple[int, ...]) -> None:
    """Add the model with windows of a length, or list why not."""
    facts, settings, wanted = draft.facts, draft.preset.context, {"seq_len": seq_len}
    windows = draft.preset.batch_sequences(budget)
    slots = windows * facts.seq_len
    problem = ""
    if seq_len < 2:
        raise ConfigError(
            f"[context] seq_lens holds {seq_len}", expected="2 or more: an event, and the one that it predicts"
        )
    if seq_len > slots:
        problem = f"a step holds {slots:,} slots, fewer than one window"
    elif slots % seq_len:
        problem = f"a step's {slots:,} slots are no whole number of windows"
    elif shorter := [n for n in settings.seq_lens if facts.longest_history <= n < seq_len]:
        problem = (
            f"windows of {min(shorter):,} hold every history already: the longest of a training user has "
            f"{facts.longest_history:,} events"
        )
    if problem:
        draft.left_out.append(LeftOut(flops_budget=budget, wanted=wanted, reason=problem))
        return
    sizes: dict[str, Any] = {
        "batch_sequences": slots // seq_len,
        "seq_len": seq_len,
        "inputs": facts.inputs,
        "attention": settings.attention,
        "precision": draft.preset.common.precision,
        "optimizer": draft.preset.common.optimizer,
        "catalogue_items": facts.num_items,
    }
    step = cell_of(model, steps=1, **sizes).flops_per_step
    cell = cell_of(model, steps=max(1, round(budget / step)), wanted={"flops": budget}, **sizes)
    # A batch has the same slots whatever the length, so that the rule's rate is that of the dataset's own windows.
    rates = rate_grid(draft.request.learning_rates, settings.learning_rates, draft.preset.rule_rate(windows, budget))
    evaluate = draft.preset.evaluate
    pool = max(1, evaluate.batch_sequences * facts.seq_len // seq_len)
    draft.add_cell(
        cell,
        budget,
        f"L={seq_len}",
        wanted,
        rates,
        {"attention_flops": settings.attention},
        {"contexts": contexts, "batch_sequences": pool},
    )
