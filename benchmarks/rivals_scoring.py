"""What all rivals share: the log they learn from, how their vectors are scored, and the course of a training.

A rival turns a history into a vector and has a vector per item that it trained on; `habitus.evaluation` does the rest,
on the queries of our own runs. Items that it never trained on score lowest. Runs in the rival's own environment, with
this repository's `src` on the path.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.data import Dataset
from habitus.evaluation import EvaluateOptions, Evaluation, PerQuery, Scores, evaluate
from habitus.evaluation.queries import QueryBatch
from habitus.softmax import CandidateScan, CandidateTable, candidate_softmax, topk
from habitus.softmax.scan import ScanTile
from habitus.store import EvaluationSide

LARGE_CATALOGUE = 50_000  # items beyond which histories are cut at 128 events, not 256
HELD_SCORES = 1 << 26  # of a step; beyond, habitus.softmax computes the same loss without holding them
ENCODED_AT_ONCE = 128  # histories
MIN_STEPS = 1_000  # before validation may stop a training: the start is a plateau
QUERIES = 20_000  # of validation and of the closing table on a GPU
CHOICE_QUERIES = 5_000  # of validation, of more users, after the passes of a rival: they choose pass and setting
METRIC = "catalogue/ndcg@10"


class Setting(NamedTuple):
    """The size of a rival; the rate is 1e-3, as in its authors' examples."""

    width: int
    depth: int
    dropout: float

    @property
    def heads(self) -> int:
        return self.width // 32

    def __str__(self) -> str:
        return f"{self.width}/{self.depth}, dropout {self.dropout}"


SETTINGS = (Setting(256, 2, 0.2), Setting(128, 2, 0.3), Setting(64, 2, 0.2), Setting(256, 3, 0.3))
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class TrainingLog:
    """The histories of the training users, cut into sequences of at most length + 1 events that share one event."""

    sequences: list[np.ndarray]  # catalogue rows, oldest first
    times: list[np.ndarray] | None  # seconds, of the event before: nobody knows when the next event will be
    items: np.ndarray  # catalogue rows that occur, sorted
    num_items: int  # of the catalogue
    length: int
    batch: int

    @classmethod
    def of(cls, dataset: Dataset, batch: int | None = None) -> "TrainingLog":
        """The training side of a dataset."""
        parts = dataset.user_parts.with_validation() if dataset.includes_validation else dataset.user_parts
        length = min(128 if dataset.num_items > LARGE_CATALOGUE else 256, dataset.seq_len)
        rows = []
        for start, stop in zip(parts.starts, parts.starts + parts.train_lengths, strict=True):
            for end in range(int(stop), int(start) + 1, -length):
                rows.append(slice(max(int(start), end - length - 1), end))
        timed = dataset.schema.events.time_unit != "order"
        sequences = [dataset.items[chosen].astype(np.int64) for chosen in rows]
        usual = 64 if len(rows) >= 2_000 else 32
        return cls(
            sequences=sequences,
            times=[times_before(dataset, chosen) for chosen in rows] if timed else None,
            items=np.unique(np.concatenate(sequences)),  # a user with one event alone is no sequence
            num_items=dataset.num_items,
            length=length,
            batch=batch or usual,
        )

    def numbered(self) -> tuple[np.ndarray, np.ndarray]:
        """An id from 1 for every catalogue row that occurs, and the sequences in ids, empty slots (0) first."""
        ids = np.zeros(self.num_items, np.int64)
        ids[self.items] = np.arange(1, len(self.items) + 1)
        matrix = np.zeros((len(self.sequences), self.length + 1), np.int64)
        for row, sequence in zip(matrix, self.sequences, strict=True):
            row[len(row) - len(sequence) :] = ids[sequence]
        return ids, matrix


def times_before(dataset: Dataset, rows: slice) -> np.ndarray:
    """Of consecutive events of one user, the time of the one before each, in seconds; its own for the first."""
    times = dataset.times[rows] // 1_000_000
    return np.concatenate([times[:1], times[:-1]])


