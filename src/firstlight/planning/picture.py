"""Owns the picture of a plan: memory of each kind of rank as bars, and which rank sits where (SVG).

Knows no browser: plain shapes and text, no script and no style sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from colorsys import hls_to_rgb
from types import MappingProxyType
from xml.sax.saxutils import escape

from firstlight.planning.hardware import Fleet
from firstlight.planning.memory import COMPONENTS, MemoryPlan, RankMemory
from firstlight.units import format_bytes

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#3b6ea5",
        "kv": "#5aa469",
        "tiers": "#8fb339",
        "activations": "#e0a030",
        "encoder": "#9b6bb3",
        "collectives": "#c96a4a",
        "reserve": "#c8c8c8",
    }
)
_WIDTH, _BAR, _LABEL = 720, 18, 120
_CELL, _MOST_CELLS = 14, 1024


def draw(memory: MemoryPlan, fleet: Fleet, title: str) -> str:
    """Returns an SVG document: a bar for each pipeline stage, the device's memory as a line, and
    one row of cells for each island, coloured by stage.
    """
    bars = list(_bars(memory, top=56))
    below = 56 + len(memory.stages) * (_BAR + 6) + 28
    cells, height = _cells(memory, fleet, below)
    body = "\n".join([_text(8, 20, title, size=14), *_legend(32), *bars, *cells])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _legend(y: int) -> Iterator[str]:
    for index, name in enumerate(COMPONENTS):
        x = 8 + index * 100
        yield _rect(x, y, 10, 10, COLOURS[name])
        yield _text(x + 14, y + 9, name)


def _bars(memory: MemoryPlan, top: int) -> Iterator[str]:
    room = _WIDTH - _LABEL - 120
    largest = max(max(stage.used, stage.device_bytes) for stage in memory.stages)
    for row, stage in enumerate(memory.stages):
        y = top + row * (_BAR + 6)
        yield _text(8, y + 13, _ranks(stage))
        x = float(_LABEL)
        for name in COMPONENTS:
            width = stage.components[name] / largest * room
            yield _rect(
                x, y, width, _BAR, COLOURS[name], f"{name} {format_bytes(stage.components[name])}"
            )
            x += width
        limit = _LABEL + stage.device_bytes / largest * room
        yield _upright(limit, y - 2, y + _BAR + 2)
        left = f"{format_bytes(abs(stage.spare))} {'left' if stage.spare >= 0 else 'short'}"
        yield _text(_LABEL + room + 8, y + 13, left)


def _ranks(stage: RankMemory) -> str:
    last = stage.ranks.stop - 1
    return f"ranks {stage.ranks.start}-{last}" if len(stage.ranks) > 1 else f"rank {last}"


def _cells(memory: MemoryPlan, fleet: Fleet, top: int) -> tuple[list[str], int]:
    layout, replicas = memory.arrangement.layout, memory.arrangement.replicas
    shown = min(_MOST_CELLS, layout.world_size * replicas)
    columns = min(fleet.island, (_WIDTH - _LABEL) // _CELL)
    lines = [
        _text(8, top - 8, f"{fleet.text}: one row an island, colour by stage, line by tp group")
    ]
    for device in range(shown):
        rank = device % layout.world_size
        island, slot = divmod(device, fleet.island)
        row = island * -(-fleet.island // columns) + slot // columns
        x, y = 8 + slot % columns * _CELL, top + row * _CELL
        place = layout.place(rank)
        hint = f"rank {rank}: stage {place.pp_index}, dp {place.dp_index}, tp {place.tp_index}"
        lines.append(_rect(x, y, _CELL - 2, _CELL - 2, _hue(place.pp_index / layout.pp), hint))
        if place.tp_index == 0:
            lines.append(_upright(x - 1, y, y + _CELL - 2))
    rows = -(-shown // fleet.island) * -(-fleet.island // columns)
    return lines, top + rows * _CELL + 12


def _hue(turn: float) -> str:
    red, green, blue = (round(255 * part) for part in hls_to_rgb(turn, 0.6, 0.55))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _rect(x: float, y: float, width: float, height: float, fill: str, hint: str = "") -> str:
    inner = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}">{inner}</rect>'
    )


def _upright(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="black"/>'


def _text(x: float, y: float, text: str, size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'
