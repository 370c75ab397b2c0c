"""A log that ends before the compute: the recipes of `train --data`, then what lies around the best, then finalists.

probe ─▶ start: usual passes and shapes ─▶ explore: one knob at a time ─▶ finalists: seeds ─▶ stage 2 ─▶ fewer users
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.planning import (
    LEAST_PASSES,
    SHAPES,
    Change,
    DeviceKind,
    Shape,
    combine,
    neighbours,
    passes_of,
    stage1_recipe,
    stage2_recipe,
    usual_passes,
)
from habitus.progress import Note
from habitus.recipe import EvaluateRecipe, Recipe
from habitus.record import Record
from habitus.sizing import SpeedModel, cell_of_recipe, wall_seconds
from habitus.store import LOG_AXIS, direction_of
from habitus.studies.progress import interruption
from habitus.studies.search_state import SEARCH_FILE, Envelope, RoundKind, SearchRound, SearchState, Trial
from habitus.sweeps import DatasetFacts, RecipeRunner
from habitus.units import format_seconds

_PROBE_STEPS: dict[DeviceKind, int] = {"gpu": 40, "cpu": 4}
# Of the envelope: explored, with finalists, and explored where the rest pays no seeds. Stage 2 and runs on fewer users
# have what is left.
_EXPLORE_SHARE, _FINALISTS_SHARE, _LAST_SHARE = 0.75, 0.93, 0.9
_WORTHWHILE = 0.005  # of the metric: a round that gains less ends the search
_WAVES = 2  # of runs on all workers in a round: each starts the workers anew
_LOG_ENDS = (
    f"no change of passes, regularisation, learning rate or size gains {_WORTHWHILE:.1%} any more: the log ends here, "
    "and more compute helps nothing"
)
_FINALISTS = ((3, 2), (2, 2), (2, 1), (1, 1))  # recipes and further seeds, the first that fits
_USER_PARTS = ((0.5, 0), (0.25, 0), (0.125, 0), (0.125, 1), (0.25, 1), (0.5, 1), (0.125, 2), (0.125, 3))
_PASSES_EXPONENT = 0.5  # of a share of the users: fewer events want fewer passes


@dataclass(frozen=True)
class Proposal:
    """A recipe to try."""

    words: str
    recipe: Recipe
    change: Change | None = None


def describe_search(dataset: Dataset, device: DeviceKind, envelope: Envelope) -> list[str]:
    """What can be said of a search before it has probed: what it begins with, and how it spends the rest."""
    inputs, usual = DatasetFacts.of(dataset).inputs, usual_passes(dataset)
    limit = format_seconds(envelope.limit) if envelope.unit == "seconds" else f"{envelope.limit:.3g} FLOPs"
    lines = [f"the search of {limit} begins with these, then half and twice the passes, as far as they are paid for:"]
    for shape in SHAPES[device]:
        passes = max(LEAST_PASSES / 2, usual * shape.pass_factor)
        recipe = stage1_recipe(shape, dataset, passes, device)
        cell = cell_of_recipe(recipe, inputs)
        lines.append(
            f"  {shape.name}: joint_dim {shape.joint_dim}, {shape.width} × {shape.depth}, {cell.params:,} parameters, "
            f"{passes:.3g} passes, {recipe.train.steps:,} steps, {float(cell.flops):.3g} FLOPs"
        )
    return [
        *lines,
        f"one knob of the best at a time until {_EXPLORE_SHARE:.0%} are used; the best with other seeds until "
        f"{_FINALISTS_SHARE:.0%}; then stage 2, and fewer users. How many runs that is depends on this machine: "
        "a dry run does not probe",
    ]


class LogSearch:
    """The search in one store. The same call continues: what is in search.json is not decided again."""

    def __init__(
        self,
        dataset: Dataset,
        out: Path,
        runner: RecipeRunner,
        probes: Callable[[], RecipeRunner],
        metric: str,
        envelope: Envelope,
        *,
        note: Note,
        pause_after: Callable[[], float | None],
        began: float | None = None,
        earlier_seconds: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.dataset, self.out, self.runner, self._probes = dataset, out, runner, probes
        self.metric, self.envelope, self.note, self._pause_after, self.seed = metric, envelope, note, pause_after, seed
        self.device: DeviceKind = "gpu" if runner.kind == "cuda" else "cpu"
        self.sign = 1.0 if direction_of(metric) == "max" else -1.0
        self._began = time.monotonic() if began is None else began  # of the call, whose seconds count
        path = out / SEARCH_FILE
        self.state = SearchState.read(path) if path.exists() else SearchState(metric=metric)
        if self.state.metric != metric:
            raise ConfigError(
                f"{out} holds a search for {self.state.metric}, and --metric is {metric}",
                expected="the metric that the study was begun with",
                next_step="give it again, or another --out",
            )
        self._earlier_seconds = max(self.state.seconds, earlier_seconds)  # a call that was killed counts what it saved
        self._replay = list(self.state.rounds)
        self._rounds: list[SearchRound] = []
        self._recipes: dict[str, Recipe] = {}
        self._speed: SpeedModel | None = None
        self._helped: list[Change] = []  # at the last centre, beside what became the new one

    def run(self) -> SearchState:
        """Search until nothing helps or the envelope ends; the winner is in the state that is returned."""
        if self.state.winner is not None:
            return self.state
        try:
            if not self.state.rounds:
                self._probe()
            self._round("start", self._start())
            ended = self._explore(_EXPLORE_SHARE)
            if not ended and not self._replay and not self._finalists():
                ended = self._explore(_LAST_SHARE)  # what is left pays no seeds
            winner, values = self._choose()
            stage2, value = self._try_stage2(winner)
            self._try_fewer_users(winner)
            self.state = self.state.model_copy(
                update={
                    "ended": ended or "the envelope is used",
                    "winner": winner.recipe_hash,
                    "winner_values": tuple(values),
                    "stage2": stage2,
                    "value": value,
                }
            )
        finally:
            self._save()
        return self.state

    # What may still be spent.

    @property
    def seconds(self) -> float:
        """Of all calls so far."""
        return self._earlier_seconds + time.monotonic() - self._began

    def _left(self, share: float = 1.0) -> float:
        spent = self.seconds
        if self.envelope.unit == "FLOPs":
            spent = sum(self._cell_flops(recipe) for recipe in self._recipes.values())
        return share * self.envelope.limit - spent

    def _cost(self, recipes: Sequence[Recipe]) -> float:
        """Of running them together, in the envelope's unit."""
        if self.envelope.unit == "FLOPs":
            return sum(map(self._cell_flops, recipes))
        return wall_seconds([self._run_seconds(recipe) for recipe in recipes], self.runner.num_workers)

    def _cell_flops(self, recipe: Recipe) -> float:
        return float(cell_of_recipe(recipe, self.runner.facts.inputs).flops)

    def _run_seconds(self, recipe: Recipe) -> float:
        measured = self.runner.speed()
        speed = measured if self._speed is None or measured.source.startswith("measured") else self._speed
        return speed.seconds(cell_of_recipe(recipe, self.runner.facts.inputs))

    def _fitting(self, proposals: Sequence[Proposal], share: float) -> list[Proposal]:
        """As many of the first proposals as may be run together within a share of the envelope."""
        fitting: list[Proposal] = []
        for proposal in proposals:
            if self._cost([one.recipe for one in (*fitting, proposal)]) <= self._left(share):
                fitting.append(proposal)
        return fitting

    # The rounds.

    def _probe(self) -> None:
        """Time a few steps of each shape under the load of all workers; refuse an envelope without one pass."""
        probes = self._probes()
        steps = _PROBE_STEPS[self.device]
        shapes = SHAPES[self.device]
        copies = max(2, -(-probes.num_workers // len(shapes)))
        recipes = [_with_steps(self._recipe(shape, 1.0, seed), steps) for shape in shapes for seed in range(copies)]
        records = probes.run("probes", recipes, self._seconds_to_pause())
        failed = next((r for r in records if r is not None and r.status == "failed"), None)
        if failed is not None:
            raise RunError(f"a probe failed: {failed.reason}", next_step="see the journal in its folder")
        if any(record is None for record in records):
            raise interruption(self.out, "probes", "time is up")
        self._speed = probes.speed()
        one_pass = self._recipe(shapes[0], 1.0)
        seconds = self._run_seconds(one_pass)
        self.note(
            f"device: a pass of the first shape takes {format_seconds(seconds)} beside {probes.num_workers - 1} others"
        )
        cost = self._cost([one_pass])
        if cost > self._left():
            spent = self.envelope.limit - self._left()
            raise self.envelope.refusal(1.5 * cost / _EXPLORE_SHARE + spent)

    def _start(self) -> list[Proposal]:
        """What `train --data` tries: the usual passes and their neighbours, for each shape."""
        deep, *others = SHAPES[self.device]
        usual = usual_passes(self.dataset)
        while usual > 1 and self._cost([self._recipe(deep, usual)]) > self._left(_EXPLORE_SHARE):
            usual = max(1.0, usual / math.sqrt(2))
        wanted = [(deep, usual)]
        wanted += [(shape, usual * shape.pass_factor) for shape in others]
        wanted += [(deep, 2 * usual), (deep, usual / 2)]
        wanted += [(shape, usual * shape.pass_factor / 2) for shape in others]
        proposals = [
            Proposal(f"{shape.name}, {passes:.3g} passes", self._recipe(shape, passes))
            for shape, passes in wanted
            if passes >= LEAST_PASSES / 2
        ]
        first, *more = proposals or [Proposal(f"{deep.name}, {usual:.3g} passes", self._recipe(deep, usual))]
        fitting = self._fitting([first, *more], _EXPLORE_SHARE)
        return fitting if first in fitting else [first]

    def _explore(self, share: float) -> str:
        """Change one knob of the best at a time, for as long as that helps; why it ended, or '' where time did."""
        centre, tried = self._best(), list[Proposal]()
        while True:
            proposals = self._around(self._recipes[centre.recipe_hash])
            if not proposals:
                return _LOG_ENDS
            most = _WAVES * self.runner.num_workers
            trials = self._round("explore", self._fitting(proposals[:most], share))
            if not trials:
                return ""
            hashes = {trial.recipe_hash for trial in trials}
            tried += [proposal for proposal in proposals if self._hash(proposal.recipe) in hashes]
            best = self._best()
            assert best.value is not None and centre.value is not None
            if self.sign * (best.value - centre.value) >= _WORTHWHILE * abs(centre.value):
                self._helped = self._changes_that_helped(centre, best, tried)[:2]
                centre, tried = best, []

    def _around(self, recipe: Recipe) -> list[Proposal]:
        """Untried neighbours of the centre; first those steps together that helped at the last one."""
        proposals = [Proposal(change.words, change.apply(recipe), change) for change in neighbours(recipe)]
        if self._helped:
            words = " and ".join(change.words for change in self._helped)
            proposals.insert(0, Proposal(words, combine(recipe, self._helped)))
        untried: dict[str, Proposal] = {}
        for proposal in proposals:
            if self._hash(proposal.recipe) not in self._recipes:
                untried.setdefault(self._hash(proposal.recipe), proposal)
        return list(untried.values())

    def _changes_that_helped(self, centre: Trial, best: Trial, tried: Sequence[Proposal]) -> list[Change]:
        """The other changes than the best one that were better than the centre, the largest gain first."""
        values = {trial.recipe_hash: trial.value for trial in self._trials()}
        taken = next((one.change for one in tried if self._hash(one.recipe) == best.recipe_hash), None)
        helped = []
        for proposal in tried:
            value = values.get(self._hash(proposal.recipe))
            if value is None or proposal.change is None or centre.value is None:
                continue
            if self.sign * (value - centre.value) > 0 and (taken is None or proposal.change.knob != taken.knob):
                helped.append((self.sign * value, proposal.change))
        return [change for _, change in sorted(helped, key=lambda pair: -pair[0])]

    def _finalists(self) -> list[Proposal]:
        """Further seeds of the best recipes, as many as the rest of the envelope pays."""
        ranked = sorted(self._trials(), key=lambda trial: -self.sign * (trial.value or 0.0))
        for number, seeds in _FINALISTS:
            finalists = [self._recipes[trial.recipe_hash] for trial in ranked[:number]]
            proposals = [
                Proposal(f"finalist {place}, seed {self.seed + seed}", _with_seed(recipe, self.seed + seed))
                for seed in range(1, seeds + 1)
                for place, recipe in enumerate(finalists, 1)
            ]
            if self._cost([one.recipe for one in proposals]) <= self._left(_FINALISTS_SHARE):
                return proposals
        return []

    def _choose(self) -> tuple[Trial, list[float]]:
        """The best recipe by the mean over seeds, as far as there are any: its best run, and the values of all."""
        self._round("finalists", self._finalists())
        by_recipe: dict[str, list[Trial]] = {}
        for trial in self._trials():
            by_recipe.setdefault(_without_seed(self._recipes[trial.recipe_hash]), []).append(trial)
        most = max(map(len, by_recipe.values()))
        groups = [group for group in by_recipe.values() if len(group) == most]
        group = max(groups, key=lambda trials: self.sign * fmean(trial.value or 0.0 for trial in trials))
        winner = max(group, key=lambda trial: self.sign * (trial.value or 0.0))
        values = [trial.value for trial in group if trial.value is not None]
        over = f"mean {fmean(values):.4f} over {most} seeds, best " if most > 1 else ""
        self.note(f"chosen: {self.describe(winner)}; {self.metric} {over}{winner.value:.4f} on validation")
        return winner, values

    def _try_stage2(self, winner: Trial) -> tuple[str | None, float]:
        """The stage-2 run of the winner where it is better on validation, and the metric to serve."""
        assert winner.value is not None
        first = self._recipes[winner.recipe_hash]
        usual = stage2_recipe(first, self.dataset)
        proposals = [
            Proposal("stage 2", usual),
            Proposal("stage 2, half the rate", _scaled_rate(usual, 0.5)),
            Proposal("stage 2, twice the rate", _scaled_rate(usual, 2.0)),
        ]
        fitting = self._fitting(proposals, 1.0) or proposals[:1]
        trials = [t for t in self._round("stage 2", fitting) if t.value is not None]
        best = max(trials, key=lambda trial: self.sign * (trial.value or 0.0), default=None)
        if best is None or best.value is None:
            return None, winner.value
        better = self.sign * (best.value - winner.value) > 0
        self.note(
            f"stage 2: {self.metric} {best.value:.4f}, {'better: kept' if better else 'not better: stage 1 stays'}"
        )
        return (best.recipe_hash, best.value) if better else (None, winner.value)

    def _try_fewer_users(self, winner: Trial) -> None:
        """The winner on shares of the users, where there is time: what more users would bring."""
        first = self._recipes[winner.recipe_hash]
        proposals = []
        for share, part in _USER_PARTS:
            data = first.data.model_copy(update={"user_share": share, "user_part": part})
            windows = self.dataset.training_view(data).counts("train").windows
            if windows < first.train.batch_sequences:
                continue
            passes = passes_of(first, self.dataset) * share**_PASSES_EXPONENT
            steps = max(1, round(passes * windows / first.train.batch_sequences))
            recipe = _with_steps(first.model_copy(update={"data": data}), steps)
            proposals.append(Proposal(f"{share:g} of the users, part {part}", recipe))
        self._round("users", self._fitting(proposals, 1.0))

    def _round(self, kind: RoundKind, proposals: Sequence[Proposal]) -> list[Trial]:
        """Run recipes together and write the round down; those of an earlier call where it came as far."""
        if self._replay:
            if self._replay[0].kind != kind:
                return []
            earlier = self._replay.pop(0)
            recipes = {t.recipe_hash: self.runner.store.recipe(t.recipe_hash) for t in earlier.trials}
            proposals = [Proposal(t.change, recipes[t.recipe_hash]) for t in earlier.trials]
        if not proposals:
            return []
        recipes_in_order = [proposal.recipe for proposal in proposals]
        hashes = [self._hash(recipe) for recipe in recipes_in_order]
        self._recipes |= dict(zip(hashes, recipes_in_order, strict=True))
        records = self.runner.run(kind, recipes_in_order, self._seconds_to_pause())
        trials = [self._trial(one, record) for one, record in zip(proposals, records, strict=True)]
        self._rounds.append(SearchRound(kind=kind, trials=tuple(trials)))
        self._save()
        if any(record is None for record in records):
            raise interruption(self.out, f"search ({kind})", "time is up")
        if kind != "stage 2":
            number = len(self._rounds)
            self.runner.write_manifest(LOG_AXIS, recipes_in_order, "log", {"round": number, "kind": kind})
        self._report(kind, trials)
        return trials

    def _report(self, kind: RoundKind, trials: Sequence[Trial]) -> None:
        for trial in trials:
            value = "failed" if trial.value is None else f"{trial.value:.4f}"
            self.note(f"  {trial.change}: {value}, {trial.passes:.3g} passes, {format_seconds(trial.seconds)}")
        if kind in ("start", "explore"):
            best = self._best()
            self.note(f"best so far: {self.describe(best)}: {self.metric} {best.value:.4f}")

    def _trial(self, proposal: Proposal, record: Record | None) -> Trial:
        metric = None if record is None or record.status != "done" else record.metrics.get(self.metric)
        if record is not None and record.status == "done" and metric is None:
            raise ConfigError(
                f"{self.metric!r} was not measured on this log", expected="a metric of its runs, as catalogue/ndcg@10"
            )
        took = record.seconds if record is not None else None
        return Trial(
            change=proposal.words,
            recipe_hash=self._hash(proposal.recipe),
            value=None if metric is None else metric.value,
            passes=passes_of(proposal.recipe, self.dataset),
            seconds=0.0 if took is None else took.warmup + took.train + took.evaluate,
        )

    def _trials(self) -> list[Trial]:
        """The runs that may win: stage 1 on all users."""
        trials = [t for one in self._rounds if one.kind in ("start", "explore", "finalists") for t in one.trials]
        return [trial for trial in trials if trial.value is not None]

    def _best(self) -> Trial:
        trials = self._trials()
        if not trials:
            reasons = {self._reason(t) for one in self._rounds for t in one.trials}
            raise RunError(f"no run of the search ended well: {'; '.join(sorted(reasons))}")
        return max(trials, key=lambda trial: self.sign * (trial.value or 0.0))

    def _reason(self, trial: Trial) -> str:
        record = self.runner.store.record(trial.recipe_hash)
        return "no Record" if record is None else str(record.reason)

    def describe(self, trial: Trial) -> str:
        """The recipe of a run in a line."""
        recipe = self._recipes[trial.recipe_hash]
        model, train = recipe.model, recipe.train
        return (
            f"joint_dim {model.joint_dim}, {model.width}/{model.depth}, {trial.passes:.3g} passes, "
            f"dropout {train.dropout:g}, rate {train.learning_rate:.3g}, seed {train.seed}"
        )

    def _recipe(self, shape: Shape, passes: float, seed: int | None = None) -> Recipe:
        seed = self.seed if seed is None else seed
        recipe = stage1_recipe(shape, self.dataset, passes, self.device, seed=seed)
        settings = self.runner.evaluation
        evaluate = EvaluateRecipe(**settings.to_values(), regimes=("batch", "catalogue"))
        return recipe.model_copy(update={"evaluate": evaluate})

    def _hash(self, recipe: Recipe) -> str:
        return recipe.hash(self.dataset.checksum)

    def _seconds_to_pause(self) -> float | None:
        hours = self._pause_after()
        return None if hours is None else hours * 3600

    def _save(self) -> None:
        rounds = (*self._rounds, *self._replay)
        best = max(self._trials(), key=lambda trial: self.sign * (trial.value or 0.0), default=None)
        at = self.state.seconds_to_best
        if best is not None and best.recipe_hash != getattr(self, "_saved_best", None):
            self._saved_best, at = best.recipe_hash, self.seconds
        self.state = self.state.model_copy(update={"rounds": rounds, "seconds": self.seconds, "seconds_to_best": at})
        self.out.mkdir(parents=True, exist_ok=True)
        self.state.write(self.out / SEARCH_FILE)


def _with_steps(recipe: Recipe, steps: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})


def _with_seed(recipe: Recipe, seed: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})


def _without_seed(recipe: Recipe) -> str:
    return _with_seed(recipe, 0).to_json()


def _scaled_rate(recipe: Recipe, factor: float) -> Recipe:
    train = recipe.train.model_copy(update={"learning_rate": factor * recipe.train.learning_rate})
    return recipe.model_copy(update={"train": train})
