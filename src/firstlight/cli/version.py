"""Owns the verb `version`: what is installed, for a bug report."""

from __future__ import annotations

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show


def version(as_json: AsJson = False) -> int:
    """Show what is installed."""
    import platform

    import firstlight
    from firstlight.accept.report import Report, Section
    from firstlight.platforms.torch_check import torch_version

    found = {
        "firstlight": firstlight.__version__,
        "python": platform.python_version(),
        "torch": torch_version() or "not installed",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    lines = tuple(f"{name:<12}{text}" for name, text in found.items())
    return show(Report("firstlight version", (Section("", lines),), data=found), as_json=as_json)
