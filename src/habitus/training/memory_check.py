"""Whether a run fits the memory that it is given, before anything is built."""

import numpy as np
import torch

from habitus.data import Dataset
from habitus.errors import ConfigError, OutOfMemory
from habitus.machine import available_memory
from habitus.recipe import Recipe
from habitus.sizing import Inputs, Workload, breakdown, training_bytes
from habitus.units import format_bytes

_MOST_LAYERS = 4096  # building more takes minutes, whatever their width
_SAMPLED_ITEMS = 4096


def check_memory(
    recipe: Recipe, dataset: Dataset, device: torch.device, *, accumulate: int = 1, processes: int = 1
) -> None:
    """Refuse a run whose steps take more memory than the device, or this process on it, can have."""
    layers = recipe.model.depth + recipe.model.text_depth
    if layers > _MOST_LAYERS:
        raise ConfigError(f"the model has {layers:,} layers", expected=f"at most {_MOST_LAYERS:,}")
    room = memory_of_device(device)
    needed = expected_bytes(
        recipe, dataset, on_cpu=device.type == "cpu", parts=accumulate * processes, processes=processes
    )
    if processes > 1:  # which share the weights too, at the latest where they are too large for one
        for part in ("weights", "gradients", "optimizer"):
            needed[part] //= processes
        needed["total"] = sum(count for part, count in needed.items() if part != "total")
    if room is None or needed["total"] <= room:
        return
    largest = sorted((part for part in needed if part != "total"), key=lambda part: -needed[part])
    named = ", ".join(f"{part} {format_bytes(needed[part])}" for part in largest[:3])
    raise OutOfMemory(
        f"a step of this recipe takes about {format_bytes(needed['total'])} ({named}), "
        f"and {device} has {format_bytes(room)}",
        expected="a step that fits; a container's limit counts as well",
        next_step="lower train.batch_sequences or the model's sizes, or pass --accumulate 2 or more; "
        "--force trains without this check",
    )


def memory_of_device(device: torch.device) -> int | None:
    """Bytes of the device that a run may take; of a machine, what is free now within its limits."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_memory()


def expected_bytes(
    recipe: Recipe, dataset: Dataset, *, on_cpu: bool, parts: int = 1, processes: int = 1
) -> dict[str, int]:
    """Bytes of a step by part, as `--dry-run` counts them, but with the dataset's own items and texts.

    Of several processes, each of which scores its share of the extra negatives.
    """
    model, train, inputs = recipe.model, recipe.train, Inputs.of(dataset.fields)
    slots = max(1, train.batch_sequences // parts) * recipe.data.seq_len
    work = Workload.expected(
        B=max(1, train.batch_sequences // parts),
        L=recipe.data.seq_len,
        t=1,
        K=-(-train.num_negatives // processes),
        stage=train.stage,
    )
    items = min(work.items, dataset.num_items)
    text_tokens = round(items * _mean_tokens(dataset, model.text_len))
    work = Workload(
        slots=slots,
        items=items,
        text_tokens=text_tokens,
        text_pairs=0,
        context_pairs=0,
        queries=work.queries,
        candidates=min(work.candidates, dataset.num_items),
        copied_pairs=work.copied_pairs,
    )
    precision = "fp32" if on_cpu else train.precision
    return training_bytes(model, inputs, breakdown(model, inputs), work, precision=precision, optimizer=train.optimizer)


def _mean_tokens(dataset: Dataset, text_len: int) -> float:
    """Text tokens of an item, on average over some of the catalogue."""
    rows = np.unique(np.linspace(0, dataset.num_items - 1, min(dataset.num_items, _SAMPLED_ITEMS)).astype(np.int64))
    tokens = dataset.item_features(rows).tokens
    return 0.0 if tokens is None else float((tokens[:, :text_len] != 0).sum(1).mean())
