"""The folder of a study of the paper's findings: Records under one seal, page, and a verdict per finding.

    python benchmarks/paper_study.py out/paper-range/store --plans out/paper-range --out docs/studies/paper-range

writes runs.store.xz (which `habitus fit` and `habitus report` read like the store), report.html, findings.json and
README.md with one row per finding: the claim, ours with its 95% interval and n, the smallest effect that could have
been seen, the verdict and the figure; and what registered plans said of runs that were made since.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from paper_evidence import Evidence
from paper_findings import judge

from habitus.errors import FitError
from habitus.files import write_atomic
from habitus.laws import fit
from habitus.record import Record
from habitus.reporting import report
from habitus.store import (
    ARCHIVE_SUFFIX,
    Laws,
    RegisteredPlan,
    headline_metrics,
    open_store,
    pack_store,
    read_records,
)

EXTRA_METRICS = ("train/loss", "batch/entropy", "batch/mrr@10")


def write_study(store: Path, out: Path, plans: Sequence[Path] = (), title: str = "") -> list[dict[str, object]]:
    """The folder of a study; returns the rows of the findings."""
    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"runs{ARCHIVE_SUFFIX}"
    num_records = pack_store(store, archive)
    with open_store(archive) as folder:
        records = list(read_records(folder))
        present = {name for r in records for name in (*r.metrics, *(point.metric for point in r.trajectory))}
        wanted = dict.fromkeys((*headline_metrics(), *EXTRA_METRICS))
        try:
            laws = fit(folder, [m for m in wanted if m in present or m == "train/loss"])
            laws.write(folder / "laws.json")
            report(folder, out / "report.html", title=title or out.name)
        except FitError as error:
            print(f"no laws, and no page: {error.problem}")
            first = records[0].recipe
            definitions = {"optimizer": first.train.optimizer, "init": first.model.init}
            laws = Laws(source=store.name, seed=0, metrics=(), definitions=definitions)
    evidence = Evidence(laws, records)
    rows, told = judge(evidence), forecasts(evidence, [RegisteredPlan.read(path) for path in plans])
    write_atomic(out / "findings.json", (json.dumps({"findings": rows, "forecasts": told}, indent=1) + "\n").encode())
    write_atomic(out / "README.md", readme(rows, told, title or out.name, num_records).encode())
    return rows


def forecasts(evidence: Evidence, plans: Iterable[RegisteredPlan]) -> list[dict[str, object]]:
    """What registered plans said of stage-1 runs that were made since, as shares of the gain since the largest budget
    below."""
    rows: list[dict[str, object]] = []
    for plan in sorted(plans, key=lambda plan: plan.flops):
        C = plan.stage1_flops
        for predicted in (p for p in plan.predictions if p.stage == 1):
            made = [r.metrics[predicted.metric].value for r in evidence.records
                    if predicted.metric in r.metrics and _same_but_seed(r, plan)]  # fmt: skip
            if not made:
                continue
            best = _best_by_budget(evidence, predicted.metric, C)
            if len(best) < 2:
                continue
            (before, far), (last, near) = sorted(best.items())[-2:]
            line = near + (near - far) * math.log(C / last) / math.log(last / before)
            measured, gain = mean(made), abs(mean(made) - near)
            inside = (
                predicted.low is not None and predicted.high is not None and predicted.low <= measured <= predicted.high
            )
            readings = {"law": predicted.value, "persistence": near, "log line": line}
            misses = {name: (value - measured) / gain if gain else None for name, value in readings.items()}
            rows.append({"flops": plan.flops, "metric": predicted.metric, "predicted": predicted.value,
                         "low": predicted.low, "high": predicted.high, "measured": measured, "runs": len(made),
                         "inside": inside, "misses": misses, "hash": plan.registered_hash})  # fmt: skip
    return rows


def _same_but_seed(record: Record, plan: RegisteredPlan) -> bool:
    ours, theirs = (r.model_copy(update={"train": r.train.model_copy(update={"seed": 0})}) for r in
                    (record.recipe, plan.stage1))  # fmt: skip
    return record.status == "done" and (ours.model, ours.train) == (theirs.model, theirs.train)


def _best_by_budget(evidence: Evidence, metric: str, below: float) -> dict[float, float]:
    best: dict[float, float] = {}
    lower = "loss" in metric
    for run in evidence.runs("allocation"):
        if run.budget < 0.9 * below and metric in run.metrics:
            value, other = run.metrics[metric], best.get(run.budget)
            best[run.budget] = value if other is None else (min if lower else max)(value, other)
    return best


def readme(rows: Sequence[dict[str, object]], told: Sequence[dict[str, object]], title: str, num_records: int) -> str:
    """README.md of the study's folder."""
    decided = sum(row["verdict"] != "not decided" for row in rows)
    lines = [
        f"# {title}", "",
        f"{num_records:,} Records in [runs{ARCHIVE_SUFFIX}](runs{ARCHIVE_SUFFIX}), one seal over all: `habitus fit` "
        "and `habitus report` read it like a store. [report.html](report.html) is the page. Made by "
        "`python benchmarks/paper_study.py`.", "",
        f"**{decided} of {len(rows)} findings are decided**: a finding is confirmed where the whole 95% interval lies "
        "in the range that it claims, refuted where none of it does. The smallest effect that could have been seen is "
        "half the width of the interval.", "",
        "| | the paper's finding | claimed | ours [95%], n | smallest effect | verdict | figure |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [_row(row) for row in rows]
    if told:
        lines += ["", "## Forecasts, registered before the runs", "",
                  "Misses are shares of the gain since the largest budget below; persistence is no gain at all.", "",
                  "| FLOPs | metric | registered [95%] | measured | inside | miss | persistence | log line | plan |",
                  "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for row in told:
            misses = row["misses"]
            assert isinstance(misses, dict)
            percents = " | ".join("–" if miss is None else f"{100 * miss:+.0f}%" for miss in misses.values())
            lines.append(
                f"| {row['flops']:.0e} | `{row['metric']}` | {_number(row['predicted'])} [{_number(row['low'])}, "
                f"{_number(row['high'])}] | {_number(row['measured'])} ({row['runs']} runs) | "
                f"{'yes' if row['inside'] else '**no**'} | {percents} | {str(row['hash'])[:12]} |"
            )
    return "\n".join(lines) + "\n"


def _row(row: dict[str, object]) -> str:
    claimed = row["claimed"]
    assert isinstance(claimed, list)
    low, high = (_number(end) for end in claimed)
    region = (
        f"at least {low}" if claimed[1] is None else f"at most {high}" if claimed[0] is None else f"{low} to {high}"
    )
    verdict = f"**{row['verdict']}**"
    if "value" not in row:
        ours, effect, verdict = "–", "–", f"{verdict}: {row['why']}"
    else:
        note = f" ({row['note']})" if row["note"] else ""
        ours = f"{_number(row['value'])} [{_number(row['low'])}, {_number(row['high'])}], {row['n']}{note}"
        effect = _number(row["smallest_effect"])
        verdict += f"; would take {row['why']}" if row["why"] else ""
    return (
        f"| {row['number']} | {row['claim']} | {row['quantity']} {region} | {ours} | {effect} | {verdict} | "
        f"[{row['figure']}](report.html#{row['figure']}) |"
    )


def _number(value: object) -> str:
    if not isinstance(value, float | int):
        return "open"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", type=Path, help="A folder of registered plans, plan-*.json.")
    parser.add_argument("--title", default="")
    o = parser.parse_args()
    plans = sorted(o.plans.glob("plan-*.json")) if o.plans else []
    for row in write_study(o.store, o.out, plans, o.title):
        print(f"{row['number']:>3} {row['verdict']:<12} {row['claim']}" + (f": {row['why']}" if row.get("why") else ""))


if __name__ == "__main__":
    main()
