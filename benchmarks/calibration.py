"""How often the 95% intervals cover the truth: simulated sweeps, fitted exactly as a user's are.

    python benchmarks/calibration.py --replicates 400

Resumable: finished replicates are kept in --state, and running again continues. Prints a table and
one JSON line. A law that says 'not identified' (or boundary, flat, monotone) is counted apart.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from planted_recipes import BUDGETS as PLANTED_BUDGETS
from planted_recipes import TRUTHS, Planted, planted_losses, planted_rows

from habitus.files import write_atomic
from habitus.laws.allocation import surface_optimum
from habitus.laws.critical_batch import critical_batch
from habitus.laws.frontier import frontier
from habitus.laws.power_law import power_law, predict_power_law
from habitus.laws.pure_error import PureError, judge_fit, pure_error
from habitus.laws.recipe_cost import slot_cost
from habitus.laws.recipe_optimum import recipe_exponents, recipe_optimum
from habitus.laws.recipe_surface import columns_of, predict_recipe, recipe_surface
from habitus.laws.runs import MeasuredRun
from habitus.laws.saturating import predict_saturating
from habitus.laws.surface import surface
from habitus.laws.two_term import two_term

BUDGETS = 10.0 ** np.arange(15, 20)
SHARES = np.array([0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.10, 0.20, 0.35])
CHUNK = 20

# One answer of one law: estimate, low, high, truth, and whether the law stands by it.
Answer = tuple[float, float, float, float, bool]
Truth = tuple[float, float, float, float, float]  # E, A, α, B, β
TEN_TIMES, HUNDRED_TIMES = 1e20, 1e21


def simulate_batch(rng: np.random.Generator, b_crit: float, noise: float, kind: str) -> dict[str, Answer]:
    """Steps to target at six batch sizes; the error of S is relative or constant."""
    B = 64.0 * 2 ** np.arange(6)
    S = 1000 * (1 + b_crit / B)
    error = S if kind == "relative" else np.full(6, S.mean())
    law = critical_batch(B, np.maximum(S + noise * error * rng.standard_normal(6), 1.0))
    if "b_crit" not in law.values:
        return {"B_crit": (np.nan, 0.0, np.inf, b_crit, False)}
    return {"B_crit": (law["b_crit"], *law.interval("b_crit"), b_crit, law.ok)}


def simulate_valley(
    rng: np.random.Generator, name: str, x: np.ndarray, shape: tuple[float, float, float, float], noise: float
) -> dict[str, Answer]:
    """One two-term curve with a given optimum, exponents and rise at its higher end, and relative noise."""
    x_opt, alpha, beta, depth = shape
    u = np.log(x / x_opt)
    rise = np.exp(alpha * u) / alpha + np.exp(-beta * u) / beta - 1 / alpha - 1 / beta
    y = (3.2 + depth * rise / rise.max()) * (1 + noise * rng.standard_normal(len(x)))
    law = two_term(x, y)
    if "x_opt" not in law.values:
        return {name: (np.nan, 0.0, np.inf, x_opt, False)}
    return {name: (law["x_opt"], *law.interval("x_opt"), x_opt, law.ok)}


def simulate_replicated(rng: np.random.Generator, kink: float, noise: float) -> dict[str, Answer]:
    """A share valley whose three middle and outer cells have three seeds, judged by them; with a `kink`, of no form
    that is fitted: beyond twice the optimum it rises at once, as where the contextualizer has too little left."""
    shape = (0.3, 0.6, 0.5, 0.40)
    x = np.array([0.02, 0.05, 0.1, 0.18, 0.27, 0.38, 0.52, 0.68, 0.9])
    seeds = np.array([3, 1, 1, 1, 3, 1, 1, 1, 3])
    u = np.log(x / shape[0])
    rise = np.exp(shape[1] * u) / shape[1] + np.exp(-shape[2] * u) / shape[2] - 1 / shape[1] - 1 / shape[2]
    truth = 3.2 + shape[3] * rise / rise.max() + kink * (x > 0.6)
    places = np.repeat(x, seeds)
    y = np.repeat(truth, seeds) * (1 + noise * rng.standard_normal(len(places)))
    runs = [
        MeasuredRun("share", f"{place:g}", 1e15, 1e-3, seed, metrics={"batch/loss": float(value)})
        for seed, (place, value) in enumerate(zip(places, y, strict=True))
    ]
    law = judge_fit(two_term(places, y), pure_error(runs, "batch/loss"))
    if "x_opt" not in law.values:
        return {"s*": (np.nan, 0.0, np.inf, shape[0], False)}
    return {"s*": (law["x_opt"], *law.interval("x_opt"), shape[0], law.ok)}


def simulate_offset_sizes(rng: np.random.Generator, scatter: float, bend: float, common: bool) -> dict[str, Answer]:
    """Five iso-FLOP lines of seven of twelve sizes, three of them with two seeds that differ by 0.025%. Sizes are off
    by a `scatter` of their own (a share of 0.06 nats), the same at every budget where it is `common`; beyond twice the
    optimum the valley may `bend` upwards, by that share of its height per e-fold."""
    sizes, exponent, noise = np.array([1.1, 2, 3.1, 4.3, 5.9, 9.6, 14, 20, 31, 47, 74, 110]) * 1e5, 0.54, 2.5e-4
    effects, rows, best = rng.standard_normal(len(sizes)), [], {}
    for budget, depth in zip((1e14, 2.3e14, 5.5e14, 1.3e15, 3e15), (0.18, 0.135, 0.05, 0.06, 0.055), strict=True):
        best[budget] = 3.4e5 * (budget / 1e14) ** exponent
        first = int(np.clip(np.argmin(np.abs(np.log(sizes / best[budget]))) - 3, 0, len(sizes) - 7))
        chosen = sizes[first : first + 7]
        u = np.log(chosen / best[budget])
        rise = np.exp(0.96 * u) / 0.96 + np.exp(-1.235 * u) / 1.235
        y = 8.5 + depth * (rise - 1 / 0.96 - 1 / 1.235) / (rise.max() - 1 / 0.96 - 1 / 1.235)
        y = y + bend * depth * np.clip(u - 0.7, 0, None)
        own = effects[first : first + 7] if common else rng.standard_normal(7)
        for k, (n, loss) in enumerate(zip(chosen, y + 0.06 * scatter * own, strict=True)):
            rows += [(budget, n, loss * (1 + noise * rng.standard_normal())) for _ in range(2 if k in (1, 3, 5) else 1)]
    error = PureError(noise**2 * float(rng.chisquare(30)) / 30, 30, 15)
    found = frontier(*np.array(rows).T, "min", error)
    answers: dict[str, Answer] = {}
    for budget, law in found.optima.items():
        missing = (np.nan, 0.0, np.inf, best[budget], False)
        has = "x_opt" in law.values
        told = (law["x_opt"], *law.interval("x_opt"), best[budget], law.ok) if has else missing
        answers[f"N* at {budget:.1e}"] = told
    law = found.size
    ends = law.interval("exponent") if law.values else (0.0, np.inf)
    answers["N* exponent"] = (law["exponent"] if law.values else np.nan, *ends, exponent, law.ok)
    return answers


def simulate_allocation(
    rng: np.random.Generator, alpha: float, beta: float, drift: float, noise: float
) -> dict[str, Answer]:
    """Five iso-FLOP lines of 7 to 9 cells on L(N, D); `drift` moves the grids off centre as compute grows."""
    truth = _surface_truth(alpha, beta)
    C, N, L = [], [], []
    for i, budget in enumerate(BUDGETS):
        cells = int(rng.integers(7, 10))
        best = _optimum(truth, budget)[0]
        sizes = best * np.exp(drift * (i - 2) / 2) * np.geomspace(1 / 6, 6, cells)
        C.append(np.full(cells, budget)), N.append(sizes)
        L.append(_loss(truth, sizes, budget / (6 * sizes)))
    C, N, L = np.concatenate(C), np.concatenate(N), np.concatenate(L)
    L = L * (1 + noise * rng.standard_normal(len(L)))
    return {**frontier_answers(C, N, L, truth), **surface_answers(C, N, L, truth)}


def frontier_answers(C: np.ndarray, N: np.ndarray, L: np.ndarray, truth: Truth) -> dict[str, Answer]:
    """What the shared-shape valleys say, and for comparison the paper's parabolas."""
    found = frontier(C, N, L)
    exponent = truth[4] / (truth[2] + truth[4])
    size_ahead = _optimum(truth, TEN_TIMES)[0]
    answers: dict[str, Answer] = {}
    if found.size.values:
        law = found.size
        answers["N* exponent, valleys"] = (law["exponent"], *law.interval("exponent"), exponent, law.ok)
        answers["N*(10x), valleys"] = (*predict_power_law(law, TEN_TIMES), size_ahead, law.ok)
    # The paper's plain reading, to show what lopsided valleys do to it; `size_law_parabola` adds that as an error.
    vertices = {c: law["x_opt"] for c, law in found.parabolas.items() if law.ok}
    plain = power_law(list(vertices), list(vertices.values()))
    if plain.values:
        answers["N*(10x), parabolas (compare)"] = (*predict_power_law(plain, TEN_TIMES), size_ahead, plain.ok)
    if found.height.values:
        for name, at in (("L*(10x), valleys", TEN_TIMES), ("L*(100x), valleys", HUNDRED_TIMES)):
            answers[name] = (*predict_saturating(found.height, at), _optimum(truth, at)[1], found.height.ok)
    return answers


