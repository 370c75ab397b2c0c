"""A small trained run over a world of many items, for the benchmarks of serving.

    python benchmarks/served_run.py --items 1000000 --work FOLDER

Vectors of a trained embedder have the structure that indexes live from (groups, brands, near twins); random vectors
have none. The model is small so that two cores embed a million items in minutes; what is measured comes after it.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import schema_of
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.bundle import save_bundle
from habitus.recipe import Recipe
from habitus.serving import Retriever

STEPS = 1_200


def served_run(num_items: int, work: Path) -> tuple[Path, Path]:
    """(run, dataset) in a folder; what an earlier call finished is not made again."""
    folder = work / f"items-{num_items}"
    data, run = folder / "dataset", folder / "run"
    if not data.exists():
        world = World(WorldConfig(num_users=4_000, num_items=num_items, events_per_user=60, seed=5))
        options = PrepareOptions(seq_len=64, text_len=8, vocabulary_size=2_000, test_share=0, threads=2)
        timed("preparing", lambda: prepare_world(world, schema_of(world), data, options, lambda *_: None))
    dataset = Dataset.open(data, verify=False)
    if not (run / "bundle").exists():
        timed("training", lambda: save_bundle(trained(dataset), recipe(), dataset, run / "bundle"))
    if not (run / "serve" / "catalogue").exists():
        timed("embedding", lambda: Retriever.open(run, data=data, device="cpu"))
    return run, data


def recipe() -> Recipe:
    model = {"joint_dim": 64, "text_len": 8, "text_depth": 1, "width": 64, "depth": 2, "head_dim": 32}
    fit = {"batch_sequences": 16, "steps": STEPS, "learning_rate": 2e-3, "precision": "fp32"}
    return Recipe.parse({"data": {"seq_len": 64}, "model": model, "train": fit}, "the benchmark's recipe")


def trained(dataset: Dataset) -> BehaviorModel:
    """A model after a plain loop over in-batch softmax."""
    model = BehaviorModel(dataset.fields, recipe().model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), recipe().train.learning_rate)
    for step in range(STEPS):
        batch = dataset.batch("train", recipe().train.batch_sequences, position=step)
        targets = batch.targets >= 0
        both = np.concatenate([batch.items.ravel(), batch.targets[targets]])
        rows, places = np.unique(both, return_inverse=True)
        vectors = model.embed_items(item_tensors(dataset.item_features(rows), model.recipe))
        events = vectors[torch.from_numpy(places[: batch.items.size].reshape(batch.items.shape))]
        queries = model.queries(batch_tensors(batch), events)[torch.from_numpy(targets)]
        loss = torch.nn.functional.cross_entropy(queries @ vectors.T, torch.from_numpy(places[batch.items.size :]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f} of {np.log(len(rows)):.3f}", flush=True)
    return model


def timed(what: str, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--items", type=int, default=1_000_000)
    arguments.add_argument("--work", type=Path, required=True)
    options = arguments.parse_args()
    print(served_run(options.items, options.work)[0])
