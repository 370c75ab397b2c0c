"""The paper's runs to 1e19 FLOPs on 1, 8 and 64 H200s, from measured rates. Prints the table of docs/scale.md.

    python benchmarks/scale.py [--extended 0.3] [--until 1e17]

Rates are nominal TFLOP/s of a whole stage-1 step on one H200 by budget, as measured (`habitus.sizing.H200_RATES`).
Cells come from preset `paper` on a log of 10⁷ items and 10¹⁰ events, more than any cell needs.
"""

import argparse

from habitus.sizing import H200_RATES, TYPICAL_INPUTS, wall_seconds
from habitus.sweeps import DatasetFacts, design_axis, load_preset

# Start-up with a warm compile cache, benchmarks/results/train-h200.json; one evaluation, evaluate-h200.json.
OVERHEAD_SECONDS = 3.7 + 3.5
PAPER_AXES = ("share", "depth", "batch", "allocation", "negatives", "init")
FACTS = DatasetFacts("0" * 64, TYPICAL_INPUTS, 256, 24, 10_000_000, 40_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extended", type=float, default=0.3, help="share of cells that get one more learning rate")
    parser.add_argument("--until", type=float, default=1e19, help="only budgets up to this one")
    arguments = parser.parse_args()
    preset = load_preset("paper")
    totals = dict.fromkeys((1, 8, 64), 0.0)
    runs, flops, disk, longest = 0, 0.0, 0.0, 0.0
    print("| axis | runs | FLOPs | hours on 1 | on 8 | on 64 | longest run, h |")
    print("|---|---|---|---|---|---|---|")
    for axis in PAPER_AXES:
        designed = design_axis(axis, FACTS, preset).distinct_runs()
        cells = [planned for planned in designed if planned.row.flops_budget <= 1.001 * arguments.until]
        seconds, alone = [], 0.0
        for planned in cells:
            one = planned.cell.flops / rate(planned.row.flops_budget) + OVERHEAD_SECONDS
            extra = arguments.extended if len(preset.axis(axis).learning_rates) > 1 else 0.0
            seconds.append(one * (1 + extra / len(preset.axis(axis).learning_rates)))
            alone = max(alone, one)
            disk += 4.0 * (planned.cell.params + planned.cell.vocabulary_params)
        longest = max(longest, alone)
        hours = {count: wall_seconds(seconds, count) / 3600 for count in totals}
        for count in totals:
            totals[count] += hours[count]
        runs, flops = runs + len(cells), flops + sum(planned.cell.flops for planned in cells)
        shown = " | ".join(f"{hours[count]:.1f}" for count in totals)
        print(f"| {axis} | {len(cells)} | {sum(p.cell.flops for p in cells):.2g} | {shown} | {alone / 3600:.2g} |")
    shown = " | ".join(f"{hours:.0f}" if hours >= 1 else f"{hours:.2g}" for hours in totals.values())
    print(f"| all, one axis after the other | {runs} | {flops:.2g} | {shown} | {longest / 3600:.2g} |")
    print(f"\nbundles {disk / 1e9:.0f} GB; a 1e15 cell {1e15 / rate(1e15) + OVERHEAD_SECONDS:.0f} s")


def rate(budget: float) -> float:
    """The rate of the nearest measured budget that is not above."""
    return H200_RATES[max(known for known in H200_RATES if known <= budget * 1.001)]


if __name__ == "__main__":
    main()
