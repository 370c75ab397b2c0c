"""What cells will take: seconds from measured rates of this store where there are any, bytes from their structure."""

from collections.abc import Iterable
from pathlib import Path

from habitus.machine import available_memory, usable_cores
from habitus.sizing import Inputs, Parts, SpeedModel, count_evaluations, fit_speed, ranks_catalogue
from habitus.sweeps.cells import PlannedRun, own_shares
from habitus.sweeps.store import Store


def speed_of_store(store: Store | None, device: str, inputs: Inputs, before: SpeedModel | None = None) -> SpeedModel:
    """The speed that the store's Records show; where there are too few, the one before, or what is assumed."""
    records = (store.record(digest) for digest in store.digests()) if store else ()
    return fit_speed((record for record in records if record is not None), device, inputs, before)


def parts_of(speeds: SpeedModel, cells: Iterable[PlannedRun]) -> dict[str, Parts]:
    """Estimated seconds of each run in their parts, by its hash; what runs of one trunk share counts for the
    shortest."""
    cells = list(cells)
    shares = own_shares(cells)
    parts = {}
    for planned in cells:
        cell, recipe = planned.cell, planned.recipe
        whole = speeds.parts(cell.steps, cell.executed_flops, count_evaluations(recipe), ranks_catalogue(recipe))
        fixed, steps, work = (shares[planned.hash] * part for part in whole)
        parts[planned.hash] = fixed, steps, work
    return parts


def seconds_of(speeds: SpeedModel, cells: Iterable[PlannedRun]) -> dict[str, float]:
    """Estimated seconds of each run, by its hash."""
    return {digest: sum(parts) for digest, parts in parts_of(speeds, cells).items()}


def device_kind(device: str) -> str:
    """cpu or cuda; `auto` looks for a GPU without loading torch where there cannot be one."""
    if device.startswith("cuda"):
        return "cuda"
    if device == "cpu" or not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def usual_workers(kind: str) -> int:
    """How many workers a machine gets where the user does not say: one per core, or a few on a GPU."""
    cores = usable_cores()
    return cores if kind == "cpu" else min(4, cores)


def device_bytes(kind: str) -> int:
    """Memory that cells may share: the GPU's, or what the machine has free."""
    if kind == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory * 0.92)
    room = available_memory()
    return 0 if room is None else int(room * 0.9)  # 0: unknown, no limit
