"""Training on a share of the users: nested, disjoint, whole again; evaluation untouched."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.recipe import DataRecipe
from habitus.store import SPLIT_NAMES
from tests.data.tables import SMALL, make_events, prepared

OPTIONS = replace(SMALL, validation_share=0.2, test_share=0.2)


@pytest.fixture(scope="module", params=["user", "time", "last"])
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(tmp_path_factory.mktemp("log"), make_events(150), options=replace(OPTIONS, split=request.param))


def trained(dataset: Dataset) -> set[int]:
    return set(dataset.windows("train").segments["user"].tolist())


def test_parts_of_one_share_are_disjoint_equal_and_together_all_users(log: Dataset) -> None:
    users = log.counts("train").users
    for number in (2, 3, 4, 8):
        parts = [log.with_users(1 / number, part) for part in range(number)]
        sizes = [part.counts("train").users for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == users
        members = [trained(part) for part in parts]
        assert sum(map(len, members)) == len(set.union(*members))
        assert set.union(*members) == trained(log)
        assert sum(part.counts("train").events for part in parts) == log.counts("train").events
        assert np.array_equal(sum(part.item_train_counts for part in parts), log.item_train_counts)


def test_smaller_shares_lie_within_larger_ones_and_parts_within_parts(log: Dataset) -> None:
    first = [trained(log.with_users(share)) for share in (1 / 8, 1 / 4, 1 / 2, 1)]
    for smaller, larger in pairwise(first):
        assert smaller < larger
    for part in range(4):
        eighths = [trained(log.with_users(1 / 8, 2 * part + i)) for i in (0, 1)]
        assert eighths[0] | eighths[1] == trained(log.with_users(1 / 4, part))


def test_held_out_sides_stay_whole_and_a_share_of_a_share_is_one_of_the_whole(log: Dataset) -> None:
    part = log.with_users(1 / 8, 3)
    for side in SPLIT_NAMES[1:]:
        assert part.counts(side) == log.counts(side)
        assert np.array_equal(part.windows(side).segments, log.windows(side).segments)
    assert trained(part.with_users(1 / 2, 1)) == trained(log.with_users(1 / 2, 1))
    assert part.with_users(1).counts("train") == log.counts("train")
    assert np.array_equal(part.with_users(1).item_train_counts, log.item_train_counts)
    assert part.checksum == log.checksum
    assert trained(part.with_seq_len(5)) <= trained(log)
    assert trained(log.with_seq_len(5).with_users(1 / 8, 3)) == trained(part.with_seq_len(5))


def test_the_line_of_users_is_shuffled(tmp_path: Path) -> None:
    log = prepared(tmp_path, make_events(200), options=OPTIONS)
    users = sorted(trained(log))
    half = trained(log.with_users(1 / 2))
    below_median = sum(user < users[len(users) // 2] for user in half)
    assert 0.3 * len(half) < below_median < 0.7 * len(half)


def test_a_recipe_names_its_share_and_part_only_where_they_say_something() -> None:
    assert DataRecipe().to_values() == {"seq_len": 256}
    assert DataRecipe(user_share=1, user_part=0).to_values() == {"seq_len": 256}
    assert DataRecipe(user_share=0.125, user_part=7).to_values() == {
        "seq_len": 256, "user_share": 0.125, "user_part": 7,
    }  # fmt: skip
    assert DataRecipe(user_share=1 / 3, user_part=2).user_part == 2
    for share, part, count in ((1.0, 1, "1 disjoint part,"), (0.125, 8, "8 disjoint parts"), (0.4, 2, "2 disjoint")):
        with pytest.raises(ConfigError, match=f"user_part = {part}, but a share of {share:g} has {count}"):
            DataRecipe.parse({"user_share": share, "user_part": part}, "recipe.toml")
    for share in (0, -0.5, 1.5):
        with pytest.raises(ConfigError, match="user_share"):
            DataRecipe.parse({"user_share": share}, "recipe.toml")
