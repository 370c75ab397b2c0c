"""The rules of `habitus train --data` without each log in turn, from the runs of one knob at a time.

    python benchmarks/any_log_rules.py [benchmarks/results/any-log-grid-h200.json]

A rule set is what a set of logs would have taught: for every knob the level with the best mean NDCG@10 relative to the
reference, a line for the passes over the size of the log, and the one further recipe that adds most to the best of what
is tried. It is learnt from all logs and from all but one, and applied to the one: its value there is the best on
validation among the recipes that the rules try, as the command does. Prints a table, then one JSON line.
"""

import json
import sys
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results" / "any-log-grid-h200.json"
METRICS = ("catalogue/ndcg@10", "catalogue/recall@10")
EVENTS = {
    "movielens_small": 85_737, "birmingham_cards": 145_682, "amazon_purchases": 211_827, "online_retail": 324_352,
    "movielens_1m_order": 804_476, "git_small": 1_166_492, "completejourney": 1_166_933,
}  # fmt: skip
# Each knob: a reference and its alternatives, measured with all else equal.
KNOBS = {
    "the item's id": ("noid", ("base",)),
    "copying": ("base", ("copyflip",)),
    "dropout": ("n.p10", ("n.d5p10",)),
    "shape": ("n.p10", ("n.s.p10",)),
    "larger shape": ("n.d5p10", ("n.L.d5p10",)),
    "weight decay": ("n.p10", ("n.wd.5p10",)),
    "batch": ("n.p10", ("n.B8p10",)),
}
PASSES = {5: "n.p5", 10: "n.p10", 20: "noid"}  # without the id
FURTHER = ("n.sh.p20", "n.s.p10", "n.B8p10", "n.rate2p10", "n.d5p10", "n.d5p20", "n.wd.5p10", "n.L.d5p10")

Values = dict[str, dict[str, float]]  # log -> label -> value


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    ndcg, recall = (values_of(rows, metric) for metric in METRICS)
    logs = sorted(EVENTS, key=EVENTS.__getitem__)
    everything = learn(ndcg, logs)
    print(f"learnt from all: {describe(everything)}")
    summary: list[dict] = []
    print(f"{'left out':20} {'NDCG@10 by all':>15} {'without it':>11} {'ratio':>7} {'recall ratio':>13}  tried")
    for log in logs:
        without = learn(ndcg, [other for other in logs if other != log])
        full, held = best_label(everything, log, ndcg), best_label(without, log, ndcg)
        ratio = ndcg[log][held] / ndcg[log][full]
        recall_ratio = recall[log][held] / recall[log][full]
        tried = ", ".join(candidates(without, log, ndcg[log]))
        print(f"{log:20} {ndcg[log][full]:15.4f} {ndcg[log][held]:11.4f} {ratio:7.3f} {recall_ratio:13.3f}  {tried}")
        summary.append({"log": log, "ndcg@10": ratio, "recall@10": recall_ratio, "rules": describe(without)})
    within = sum(row["ndcg@10"] > 0.95 for row in summary)
    print(json.dumps({"benchmark": "any_log_rules", "within_5_percent": within, "rows": summary}, ensure_ascii=False))


def values_of(rows: list[dict], metric: str) -> Values:
    """The runs' values; baselines and facts have no configuration and are left out."""
    values: Values = {}
    for row in rows:
        if "config" in row:
            values.setdefault(row["log"], {})[row["label"]] = row["metrics"][metric]
    return values


def learn(values: Values, logs: list[str]) -> dict:
    """What these logs teach."""
    levels = {}
    for knob, (reference, alternatives) in KNOBS.items():
        gains = {label: mean_ratio(values, logs, label, reference) for label in alternatives}
        best = max(gains, key=gains.__getitem__)
        levels[knob] = best if gains[best] > 1 else reference
    best_passes = [max(PASSES, key=lambda passes: values[log][PASSES[passes]]) for log in logs]
    sizes = np.log([EVENTS[log] for log in logs])
    slope, height = np.polyfit(sizes, np.log(best_passes), 1)
    rules = {"levels": levels, "slope": float(slope), "height": float(height), "further": None}
    base = {log: values[log][best_label(rules, log, values)] for log in logs}
    gains = {
        label: np.mean([max(values[log].get(label, 0), base[log]) / base[log] for log in logs]) for label in FURTHER
    }
    rules["further"] = max(gains, key=gains.__getitem__)
    return rules


def mean_ratio(values: Values, logs: list[str], label: str, reference: str) -> float:
    ratios = [values[log][label] / values[log][reference] for log in logs if label in values[log]]
    return float(np.mean(ratios)) if ratios else 0.0


def candidates(rules: dict, log: str, measured: dict[str, float]) -> list[str]:
    """The recipes that the rules try on a log: passes around the line, and the further one."""
    usual = np.exp(rules["height"] + rules["slope"] * np.log(EVENTS[log]))
    nearest = min(PASSES, key=lambda passes: abs(np.log(passes / usual)))
    around = [passes for passes in PASSES if 0.5 <= passes / nearest <= 2]
    labels = [PASSES[passes] for passes in around]
    if rules["levels"]["the item's id"] != "noid":
        labels = ["base"]
    return labels + ([rules["further"]] if rules["further"] in measured else [])


def best_label(rules: dict, log: str, values: Values) -> str:
    return max(candidates(rules, log, values[log]), key=values[log].__getitem__)


def describe(rules: dict) -> str:
    levels = ", ".join(f"{knob} {label}" for knob, label in rules["levels"].items())
    at = np.exp(rules["height"] + rules["slope"] * np.log(8e5))
    return f"{levels}; passes {at:.3g}·(events / 800,000)^{rules['slope']:.2f}; further {rules['further']}"


if __name__ == "__main__":
    main()
