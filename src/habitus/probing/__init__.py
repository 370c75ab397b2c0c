"""What a model's vectors know of its users: labels of one's own, aggregates made by hand, a probe on each."""

from habitus.probing.aggregates import aggregate
from habitus.probing.estimators import PROBE_KINDS, ProbeKind
from habitus.probing.labels import Label, Task, churn_label, read_labels
from habitus.probing.probe import ProbeOptions, ProbeResult, probe

__all__ = [
    "PROBE_KINDS",
    "Label",
    "ProbeKind",
    "ProbeOptions",
    "ProbeResult",
    "Task",
    "aggregate",
    "churn_label",
    "probe",
    "read_labels",
]
