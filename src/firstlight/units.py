"""Owns how bytes, seconds and rates are written and read; knows nothing of what is measured."""

import re

from firstlight.errors import UsageError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SCALE = {
    "": 1,
    "b": 1,
    **{f"{p}{s}": 1024 ** (i + 1) for i, p in enumerate("kmgtp") for s in ("", "i", "ib")},
    **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgtp")},
}
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def format_bytes(num_bytes: float) -> str:
    """Writes a byte count with a binary unit and at least three significant digits: `1.42 TiB`."""
    value = float(num_bytes)
    for unit in _BINARY[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} {_BINARY[-1]}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def parse_bytes(text: str) -> int:
    """Reads `24GiB`, `24G` (binary), `24GB` (decimal) or plain bytes.

    Raises UsageError when the text is no size.
    """
    match = _NUMBER.match(text)
    scale = _SCALE.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise UsageError(f"{text!r} is not a size in bytes; write for example 8GiB, 512M or 4096")
    return int(float(match.group(1)) * scale)


def parse_count(text: str) -> int:
    """Reads a token or item count with an optional binary suffix: `1M` is 1,048,576.

    Raises UsageError when the text is no count.
    """
    match = _NUMBER.match(text)
    scale = {"": 1, "k": 1024, "m": 1024**2}.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise UsageError(f"{text!r} is not a count; write for example 8192, 128K or 1M")
    return int(float(match.group(1)) * scale)


def format_seconds(seconds: float) -> str:
    """Writes a duration so that its size is seen at once: `820 us`, `3.1 s`, `1 h 04 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, _ = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {round(seconds) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_rate(num_bytes: float, seconds: float) -> str:
    """Writes a transfer rate in bytes per second; `-` when no time has passed."""
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds > 0 else "-"


def format_count(number: int) -> str:
    """Writes an integer with thousands separators."""
    return f"{number:,}"
