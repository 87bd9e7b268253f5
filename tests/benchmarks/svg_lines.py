"""Line charts as SVG text for the plots of the docs, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 44
COLORS = ("#1f5fa8", "#c2491d", "#2f7d32")


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    label: str
    values: Sequence[float]
    """One value per tick of the x axis."""
    color: int = 0
    """Index into `COLORS`."""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    lines: Sequence[Line]


def render(panels: Sequence[Panel], ticks: Sequence[str], x_label: str) -> str:
    """Render panels side by side; y axes start at 0, and all x axes have the same ticks."""
    total = WIDTH * len(panels)
    body = [
        f'<g transform="translate({WIDTH * index},0)">{_panel(panel, ticks, x_label)}</g>'
        for index, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" width="{total}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{total}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(panel: Panel, ticks: Sequence[str], x_label: str) -> str:
    top = _round_up(max(max(line.values) for line in panel.lines))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(index: int) -> float:
        return LEFT + width * (index + 0.5) / len(ticks)

    def y(value: float) -> float:
        return TOP + height * (1 - value / top)

    elements = [_text(LEFT, 16, panel.title, "start", bold=True), _text(LEFT + width / 2, HEIGHT - 8, x_label)]
    for step in range(5):
        value = top * step / 4
        elements.append(f'<path d="M{LEFT},{y(value):.1f}h{width}" stroke="#ddd"/>')
        elements.append(_text(LEFT - 6, y(value) + 4, f"{value:g}", "end"))
    elements += [_text(x(index), HEIGHT - BOTTOM + 16, tick) for index, tick in enumerate(ticks)]
    for number, line in enumerate(panel.lines):
        coordinates = [(x(index), y(value)) for index, value in enumerate(line.values)]
        color, dash = COLORS[line.color], ' stroke-dasharray="5 4"' if line.dashed else ""
        path = "L".join(f"{px:.1f},{py:.1f}" for px, py in coordinates)
        elements.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        fill = "#fff" if line.dashed else color
        elements += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{fill}" stroke="{color}"/>' for px, py in coordinates
        ]
        row = TOP + 12 + 15 * number
        elements.append(f'<path d="M{LEFT + 8},{row - 4}h22" stroke="{color}" stroke-width="2"{dash}/>')
        elements.append(_text(LEFT + 36, row, line.label, "start"))
    return "".join(elements)


def _text(x: float, y: float, text: str, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{text}</text>'


def _round_up(value: float) -> float:
    """Return the top of the y axis: a number with short quarters that leaves space for the legend."""
    minimum, unit = value * 1.25, 1.0
    while unit * 10 <= minimum:
        unit *= 10
    while unit > minimum:
        unit /= 10
    return next(unit * step for step in (1, 2, 4, 6, 8, 10) if unit * step >= minimum)
