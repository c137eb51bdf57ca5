"""Owns the table of versions this program needs and was tested with; data, and comparisons."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Requirement:
    """A component, the least version that works, and the one the tests run with."""

    component: str
    minimum: str
    tested: str
    why: str


PYTHON = Requirement("python", "3.10", "3.11", "accelerator stacks still ship 3.10")
TORCH = Requirement("torch", "2.7", "2.13.0", "device-neutral accelerator API")
REQUIREMENTS = (PYTHON, TORCH)


def at_least(version: str, minimum: str) -> bool:
    """Compares the leading numbers of two versions; suffixes such as `+cpu` do not count."""
    found, needed = _numbers(version), _numbers(minimum)
    width = max(len(found), len(needed))
    return _padded(found, width) >= _padded(needed, width)


def release(version: str) -> tuple[int, ...]:
    """Returns a version as numbers that compare: five of the release, then that of a post-release.

    `2.11.0.post2+vendor5.2.0` is (2, 11, 0, 0, 0, 2). Empty when the text begins with no number.
    """
    numbers = _numbers(version)
    post = re.match(r"\d+(?:\.\d+)*\.post(\d+)", version)
    return (*_padded(numbers, 5)[:5], int(post.group(1)) if post else 0) if numbers else ()


def local_part(version: str, word: str) -> str:
    """Returns what follows `+WORD` in a version, empty when it has no such part: for `vendor`,
    `2.11.0+vendor5.2.0` gives `5.2.0`.
    """
    local = version.partition("+")[2]
    return local.removeprefix(word) if local.startswith(word) else ""


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))
