"""The verb: a store in, one HTML page out."""

from dataclasses import replace
from pathlib import Path

from habitus.errors import ConfigError
from habitus.files import write_atomic
from habitus.reporting.contents import contents
from habitus.reporting.page import page
from habitus.reporting.study import read_study


def report(
    store: str | Path,
    out: str | Path,
    *,
    png: str | Path | None = None,
    plan: str | Path | None = None,
    title: str | None = None,
    next_command: str | None = None,
) -> Path:
    """Write the report of a store (or a flat CSV of runs) to `out`; with `png`, its figures as PNG files too.

    `title` stands on top instead of the store's name, `next_command` below the plan.
    """
    store, out = Path(store), Path(out)
    if out.suffix.lower() not in (".html", ".htm") or not out.parent.is_dir():
        raise ConfigError(f"--out {out}", expected="a name that ends in .html, in a folder that exists")
    study = read_study(store, None if plan is None else Path(plan))
    study = replace(study, name=title or study.name, next_command=next_command)
    found = contents(study)
    try:
        write_atomic(out, page(study, found).encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", expected="a file name in a folder") from error
    if png is not None:
        from habitus.reporting.png import write_pngs

        write_pngs(found, study, Path(png))
    return out
