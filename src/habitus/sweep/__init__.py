"""Axes to recipes, the run store, its workers."""

from habitus.sweep.cells import Design, Facts, Planned
from habitus.sweep.draft import Asked
from habitus.sweep.outcome import CellStatus, SweepProgress, SweepResult
from habitus.sweep.preset import AXES, Preset, load_preset, preset_names
from habitus.sweep.running import sweep
from habitus.sweep.store import Store

__all__ = [
    "AXES",
    "Asked",
    "CellStatus",
    "Design",
    "Facts",
    "Planned",
    "Preset",
    "Store",
    "SweepProgress",
    "SweepResult",
    "load_preset",
    "preset_names",
    "sweep",
]
