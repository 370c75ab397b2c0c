"""A world like logs has their structure: every statistic of the fixed list lies within the range of three real logs."""

import re
from pathlib import Path

from habitus.data import Dataset, PrepareOptions, Structure, prepare_world, structure
from habitus.events import World, WorldConfig, schema_of

# completejourney, movielens_1m_order and git_touches/small at 10⁶ events each, with standard errors (docs/world.md).
LOGS = {
    "popularity/top_1_percent": ((0.302, 0.003), (0.082, 0.001), (0.227, 0.013)),
    "popularity/zipf_slope": ((0.704, 0.002), (0.547, 0.002), (0.612, 0.022)),
    "popularity/effective_items": ((0.193, 0.003), (0.525, 0.003), (0.374, 0.027)),
    "repeats/all": ((0.408, 0.005), (0.0, 0.0), (0.714, 0.02)),
    "repeats/lag<=1": ((0.002, 0.0), (0.0, 0.0), (0.054, 0.004)),
    "repeats/lag<=5": ((0.01, 0.0), (0.0, 0.0), (0.109, 0.006)),
    "repeats/lag<=20": ((0.047, 0.001), (0.0, 0.0), (0.143, 0.006)),
    "repeats/lag<=100": ((0.167, 0.002), (0.0, 0.0), (0.16, 0.006)),
    "repeats/lag>100": ((0.181, 0.004), (0.0, 0.0), (0.248, 0.027)),
    "cold/events": ((0.044, 0.005), (0.0, 0.0), (0.483, 0.037)),
    "pair/information": ((0.006, 0.002), (0.805, 0.033), (0.304, 0.044)),
    "history/gain@1": ((0.035, 0.007), (0.976, 0.028), (0.663, 0.041)),
    "history/gain@20": ((0.125, 0.014), (1.156, 0.032), (0.988, 0.053)),
    "history/beyond_last": ((0.09, 0.012), (0.304, 0.023), (0.326, 0.027)),
    "rank/gain@8": ((0.11, 0.01), (0.649, 0.025), (0.218, 0.054)),
    "rank/gain@32": ((0.125, 0.014), (0.974, 0.029), (0.733, 0.058)),
    "rank/gain@128": ((0.108, 0.012), (1.156, 0.032), (0.988, 0.053)),
    "rank/needed": ((9.2, 2.5), (45.7, 1.8), (63.5, 4.5)),
    "fields/gain": ((0.131, 0.01), (0.361, 0.018), (2.716, 0.07)),
    "fields/with_id_gain": ((0.173, 0.015), (1.152, 0.032), (2.75, 0.07)),
    "fields/share": ((0.755, 0.049), (0.314, 0.013), (0.988, 0.003)),
}
TOLD = 2.0  # standard errors, of the world and of the log at that end of the range


def measured(like: str, num_items: int, num_users: int, folder: Path) -> Structure:
    world = World(WorldConfig.like(like, num_items=num_items, num_users=num_users, seed=1))  # type: ignore[arg-type]
    options = PrepareOptions(
        seq_len=256, text_len=8, vocabulary_size=400, validation_share=0.1, test_share=0, threads=1
    )
    prepare_world(world, schema_of(world), folder, options, lambda *_: None)
    return structure(Dataset.open(folder))


def outside(found: Structure) -> dict[str, tuple[float, float, float]]:
    """The statistics beyond the range by more than chance: value, and the ends that it may have."""
    beyond = {}
    for name, logs in LOGS.items():
        one = found.statistics[name]
        low = min(value - TOLD * (se**2 + one.se**2) ** 0.5 for value, se in logs)
        high = max(value + TOLD * (se**2 + one.se**2) ** 0.5 for value, se in logs)
        if not low <= one.value <= high:
            beyond[name] = (one.value, low, high)
    return beyond


def test_a_small_world_like_logs_lies_within_their_range(tmp_path: Path) -> None:
    assert outside(measured("logs", 2_000, 3_000, tmp_path / "logs")) == {}


def test_the_default_world_does_not_so_that_the_ranges_can_tell(tmp_path: Path) -> None:
    """Its last item tells more than the whole history, copies come from the last event, and its head is too steep."""
    beyond = outside(measured("shop", 1_000, 1_500, tmp_path / "shop"))
    assert {"history/beyond_last", "repeats/lag<=1", "popularity/zipf_slope", "rank/gain@8"} <= set(beyond)


def test_the_ranges_are_those_of_the_docs() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "world.md").read_text(encoding="utf-8")
    text = text.partition("Three logs and four worlds")[2]
    for name, logs in LOGS.items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*)$", text, re.M)
        printed = [cell.strip().split(" ± ") for cell in row.split("|")[:3]]
        assert [(float(cell[0]), float(cell[1]) if len(cell) > 1 else 0.0) for cell in printed] == list(logs), name
