"""Is the recipe that a study ends with the best of its neighbours at equal compute? One knob at a time.

    python benchmarks/plan_neighbours.py out/study [out/seed1 …] [--keep benchmarks/results/plan-neighbours-cpu.json]

Stage 1 of each study's plan is trained (or found in STUDY/run/stage1, where the study's printed command leaves it), and
then with half and twice its learning rate, size, share and batch, and with another seed; all by the same nominal FLOPs,
in STUDY/neighbours. Differences in what is served are paired over users. Prints a table, ends with one JSON line.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import habitus as hb
from habitus.data import Dataset
from habitus.planning.facts import DatasetProfile
from habitus.planning.shape import FixedSettings, stage1_cell
from habitus.recipe import Recipe
from habitus.store import RegisteredPlan

METRICS = ("catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("studies", type=Path, nargs="+")
    arguments.add_argument("--factors", type=float, nargs="+", default=[0.5, 2.0])
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    options = arguments.parse_args()
    rows = [row for study in options.studies for row in neighbours_of(study, options.factors)]
    result = {"benchmark": "plan_neighbours", "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def neighbours_of(study: Path, factors: list[float]) -> Iterator[dict[str, object]]:
    """Every neighbour's metrics less those of the plan, with intervals over users."""
    data, usual = study / "dataset", study / "run" / "stage1"
    planned = Recipe.read(study / "recipe" / "stage1.toml")
    if not (usual / "record.json").exists():
        hb.train(planned, data, out=usual)
    for name, recipe in recipes(study, planned, factors):
        out = study / "neighbours" / name
        if not (out / "record.json").exists():
            hb.train(recipe, data, out=out)
        found = {one.metric: one for one in hb.diff(usual, out, dataset=data).metrics}
        told = {name: (found[name].difference, found[name].low, found[name].high) for name in METRICS}
        print(f"{study.name:10s} {name:16s}", *(f"{m} {d:+.4f} [{a:+.4f}, {b:+.4f}]" for m, (d, a, b) in told.items()))
        yield {"study": study.name, "neighbour": name, **told}


def recipes(study: Path, planned: Recipe, factors: list[float]) -> Iterator[tuple[str, Recipe]]:
    """The plan's recipe with one knob changed, its steps what the same FLOPs pay."""
    plan, train = RegisteredPlan.read(study / "plan.json"), planned.train
    size, share = plan["params"].value, plan["embedder_share"].value
    fixed = FixedSettings(
        DatasetProfile.of(Dataset.open(study / "dataset")),
        text_depth=planned.model.text_depth,
        head_dim=planned.model.head_dim,
        optimizer=train.optimizer,
        precision=train.precision,
        copying=planned.model.copying,
    )

    def changed(N: float, s: float, batch: int) -> Recipe:
        cell = stage1_cell(plan.stage1_flops, N, s, batch, fixed)
        rate = train.learning_rate * (batch / train.batch_sequences) ** 0.5
        shape = {name: getattr(cell.model, name) for name in ("joint_dim", "width", "depth")}
        steps = {"steps": cell.steps, "batch_sequences": batch, "learning_rate": float(f"{rate:.4g}")}
        return planned.model_copy(
            update={"model": planned.model.model_copy(update=shape), "train": train.model_copy(update=steps)}
        )

    for factor in factors:
        rate = float(f"{factor * train.learning_rate:.4g}")
        of_rate = train.model_copy(update={"learning_rate": rate})
        yield f"rate-{factor:g}", planned.model_copy(update={"train": of_rate})
        yield f"size-{factor:g}", changed(factor * size, share, train.batch_sequences)
        yield f"share-{factor:g}", changed(size, min(0.9, factor * share), train.batch_sequences)
        yield f"batch-{factor:g}", changed(size, share, max(1, round(factor * train.batch_sequences)))
    yield "seed", planned.model_copy(update={"train": train.model_copy(update={"seed": train.seed + 1})})


if __name__ == "__main__":
    main()
