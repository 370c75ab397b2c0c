"""What earlier axes of a store found, as far as later ones need it: shares, sizes, and which run won."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from habitus.errors import ConfigError, FitError, RunError
from habitus.progress import Note
from habitus.store import AXES, Law, Laws, RunRow
from habitus.sweeps.cells import DatasetFacts, PlannedRun
from habitus.sweeps.manifest import load_manifests
from habitus.sweeps.store import Store

LOSS = "batch/loss"


@dataclass(frozen=True)
class PriorResults:
    """Answers of earlier axes. Empty where the store has none."""

    shares: Mapping[float, float] = field(default_factory=dict)  # budget: best share
    sizes: Mapping[float, float] = field(default_factory=dict)  # budget: N* with an interior optimum
    size_law: tuple[float, float] | None = None  # a, b of N* = a·C^b
    winners: Mapping[float, RunRow] = field(default_factory=dict)  # budget: best allocation run by batch/loss

    @classmethod
    def of(cls, laws: Laws) -> "PriorResults":
        """What the laws of a store say."""
        sizes = _optima(laws, "size_optimum")
        # At each budget the best share that was run, replaced by the fitted optimum where that is interior.
        shares = {budget: run.knobs["embedder_share"] for budget, run in _best_runs(laws, "share").items()}
        return cls(
            shares=shares | _optima(laws, "share_optimum"),
            sizes=sizes,
            size_law=_size_law(laws) if len(sizes) >= 3 else None,
            winners=_best_runs(laws, "allocation"),
        )

    def share(self, default: float) -> tuple[float, str]:
        """One share for all budgets, and where it comes from: the geometric mean of the best ones."""
        if not self.shares:
            return default, f"share {default:.3g}: the preset's, since the store has no share sweep"
        mean = math.exp(sum(math.log(s) for s in self.shares.values()) / len(self.shares))
        mean = float(f"{mean:.3g}")
        of = f"mean of {len(self.shares)} budgets" if len(self.shares) > 1 else "one budget"
        return mean, f"share {mean:.3g}: the store's share sweep, {of}"

    def size(self, budget: float) -> tuple[float, str] | None:
        """The expected best size at a budget, from the size law or the nearest budget with an optimum."""
        if self.size_law is not None:
            a, b = self.size_law
            return a * budget**b, f"the store's size law, {a:.3g}·C^{b:.3g}"
        if not self.sizes:
            return None
        near = min(self.sizes, key=lambda other: abs(math.log(other / budget)))
        # Between two budgets the size grows about as the root of the compute; the grid is wide enough to be wrong.
        return self.sizes[near] * (budget / near) ** 0.5, f"the optimum at {near:.3g} FLOPs, scaled as C^0.5"


def prior_results(axis: str, store: Store, note: Note) -> PriorResults:
    """What the store says that the axis needs; fits anew where laws.json is absent or out of date."""
    swept = {file.manifest.axis for file in load_manifests(store.path)}
    newest = store.newest_record()
    if not swept & set(AXES[axis].needs) or not newest:
        return PriorResults()
    if not store.laws.exists() or store.laws.stat().st_mtime < newest:
        why = "is older than the newest Record" if store.laws.exists() else "does not exist yet"
        from habitus.laws import fit

        note(f"{store.laws} {why}: running `habitus fit {store.path}`")
        try:
            laws = fit(store.path)
        except FitError as error:
            note(f"no laws could be fitted, so the preset decides: {error.problem.splitlines()[0]}")
            return PriorResults()
        laws.write(store.laws)
        return PriorResults.of(laws)
    try:
        return PriorResults.of(Laws.read(store.laws))
    except ConfigError as error:
        raise RunError(
            f"{store.laws} cannot be read: {error.problem}",
            expected="laws as `habitus fit` writes them",
            next_step=f"delete {store.laws.name}; the sweep fits again",
        ) from None


def allocation_winners(prior: PriorResults, store: Store, facts: DatasetFacts) -> dict[float, PlannedRun]:
    """The stage-1 run that won the allocation axis at each budget, where its bundle is at hand."""
    winners = {}
    for file in load_manifests(store.path, "allocation"):
        for row in file.manifest.cells:
            best = prior.winners.get(row.flops_budget)
            if best is None or (best.cell_id, best.learning_rate, best.seed) != (
                row.cell_id,
                row.learning_rate,
                row.seed,
            ):
                continue
            if (store.cell(row.recipe_hash) / "bundle" / "bundle.json").exists():
                winners[row.flops_budget] = file.load_run(store, row, facts)
    return winners


def _identified(laws: Laws, name: str) -> Iterator[tuple[float | None, Law]]:
    """The identified laws of that name for the loss, with their budgets."""
    for entry in laws.entries:
        if entry.name == name and entry.metric == LOSS and entry.law.ok:
            yield entry.budget, entry.law


def _optima(laws: Laws, name: str) -> dict[float, float]:
    return {budget: float(law["x_opt"]) for budget, law in _identified(laws, name) if budget is not None}


def _size_law(laws: Laws) -> tuple[float, float] | None:
    for _, law in _identified(laws, "size_law"):
        if 0 < law["exponent"] < 1.5:
            return float(law["coefficient"]), float(law["exponent"])
    return None


def _best_runs(laws: Laws, axis: str) -> dict[float, RunRow]:
    """At each budget the run with the lowest loss among those at their cell's chosen learning rate."""
    best: dict[float, RunRow] = {}
    for run in laws.runs:
        if run.axis != axis or not run.chosen or LOSS not in run.metrics:
            continue
        if run.budget not in best or run.metrics[LOSS] < best[run.budget].metrics[LOSS]:
            best[run.budget] = run
    return best