class Rival(Protocol):
    """A model with a vector per history and per trained item."""

    @property
    def module(self) -> torch.nn.Module: ...

    ids: np.ndarray  # the rival's id of every catalogue row; 0 where it never trained on it

    def fit(self, course: "Course") -> None:
        """Train until the course says so."""
        ...

    def encode(self, items: Tensor, times: Tensor) -> Tensor:
        """Vectors [q, d] of histories: ids [q, L], empty slots (0) first, and times [q, L + 1], the query's last."""
        ...

    def item_vectors(self) -> Tensor:
        """Vectors of the trained items, in the order of their catalogue rows."""
        ...


class LoopedRival(Protocol):
    """A rival whose torch module is trained by `fit_in_passes`."""

    @property
    def module(self) -> torch.nn.Module: ...

    def hidden(self, items: Tensor, times: Tensor) -> Tensor:
        """Vectors [b, L, d] of every place of the sequences."""
        ...

    def output_vectors(self) -> Tensor:
        """What a vector is multiplied with for the scores [ids, d]; differentiable."""
        ...


def fit_in_passes(rival: LoopedRival, sequences: np.ndarray, times: np.ndarray, batch: int, course: "Course") -> None:
    """Passes over ids [n, L + 1] and times [n, L + 1] in an order drawn anew, until the course ends.

    Adam as RecTools and RePlay set it; the mean cross-entropy over all ids at the places that have a next event. On a
    GPU everything lies there.
    """
    device = next(rival.module.parameters()).device
    ids, moments = torch.from_numpy(sequences).to(device), torch.from_numpy(times).to(device)
    optimizer = torch.optim.Adam(rival.module.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    rival.module.train()
    while True:
        order = torch.randperm(len(ids)).to(device)
        for rows in order.split(batch):
            next_item_loss(rival, ids[rows], moments[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if course.expired():
                break
        if course.after_pass():
            return


def next_item_loss(rival: LoopedRival, ids: Tensor, times: Tensor) -> Tensor:
    """The mean cross-entropy of the next items; on a GPU the scores are products of bf16."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    chosen = inputs > 0
    vectors, table, wanted = rival.hidden(inputs, times)[chosen], rival.output_vectors(), targets[chosen]
    if ids.is_cuda:
        vectors, table = vectors.bfloat16(), table.bfloat16()
    if len(wanted) * len(table) <= HELD_SCORES:
        return F.cross_entropy((vectors @ table.T).float(), wanted)
    return candidate_softmax(vectors, table, wanted).loss.mean()


class RivalScorer:
    """A rival as a scorer of `habitus.evaluation`; only ranks and lists, no losses."""

    def __init__(self, name: str, rival: Rival, dataset: Dataset, log: TrainingLog, device: torch.device) -> None:
        self.name = name
        self.rival = rival
        self.dataset = dataset
        self.log = log
        self.device = device
        self._histories: dict[int, tuple[Tensor, Tensor]] = {}  # by batch: they stay the same at every evaluation

    @torch.no_grad()
    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int, *, losses: bool = True) -> Scores:
        if losses or candidates is not None:
            raise ValueError("a rival is ranked over the whole catalogue, without losses")
        if queries.number not in self._histories:
            self._histories[queries.number] = self._gather(queries)
        ids, times = self._histories[queries.number]
        table = self.rival.item_vectors().float().contiguous()
        parts = zip(ids.split(ENCODED_AT_ONCE), times.split(ENCODED_AT_ONCE), strict=True)
        vectors = torch.cat([self.rival.encode(*part).float() for part in parts])
        vectors[(ids == 0).all(1)] = 0.0  # nothing of the history is known: all items tie
        place = np.searchsorted(self.log.items, queries.targets)
        known = self.rival.ids[queries.targets] > 0
        targets = torch.from_numpy(np.where(known, place, 0)).to(self.device)
        tile = ScanTile(2048, 4096) if self.device.type == "cuda" else ScanTile(256, 2048)
        width = min(k, len(table))
        with full_precision():  # a target's score and the same item's in the table must be equal to the bit
            scan = CandidateScan(
                vectors, width, target_rows=table[targets], losses=False, tile=tile, memory_bytes=1 << 30
            )
            scan.scan_table(CandidateTable(table))
            rank = scan.sums().reached.long().cpu().numpy()
            listed = topk.decode_ids(scan.topk_keys()).cpu().numpy()
        top = np.full((len(known), k), -1, np.int64)
        top[:, :width] = self.log.items[listed]
        return Scores(loss=None, entropy=None, rank=np.where(known, rank, self.log.num_items), top=top)

    def _gather(self, queries: QueryBatch) -> tuple[Tensor, Tensor]:
        """The known items of each query's history and the times before them."""
        length = self.log.length
        ids = np.zeros((len(queries.events), length), np.int64)
        times = np.zeros((len(queries.events), length + 1), np.int64)
        for query, (event, history) in enumerate(zip(queries.events, queries.histories, strict=True)):
            rows = slice(event + 1 - history, event + 1)
            visible = self.rival.ids[self.dataset.items[rows]]
            known = np.flatnonzero(visible)[-length:]
            before = times_before(self.dataset, rows)[known]
            ids[query, length - len(known) :] = visible[known]
            times[query] = before[0] if len(before) else 0
            times[query, length - len(known) : length] = before
            times[query, length] = self.dataset.times[event] // 1_000_000
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(times).to(self.device)


class full_precision:  # noqa: N801, a context
    """Matrix products in float32 inside, whatever is set outside."""

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before)


def evaluate_options(
    dataset: Dataset, use: Literal["choice", "validation", "test"], choice_queries: int = CHOICE_QUERIES
) -> EvaluateOptions:
    """The queries by which a rival is chosen, those by which `habitus train --data` chooses, those of its last table.

    Where the last events of all users are held out, the protocol of published tables: all of them, seen items excluded.
    """
    last = dataset.manifest.split.kind == "last"
    side: EvaluationSide = "test" if use == "test" else "validation"
    number = choice_queries if use == "choice" else 100_000 if last else QUERIES
    per_user = max(8, math.ceil(number / max(dataset.counts(side).segments, 1)))
    return EvaluateOptions(
        regimes=("catalogue",), queries=number, per_user=None if last or use == "validation" else per_user,
        cutoffs=(10,), metrics=("ranking",), histories=(), exclude_history=last, side=side,
    )  # fmt: skip


class Course:
    """A training from its first step to its last: clock, validation curve, best weights.

    With `passes` nothing is validated: it ends after so many. On a CPU seconds are those of the process, since others
    may share it.
    """

    def __init__(
        self, validate: Callable[[], Evaluation], module: torch.nn.Module, seconds: float, passes: int | None = None
    ) -> None:
        self._validate, self._module, self._limit, self._last_pass = validate, module, seconds, passes
        on_cpu = next(module.parameters()).device.type == "cpu"
        self._now = time.process_time if on_cpu else time.perf_counter
        self._began = self._trained_from = self._now()
        self._validation_seconds = 0.0
        self._best: tuple[float, int, int] | None = None  # value, pass, point
        self._weights: dict[str, Tensor] = {}
        self.train_seconds = 0.0
        self.passes = self.steps = 0
        self.curve: list[dict[str, Any]] = []
        self.stopped = ""

    def expired(self) -> bool:
        """Whether the time is up; called after every step."""
        self.steps += 1
        if self._now() - self._began > self._limit:
            self.stopped = "time"
        return bool(self.stopped)

    def after_pass(self) -> bool:
        """Validate if that does not take more time than training; whether to stop."""
        self.passes += 1
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        since = self._now() - self._trained_from
        if self._last_pass is not None:
            self.train_seconds = since
            self.stopped = self.stopped or ("passes" if self.passes >= self._last_pass else "")
            return bool(self.stopped)
        if self.curve and since < self._validation_seconds and not self.stopped:
            return False
        self.train_seconds += since
        began = self._now()
        self._module.eval()
        metrics = self._validate().metrics
        self._module.train()
        value = metrics[METRIC].value
        self.curve.append(
            {"seconds": round(self.train_seconds, 2), "passes": self.passes, "steps": self.steps, "ndcg@10": value,
             "recall@10": metrics["catalogue/recall@10"].value}
        )  # fmt: skip
        if self._best is None or value > self._best[0]:
            self._best = value, self.passes, len(self.curve)
            self._weights = {name: tensor.clone() for name, tensor in self._module.state_dict().items()}
        _, best_pass, best_point = self._best
        waited = self.passes - best_pass >= max(3, best_pass / 3) and len(self.curve) - best_point >= 3
        if not self.stopped and waited and self.steps >= MIN_STEPS:
            self.stopped = "validation"
        self._trained_from = self._now()
        self._validation_seconds = self._trained_from - began
        return bool(self.stopped)

    def restore_best(self) -> dict[str, Any] | None:
        """Put the best weights back; their point of the curve, where there is one."""
        if self._last_pass is not None:
            self._module.eval()
            return None
        if not self.curve or self.curve[-1]["steps"] < self.steps:
            self.stopped = self.stopped or "passes"
            self.after_pass()
        assert self._best is not None
        self._module.load_state_dict(self._weights)
        self._module.eval()
        return self.curve[self._best[2] - 1]


class TrainedRival(NamedTuple):
    """What one training gave."""

    row: dict[str, Any]
    test: PerQuery


def train_rival(
    name: str,
    build: Callable[[TrainingLog, Setting, torch.device, int], Rival],
    dataset: Dataset,
    setting: Setting,
    *,
    device: str = "cpu",
    seconds: float = 300.0,
    batch: int | None = None,
    choice_queries: int = CHOICE_QUERIES,
    seed: int = 0,
    refit_passes: int | None = None,
) -> TrainedRival:
    """Train one setting of one rival, validate as it goes, and rank the test queries with its best weights.

    With `refit_passes` it trains so many passes on the training and validation events, as our runs end.
    """
    torch.set_float32_matmul_precision("high")
    place = torch.device(device)
    log = TrainingLog.of(dataset if refit_passes is None else dataset.with_validation(), batch)
    rival = build(log, setting, place, seed)
    choice = RivalScorer(name, rival, dataset, log, place)
    options = evaluate_options(dataset, "choice", choice_queries)
    course = Course(lambda: evaluate(dataset, choice, options), rival.module, seconds, refit_passes)
    rival.fit(course)
    best = course.restore_best()
    values: list[PerQuery] = []
    scorer = RivalScorer(name, rival, dataset, log, place)
    test = evaluate(dataset, scorer, evaluate_options(dataset, "test"), keep=lambda _regime, kept: values.append(kept))
    if best is not None and place.type == "cuda":  # many queries: too slow elsewhere
        scorer = RivalScorer(name, rival, dataset, log, place)
        validation = evaluate(dataset, scorer, evaluate_options(dataset, "validation"))
        best = best | {"on our queries": validation.metrics[METRIC].value}
    row = {
        "log": dataset.path.name, "rival": name, "setting": str(setting), "learning_rate": LEARNING_RATE,
        "batch": log.batch, "length": log.length, "params": sum(p.numel() for p in rival.module.parameters()),
        "refit": refit_passes is not None, "validation": best, "curve": course.curve, "stopped": course.stopped,
        "train_seconds": round(course.train_seconds, 2), "passes": course.passes, "steps": course.steps,
        "test": {key.partition("/")[2]: metric.to_values() for key, metric in test.metrics.items()},
        "dataset_checksum": dataset.checksum,
        "query_set_checksum": test.specification["catalogue"].query_set_checksum, "seed": seed, "limit": seconds,
    }  # fmt: skip
    return TrainedRival(row, values[0])
