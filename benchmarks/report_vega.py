# ruff: noqa: E501
"""The report drawn by Vega-Lite instead of our own SVG, for docs/decisions/0116: the same panels, the same page.

python benchmarks/report_vega.py STORE out.html SCRIPTS [CHAPTER ...]

SCRIPTS holds vega.min.js, vega-lite.min.js and vega-interpreter.js (npm pack vega vega-lite vega-interpreter; the last
one is an ES module: its import becomes `= vega`, its export `vega.expressionInterpreter =`).
"""

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from habitus.reporting.colours import DARK, LIGHT, colour_values, correlation_colours
from habitus.reporting.figure import Band, Contents, Heat, Line, Mark, Panel, PlotAxis, Points
from habitus.reporting.study import read_study

_SHAPES = {"circle": "circle", "diamond": "diamond", "square": "square"}
_SUPER = "['⁰','¹','²','³','⁴','⁵','⁶','⁷','⁸','⁹']"
_EXPONENT = "floor(log(abs(datum.value)) / LN10 + 1e-9)"
_POWER = (
    f"(abs(datum.value / pow(10, {_EXPONENT}) - 1) < 1e-6 ? '' : format(datum.value / pow(10, {_EXPONENT}), '.3~g') + '·')"
    f" + '10' + ({_EXPONENT} < 0 ? '⁻' : '') + (abs({_EXPONENT}) > 9 ? {_SUPER}[floor(abs({_EXPONENT}) / 10)] : '')"
    f" + {_SUPER}[abs({_EXPONENT}) % 10]"
)
_LABELS = {
    "count": "replace(format(datum.value, '.3~s'), 'G', 'B')",
    "percent": "format(100 * datum.value, '.3~g') + '%'",
    "flops": _POWER,
    "rate": _POWER,
    "plain": "datum.label",
}


def specification(panel: Panel) -> dict[str, Any]:
    """One panel as a Vega-Lite specification; colours are names that the page's configuration gives a value."""
    if panel.heat:
        return _heat(panel, panel.heat)
    x, y = panel.x or PlotAxis("x"), panel.y or PlotAxis("y")
    layers: list[dict[str, Any]] = []
    for mark in panel.marks:
        layers += _layers(mark, x)
    layers[0]["params"] = [{"name": "zoom", "select": "interval", "bind": "scales"}]
    return {
        "title": panel.title,
        "width": "container",
        "height": 250,
        "encoding": {"x": _axis("x", x), "y": _axis("y", y)},
        "layer": layers,
    }


def _axis(name: str, axis: PlotAxis) -> dict[str, Any]:
    scale: dict[str, Any] = {"type": "log" if axis.log else "linear", "zero": False, "nice": False}
    for end in ("low", "high"):
        if getattr(axis, end) is not None:
            scale["domainMin" if end == "low" else "domainMax"] = getattr(axis, end)
    ticks: dict[str, Any] = {"labelExpr": _LABELS[axis.kind], "tickCount": 6, "grid": name == "y"}
    if axis.ticks:
        ticks["values"] = list(axis.ticks)
    return {"field": name, "type": "quantitative", "title": axis.label, "scale": scale, "axis": ticks}


