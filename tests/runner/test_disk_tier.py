from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from firstlight.errors import BadInput, EnvironmentProblem
from firstlight.runner.disk_tier import DiskTier
from firstlight.runner.tier_files import (
    HEADER_BYTES,
    VERSION,
    check_header,
    read_header,
    remove_stale,
    require_room,
)

LAYOUT = {"rank": 0, "tp": 2, "groups": [[1, [["torch.int8", [2, 3]]]]]}


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, 1000, LAYOUT)
    yield tier
    tier.close()


def rewrite(path: Path, **changes: object) -> None:
    header = msgspec.to_builtins(read_header(path)) | changes
    data = msgspec.json.encode(header).ljust(HEADER_BYTES)
    with path.open("r+b") as file:
        file.write(data)


def test_rows_are_read_as_written_and_the_file_goes_at_the_end(tier: DiskTier) -> None:
    row, read = np.arange(100, dtype=np.uint8), np.empty(100, np.uint8)
    tier.write(900, [row[:30], row[30:]])
    tier.read(900, [read[:50], read[50:]])
    assert (read == row).all() and tier.path.stat().st_size == HEADER_BYTES + 1000
    tier.close()
    assert not tier.path.exists()
    tier.close()


def test_another_layout_or_version_is_refused_by_name(tier: DiskTier) -> None:
    check_header(tier.path, LAYOUT)
    with pytest.raises(BadInput, match="tp 2, not 4"):
        check_header(tier.path, {**LAYOUT, "tp": 4})
    rewrite(tier.path, version=VERSION + 1)
    with pytest.raises(BadInput, match=f"version {VERSION + 1}; this program reads {VERSION}"):
        check_header(tier.path, LAYOUT)


def test_files_of_dead_processes_go_and_others_stay(tier: DiskTier, tmp_path: Path) -> None:
    owner = msgspec.to_builtins(read_header(tier.path).owner)
    names = {"dead": owner | {"started": 1.0}, "far": owner | {"started": 1.0, "host": "other"}}
    for name, of in names.items():
        path = tmp_path / f"firstlight-tier-{name}.bin"
        path.write_bytes(tier.path.read_bytes())
        rewrite(path, owner=of)
    alien = tmp_path / "firstlight-tier-alien.bin"
    alien.write_bytes(b"somebody's photographs")
    assert [path.name for path in remove_stale(tmp_path)] == ["firstlight-tier-dead.bin"]
    assert alien.exists() and tier.path.exists()


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="are free there; lower disk="):
        DiskTier(tmp_path / "new", 2**60, LAYOUT)
    assert not list((tmp_path / "new").iterdir())


def test_all_ranks_are_counted(tmp_path: Path) -> None:
    require_room(tmp_path / "to be" / "made", 1000, ranks=8)
    with pytest.raises(EnvironmentProblem, match="the disk tiers of 1024 ranks take"):
        require_room(tmp_path, 2**50, ranks=1024)


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentProblem, match="cannot keep a cache tier here"):
        DiskTier(tmp_path / "file", 10, LAYOUT)
