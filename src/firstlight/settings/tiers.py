"""Owns how `--tiers` is written: host memory and a folder that hold cache of each rank."""

from pathlib import Path
from typing import NamedTuple

from firstlight.errors import UsageError
from firstlight.units import parse_bytes

_EXAMPLE = "write for example host=64GiB,disk=/var/cache/firstlight:500GiB"


class TierSettings(NamedTuple):
    """Bytes of each rank in host memory and in a file of `folder`; 0 for none."""

    host_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None


def parse_tiers(text: str) -> TierSettings:
    """Reads `host=64MiB,disk=/path:10GiB`; either part may be left out, empty text means none.

    Raises UsageError saying which part is wrong and how it is written.
    """
    host, disk, folder = 0, 0, None
    seen: set[str] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, value = part.partition("=")
        if not separator or name not in ("host", "disk"):
            raise UsageError(
                f"tiers: {part!r} is neither host=SIZE nor disk=FOLDER:SIZE; {_EXAMPLE}"
            )
        if name in seen:
            raise UsageError(f"tiers: {name} is given twice; {_EXAMPLE}")
        seen.add(name)
        if name == "host":
            host = _size(name, value)
            continue
        place, colon, size = value.rpartition(":")
        if not colon or not place:
            raise UsageError(f"tiers: disk={value} lacks folder or size; {_EXAMPLE}")
        disk, folder = _size(name, size), Path(place)
    return TierSettings(host, disk, folder)


def _size(name: str, text: str) -> int:
    try:
        size = parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"tiers: {name}: {error}") from None
    if size < 1:
        raise UsageError(f"tiers: {name} has size {text}; leave it out for none")
    return size