def surface_answers(C: np.ndarray, N: np.ndarray, L: np.ndarray, truth: Truth) -> dict[str, Answer]:
    """What L(N, D) says of the same runs."""
    law = surface(N, C / (6 * N), L)
    exponent = truth[4] / (truth[2] + truth[4])
    size, loss = _optimum(truth, TEN_TIMES)
    near, far = surface_optimum(law, TEN_TIMES), surface_optimum(law, HUNDRED_TIMES)
    return {
        "N* exponent, surface": (near["exponent"], *near.interval("exponent"), exponent, law.ok),
        "N*(10x), surface": (near["size"], *near.interval("size"), size, law.ok),
        "L*(10x), surface": (near["loss"], *near.interval("loss"), loss, law.ok),
        "L*(100x), surface": (far["loss"], *far.interval("loss"), _optimum(truth, HUNDRED_TIMES)[1], law.ok),
    }


def simulate_recipe(
    rng: np.random.Generator, truth: Planted, noise: float, *, by_rule: bool = False
) -> dict[str, Answer]:
    """Cells spread over all knobs at three budgets, four of them with three seeds: the law of a recipe, its optimum at
    the largest budget, how sizes move, and one more run at ten times the compute. With `by_rule` the rates of all runs
    are a function of their size, near the best ones but not the best: what a rate costs, the runs do not say."""
    seed = int(rng.integers(2**31))
    rows, numbers = planted_rows(seed)
    if by_rule:
        rows = [_at_the_rule(row) for row in rows]
    law = recipe_surface(columns_of(rows), planted_losses(truth, rows, noise, seed), numbers, draws=100, seed=seed)
    cost = slot_cost(columns_of(rows))
    first, last = min(PLANTED_BUDGETS), max(PLANTED_BUDGETS)
    found, true = recipe_optimum(law, last, cost), {c: truth.best(c) for c in (first, last, 10 * last)}
    moves = recipe_exponents(law, first, last, cost)
    size = {c: cell["embedder_params"] + cell["contextualizer_params"] for c, cell in true.items()}
    answers = {
        name: (found[knob], *found.interval(knob), value, found.ok)
        for name, knob, value in (("N*, recipe", "params", size[last]), ("B*, recipe", "batch",
                                  true[last]["batch_sequences"]), ("L*, recipe", "metric", truth.loss(true[last])),
                                  ("s*, recipe", "share", true[last]["embedder_params"] / size[last]))
    }  # fmt: skip
    exponent = float(np.log(size[last] / size[first]) / np.log(last / first))
    answers["N* exponent, recipe"] = (moves["params"], *moves.interval("params"), exponent, moves.ok)
    run = _at_the_rule(true[10 * last]) if by_rule else true[10 * last]
    measured = truth.loss(run) + noise * rng.standard_normal()
    value, low, high = (float(v[0]) for v in predict_recipe(law, columns_of([run])))
    answers["run at 10x, recipe"] = (value, low, high, measured, law.ok)
    return answers


