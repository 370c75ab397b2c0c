"""One step away from a recipe on a log that has ended: passes, regularisation, learning rate, size."""

from collections.abc import Callable
from dataclasses import dataclass

from habitus.data import Dataset
from habitus.recipe import Recipe, TrainRecipe

_MOST_DROPOUT = 0.6
_MOST_JOINT_DIM = 248  # of the fast softmax with its bias columns
_MOST_DEPTH = 8
_DROPPED = 0.1  # the first step of a dropout in the embedder


@dataclass(frozen=True)
class Change:
    """One knob of a recipe moved by one step."""

    knob: str  # two changes of one knob exclude each other
    words: str
    apply: Callable[[Recipe], Recipe]


def passes_of(recipe: Recipe, dataset: Dataset) -> float:
    """How often the recipe passes over the training windows."""
    windows = dataset.training_view(recipe.data).counts("train").windows
    return recipe.train.steps * recipe.train.batch_sequences / max(1, windows)


def neighbours(recipe: Recipe) -> list[Change]:
    """Every change that may help, the most promising first (docs/any-log.md has what moved most on seven logs)."""
    dropout = recipe.train.dropout
    changes = [
        _passes(2.0, "twice the passes"),
        _dropout(round(dropout - 0.1, 3)),
        _rate(0.5, "half the learning rate"),
        _size(1.5, "half as wide again"),
        _passes(0.5, "half the passes"),
        _dropout(round(dropout + 0.1, 3)),
        _depth(1, "one layer more"),
        _rate(2.0, "twice the learning rate"),
        *_embedder_dropouts(recipe),
        _passes(1.4, "1.4 times the passes"),
        _size(2 / 3, "a third narrower"),
        _depth(-1, "one layer fewer"),
        _passes(0.7, "0.7 times the passes"),
    ]
    return [change for change in changes if change is not None and change.apply(recipe) != recipe]


def combine(recipe: Recipe, changes: list[Change]) -> Recipe:
    """The recipe with several changes, the first of each knob."""
    seen: set[str] = set()
    for change in changes:
        if change.knob not in seen:
            seen.add(change.knob)
            recipe = change.apply(recipe)
    return recipe


def _passes(factor: float, words: str) -> Change:
    return Change("passes", words, lambda r: _train(r, steps=max(1, round(factor * r.train.steps))))


def _rate(factor: float, words: str) -> Change:
    return Change("rate", words, lambda r: _train(r, learning_rate=factor * r.train.learning_rate))


def _dropout(value: float) -> Change | None:
    if not 0 <= value <= _MOST_DROPOUT:
        return None
    return Change("dropout", f"dropout {value:g}", lambda r: _train(r, dropout=value))


def _embedder_dropouts(recipe: Recipe) -> list[Change]:
    names = [name for name in ("field_dropout", "token_dropout", "item_dropout") if name in TrainRecipe.model_fields]
    changes = []
    for name in names:
        value = 2 * getattr(recipe.train, name) or _DROPPED
        if value <= _MOST_DROPOUT:
            words = f"{name.replace('_', ' ')} {value:g}"
            changes.append(Change(name, words, lambda r, name=name, value=value: _train(r, **{name: value})))  # type: ignore[misc]
    return changes


def _depth(step: int, words: str) -> Change:
    def apply(recipe: Recipe) -> Recipe:
        depth = min(max(1, recipe.model.depth + step), _MOST_DEPTH)
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"depth": depth})})

    return Change("depth", words, apply)


def _size(factor: float, words: str) -> Change:
    def apply(recipe: Recipe) -> Recipe:
        model = recipe.model
        joint_dim = min(max(8, round(factor * model.joint_dim / 8) * 8), _MOST_JOINT_DIM)
        width = max(1, round(factor * model.width / model.head_dim)) * model.head_dim
        return recipe.model_copy(update={"model": model.model_copy(update={"joint_dim": joint_dim, "width": width})})

    return Change("size", words, apply)


def _train(recipe: Recipe, **changes: float) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
