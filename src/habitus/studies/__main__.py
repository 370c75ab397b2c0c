"""A study without the command line's libraries, for bare machines: `python -m habitus.studies --out OUT ...`.

Where typer, DuckDB and Ray are not installed. With --items and --users it makes a synthetic world of that size first.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from habitus.errors import HabitusError, Interrupted
from habitus.studies import StudyOptions, study


def main(arguments: list[str] | None = None) -> int:
    """Run or go on; 0 when it is finished, 3 when time was up, 1 on an error in words."""
    parser = argparse.ArgumentParser(prog="python -m habitus.studies", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="a prepared dataset")
    parser.add_argument("--items", type=int, help="of a synthetic world, made in OUT/dataset")
    parser.add_argument("--users", type=int, help="of that world")
    parser.add_argument("--preset", default="standard")
    parser.add_argument("--metric", default="catalogue/recall@10")
    parser.add_argument("--device", default="auto")
    for name in ("--flops", "--gpu-hours", "--max-minutes"):
        parser.add_argument(name, type=float)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    options = StudyOptions(
        data=given.data,
        preset=given.preset,
        metric=given.metric,
        device=given.device,
        flops=given.flops,
        gpu_hours=given.gpu_hours,
        max_minutes=given.max_minutes,
        workers=given.workers,
        dry_run=given.dry_run,
    )
    try:
        if given.items or given.users:
            options = replace(options, data=_world(given.out, options, given.items, given.users))
        result = study(given.out, options, note=lambda text: print(text, flush=True))
    except Interrupted as stopped:
        print(stopped, flush=True)
        return 3
    except HabitusError as error:
        print(f"habitus: {error}", file=sys.stderr)
        return 1
    if not result.dry_run:
        print(json.dumps({"seconds": round(result.seconds, 1), "laws": result.identified, "next": result.next_command}))
    return 0


def _world(out: Path, options: StudyOptions, items: int | None, users: int | None) -> Path:
    """The dataset of a world like the preset's, of another size."""
    from habitus.sweeps import load_preset, preset_dataset, usual_workers

    preset = load_preset(options.preset)
    size = preset.world.model_copy(
        update={"num_items": items or preset.world.num_items, "num_users": users or preset.world.num_users}
    )
    out.mkdir(parents=True, exist_ok=True)
    made = preset.model_copy(update={"world": size})
    return preset_dataset(made, out / "dataset", threads=usual_workers("cpu")).path


if __name__ == "__main__":
    sys.exit(main())