def _at_the_rule(row: dict[str, float]) -> dict[str, float]:
    """The row at a rate that follows from its size alone."""
    size = row["embedder_params"] + row["contextualizer_params"]
    return {**row, "rate_at_512": 0.04 * (size / 1e6) ** -0.4}


def scenarios() -> Iterator[tuple[str, Callable[[np.random.Generator], dict[str, Answer]]]]:
    """Name and simulator of every scenario."""
    for kind, levels in (("relative", (0.03, 0.10)), ("constant", (0.01, 0.05))):
        for noise in levels:
            for b_crit in (200.0, 550.0):
                name = f"batch, B_crit {b_crit:.0f}, {kind} error {noise:.0%}"
                yield name, lambda rng, b=b_crit, e=noise, k=kind: simulate_batch(rng, b, e, k)
    K = 2.0 ** np.arange(14, 22)
    shapes = {
        "share, centred": ("s*", SHARES, (0.03, 0.6, 1.0, 0.40)),
        "share, asymmetric": ("s*", SHARES, (0.037, 0.94, 0.26, 0.40)),
        "share, off-centre": ("s*", SHARES, (0.012, 0.4, 1.0, 0.40)),
        "negatives, centred": ("K*", K, (2.0e5, 0.5, 0.45, 0.30)),
        "negatives, asymmetric": ("K*", K, (3.0e5, 0.81, 0.45, 0.30)),
        "negatives, off-centre": ("K*", K, (6.0e5, 0.5, 0.45, 0.30)),
    }
    for name, (value, x, shape) in shapes.items():
        for noise in (0.003, 0.01):
            yield (
                f"{name}, noise {noise:.1%}",
                lambda rng, v=value, x=x, s=shape, e=noise: simulate_valley(rng, v, x, s, e),
            )
    for label, alpha, beta in (("alpha/beta = 1.8", 0.504, 0.28), ("symmetric", 0.36, 0.36)):
        for place, drift in (("centred", 0.0), ("off-centre", 0.55)):
            for noise in (0.003, 0.01):
                yield (
                    f"allocation, {label}, {place}, noise {noise:.1%}",
                    lambda rng, a=alpha, b=beta, d=drift, e=noise: simulate_allocation(rng, a, b, d, e),
                )
    for label, kink in (("right form", 0.0), ("wrong form", 0.12)):
        yield f"seeds, valley of the {label}, noise 0.3%", lambda rng, k=kink: simulate_replicated(rng, k, 0.003)
    for label, truth in TRUTHS.items():
        yield f"recipe, {label}, noise 0.004", lambda rng, t=truth: simulate_recipe(rng, t, 0.004)
    for common in (True, False):
        for scatter, bend in ((0.0, 0.0), (0.05, 0.0), (0.08, 0.0), (0.12, 0.0), (0.0, 0.6), (0.05, 0.3)):
            label = "the same at all budgets" if common else "at each budget"
            yield (
                f"sizes of their own {label}, {scatter:.0%}, bend {bend:g}",
                lambda rng, s=scatter, b=bend, c=common: simulate_offset_sizes(rng, s, b, c),
            )
    truth = TRUTHS["scarcest decides"]
    yield "recipe, rates by size, noise 0.004", lambda rng: simulate_recipe(rng, truth, 0.004, by_rule=True)


