"""Owns what is published of versions that work together, of quirks and of combinations that fail.

Data beside this file, with links; pure functions of versions. What nobody published is unknown here
and stays unknown: no function answers yes for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.resources import files

import msgspec

from firstlight.platforms.versions import release

# By component; empty where it is known not to be there, None where nothing tells.
Versions = Mapping[str, str | None]


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One generation of cards: its number, the cards, and whether this program may serve on it."""

    arch: int
    cards: list[str]
    serves: bool
    why: str
    link: str


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Versions that were published as belonging together. An empty list: nothing was published.

    `unsure` names lists that may be incomplete: what is not in them is unknown, not wrong.
    """

    id: str
    sdk_min: str
    sdk_max: str
    torch: list[str]
    plugin: list[str]
    driver: list[str]
    driver_min: str = ""
    archs: list[int]
    unsure: list[str] = []
    link: str


class Quirk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named workaround: on from `since` up to `until` (exclusive) of a component's version.

    Empty bounds are open; an empty `until` means that no fix was published. `archs` empty: all.
    """

    name: str
    component: str
    since: str = ""
    until: str = ""
    archs: list[int] = []
    why: str
    link: str


class BadCombination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values of facts (shell patterns) that are known to fail together."""

    name: str
    when: dict[str, str]
    why: str
    fix: str
    link: str


class Compatibility(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is known of one vendor's stack."""

    architectures: list[Architecture]
    rows: list[Row]
    quirks: list[Quirk]
    bad: list[BadCombination]

    def architecture(self, arch: int) -> Architecture | None:
        """Returns what is known of an architecture, None when nothing is."""
        return next((known for known in self.architectures if known.arch == arch), None)


NOTHING_KNOWN = Compatibility([], [], [], [])


def read_compatibility(name: str) -> Compatibility:
    """Returns the data of a vendor's stack, by the name of its platform; nothing for others."""
    resource = files("firstlight.platforms").joinpath(f"{name}.json")
    if not resource.is_file():
        return NOTHING_KNOWN
    return msgspec.json.decode(resource.read_bytes(), type=Compatibility)


def quirks_on(known: Compatibility, versions: Versions, arch: int) -> tuple[Quirk, ...]:
    """Returns the quirks that hold for these versions; a version that is unknown has them all."""
    return tuple(quirk for quirk in known.quirks if _holds(quirk, versions, arch))


def _holds(quirk: Quirk, versions: Versions, arch: int) -> bool:
    if quirk.archs and arch and arch not in quirk.archs:
        return False
    found = release(versions.get(quirk.component) or "")
    if not found:
        return True
    after = not quirk.since or found >= release(quirk.since)
    return after and (not quirk.until or found < release(quirk.until))


class Match(msgspec.Struct, frozen=True):
    """The published row that the versions fit best. `wrong` contradicts it, `unknown` could not be
    compared: the row does not say it, or the machine does not.
    """

    row: Row | None
    wrong: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether everything was compared and agrees."""
        return self.row is not None and not self.wrong and not self.unknown


def find_row(known: Compatibility, versions: Versions, arch: int) -> Match:
    """Returns the row with fewest contradictions, that of the toolkit at hand before others, then
    that with which most agrees. A row counts only when something known agrees with it.
    """
    found = []
    for row in known.rows:
        verdicts = _compare(row, versions, arch)
        agreeing = sum(verdict is True for verdict in verdicts.values())
        wrong = tuple(name for name, verdict in verdicts.items() if verdict is False)
        unknown = tuple(name for name, verdict in verdicts.items() if verdict is None)
        if agreeing:
            rank = (len(wrong), "sdk" in wrong, -agreeing, len(unknown))
            found.append((rank, Match(row, wrong, unknown)))
    return min(found, key=lambda entry: entry[0])[1] if found else Match(None)


def _compare(row: Row, versions: Versions, arch: int) -> dict[str, bool | None]:
    sdk = release(versions.get("sdk") or "")
    within = release(row.sdk_min) <= sdk <= release(row.sdk_max) if sdk else None
    verdicts = {
        "sdk": within,
        "torch": _listed(row.torch, versions.get("torch")),
        "plugin": _listed(row.plugin, versions.get("plugin")) if row.plugin else True,
        "driver": _driver(row, versions.get("driver")),
        "arch": (arch in row.archs) if arch and row.archs else None if row.archs else True,
    }
    return {n: None if v is False and n in row.unsure else v for n, v in verdicts.items()}


def _driver(row: Row, found: str | None) -> bool | None:
    if row.driver_min:
        return release(found) >= release(row.driver_min) if found and release(found) else None
    return _listed(row.driver, found)


def _listed(known: list[str], found: str | None) -> bool | None:
    if not known or not found:
        return None
    plain = found.partition("+")[0]
    return any(plain == one or fnmatchcase(plain, one) for one in known)


def published_together(known: Compatibility, plugin: str, torch: str) -> bool:
    """Says whether a row names this plug-in with this torch."""
    return any(
        _listed(row.plugin, plugin) is True and _listed(row.torch, torch) is True
        for row in known.rows
    )


def known_bad(known: Compatibility, facts: Versions) -> tuple[BadCombination, ...]:
    """Returns every combination known to fail all of whose facts were found."""
    return tuple(bad for bad in _not_refuted(known, facts) if all(map(facts.get, bad.when)))


def possibly_bad(known: Compatibility, facts: Versions) -> tuple[BadCombination, ...]:
    """Returns combinations known to fail that what was found does not refute, some of their facts
    being unknown.
    """
    return tuple(bad for bad in _not_refuted(known, facts) if unknown_facts(bad, facts))


def unknown_facts(bad: BadCombination, facts: Versions) -> tuple[str, ...]:
    """Returns the facts of a combination that nothing tells."""
    return tuple(name for name in bad.when if facts.get(name) is None)


def _not_refuted(known: Compatibility, facts: Versions) -> list[BadCombination]:
    return [
        bad
        for bad in known.bad
        if all((v := facts.get(name)) is None or fnmatchcase(v, p) for name, p in bad.when.items())
    ]
