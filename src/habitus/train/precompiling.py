"""Compiling with all cores: processes that fill the compile cache, each with other pieces of the model.

One process compiles piece after piece and mostly waits. So before a long run's first step, a few helpers run one
step without compiling, note what each piece is given, compile their own pieces for exactly that, and end. The run then
finds every kernel in the cache. Should a helper fail, the run compiles that piece itself: nothing depends on them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from habitus.data import Dataset
from habitus.model import BehaviorModel
from habitus.model.bundle import autocast
from habitus.recipe import Recipe

Piece = tuple[nn.Module, str]  # a module and its method
GROUPS = ("contextualizer's layer", "text layer", "contextualizer", "embedder")
_LEAST_CORES = 8
_LONGEST_SECONDS = 120.0


class Helpers:
    """Processes that compile the pieces of a run; none on a small machine."""

    def __init__(self, recipe: Recipe, dataset: Dataset, device: torch.device) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes: list[subprocess.Popen[bytes]] = []
        if (os.cpu_count() or 1) < _LEAST_CORES:
            return
        job = Path(self.folder.name) / "job.json"
        values = {"recipe": recipe.to_values(), "dataset": str(dataset.path), "device": str(device)}
        job.write_text(json.dumps(values), encoding="utf-8")
        for group in GROUPS if recipe.train.stage == 1 else (GROUPS[0], GROUPS[2]):
            command = [sys.executable, "-m", "habitus.train.precompiling", str(job), group]
            quiet = subprocess.DEVNULL
            self.processes.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))

    def wait(self) -> None:
        """Return when all have ended, or have taken too long."""
        for process in self.processes:
            try:
                process.wait(_LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []
        self.folder.cleanup()


def compile_group(job: Path, group: str) -> int:
    """Compile one group's pieces into the cache, in this process; returns how many there were."""
    from habitus.train.captured import CapturedEngine
    from habitus.train.compiling import use_compile_cache

    use_compile_cache()
    given = json.loads(job.read_text(encoding="utf-8"))
    dataset = Dataset.open(given["dataset"], verify=False)
    recipe = Recipe.parse(given["recipe"], "the run's recipe")
    # Extra negatives change nothing for the pieces.
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"num_negatives": 0})})
    device = torch.device(given["device"])
    model = BehaviorModel(dataset.fields, recipe.model).to(device)
    table = None
    if recipe.train.stage == 2:
        model.freeze()
        dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
        table = torch.zeros(dataset.num_items, recipe.model.joint_dim, dtype=dtype, device=device)
    engine = CapturedEngine(model, dataset, recipe, device, table, compiled=False)
    engine.incoming.begin(0)
    engine.incoming.settle_into_place()
    size = engine.incoming.buckets.size(engine.incoming.bucket())

    def step() -> None:
        engine.objective(engine.incoming.current, engine.incoming.keys, size, engine.latch)

    with autocast(device, recipe.train.precision):
        calls = inputs_of(pieces_of(model)[group], step)
        model.compile_blocks()
        for (owner, name), (arguments, named) in calls:
            run_there_and_back(owner if name == "forward" else getattr(owner, name), arguments, named)
    return len(calls)


def pieces_of(model: BehaviorModel) -> dict[str, list[Piece]]:
    """What `compile_blocks` compiles, by group; of equal layers the first one."""
    embedder, contextualizer = model.embedder, model.contextualizer
    events, text = contextualizer.events, embedder.text
    outer = [piece for piece in (events.numbers, events.categories) if _is_compiled(piece)]
    inner = [
        piece
        for piece in (embedder.fusion, embedder.numbers, embedder.vectors, embedder.categories)
        if _is_compiled(piece)
    ]
    parts: dict[str, list[Piece]] = {
        "contextualizer's layer": [(contextualizer.blocks[0], "forward")],
        "text layer": [] if text is None else [(text.blocks[0], "forward")],
        "contextualizer": [(contextualizer, name) for name in ("enter", "layout", "leave")],
        "embedder": [] if text is None else [(text, "enter"), (text, "leave")],
    }
    parts["contextualizer"] += [(piece, "forward") for piece in outer if piece is not None]
    parts["embedder"] += [(piece, "forward") for piece in inner if piece is not None]
    return parts


def inputs_of(pieces: list[Piece], step: Callable[[], None]) -> list[tuple[Piece, tuple[Any, Any]]]:
    """What each piece is given in a step: (arguments, named arguments) of its first call."""
    found: dict[int, tuple[Any, Any]] = {}

    def listening(number: int, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            found.setdefault(number, (arguments, named))
            return method(*arguments, **named)

        return call

    for number, (owner, name) in enumerate(pieces):
        setattr(owner, name, listening(number, getattr(owner, name)))
    try:
        step()
    finally:
        for owner, name in pieces:
            delattr(owner, name)
    return [(pieces[number], given) for number, given in sorted(found.items())]


def run_there_and_back(piece: Callable[..., Any], arguments: Any, named: Any) -> None:
    """Call a piece on inputs like these, and ask for its gradients."""

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    outputs = piece(*tree_map(like, arguments), **tree_map(like, named))
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


def _is_compiled(piece: nn.Module | None) -> bool:
    """Whether `compile_blocks` takes it: tables that are looked up stay as they are."""
    return piece is not None and bool(getattr(piece, "one_hot", True))


if __name__ == "__main__":
    compile_group(Path(sys.argv[1]), sys.argv[2])