def _layers(mark: Mark, x: PlotAxis) -> list[dict[str, Any]]:
    if isinstance(mark, Points):
        return _points(mark, x)
    if isinstance(mark, Line):
        style = {
            "type": "line",
            "color": f"@{mark.colour}",
            "strokeWidth": 8 if mark.thick else 1.6,
            "opacity": 0.28 if mark.thick else 1,
        }
        style |= {"strokeDash": [5, 4]} if mark.dashed else {}
        rows = [{"x": a, "y": b} for a, b in zip(mark.x, mark.y, strict=True) if math.isfinite(a + b)]
        layers: list[dict[str, Any]] = [{"data": {"values": rows}, "mark": style}]
        if mark.label and rows:
            text = {
                "type": "text",
                "align": "left",
                "dx": 6,
                "fontWeight": 600,
                "text": mark.label,
                "color": f"@{mark.colour}",
            }
            layers.append({"data": {"values": rows[-1:]}, "mark": text})
        return layers
    if isinstance(mark, Band):
        rows = [
            {"x": a, "y": lo, "y2": hi}
            for a, lo, hi in zip(mark.x, mark.low, mark.high, strict=True)
            if math.isfinite(lo + hi)
        ]
        area = {"type": "area", "opacity": 0.15, "color": f"@{mark.colour}", "clip": True}
        return [{"data": {"values": rows}, "mark": area, "encoding": {"y2": {"field": "y2"}}}]
    field, other = ("x", "y") if mark.along == "x" else ("y", "x")
    rule = {"type": "rule", "strokeDash": [5, 4], "color": f"@{mark.colour}"}
    return [
        {"data": {"values": [{field: mark.at, "label": mark.label}]}, "mark": rule, "encoding": {other: None}},
        {
            "data": {"values": [{field: mark.at}]},
            "encoding": {other: {"value": 10 if other == "y" else 4}},
            "mark": {
                "type": "text",
                "align": "left",
                "dx": 4,
                "dy": -4,
                "text": mark.label,
                "color": f"@{mark.colour}",
            },
        },
    ]


def _points(mark: Points, x: PlotAxis) -> list[dict[str, Any]]:
    tips = list(mark.tips) or [""] * len(mark.x)
    rows = [
        {"x": x.zero_at if a == 0 and x.zero_at else a, "y": b, "t": t}
        for a, b, t in zip(mark.x, mark.y, tips, strict=True)
        if math.isfinite(a + b)
    ]
    style = {
        "type": "point",
        "shape": _SHAPES[mark.shape],
        "size": 90 if mark.large else 36,
        "filled": not (mark.hollow or mark.ring),
        "color": f"@{mark.colour}",
        "opacity": 1,
        "fill": "@card" if mark.hollow else None,
    }
    style = {k: v for k, v in style.items() if v is not None}
    layers: list[dict[str, Any]] = []
    if len(mark.low):
        low, high = ("y", "y2") if mark.bars == "y" else ("x", "x2")
        bars = []
        for row, lo, hi in zip(rows, mark.low, mark.high, strict=False):
            if math.isfinite(lo + hi):
                bars.append({**row, low: lo, high: hi})
        if bars:
            layers.append(
                {
                    "data": {"values": bars},
                    "mark": {"type": "rule", "color": f"@{mark.colour}", "clip": True},
                    "encoding": {high: {"field": high}},
                }
            )
    layers.append({"data": {"values": rows}, "mark": style, "encoding": {"tooltip": {"field": "t", "type": "nominal"}}})
    if mark.label and rows:
        text = {
            "type": "text",
            "align": "left",
            "dx": 8,
            "fontWeight": 600,
            "text": mark.label,
            "color": f"@{mark.colour}",
        }
        layers.append({"data": {"values": [max(rows, key=lambda r: r["x"])]}, "mark": text})
    return layers


def _heat(panel: Panel, heat: Heat) -> dict[str, Any]:
    rows = []
    for i, row in enumerate(heat.rows):
        for j, column in enumerate(heat.columns):
            value = heat.values[i][j]
            if value is not None:
                cell, ink = correlation_colours(value, bool(heat.faded and heat.faded[i][j]))
                rows.append(
                    {"row": row, "column": column, "v": f"{value:.2f}", "t": heat.tips[i][j], "cell": cell, "ink": ink}
                )
    place = {
        "x": {
            "field": "column",
            "type": "nominal",
            "sort": None,
            "title": None,
            "axis": {"orient": "top", "labelAngle": -42},
        },
        "y": {"field": "row", "type": "nominal", "sort": None, "title": None},
    }
    fill = {"color": {"field": "cell", "type": "nominal", "scale": None}, "tooltip": {"field": "t", "type": "nominal"}}
    ink = {"text": {"field": "v"}, "color": {"field": "ink", "type": "nominal", "scale": None}}
    return {
        "title": panel.title,
        "data": {"values": rows},
        "encoding": place,
        "width": {"step": 46},
        "height": {"step": 27},
        "layer": [{"mark": {"type": "rect", "cornerRadius": 3}, "encoding": fill}, {"mark": "text", "encoding": ink}],
    }


