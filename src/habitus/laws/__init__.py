"""Laws with uncertainty: what the records say, how sure that is, and where there is no law."""

from habitus.laws.allocation import surface_optimum
from habitus.laws.best_recipe import best_rate, best_recipe
from habitus.laws.bootstrap import allocation_pipeline, hierarchical_bootstrap
from habitus.laws.checks import sign_of
from habitus.laws.context_axis import describe_history, history_of_record, served_history
from habitus.laws.correlation import (
    correlation_by_budget,
    paired_regimes,
    slice_agreement,
    spearman_matrix,
    surrogacy,
)
from habitus.laws.cost import RealisedCost, realised_cost
from habitus.laws.critical_batch import critical_batch
from habitus.laws.finite_forms import Place
from habitus.laws.finite_log import FiniteLog, best_rows, finite_log, open_finite_log
from habitus.laws.fit import fit
from habitus.laws.forms import compare_approaches, compare_scaling, compare_valleys
from habitus.laws.frontier import frontier
from habitus.laws.isoflop import depth_optimum, isoflop_optimum
from habitus.laws.learning_rate import learning_rate_drift
from habitus.laws.loss_link import LossLink, loss_link
from habitus.laws.paired_users import PairedUsers
from habitus.laws.power_law import NO_TREND, power_law, predict_power_law, trend
from habitus.laws.published import published_laws
from habitus.laws.recipe_surface import predict_recipe
from habitus.laws.recipe_value import RecipeLaws, RunValue
from habitus.laws.response_surface import response_optimum, response_surface
from habitus.laws.rollout import leave_one_out, rollout
from habitus.laws.run_sources import read_runs
from habitus.laws.runs import MeasuredRun
from habitus.laws.saturating import predict_saturating, saturating
from habitus.laws.selection import select
from habitus.laws.size_test import compared_cells, is_loss
from habitus.laws.steps import EWMA_HALF_LIFE, iso_target, smooth, steps_to_target
from habitus.laws.study_recipe import RECIPE_AXES
from habitus.laws.summary import format_summary
from habitus.laws.surface import surface
from habitus.laws.tables import format_tables
from habitus.laws.told_knobs import rate_of_runs, why_untold
from habitus.laws.two_term import two_term, two_term_by_budget

__all__ = [
    "EWMA_HALF_LIFE",
    "NO_TREND",
    "RECIPE_AXES",
    "FiniteLog",
    "LossLink",
    "MeasuredRun",
    "PairedUsers",
    "Place",
    "RealisedCost",
    "RecipeLaws",
    "RunValue",
    "allocation_pipeline",
    "best_rate",
    "best_recipe",
    "best_rows",
    "compare_approaches",
    "compare_scaling",
    "compare_valleys",
    "compared_cells",
    "correlation_by_budget",
    "critical_batch",
    "depth_optimum",
    "describe_history",
    "finite_log",
    "fit",
    "format_summary",
    "format_tables",
    "frontier",
    "hierarchical_bootstrap",
    "history_of_record",
    "is_loss",
    "iso_target",
    "isoflop_optimum",
    "learning_rate_drift",
    "leave_one_out",
    "loss_link",
    "open_finite_log",
    "paired_regimes",
    "power_law",
    "predict_power_law",
    "predict_recipe",
    "predict_saturating",
    "published_laws",
    "rate_of_runs",
    "read_runs",
    "realised_cost",
    "response_optimum",
    "response_surface",
    "rollout",
    "saturating",
    "select",
    "served_history",
    "sign_of",
    "slice_agreement",
    "smooth",
    "spearman_matrix",
    "steps_to_target",
    "surface",
    "surface_optimum",
    "surrogacy",
    "trend",
    "two_term",
    "two_term_by_budget",
    "why_untold",
]
