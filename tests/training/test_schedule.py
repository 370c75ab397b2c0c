"""Learning rates by hand, and the same on host and device."""

import math

import pytest
import torch

from habitus.recipe import TrainRecipe
from habitus.training.optimizers import learning_rate_at


def recipe(**changes: object) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {"batch_sequences": 8, "steps": 20, "learning_rate": 0.5, "warmup": 0.2, **changes}
    )


def test_the_warm_up_rises_by_equal_steps_and_ends_at_the_peak() -> None:
    assert [learning_rate_at(step, recipe()) for step in range(4)] == [0.125, 0.25, 0.375, 0.5]


def test_the_cosine_falls_from_the_peak_to_zero_behind_the_last_step() -> None:
    assert learning_rate_at(4, recipe()) == 0.5
    assert learning_rate_at(12, recipe()) == pytest.approx(0.25)  # half of the 16 steps that are left
    assert learning_rate_at(8, recipe()) == pytest.approx(0.25 * (1 + math.sqrt(0.5)))
    assert 0 < learning_rate_at(19, recipe()) < 0.01
    assert learning_rate_at(20, recipe()) == 0.0
    assert learning_rate_at(40, recipe()) == 0.0  # a counter that runs on does no harm


def test_a_constant_rate_stays_after_its_warm_up() -> None:
    constant = recipe(schedule="constant")
    assert learning_rate_at(1, constant) == 0.25
    assert {learning_rate_at(step, constant) for step in range(3, 30)} == {0.5}


def test_no_warm_up_starts_at_the_peak_and_a_small_one_takes_one_step() -> None:
    assert learning_rate_at(0, recipe(warmup=0.0)) == 0.5
    assert learning_rate_at(0, recipe(warmup=0.01)) == 0.5
    assert learning_rate_at(19, recipe(warmup=1.0)) == 0.5
    assert learning_rate_at(0, recipe(steps=1, warmup=1.0)) == 0.5


def test_wsd_stays_at_the_peak_and_falls_linearly_in_its_last_fifth() -> None:
    wsd = recipe(schedule="wsd", warmup_steps=4)
    rates = [learning_rate_at(step, wsd) for step in range(21)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert set(rates[4:17]) == {0.5}  # 20 - 4 steps are stable, and the decay begins at the peak
    assert rates[17:] == pytest.approx([0.375, 0.25, 0.125, 0.0])
    assert wsd.stable_steps == 16
    half = recipe(schedule="wsd", warmup_steps=0, decay_share=0.5)
    assert [learning_rate_at(step, half) for step in (0, 9, 10, 15)] == [0.5, 0.5, 0.5, 0.25]


def test_wsd_runs_of_all_lengths_have_the_same_rates_until_they_decay() -> None:
    short, long = (recipe(schedule="wsd", warmup_steps=5, steps=steps) for steps in (20, 90))
    for step in range(short.stable_steps):
        assert learning_rate_at(step, short) == learning_rate_at(step, long)


def test_wsd_keys_stand_in_a_recipe_only_where_they_say_something_and_must_make_sense() -> None:
    assert {"decay_share", "warmup_steps"}.isdisjoint(recipe().to_values())
    values = recipe(schedule="wsd", warmup_steps=0, decay_share=0.3).to_values()
    assert (values["warmup_steps"], values["decay_share"]) == (0, 0.3)
    assert recipe(warmup_steps=4).stable_steps == 16
    with pytest.raises(ValueError, match="set warmup_steps"):
        recipe(schedule="wsd")
    with pytest.raises(ValueError, match="warmup_steps = 17, but 20 steps begin to decay after 16"):
        recipe(schedule="wsd", warmup_steps=17)
    with pytest.raises(ValueError, match="decay_share"):
        recipe(schedule="wsd", warmup_steps=1, decay_share=0)


@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
def test_a_counter_on_the_device_gives_the_same_rates(schedule: str, warmup: float) -> None:
    counted = {"warmup_steps": min(16, round(20 * warmup))} if schedule == "wsd" else {}
    changed = recipe(schedule=schedule, warmup=warmup, **counted)
    counter = torch.zeros((), dtype=torch.int64)
    for step in range(25):
        rate = learning_rate_at(counter, changed)
        assert rate.dtype == torch.float32 and rate.shape == ()
        assert rate.item() == pytest.approx(learning_rate_at(step, changed), rel=1e-6, abs=1e-12)
        counter += 1
