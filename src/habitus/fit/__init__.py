"""Laws with uncertainty: what the records say, how sure that is, and where there is no law."""

from habitus.fit.allocation import surface_optimum
from habitus.fit.bootstrap import allocation_pipeline, hierarchical_bootstrap
from habitus.fit.correlation import (
    correlation_by_budget,
    paired_regimes,
    slice_agreement,
    spearman_matrix,
    surrogacy,
)
from habitus.fit.critical_batch import critical_batch
from habitus.fit.forms import compare_approaches, compare_scaling, compare_valleys
from habitus.fit.frontier import frontier
from habitus.fit.isoflop import depth_optimum, isoflop_optimum
from habitus.fit.laws import fit
from habitus.fit.laws_file import LawsFile, direction_of
from habitus.fit.learning_rate import learning_rate_drift
from habitus.fit.power_law import power_law, predict_power_law, trend
from habitus.fit.published import published_laws
from habitus.fit.result import Law
from habitus.fit.rollout import leave_one_out, rollout
from habitus.fit.runs import read_runs
from habitus.fit.saturating import predict_saturating, saturating
from habitus.fit.selection import select
from habitus.fit.steps import iso_target, steps_to_target
from habitus.fit.surface import surface
from habitus.fit.two_term import two_term, two_term_by_budget

__all__ = [
    "Law",
    "LawsFile",
    "allocation_pipeline",
    "compare_approaches",
    "compare_scaling",
    "compare_valleys",
    "correlation_by_budget",
    "critical_batch",
    "depth_optimum",
    "direction_of",
    "fit",
    "frontier",
    "hierarchical_bootstrap",
    "iso_target",
    "isoflop_optimum",
    "learning_rate_drift",
    "leave_one_out",
    "paired_regimes",
    "power_law",
    "predict_power_law",
    "predict_saturating",
    "published_laws",
    "read_runs",
    "rollout",
    "saturating",
    "select",
    "slice_agreement",
    "spearman_matrix",
    "steps_to_target",
    "surface",
    "surface_optimum",
    "surrogacy",
    "trend",
    "two_term",
    "two_term_by_budget",
]
