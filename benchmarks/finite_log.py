"""Whether the intervals of the law for finite logs hold what they promise: logs with a planted law, fitted as a user's.

    python benchmarks/finite_log.py --logs 200 --out finite-log.json

Every log has runs on eight eighths, four quarters and two halves of its users, for one and two times the usual passes
(and half and four times on some parts), with a noise of each run and one of each part; its exponents are drawn. Counted
is how often the 95% interval at all users holds the law's value there, and how often that of one run holds a run.
Prints a table and ends with one JSON line.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZE, EVENTS, PASSES = 2.7e6, 8e5, 20.0
PART_NOISE, RUN_NOISE = 0.02, 0.008


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=int, default=200, help="simulated logs per truth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(TRUTHS), choices=list(TRUTHS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [row for truth in given.only for row in simulate(truth, given.logs, given.seed)]
    print("truth        metric    logs  refused    law    run   error  half width")
    for row in rows:
        print(
            f"{row['truth']:12s} {row['metric']:8s} {row['logs']:5d} {row['refused']:8.0%} {row['law']:6.1%} "
            f"{row['run']:6.1%} {row['median_error']:7.2%} {row['median_half_width']:11.2%} {row['ways']}"
        )
    if given.out:
        given.out.write_text(json.dumps({"seed": given.seed, "rows": rows}))
    print(json.dumps(rows))


def penalty(U: np.ndarray, R: np.ndarray, beta: float) -> np.ndarray:
    return 4.5 + (U * R / 1.6e7) ** -beta + 0.0012 * np.maximum(R - 1, 0) ** 1.2 * EVENTS / U


def repetition(U: np.ndarray, R: np.ndarray, beta: float) -> np.ndarray:
    return 4.5 + (U * (1 + 8 * -np.expm1(-(R - 1) / 8)) / 8e6) ** -beta


TRUTHS = {"penalty": penalty, "repetition": repetition}


def simulate(name: str, logs: int, seed: int) -> list[dict[str, Any]]:
    """Coverage of loss and of a ranking metric that falls with it, over simulated logs."""
    rng = np.random.default_rng([seed, list(TRUTHS).index(name)])
    answers: dict[str, list[dict[str, Any]]] = {"loss": [], "ranking": []}
    began = time.monotonic()
    for _ in range(logs):
        beta = rng.uniform(0.2, 0.7)
        share, part, U, R = design(rng)
        ids = np.unique(part, return_inverse=True)[1]
        loss = TRUTHS[name](U, R, beta) + PART_NOISE * rng.standard_normal(ids.max() + 1)[ids]
        loss += RUN_NOISE * rng.standard_normal(len(U))
        passes = PASSES * np.array([0.5, 1.0, 2.0])
        whole = TRUTHS[name](np.full(3, EVENTS), passes, beta)
        best = float(passes[whole.argmin()])
        # A part of all users is the whole log: its own miss is that of eight eighths.
        run = whole.min() + rng.normal(0, PART_NOISE / np.sqrt(8)) + rng.normal(0, RUN_NOISE)
        answers["loss"].append(ask(share, part, U, R, loss, None, best, float(whole.min()), run))
        ranking = rank(loss, R) + 0.002 * rng.standard_normal(len(U))
        truth = float(rank(whole.min(), best))
        answers["ranking"].append(ask(share, part, U, R, ranking, loss, best, truth, truth + rng.normal(0, 0.002)))
    print(f"{name}: {logs} logs in {time.monotonic() - began:.0f} s", flush=True)
    return [summarise(name, metric, rows) for metric, rows in answers.items()]


def rank(loss: Any, R: Any) -> Any:
    """Falls with the loss, and rises a little with the passes at the same loss, as recall does."""
    return 0.35 - 0.09 * (loss - 4.5) + 0.004 * np.log(R)


def design(rng: np.random.Generator) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    rows = []
    for share in (0.5, 0.25, 0.125):
        for part in range(round(1 / share)):
            events = share * EVENTS * np.exp(rng.normal(0, 0.1))
            factors = [1.0, 2.0] + [0.5] * (part < 2) + [4.0] * (share < 0.5 and part < (2 if share == 0.125 else 1))
            rows += [(share, f"{share}/{part}", events, factor * PASSES * share**0.75) for factor in factors]
    share, part, U, R = zip(*rows, strict=True)
    return np.array(share), list(part), np.array(U), np.array(R)


def ask(
    share: np.ndarray, part: list[str], U: np.ndarray, R: np.ndarray, y: np.ndarray, loss: np.ndarray | None,
    passes: float, truth: float, run: float,
) -> dict[str, Any]:  # fmt: skip
    from habitus.laws import finite_log, open_finite_log

    direction = "min" if loss is None else "max"
    law = finite_log(np.full(len(U), SIZE), U, R, y, share=share, part=part, loss=loss, direction=direction)  # type: ignore[arg-type]
    if law.status != "ok":
        return {"refused": True}
    fitted = open_finite_log(law)
    value, low, high = fitted.forecast(SIZE, EVENTS, passes)
    _, run_low, run_high = fitted.forecast(SIZE, EVENTS, passes, new_runs=1)
    return {
        "refused": False, "law": low <= truth <= high, "run": run_low <= run <= run_high,
        "error": abs(value / truth - 1), "width": (high - low) / 2 / abs(truth), "way": law.details["forecast_by"],
    }  # fmt: skip


def summarise(truth: str, metric: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    told = [row for row in rows if not row["refused"]]
    ways = [row["way"] for row in told]
    return {
        "truth": truth,
        "metric": metric,
        "logs": len(rows),
        "refused": 1 - len(told) / len(rows),
        "law": float(np.mean([row["law"] for row in told])),
        "run": float(np.mean([row["run"] for row in told])),
        "median_error": float(np.median([row["error"] for row in told])),
        "median_half_width": float(np.median([row["width"] for row in told])),
        "ways": {way: ways.count(way) for way in sorted(set(ways))},
    }


if __name__ == "__main__":
    main()
