"""The figures as PNG files: the page's own drawings, rendered by vl-convert (`pip install 'habitus[png]'`)."""

import re
from pathlib import Path

from habitus.errors import ConfigError
from habitus.files import write_atomic
from habitus.reporting.colours import LIGHT, colour_values, figure_style
from habitus.reporting.figure import Contents, View
from habitus.reporting.study import Study
from habitus.reporting.svg import draw

_GAP = 16.0  # between panels
_DOTS_PER_UNIT = 2.0  # a panel of 480 units is 4.8 inches wide at 200 dots per inch
_VIEW_BOX = re.compile(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"')


def write_pngs(study: Study, contents: Contents, folder: Path) -> list[Path]:
    """One PNG per figure and metric in `folder`, at 200 dots per inch; older ones of the same names are replaced."""
    try:
        from vl_convert import register_font_directory, svg_to_png
    except ImportError:
        raise ConfigError(
            "--png needs vl-convert, which is not installed",
            expected="the extra 'png'",
            next_step="pip install 'habitus[png]'",
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--png {folder} cannot be created: {error.strerror}", expected="a folder") from None
    import matplotlib

    register_font_directory(f"{matplotlib.get_data_path()}/fonts/ttf")  # has superscript digits, on every machine
    style = _resolve(figure_style(len(study.budgets)), len(study.budgets))
    written = []
    for number, exhibit in enumerate((e for e in contents.exhibits if e.is_figure), 1):
        for view in exhibit.views:
            if view.panels:
                suffix = "-" + re.sub(r"[^a-z0-9]+", "-", view.metric.lower()).strip("-") if view.metric else ""
                path = folder / f"figure-{number:02d}-{exhibit.key}{suffix}.png"
                write_atomic(path, svg_to_png(_compose(view, style), scale=_DOTS_PER_UNIT, ppi=72))
                written.append(path)
    return written


def _resolve(style: str, num_budgets: int) -> str:
    """The style sheet with the values of its colours, as there are no variables outside a browser."""
    colours = {**LIGHT, **colour_values(num_budgets)}
    style = style.replace("system-ui", '"DejaVu Sans"')
    return re.sub(r"var\(--(\w+)\)", lambda match: colours[match[1]], style)


def _compose(view: View, style: str) -> str:
    """The panels of a view in two columns as one SVG."""
    drawings = [draw(panel) for panel in view.panels]
    sizes = [_size(drawing) for drawing in drawings]
    rows = [range(i, min(i + 2, len(drawings))) for i in range(0, len(drawings), 2)]
    column = max(width for width, _ in sizes) + _GAP
    parts, top = [], _GAP
    for row in rows:
        for place, i in enumerate(row):
            (width, height), left = sizes[i], _GAP + place * column
            at = f'<svg x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" viewBox='
            parts.append(drawings[i].replace("<svg viewBox=", at, 1))
        top += max(sizes[i][1] for i in row) + _GAP
    width = _GAP + min(2, len(drawings)) * column
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{top:g}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _size(drawing: str) -> tuple[float, float]:
    match = _VIEW_BOX.match(drawing)
    assert match is not None
    return float(match[1]), float(match[2])
