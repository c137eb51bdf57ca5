"""Owns the picture of a run: its loss over steps as an SVG file. It knows numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

WIDTH, HEIGHT = 840, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 48
_POINTS = 400


class Mark(NamedTuple):
    """Where a stage begins."""

    step: int
    name: str


def loss_svg(history: Sequence[tuple[int, float]], marks: Sequence[Mark], title: str) -> str:
    """Returns a line of the loss, on a logarithmic scale, averaged over runs of steps."""
    points = [(step, loss) for step, loss in history if math.isfinite(loss) and loss > 0]
    body: list[str] = []
    if points:
        first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
        shown = _averaged(points)
        low = math.floor(math.log10(min(loss for _, loss in shown)))
        high = max(math.ceil(math.log10(max(loss for _, loss in shown))), low + 1)
        scale = _Scale(first, last, low, high)
        body += _grid(scale)
        body += [_mark(scale, mark) for mark in marks if first <= mark.step <= last]
        line = " ".join(f"{scale.x(step):.1f},{scale.y(loss):.1f}" for step, loss in shown)
        body.append(f'<polyline points="{line}" fill="none" stroke="#1f5fbf" stroke-width="1.5"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="15">{_escaped(title)}</text>',
            *body,
            "</svg>",
            "",
        ]
    )


class _Scale(NamedTuple):
    """Steps to the right, powers of ten of the loss upward."""

    first: int
    last: int
    low: int
    high: int

    def x(self, step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - self.first) / (self.last - self.first)

    def y(self, loss: float) -> float:
        share = (math.log10(loss) - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share


def _averaged(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """At most _POINTS means of steps and, as a geometric mean, of losses."""
    size = -(-len(points) // _POINTS)
    borders = [*range(0, len(points), size), len(points)]
    means = []
    for begin, end in pairwise(borders):
        part = points[begin:end]
        step = sum(step for step, _ in part) / len(part)
        means.append((step, math.exp(sum(math.log(loss) for _, loss in part) / len(part))))
    return means


def _grid(scale: _Scale) -> list[str]:
    lines = []
    for power in range(scale.low, scale.high + 1):
        y = scale.y(10.0**power)
        lines.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for part in range(5):
        step = scale.first + (scale.last - scale.first) * part / 4
        lines.append(
            f'<text x="{scale.x(step):.1f}" y="{HEIGHT - 24}" text-anchor="middle">'
            f"{step:.0f}</text>"
        )
    middle = (WIDTH + _LEFT) / 2
    lines.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    return lines


def _mark(scale: _Scale, mark: Mark) -> str:
    x = scale.x(mark.step)
    return (
        f'<path d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}" stroke="#c60" stroke-dasharray="3 3"/>'
        f'<text x="{x + 4:.1f}" y="{_TOP + 12}" fill="#c60">{_escaped(mark.name)}</text>'
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