def main(store: Path, out: Path, scripts: Path, chapters: list[str]) -> None:
    page, contents_of = (importlib.import_module(f"habitus.reporting.{name}") for name in ("page", "report"))
    study = read_study(store)
    contents = contents_of._list_contents(study)
    if chapters:
        contents = Contents(tuple(c for c in contents.chapters if c.key in chapters), ())
    specifications: list[dict[str, Any]] = []

    def draw(panel: Panel) -> str:
        specifications.append(specification(panel))
        return f'<div class="vg" data-spec="{len(specifications) - 1}"></div>'

    page.draw = draw
    html = page.render_page(study, contents)
    colours = {
        name: {**page_colours, **colour_values(len(study.budgets), name == "dark")}
        for name, page_colours in (("light", LIGHT), ("dark", DARK))
    }
    names = ("vega.min.js", "vega-lite.min.js", "vega-interpreter.js")
    libraries = [(scripts / name).read_text().replace("</script", "<\\/script") for name in names]
    data = {"specs": page._as_json(specifications), "colours": json.dumps(colours)}
    tail = "".join(f'<script type="application/json" id="{key}">{text}</script>' for key, text in data.items())
    tail += "".join(f"<script>{text}</script>" for text in (*libraries, _SCRIPT))
    out.write_text(html.replace("</body>", tail + "</body>"), encoding="utf-8")
    sizes = {"page": out.stat().st_size, "specifications": len(data["specs"]), "scripts": sum(map(len, libraries))}
    print(json.dumps({"panels": len(specifications), **sizes}))


_SCRIPT = """
(function () {
  var specs = JSON.parse(document.getElementById("specs").textContent);
  var runs = JSON.parse(document.getElementById("runs").textContent);
  var names = JSON.parse(document.getElementById("colours").textContent);
  var dark = function () { return document.documentElement.dataset.theme === "dark" || matchMedia("(prefers-color-scheme: dark)").matches; };
  function resolve(text, colours) { return JSON.parse(text.replace(/"@(\\w+)"/g, function (_, n) { return '"' + colours[n] + '"'; })); }
  window.drawn = 0; window.spent = 0;
  function draw(box) {
    var start = performance.now(), colours = names[dark() ? "dark" : "light"];
    var spec = resolve(JSON.stringify(specs[+box.dataset.spec]), colours);
    spec.config = { background: null, view: { stroke: null }, title: { color: colours.ink, anchor: "start", fontSize: 13 },
      axis: { labelColor: colours.soft, titleColor: colours.soft, gridColor: colours.grid, domainColor: colours.soft, tickColor: colours.soft } };
    var flow = vega.parse(vegaLite.compile(spec).spec, null, { ast: true });
    var view = new vega.View(flow, { renderer: "svg", container: box, hover: true, expr: vega.expressionInterpreter });
    view.tooltip(function (_, event, item, value) { var tip = document.getElementById("tip"); if (!value) { tip.hidden = true; return; }
      tip.textContent = value[0] === "~" ? value.slice(value.indexOf("|") + 1) + " · " + runs[+value.slice(1, value.indexOf("|"))] : value; tip.hidden = false; });
    view.run(); window.drawn++; window.spent += performance.now() - start;
  }
  var watch = new IntersectionObserver(function (entries) {
    entries.forEach(function (e) { if (e.isIntersecting) { watch.unobserve(e.target); draw(e.target); } });
  }, { rootMargin: "300px" });
  document.querySelectorAll(".vg").forEach(function (box) { watch.observe(box); });
  window.drawAll = function () { document.querySelectorAll(".vg").forEach(function (b) { if (!b.firstChild && b.getClientRects().length) draw(b); }); };
}());
"""

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
