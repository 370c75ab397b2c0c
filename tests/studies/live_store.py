"""A store in which runs can be made to end one by one, as a sweep's do."""

import json
import time
from pathlib import Path

from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import EvaluationFiles, StoreInfo
from tests.sealing import seal_records

CHECKSUM = "5eed" * 16
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
WORKER = "host-7-abc123"
HOSTILE = "<script>alert(1)</script>"


class LiveStore:
    """Six cells of the share axis at one budget; the first is at work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipes = [_recipe(number) for number in range(len(SHARES))]
        self.digests = [recipe.hash(CHECKSUM) for recipe in self.recipes]
        rows = []
        for number, (recipe, digest) in enumerate(zip(self.recipes, self.digests, strict=True)):
            (path / "cells" / digest).mkdir(parents=True)
            recipe.write(path / "cells" / digest / "recipe.toml")
            realised = {"params": 10_000, "embedder_share": SHARES[number], "steps": recipe.train.steps}
            rows.append(
                {"cell_id": f"s{number}", "flops_budget": 1e12, "wanted": {}, "realised": realised,
                 "learning_rate": 2e-3, "seed": 0, "recipe_hash": digest}
            )  # fmt: skip
        (path / "sweeps").mkdir()
        (path / "workers").mkdir()
        manifest = {"axis": "share", "preset": "test", "cells": rows}
        (path / "sweeps" / "share-1.json").write_text(json.dumps(manifest), encoding="utf-8")
        evaluation = EvaluationFiles(
            queries=7, batch_sequences=8, catalogue_items="all", seed=0, query_set_checksum="q", queries_sha256="s"
        )
        StoreInfo(dataset_checksum=CHECKSUM, evaluation=evaluation).write(path / "store.json")
        self.start(0)

    def start(self, number: int) -> None:
        """A worker claims a cell and trains a few steps of it."""
        cell = self.path / "cells" / self.digests[number]
        (cell / "lease-000001").write_text(json.dumps({"worker": WORKER, "number": 1}), encoding="utf-8")
        attempt = cell / "attempts" / f"000001-{WORKER}"
        attempt.mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": 6.5 - step / 100}) for step in range(40)]
        (attempt / "journal.jsonl").write_text("\n".join(lines) + '\n{"step": 4', encoding="utf-8")
        self._log("claimed", number)

    def end(self, number: int, reason: str = "") -> None:
        """The Record of a cell is published."""
        cell, recipe = self.path / "cells" / self.digests[number], self.recipes[number]
        common = {
            "recipe": recipe, "recipe_hash": self.digests[number], "dataset_checksum": CHECKSUM, "seed": 0,
            "flops_budget": 1e12,
        }  # fmt: skip
        if reason:
            record = Record.model_validate({**common, "status": "failed", "reason": reason})
        else:
            share = SHARES[number]
            loss = 5.0 + (share - 0.1) ** 2
            embedder = round(10_000 * share)
            record = Record.model_validate(
                {
                    **common, "status": "done", "flops_nominal": 1e12, "steps": 100, "slots_seen": 100_000,
                    "params": {"embedder": embedder, "contextualizer": 10_000 - embedder, "vocabulary": 50},
                    "embedder_share": share, "train": {"loss": loss, "in_batch_loss": loss}, "epochs": 0.5,
                    "metrics": {
                        "batch/loss": {"value": loss, "se": (3, 4)[number % 2] / 100, "n": 7},
                        "catalogue/recall@10": {"value": 0.4 - share, "n": 7},
                    },
                    "seconds": {"warmup": 1.0, "train": 10.0, "evaluate": 1.0},
                }
            )  # fmt: skip
        record.write(cell / "record.json")
        for path in sorted(cell.rglob("*"), reverse=True):
            if "lease" in path.name or "attempts" in str(path.relative_to(cell)):
                path.rmdir() if path.is_dir() else path.unlink()
        seal_records(self.path)
        self._log("published", number)

    def _log(self, event: str, number: int) -> None:
        line = json.dumps({"at": time.time(), "worker": WORKER, "event": event, "cell": self.digests[number]})
        with (self.path / "workers" / f"{WORKER}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _recipe(number: int) -> Recipe:
    values = {
        "model": {"joint_dim": 8 + 4 * number, "width": 64, "depth": 2},
        "train": {"batch_sequences": 4, "steps": 100, "learning_rate": 2e-3},
    }
    return Recipe.parse(values, "test")
