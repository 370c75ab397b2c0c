"""From a log to a model: prepare two tables, train without a recipe, ask for one user.

python examples/log_to_model.py events.csv items.csv          # your own log
python examples/log_to_model.py --hours 0.05                  # a synthetic shop
"""

import argparse
from pathlib import Path

import pyarrow.parquet as pq

import habitus as hb


def main() -> None:
    parser = argparse.ArgumentParser(description="From a log to a model.")
    parser.add_argument("events", nargs="?", help="events as CSV, Parquet or JSON lines")
    parser.add_argument("items", nargs="?", help="items as CSV, Parquet or JSON lines")
    parser.add_argument("--out", type=Path, default=Path("out/log-to-model"))
    parser.add_argument("--users", type=int, default=1_500, help="of the synthetic shop")
    parser.add_argument("--hours", type=float, help="for the search; 0.13 on a CPU, 0.04 on a GPU unless given")
    options = parser.parse_args()

    events, items = options.events, options.items
    if events is None:
        shop = options.out / "shop"
        hb.world(shop, prepared=False, num_users=options.users, num_items=150, events_per_user=24)
        events, items = shop / "events.parquet", shop / "items.parquet"

    dataset = hb.prepare(events, items, out=options.out / "dataset", seq_len=64)  # the schema is guessed
    print(dataset)
    run = hb.train(dataset, out=options.out / "run", **({} if options.hours is None else {"hours": options.hours}))
    print(run)

    ids = pq.read_table(dataset.path / "items" / "ids.parquet").column(0).to_pylist()
    history = ids[:3]
    print(f"after {history}:")
    for item in run.recommend(history, k=5, exclude_seen=True):
        print(f"  {item.item_id}  {item.probability:.3f}")


if __name__ == "__main__":
    main()