def run(replicates: int, state: Path | None, only: str = "") -> dict[str, dict[str, list[Answer]]]:
    """All answers per scenario and law; continues from `state` and saves to it after every few replicates."""
    done: dict[str, dict[str, list[Answer]]] = {}
    if state is not None and state.exists():
        done = json.loads(state.read_text(encoding="utf-8")).get("answers", {})
    for number, (name, simulate) in enumerate(scenarios()):
        if only not in name:
            continue
        answers = done.setdefault(name, {})
        finished = int(answers.pop("replicates", 0))  # type: ignore[call-overload]
        for replicate in range(finished, replicates):
            rng = np.random.default_rng([7, number, replicate])
            for law, answer in simulate(rng).items():
                answers.setdefault(law, []).append([_plain(v) for v in answer])  # type: ignore[arg-type]
            finished = replicate + 1
            if state is not None and (finished % CHUNK == 0 or finished == replicates):
                _save(state, {**done, name: {**answers, "replicates": finished}})  # type: ignore[dict-item]
        answers["replicates"] = finished  # type: ignore[assignment]
    return done


def summarise(answers: dict[str, dict[str, list[Answer]]]) -> list[dict[str, object]]:
    """One row per scenario and law: coverage where the law stands by its answer, refusals, bias, width."""
    rows: list[dict[str, object]] = []
    for scenario, laws in answers.items():
        total = laws["replicates"]
        for law, given in laws.items():
            if law == "replicates":
                continue
            table = np.array([[np.nan if v is None else v for v in row] for row in given], dtype=float)
            estimate, low, high, truth, ok = table.T
            low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
            stands = ok == 1
            covered = (low <= truth) & (truth <= high)
            row: dict[str, object] = {"scenario": scenario, "law": law, "n": total, "answers": int(stands.sum())}
            if stands.any():
                e, t = estimate[stands], truth[stands]
                row["coverage"] = round(float(covered[stands].mean()), 4)
                row["bias_pct"] = round(100 * float(np.median(e / t) - 1), 2)
                row["half_width_pct"] = round(50 * float(np.median(high[stands] - low[stands]) / t[0]), 2)
            row["coverage_all"] = round(float(covered.mean()), 4)
            row["refused"] = round(1 - float(stands.sum()) / int(total), 4)  # type: ignore[call-overload]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicates", type=int, default=400)
    parser.add_argument("--only", default="", help="only scenarios whose name contains this")
    parser.add_argument("--state", type=Path, default=Path("out/calibration.json"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibration.json"))
    options = parser.parse_args()
    rows = summarise(run(options.replicates, options.state, options.only))
    print(f"{'scenario':58} {'law':30} {'cover':>6} {'of':>4} {'refused':>8} {'bias %':>7} {'± %':>7}")
    for row in rows:
        print(
            f"{row['scenario']:58} {row['law']:30} {row.get('coverage', float('nan')):6.3f} "
            f"{row['answers']:4} {row['refused']:8.3f} {row.get('bias_pct', float('nan')):7.2f} "
            f"{row.get('half_width_pct', float('nan')):7.2f}"
        )
    about = {
        "benchmark": "calibration",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "rows": rows,
    }
    write_atomic(options.out, (json.dumps(about, indent=1) + "\n").encode())
    print(json.dumps(about))


def _surface_truth(alpha: float, beta: float) -> Truth:
    """E, A, α, B, β with N* = 10M at 1e17 FLOPs and 1.2 nats above the floor there."""
    size, data = 1e7, 1e17 / 6e7
    return 1.8, 1.2 * beta / (alpha + beta) * size**alpha, alpha, 1.2 * alpha / (alpha + beta) * data**beta, beta


def _loss(truth: Truth, N: np.ndarray, D: np.ndarray) -> np.ndarray:
    E, A, alpha, B, beta = truth
    return E + A * N**-alpha + B * D**-beta


def _optimum(truth: Truth, budget: float) -> tuple[float, float]:
    _, A, alpha, B, beta = truth
    size = (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (budget / 6) ** (beta / (alpha + beta))
    return size, float(_loss(truth, size, budget / (6 * size)))  # type: ignore[arg-type]


def _plain(value: float | bool) -> float | int | None:
    """JSON has no infinity: an open end is null."""
    return None if not np.isfinite(value) else float(f"{value:.6g}")


def _save(state: Path, answers: object) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(state, json.dumps({"answers": answers}).encode())


if __name__ == "__main__":
    main()
