"""The paper's published laws, in the schema of laws.json."""

from functools import cache
from importlib.resources import files

from habitus.store import Laws


@cache
def published_laws() -> Laws:
    """The laws as printed: values, and the printed errors as details. `notes` say what cannot be derived."""
    path = files("habitus.laws").joinpath("published.json")
    return Laws.model_validate_json(path.read_text(encoding="utf-8"))
