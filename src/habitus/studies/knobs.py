"""`habitus show`: every knob of a recipe with its meaning, where its value came from, and what a change costs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from habitus.planning import RATE_AT_512
from habitus.recipe import Recipe
from habitus.sizing import Cell
from habitus.store import Quantity
from habitus.studies.subject import Subject
from habitus.units import format_seconds

# Twice the value is tried; what is absent, or is no size, changes no cost.
_SIZES = (
    "data.seq_len", "model.joint_dim", "model.text_len", "model.text_depth", "model.width", "model.depth",
    "train.num_negatives", "train.batch_sequences", "train.steps",
)  # fmt: skip
_FIRST_NEGATIVES = 16_384  # tried where there are none


@dataclass(frozen=True)
class KnobChange:
    """What another value of a knob makes of the run, as factors of what it is now; seconds are added."""

    value: Any
    params: float
    flops: float
    seconds: float

    def __str__(self) -> str:
        sign = "+" if self.seconds >= 0 else "−"
        value = str(self.value).lower() if isinstance(self.value, bool) else f"{self.value:,}"
        cost = f"{sign}{format_seconds(abs(self.seconds))}"
        return f"{value}: N ×{self.params:.3g}, FLOPs ×{self.flops:.3g}, {cost}"


@dataclass(frozen=True)
class Knob:
    """One value of a recipe."""

    name: str  # train.learning_rate
    value: Any
    meaning: str
    origin: str  # default, rule, plan, sweep, search or by hand, with what is known of it
    change: KnobChange | None = None

    def to_values(self) -> dict[str, Any]:
        values = {"name": self.name, "value": self.value, "meaning": self.meaning, "origin": self.origin}
        return values if self.change is None else {**values, "change": vars(self.change)}


def explain_recipe(subject: Subject) -> list[Knob]:
    """The knobs of a recipe or a run, in the order of the file."""
    origins = _Origins(subject)
    return [
        Knob(name, value, meaning, origins.of(name, value, is_default), _try_change(subject, name, value))
        for name, value, meaning, is_default in _values(subject.recipe)
    ]


def _values(recipe: Recipe) -> Iterator[tuple[str, Any, str, bool]]:
    """Name, value, meaning of each knob, and whether the value is the default."""
    for section, model in recipe:
        for key, info in type(model).model_fields.items():
            value = getattr(model, key)
            shown = list(value) if isinstance(value, tuple) else value
            yield f"{section}.{key}", shown, info.description or "", not info.is_required() and value == info.default


class _Origins:
    """Where values came from, as far as files know it."""

    def __init__(self, subject: Subject) -> None:
        self.recipe, self.plan = subject.recipe, subject.plan()
        search = subject.search_change()
        cells = [f"{axis} {cell} at {budget:.3g} FLOPs" for axis, cell, budget in subject.manifest_rows()]
        if self.plan is not None:
            self.rest = "plan: as the runs that it rests on"
        elif search is not None:
            self.rest = f"search: {search}"
        elif cells:
            self.rest = f"sweep: {'; '.join(cells)}"
        elif subject.record is not None and subject.store is not None:
            self.rest = "study: a run of its store"
        else:
            self.rest = "by hand"

    def of(self, name: str, value: Any, is_default: bool) -> str:
        section, _, key = name.partition(".")
        quantity = self._quantity(key) if section in ("model", "train") else None
        if quantity is not None:
            return f"plan: {quantity.how} ({quantity.source})"
        if is_default:
            return "default"
        if name == "train.learning_rate" and self.rest == "by hand":
            batch = self.recipe.train.batch_sequences
            if math.isclose(value, RATE_AT_512 * math.sqrt(batch / 512), rel_tol=1e-6):
                return f"rule: {RATE_AT_512:g}·√(B/512)"
        return self.rest

    def _quantity(self, key: str) -> Quantity | None:
        if self.plan is None or (self.recipe.train.stage == 1 and key == "num_negatives"):
            return None
        stage2 = self.recipe.train.stage == 2 and f"stage2_{key}" in self.plan.quantities
        return self.plan.quantities.get(f"stage2_{key}" if stage2 else key)


def _try_change(subject: Subject, name: str, value: Any) -> KnobChange | None:
    """What twice the value costs, or switching it."""
    recipe = subject.recipe
    if name == "model.copying":
        other: Any = not value
    elif name in _SIZES and (name != "train.num_negatives" or recipe.train.stage == 2):
        other = 2 * value or _FIRST_NEGATIVES
    else:
        return None
    section, _, key = name.partition(".")
    changed = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={key: other})})
    now, then = subject.cell, subject.size(changed)
    return KnobChange(
        other,
        params=then.params / now.params,
        flops=then.flops / now.flops,
        seconds=subject.seconds(changed) - subject.seconds(recipe),
    )


def describe_size(subject: Subject) -> str:
    """What the recipe amounts to, in a line."""
    cell: Cell = subject.cell
    time = format_seconds(subject.seconds(subject.recipe))
    assumed = "" if subject.knows_fields else "; typical fields are assumed, --data counts yours"
    return (
        f"N = {cell.params:,} parameters, {cell.embedder_share:.1%} of them in the embedder; D = {cell.slots_seen:,} "
        f"slots, D/N = {cell.data_ratio:.3g}; {cell.flops:.3g} FLOPs, about {time} "
        f"({subject.speed.source}){assumed}"
    )
