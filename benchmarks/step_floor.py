"""How few steps starve a run: the same model on the same data, in batches of more and more windows.

    python benchmarks/step_floor.py --data out/study/dataset --out out/floor

trains one size of preset `quick` at two budgets in batches of 4 to 128 windows, at half, once and twice the rule's
rate, and prints the loss of the best rate by the number of steps.
"""

import argparse
from pathlib import Path

from habitus.data import Dataset
from habitus.record import Record
from habitus.sweeps import DatasetFacts, design_axis, load_preset
from habitus.sweeps.request import SweepRequest
from habitus.training import TrainOptions, train

SIZES = {4e10: "24x2", 1e11: "32x2"}
BATCHES, RATES = (4, 8, 16, 32, 64, 128), (0.5, 1.0, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    dataset, preset = Dataset.open(o.data, verify=False), load_preset("quick")
    for budget, size in SIZES.items():
        request = SweepRequest((budget,), 1, 1)
        cells = design_axis("allocation", DatasetFacts.of(dataset), preset, request=request).cells
        recipe = next(planned.recipe for planned in cells if planned.row.cell_id.startswith(size))
        windows = recipe.train.batch_sequences * recipe.train.steps
        for batch in BATCHES:
            losses = {}
            for multiple in RATES:
                changes = {"batch_sequences": batch, "steps": max(1, windows // batch),
                           "learning_rate": multiple * preset.rule_rate(batch, budget)}  # fmt: skip
                evaluate = recipe.evaluate.model_copy(update={"regimes": ("batch",)})
                update = {"train": recipe.train.model_copy(update=changes), "evaluate": evaluate}
                folder = o.out / f"{size}-{batch}-{multiple}"
                if not (folder / "record.json").exists():
                    options = TrainOptions(device="cpu", threads=1)
                    train(recipe.model_copy(update=update), dataset, folder, options=options)
                losses[multiple] = Record.read(folder / "record.json").metrics["batch/loss"].value
            best = min(losses, key=lambda multiple: losses[multiple])
            told = f"{size} at {budget:.0e}: {windows // batch:>4} steps of {batch:>3} windows"
            print(f"{told}: {losses[best]:.3f} at {best:g} times the rule's rate", flush=True)


if __name__ == "__main__":
    main()
