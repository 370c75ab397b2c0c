"""From a budget to a plan: from the paper's laws, and from the runs of a study.

python examples/budget_to_plan.py                              # the study that is kept in this repository
python examples/budget_to_plan.py --runs study/store --flops 1e16 --metric catalogue/recall@10
"""

import argparse
from pathlib import Path

import habitus as hb

KEPT = Path(__file__).parents[1] / "docs" / "studies" / "h200-standard" / "runs.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description="From a budget to a plan.")
    parser.add_argument("--runs", type=Path, default=KEPT, help="a run store, or a flat CSV of runs")
    parser.add_argument("--flops", type=float, default=1e16)
    parser.add_argument("--metric", default="batch/loss")
    parser.add_argument("--out", type=Path, default=Path("out/budget-to-plan"))
    options = parser.parse_args()

    published = hb.plan(options.flops, options.metric)
    laws = hb.fit(options.runs, [options.metric])
    print(laws)
    ours = hb.plan(options.flops, options.metric, laws=laws)
    print(ours)
    print(f"parameters: {ours['params'].value:.3g} by these runs, {published['params'].value:.3g} by the paper's laws")
    print(*ours.write_recipes(options.out), sep="\n")


if __name__ == "__main__":
    main()
