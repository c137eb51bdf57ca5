from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import UsageError
from firstlight.settings.serve import ServeSettings
from firstlight.settings.tiers import TierSettings, parse_tiers

sizes = st.integers(1, 2**40)


@given(host=st.none() | sizes, disk=st.none() | sizes, folder=st.sampled_from(["/a", "b/c:d"]))
def test_what_is_written_is_read(host: int | None, disk: int | None, folder: str) -> None:
    parts = [] if host is None else [f"host={host}"]
    parts += [] if disk is None else [f"disk={folder}:{disk}"]
    expected = TierSettings(host or 0, disk or 0, Path(folder) if disk else None)
    assert parse_tiers(",".join(parts)) == expected


def test_units_and_order_are_free() -> None:
    want = TierSettings(64 * 2**20, 10 * 2**30, Path("/path"))
    assert parse_tiers(" disk=/path:10GiB , host=64MiB") == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu=1GiB", "neither host=SIZE nor disk"),
        ("host", "neither"),
        ("host=much", "tiers: host: 'much' is not a size"),
        ("host=0", "leave it out"),
        ("host=1GiB,host=2GiB", "given twice"),
        ("disk=10GiB", "lacks folder or size"),
        ("disk=/path:", "tiers: disk"),
        ("disk=:10GiB", "lacks folder or size"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ServeSettings(model=Path("m"), tiers=text)
