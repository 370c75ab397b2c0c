"""habitus: behavioral foundation models on event logs, and the scaling laws that size them.

    import habitus as hb
    dataset = hb.prepare("log/*.parquet", "items.parquet", schema="schema.toml", out="dataset")
    run = hb.train("recipe.toml", dataset, out="run")
    run.recommend(["item-1", "item-2"], k=10)

The verbs are functions here and commands of `habitus`. Everything is loaded when it is first used, so that
`import habitus` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from habitus.api import (
        Laws,
        Run,
        age,
        card,
        describe,
        diff,
        embed,
        evaluate,
        export,
        fit,
        load,
        plan,
        prepare,
        probe,
        recommend,
        report,
        runs,
        serve,
        show,
        size,
        study,
        sweep,
        train,
        world,
    )
    from habitus.data import Dataset
    from habitus.events import Schema
    from habitus.recipe import Recipe
    from habitus.record import Record
    from habitus.store import Plan

__all__ = [
    "Dataset",
    "Laws",
    "Plan",
    "Recipe",
    "Record",
    "Run",
    "Schema",
    "age",
    "card",
    "describe",
    "diff",
    "embed",
    "evaluate",
    "export",
    "fit",
    "load",
    "plan",
    "prepare",
    "probe",
    "recommend",
    "report",
    "runs",
    "serve",
    "show",
    "size",
    "study",
    "sweep",
    "train",
    "world",
]

# Objects that live in a room of their own; everything else is in habitus.api.
_HOMES = {"Dataset": "data", "Plan": "store", "Recipe": "recipe", "Record": "record", "Schema": "events"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'habitus' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"habitus.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
