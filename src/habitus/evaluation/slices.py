"""Where a run errs: its metric in every group of queries, beside a reference on the same queries.

Intervals and tests take the queries of one user as one draw, and Student's distribution with one less than the users
of the group as its degrees. Holm's adjustment holds for all rows of all columns together, however they depend on each
other: a reader acts on single rows, so that one false row is an error already.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from habitus.data import PADDING_TOKEN, Dataset
from habitus.errors import ConfigError
from habitus.evaluation.groups import NO_VALUE, OTHERS, Groups
from habitus.evaluation.metrics import Mean, means
from habitus.evaluation.paired import query_values
from habitus.evaluation.per_query import PerQuery
from habitus.record import Metric
from habitus.store import QueryExample, SliceRow, SliceTable, direction_of

MIN_USERS = 5  # of a row that is tested, and that may be called the worst
_MIN_SHARE = 0.01  # of the queries, of a row that may be called the worst
_EXAMPLES = 3
_SHOWN_ITEMS = 3  # of a history and of a list
_LONGEST_NAME = 50
_SPACE = "Ġ"  # of the tokenizer


def slice_tables(
    dataset: Dataset,
    values: PerQuery,
    groups: Sequence[Groups],
    metric: str,
    reference: tuple[str, PerQuery] | None = None,
) -> tuple[SliceTable, ...]:
    """A table per column of groups, for a metric named without its regime; `reference` is a scorer and its values."""
    rows_by_column = [_slice_rows(values, one, metric, None if reference is None else reference[1]) for one in groups]
    tested = [row for rows in rows_by_column for row in rows if row.p_value is not None]
    adjusted = dict(zip(map(id, tested), holm([row.p_value or 0.0 for row in tested]), strict=True))
    names = _ItemNames(dataset)
    tables = []
    for one, rows in zip(groups, rows_by_column, strict=True):
        rows = [row.model_copy(update={"p_value": adjusted[id(row)]}) if id(row) in adjusted else row for row in rows]
        worst = _worst_row(rows, metric)
        chosen = np.flatnonzero(one.codes == worst) if worst is not None else np.empty(0, np.int64)
        tables.append(
            SliceTable(
                by=one.by,
                source=one.source,
                metric=metric,
                reference=None if reference is None else reference[0],
                comparisons=len(tested),
                rows=tuple(rows),
                worst=None if worst is None else one.labels[worst],
                examples=_worst_queries(dataset, values, chosen, metric, names),
            )
        )
    return tuple(tables)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values adjusted by Holm's step-down method: the chance of any false row stays below the level."""
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in adjusted]


def _slice_rows(values: PerQuery, groups: Groups, metric: str, reference: PerQuery | None) -> list[SliceRow]:
    per_query = [query_values(values, metric)]
    if reference is not None:
        if not np.array_equal(values.event, reference.event):
            raise ConfigError("the reference answered different queries", expected="evaluations on one query set")
        other = query_values(reference, metric)
        per_query += [other, per_query[0] - other]
    matrix = np.stack(per_query)
    rows = []
    for code, label in enumerate(groups.labels):
        chosen = groups.codes == code
        users = values.user[chosen]
        row = means(matrix[:, chosen], users)
        compared = {} if reference is None else _compare(row[1], row[2], len(np.unique(users)))
        measured = Metric(value=row[0].value, se=row[0].se, n=row[0].n)
        rows.append(SliceRow(value=label, users=len(np.unique(users)), metric=measured, **compared))
    return rows


def _compare(reference: Mean, difference: Mean, num_users: int) -> dict[str, float | None]:
    """The reference's value, the difference, its interval and, with enough users, its p value."""
    from scipy.stats import t

    compared: dict[str, float | None] = {"reference": reference.value, "difference": difference.value}
    if difference.se is None:
        return compared
    half = float(t.ppf(0.975, num_users - 1)) * difference.se
    compared |= {"low": difference.value - half, "high": difference.value + half}
    if num_users >= MIN_USERS:
        statistic = abs(difference.value) / difference.se if difference.se else np.inf if difference.value else 0.0
        compared["p_value"] = float(2 * t.sf(statistic, num_users - 1))
    return compared


def _worst_row(rows: Sequence[SliceRow], metric: str) -> int | None:
    """The place of the row whose metric is worst, among those of one value with enough users and queries."""
    sign = 1 if direction_of(metric) == "max" else -1
    least = _MIN_SHARE * sum(row.metric.n for row in rows)
    candidates = [
        place
        for place, row in enumerate(rows)
        if row.users >= MIN_USERS and row.metric.n >= least
        if row.value != NO_VALUE and not row.value.startswith(OTHERS)
    ]
    return min(candidates, key=lambda place: sign * rows[place].metric.value, default=None)


def _worst_queries(
    dataset: Dataset, values: PerQuery, chosen: np.ndarray, metric: str, names: "_ItemNames"
) -> tuple[QueryExample, ...]:
    """Of the chosen queries those that are furthest off, each of another user and with another target."""
    badness = values.loss if metric == "loss" and values.loss is not None else values.rank
    examples: list[QueryExample] = []
    users, targets = set[int](), set[int]()
    for query in chosen[np.argsort(-badness[chosen], kind="stable")].tolist():
        user, target = int(values.user[query]), int(values.target[query])
        if user in users or target in targets:
            continue
        users.add(user)
        targets.add(target)
        last = int(values.event[query]) + 1
        seen = dataset.items[last - min(int(values.history[query]), _SHOWN_ITEMS) : last]
        first = values.top[query, :_SHOWN_ITEMS]
        examples.append(
            QueryExample(
                user=names.user(user),
                history=tuple(names.item(item) for item in seen.tolist()),
                target=names.item(target),
                rank=int(values.rank[query]),
                first=tuple(names.item(item) for item in first.tolist() if item >= 0),
            )
        )
        if len(examples) == _EXAMPLES:
            break
    return tuple(examples)


class _ItemNames:
    """What people call users and items: ids, and the name that the schema displays, or the item's text."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def user(self, row: int) -> str:
        return str(self._users[row].as_py())

    def item(self, row: int) -> str:
        item = " · ".join(str(column[row].as_py()) for column in self._items.columns)
        name = self._name(row)
        return item if not name or name.casefold() == item.casefold() else f"{item} ({name[:_LONGEST_NAME]})"

    @cached_property
    def _users(self) -> Any:
        return self.dataset.user_ids()

    @cached_property
    def _items(self) -> Any:
        return self.dataset.item_ids()

    @cached_property
    def _display(self) -> Any:
        return self.dataset.item_display()

    def _name(self, row: int) -> str:
        if self._display is not None:
            return str(self._display.column(0)[row].as_py() or "")
        tokens = self.dataset.item_features(np.array([row])).tokens
        if tokens is None:
            return ""
        pieces = [
            self.dataset.tokenizer.id_to_token(token) or "" for token in tokens[0].tolist() if token != PADDING_TOKEN
        ]
        return " ".join("".join(pieces).replace(_SPACE, " ").split())
