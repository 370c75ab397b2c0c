"""Axes to recipes, the run store, its workers."""

from habitus.sweeps.cells import Design, Facts, Planned
from habitus.sweeps.design import budgets_from, centred_shapes, check_axis, design
from habitus.sweeps.draft import Asked
from habitus.sweeps.estimate import Speeds, device_kind, evaluations_of, speeds_of, usual_workers, wall_seconds
from habitus.sweeps.listing import Listing, check_state, listing
from habitus.sweeps.outcome import CellStatus, SweepProgress, SweepResult
from habitus.sweeps.preset import AXES, Preset, load_preset, preset_names, preset_text
from habitus.sweeps.preset_world import preset_dataset
from habitus.sweeps.prior_results import Known
from habitus.sweeps.running import sweep
from habitus.sweeps.store import Store

__all__ = [
    "AXES",
    "Asked",
    "CellStatus",
    "Design",
    "Facts",
    "Known",
    "Listing",
    "Planned",
    "Preset",
    "Speeds",
    "Store",
    "SweepProgress",
    "SweepResult",
    "budgets_from",
    "centred_shapes",
    "check_axis",
    "check_state",
    "design",
    "device_kind",
    "evaluations_of",
    "listing",
    "load_preset",
    "preset_dataset",
    "preset_names",
    "preset_text",
    "speeds_of",
    "sweep",
    "usual_workers",
    "wall_seconds",
]
