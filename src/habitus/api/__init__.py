"""habitus in Python: the verbs as functions, and the objects that they return."""

from habitus.api.laws import FittedLaw, Laws
from habitus.api.questions import age, diff, probe, show
from habitus.api.run import Run
from habitus.api.verbs import (
    card,
    describe,
    embed,
    evaluate,
    export,
    fit,
    load,
    plan,
    prepare,
    recommend,
    report,
    runs,
    serve,
    size,
    study,
    sweep,
    train,
    world,
)

__all__ = [
    "FittedLaw",
    "Laws",
    "Run",
    "age",
    "card",
    "describe",
    "diff",
    "embed",
    "evaluate",
    "export",
    "fit",
    "load",
    "plan",
    "prepare",
    "probe",
    "recommend",
    "report",
    "runs",
    "serve",
    "show",
    "size",
    "study",
    "sweep",
    "train",
    "world",
]
