"""habitus: behavioral foundation models on event logs, and the scaling laws that size them.

The verbs are functions here and commands of `habitus`. They load their rooms when first used,
so that `import habitus` stays light.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# verb -> the room that holds it
_VERBS = {
    "prepare": "habitus.data",
    "PrepareOptions": "habitus.data",
    "Dataset": "habitus.data",
    "describe": "habitus.data.describe",
    "Schema": "habitus.events.schema",
    "Recipe": "habitus.recipe",
    "Record": "habitus.record",
}

__all__ = list(_VERBS)


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'habitus' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_VERBS[name]), name)
