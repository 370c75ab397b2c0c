"""Stage 2 of a plan: its cell, its number of negatives and its learning rate."""

from dataclasses import dataclass

from habitus.errors import ConfigError
from habitus.planning.facts import StoreFacts
from habitus.planning.rates import learning_rate
from habitus.planning.shape import MIN_STEPS, FixedSettings
from habitus.planning.sources import SourcedLaws
from habitus.sizing import Cell, breakdown, cell_of, largest_num_negatives, steps_for
from habitus.store import Quantity

_USUAL_BATCH = 64


@dataclass(frozen=True)
class StageTwoCell:
    """K after what moved it, and the cell that stage 2 becomes."""

    cell: Cell
    optimum: float  # K* of the laws
    as_stage1: int  # K with which a step has as many candidates as one of stage 1
    affordable: int
    catalogue: int | None

    @property
    def moved(self) -> str:
        """What raised K or held it back, in words; empty where nothing did."""
        K = self.cell.num_negatives
        if round(self.optimum) < K:
            return "raised towards as many candidates per step as stage 1 has: with fewer, it unlearns"
        if round(self.optimum) == K:
            return ""
        if self.catalogue is not None and self.catalogue == K:
            return f"capped at the {self.catalogue:,} items of the catalogue: every item is a candidate"
        return f"capped so that {MIN_STEPS} steps remain"


def stage2_cell(C2: float, stage1: Cell, K: float, B: int, fixed: FixedSettings) -> StageTwoCell:
    """Stage 2 of the same model: K no fewer than gives it stage 1's candidates, capped by MIN_STEPS steps and by the
    catalogue."""
    parts = breakdown(stage1.model, fixed.dataset.inputs)
    p, h, L = parts.contextualizer_params, stage1.model.joint_dim, stage1.seq_len
    affordable = largest_num_negatives(C2, p, B=B, L=L, h=h, min_steps=MIN_STEPS)
    while affordable is None and B > 1:
        B //= 2
        affordable = largest_num_negatives(C2, p, B=B, L=L, h=h, min_steps=MIN_STEPS)
    if affordable is None:
        raise ConfigError(
            f"stage 2's {C2:.3g} FLOPs do not pay {MIN_STEPS} steps of a model with {p:,} contextualizer parameters",
            expected="a larger budget, or no second stage",
            next_step="raise --flops or --stage2-share, or give --stage2-share 0",
        )
    catalogue = fixed.dataset.num_candidates or fixed.dataset.num_items
    as_stage1 = max(0, stage1.batch_sequences - B) * L
    wanted = max(round(K), as_stage1)
    capped = max(0, min(wanted, affordable, catalogue if catalogue is not None else affordable))
    step_flops = cell_of(
        stage1.model, batch_sequences=B, steps=1, seq_len=L, stage=2, num_negatives=capped, inputs=fixed.dataset.inputs
    ).flops_per_step
    cell = cell_of(
        stage1.model,
        batch_sequences=B,
        steps=steps_for(C2, step_flops),
        seq_len=L,
        stage=2,
        num_negatives=capped,
        inputs=fixed.dataset.inputs,
        precision=fixed.precision,
        optimizer=fixed.optimizer,
        catalogue_items=catalogue,
    )
    return StageTwoCell(cell, K, as_stage1, affordable, catalogue)


def usual_batch(fixed: FixedSettings, facts: StoreFacts) -> int:
    """Windows per step of stage 2: those of the study's runs, or the printed ones."""
    return fixed.in_windows(facts.stage2_batch or _USUAL_BATCH)


def stage2_quantities(
    second: StageTwoCell, K: Quantity, budgets: tuple[float, float], fixed: FixedSettings, facts: StoreFacts,
    sources: list[SourcedLaws],
) -> dict[str, Quantity]:  # fmt: skip
    """What the plan says of stage 2; `budgets` are those of both stages."""
    capped = second.cell.num_negatives
    low, high = None if K.low is None else min(K.low, capped), None if K.high is None else max(K.high, capped)
    how = f"{K.how}; {second.moved}" if second.moved else K.how
    batch_source, batch_how = ("this study", "the runs' own") if facts.stage2_batch else ("default", "64, as printed")
    if second.cell.batch_sequences < usual_batch(fixed, facts):
        batch_how += f"; halved until the budget pays {MIN_STEPS} steps"
    rate = learning_rate(
        round(second.cell.batch_sequences / fixed.batch_scale), ("negatives", "allocation"), sources, budgets[1]
    )
    return {
        "num_negatives": K.model_copy(update={"value": capped, "low": low, "high": high, "how": how}),
        "stage2_steps": Quantity(
            value=second.cell.steps, source=K.source, how="what stage 2's budget pays at its batch and K"
        ),
        "stage2_batch_sequences": Quantity(value=second.cell.batch_sequences, source=batch_source, how=batch_how),
        "stage2_learning_rate": _of_shorter_run(rate, budgets[1] / budgets[0], facts.stage2_compute),
    }


def _of_shorter_run(rate: Quantity, compute: float, measured: float | None) -> Quantity:
    """The rate of a stage 2 that has less of its parent's compute than the runs had: as much less."""
    if measured is None or compute >= 0.99 * measured:
        return rate
    share = compute / measured
    how = f"{rate.how}; times {share:.2g}: it has {compute:.2g} times its parent's compute, the runs had {measured:.2g}"
    ends = {name: None if end is None else share * end for name, end in (("low", rate.low), ("high", rate.high))}
    return rate.model_copy(update={"value": share * rate.value, "how": how, **ends})


def stage2_warnings(second: StageTwoCell | None) -> list[str]:
    """Fewer candidates than stage 1 had, where the budget pays no more."""
    if second is None:
        return []
    K, cell = second.cell.num_negatives, second.cell
    if second.as_stage1 <= K or second.catalogue == K:
        return []
    slots = cell.batch_sequences * cell.seq_len
    return [
        f"stage 2 has at most {slots + K:,} candidates per step and stage 1 {slots + second.as_stage1:,}: with fewer "
        "it unlearns; raise --flops or --stage2-share, or leave stage 2 out with --stage2-share 0"
    ]
