"""The store's laws, fitted anew where Records are younger than they are. Through files and a command, not imports."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from habitus.sizing import cell_of_recipe
from habitus.sweeps.cells import Facts, Planned
from habitus.sweeps.manifest import manifests
from habitus.sweeps.prior_results import Known, read_known
from habitus.sweeps.store import Store

# What an axis reads of earlier ones; `share` and `depth` need nothing.
NEEDS = {"batch": ("share",), "init": ("share",), "allocation": ("share", "allocation"), "negatives": ("allocation",)}


def known_for(axis: str, store: Store, note: Callable[[str], None]) -> Known:
    """What the store knows that the axis needs; runs `habitus fit` where laws.json is absent or out of date."""
    needs = NEEDS.get(axis, ())
    held = {file.manifest.axis for file in manifests(store.path)}
    newest = store.newest_record()
    if not held & set(needs) or not newest:
        return Known()
    if not store.laws.exists() or store.laws.stat().st_mtime < newest:
        why = "is older than the newest Record" if store.laws.exists() else "does not exist yet"
        note(f"{store.laws} {why}: running `habitus fit {store.path}`")
        problem = _fit(store.path)
        if problem:
            note(f"no laws could be fitted, so the preset decides: {problem}")
            return Known()
    return read_known(store.laws)


def winners(known: Known, store: Store, facts: Facts) -> dict[float, Planned]:
    """The stage-1 run that won the allocation axis at each budget, where its bundle is at hand."""
    found = {}
    for file in manifests(store.path, "allocation"):
        for row in file.manifest.cells:
            best = known.winners.get(row.flops_budget)
            if best is None or (row.cell_id, row.learning_rate, row.seed) != (
                best.cell_id,
                best.learning_rate,
                best.seed,
            ):
                continue
            if (store.cell(row.recipe_hash) / "bundle" / "bundle.json").exists():
                recipe = store.recipe(row.recipe_hash)
                found[row.flops_budget] = Planned(row, recipe, cell_of_recipe(recipe, facts.inputs))
    return found


def _fit(store: Path) -> str:
    """Run the command; the first line of its complaint, or nothing."""
    command = [sys.executable, "-m", "habitus", "fit", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == 0:
        return ""
    return lines[0].removeprefix("habitus: ") if lines else f"exit code {done.returncode}"
