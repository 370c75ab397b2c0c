"""The fastest batch among those that lose nothing: planted losses and speeds."""

from habitus.planning.fast_batch import choose_fastest
from habitus.record import Seconds
from habitus.sizing import StepSpeed, step_speeds
from habitus.store import Laws, Quantity, RunRow

from .planted import example_recipe, record_of

SIZES = (4.0, 8.0, 16.0, 32.0, 64.0)
STEP = 1e6  # FLOPs of a step of one window
OWN = Quantity(value=16, source="this study", how="batch 16 of the runs")


def run(axis: str, batch: float, loss: float, times: float = 1.0, **knobs: float) -> RunRow:
    steps = 640 / batch * times
    values = {
        "batch_sequences": batch,
        "steps": steps,
        "flops_nominal": steps * batch * STEP,
        "slots_seen": steps * batch,
    }
    return RunRow(
        axis=axis, budget=1e12, cell_id=f"{axis}-{batch}-{times}", learning_rate=1e-3, seed=0, init="default",
        chosen=True, knobs={**values, **knobs}, metrics={"batch/loss": loss},
    )  # fmt: skip


def laws(losses: dict[float, float], *more: RunRow) -> Laws:
    runs = [run("batch", batch, loss) for batch, loss in losses.items()]
    return Laws(source="", seed=0, metrics=("batch/loss",), runs=(run("allocation", 16, 4.0), *runs, *more))


def speeds(rate: float = 1.0) -> list[StepSpeed]:
    """Twice the batch, 1.5 times the speed."""
    return [StepSpeed(1, batch * STEP, rate * 1e9 * 1.5**place) for place, batch in enumerate(SIZES)]


def test_the_fastest_of_those_within_half_a_percent_is_chosen() -> None:
    losses = {4.0: 4.02, 8.0: 4.0, 16.0: 4.001, 32.0: 4.015, 64.0: 4.05}
    chosen = choose_fastest(OWN, laws(losses), speeds())
    assert chosen.value == 32  # 64 is faster and 1.25% worse
    assert "32 trains fastest (1.50 times the speed of 16)" in chosen.how and "4, 8, 16, 32" in chosen.how
    # At ten times the budget the plan's own batch is larger, and the factor stays.
    assert choose_fastest(OWN.model_copy(update={"value": 64}), laws(losses), speeds()).value == 128


def test_longer_runs_and_those_of_a_fixed_pool_do_not_count() -> None:
    losses = {4.0: 4.02, 8.0: 4.0, 16.0: 4.001, 32.0: 4.03, 64.0: 4.05}
    better = run("batch", 64, 3.9, times=4), run("batch", 64, 3.8, pool_sequences=4)
    assert choose_fastest(OWN, laws(losses, *better), speeds()).value == 16


def test_seeds_of_a_size_are_averaged() -> None:
    losses = {4.0: 4.02, 8.0: 4.0, 16.0: 4.001, 32.0: 4.015, 64.0: 4.05}
    unlucky = run("batch", 32, 4.035).model_copy(update={"seed": 1})
    assert choose_fastest(OWN, laws(losses, unlucky), speeds()).value == 16


def test_runs_with_several_pools_of_candidates_tell_no_speed() -> None:
    """They share their nominal FLOPs with the plain runs, and run one operation at a time on a GPU."""
    plain = example_recipe()
    pooled = plain.model_copy(update={"train": plain.train.model_copy(update={"pool_sequences": 4})})
    slow = Seconds(warmup=0.0, train=1000.0, evaluate=1.0)
    found = list(step_speeds([record_of(plain, "c" * 64), record_of(pooled, "c" * 64, seconds=slow)]))
    assert [speed.flops_per_second for speed in found] == [1e11]


def test_without_speeds_or_runs_the_batch_stays_and_it_is_said() -> None:
    for source, known in ((laws({8.0: 4.0, 16.0: 4.0}), speeds()), (laws(dict.fromkeys(SIZES, 4.0)), [])):
        kept = choose_fastest(OWN, source, known)
        assert kept.value == 16 and "no batch axis with speeds" in kept.how
