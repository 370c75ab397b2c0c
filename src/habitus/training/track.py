"""Journals shown in a tracker: TensorBoard, MLflow or W&B read what the run wrote. The run knows nothing of it.

    python -m habitus.training.track run --to tensorboard

Follows journal.jsonl until the Record is there, so that it can be started before, during or after a run.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from habitus.errors import ConfigError, HabitusError
from habitus.typed import suggest_name

Log = Callable[[str, float, int], None]
_POLL_SECONDS = 1.0


def track(run: Path, tracker: str, *, follow: bool = True) -> int:
    """Hand every number of a run's journal to a tracker; returns how many there were."""
    if tracker not in TRACKERS:
        raise ConfigError(f"{tracker!r} is not a tracker", expected=suggest_name(tracker, list(TRACKERS)))
    try:
        log, close = TRACKERS[tracker](run)
    except ImportError as error:
        raise ConfigError(f"{tracker} is not installed ({error})", next_step="pip install 'habitus[track]'") from error
    count = 0
    try:
        for line in _read_lines(run, follow=follow):
            step = int(line["step"])
            metrics = line.get("metrics") or {f"train/{name}": value for name, value in line.items() if name != "step"}
            for name, value in metrics.items():
                if isinstance(value, int | float):
                    log(name, float(value), step)
                    count += 1
    finally:
        close()
    return count


def _read_lines(run: Path, *, follow: bool) -> Iterator[dict[str, Any]]:
    """The lines of a run's journal, each once; with `follow` until the run is over."""
    path, partial = run / "journal.jsonl", ""
    while follow and not path.exists():
        time.sleep(_POLL_SECONDS)
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            over = not follow or (run / "record.json").exists()  # looked up before reading, so that no line is missed
            for text in file:
                partial += text
                if partial.endswith("\n"):
                    yield from _parse_line(partial)
                    partial = ""
            if over:
                return
            time.sleep(_POLL_SECONDS)


def _parse_line(text: str) -> Iterator[dict[str, Any]]:
    """The values of a line; nothing where it is damaged."""
    try:
        values = json.loads(text)
    except ValueError:
        return
    if isinstance(values, dict):
        yield values


def _tensorboard(run: Path) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))
    return lambda name, value, step: writer.add_scalar(name, value, step), writer.close


def _mlflow(run: Path) -> tuple[Log, Callable[[], None]]:
    import mlflow

    mlflow.start_run(run_name=run.name)
    # MLflow allows no '@' in names.
    return lambda name, value, step: mlflow.log_metric(name.replace("@", "_at_"), value, step), mlflow.end_run


def _wandb(run: Path) -> tuple[Log, Callable[[], None]]:
    import wandb

    started = wandb.init(project="habitus", name=run.name)
    return lambda name, value, step: started.log({name: value}, step=step), started.finish


TRACKERS: dict[str, Callable[[Path], tuple[Log, Callable[[], None]]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a run's journal in a tracker.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", default="tensorboard", help=", ".join(TRACKERS))
    parser.add_argument(
        "--once", action="store_true", help="show what is in the journal now, without waiting for the end"
    )
    arguments = parser.parse_args()
    try:
        print(f"{track(arguments.run, arguments.to, follow=not arguments.once):,} values")
    except HabitusError as error:
        parser.exit(1, f"habitus: {error}\n")


if __name__ == "__main__":
    main()
