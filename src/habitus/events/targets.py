"""The table [targets] of a schema: which events are predicted, and how much each of them counts."""

from typing import Self

from pydantic import Field, model_validator

from habitus.typed import Typed


class Targets(Typed):
    """Events of weight 0 are context only: seen, never predicted. Below 0 an event says 'not this item'."""

    column: str = Field(description="Column of the event table that decides what is predicted.")
    weights: dict[str, float] | None = Field(
        None,
        description="The weight of each value of the column; other values are context only. "
        "Absent: the column itself is the weight, a number, or a boolean that says what is predicted.",
    )
    candidates: dict[str, tuple[str, ...]] | None = Field(
        None,
        description="Category fields of the items and the values that an item must have to be ranked or recommended; "
        "absent: every item.",
    )

    @model_validator(mode="after")
    def _something_is_predicted(self) -> Self:
        if self.weights is not None and not any(weight > 0 for weight in self.weights.values()):
            raise ValueError(
                f"weights are {self.weights}: nothing would be predicted; give a value of {self.column!r} "
                "a weight above 0"
            )
        if self.candidates == {} or any(not values for values in (self.candidates or {}).values()):
            raise ValueError("candidates leave no item; name a category field of the items and its values, or omit it")
        return self
