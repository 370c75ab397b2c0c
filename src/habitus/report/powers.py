"""Power laws of optima against compute: s*(C), K*(C), with the paper's beside them."""

from typing import Any

from habitus.report.curves import optima, power_line, reach
from habitus.report.marks import Axis, Block, Mark, Panel, Points, Sheet, View
from habitus.report.study import Study
from habitus.report.valleys import views
from habitus.report.words import exponent, number, power_of_ten, reason, sentence

COMPUTE = Axis("compute C (FLOPs)", log=True, kind="flops")


def power_law_block(
    study: Study, key: str, title: str, optimum: str, law_name: str, letter: str, y: Axis
) -> Block | None:
    """Optima of every budget with their power law, per metric, and the paper's beside them."""
    metrics = [m for m in study.metrics if study.by_budget(optimum, m)]
    raw: list[tuple[Any, ...]] = []

    def view(metric: str) -> View | None:
        laws = {b: law for b, law in study.by_budget(optimum, metric).items() if "x_opt" in law.values}
        law = study.law(law_name, metric)
        printed = paper_optima(study, optimum, metric)
        for b, one in laws.items():
            low, high = one.interval("x_opt")
            raw.append((metric, b, float(one["x_opt"]), low, high, one.status, printed.get(b)))
        if not laws:
            why = reason(law) if law is not None else "no law was fitted"
            empty = Panel(metric, COMPUTE, y, paper_marks(printed, y.kind))
            return View(sentence(f"Not identified for {metric}: {why}"), metric, (empty,) if printed else ())
        low, high = reach(list(laws))
        marks = [*paper_marks(printed, y.kind), *power_line(law, low, high, "main"), *optima(laws, "main", y.kind)]
        panel = Panel(f"{letter} for {metric}", COMPUTE, y, tuple(marks))
        return View(law_words(study, law_name, metric, letter), metric, (panel,))

    found = views(metrics, view)
    header = ("metric", "flops_budget", "optimum", "low95", "high95", "status", "paper")
    how = "Dots: optima with 95% intervals, hollow where they do not hold; the band is the law's; grey: the paper's."
    return Block(key, title, found, Sheet(header, tuple(raw)), how) if found else None


def paper_optima(study: Study, name: str, metric: str) -> dict[float, float]:
    """The paper's printed optima of a metric, by budget."""
    return {
        e.budget: float(e.law["x_opt"])
        for e in study.published.entries
        if (e.name, e.metric) == (name, metric) and e.budget and "x_opt" in e.law.values
    }


def paper_marks(printed: dict[float, float], kind: str) -> tuple[Mark, ...]:
    if not printed:
        return ()
    tips = [f"paper at {power_of_ten(b)}: {number(v, kind)}" for b, v in printed.items()]
    return (Points(list(printed), list(printed.values()), "paper", tips, shape="diamond", hollow=True, label="paper"),)


def law_words(study: Study, name: str, metric: str, letter: str) -> str:
    law, paper = study.law(name, metric), study.paper(name, metric)
    printed = f"the paper: exponent {paper['exponent']:.2f}" if paper is not None else ""
    if law is None or "exponent" not in law.values:
        return sentence(
            f"No law {letter}(C) is identified for {metric}: {reason(law) if law else 'not fitted'}", printed
        )
    low, high = law.interval("exponent")
    n = law.residuals.n
    trend = "rises with compute" if low > 0 else "falls with compute" if high < 0 else "shows no trend above its error"
    words = f"{letter} for {metric} {trend}: exponent {exponent(law)} from {n} interior budgets"
    return sentence(words, printed)
