"""Published rows, quirks and failures: what fits, what contradicts, and what nobody said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.platforms.compatibility import (
    NOTHING_KNOWN,
    find_row,
    known_bad,
    possibly_bad,
    published_together,
    quirks_on,
    read_compatibility,
)
from firstlight.platforms.versions import local_part, release

MUSA = read_compatibility("musa")
GOOD = {"sdk": "4.3.5", "torch": "2.7.1", "plugin": "2.7.1", "driver": "3.3.5-server"}
VERSIONS = st.sampled_from([None, "1.3.0", "2.7.1", "2.9.1", "2.11.0.post1", "2.11.0.post2", "9.0"])


def names(versions, arch=31):
    return {quirk.name for quirk in quirks_on(MUSA, versions, arch)}


def test_every_quirk_row_and_failure_has_a_link():
    for vendor in ("musa", "cuda"):
        known = read_compatibility(vendor)
        records = [*known.rows, *known.quirks, *known.bad, *known.architectures]
        assert known.rows and all(record.link.startswith("https://") for record in records)
        assert len({quirk.name for quirk in known.quirks}) == len(known.quirks)


def test_a_platform_without_data_knows_nothing():
    assert read_compatibility("abacus") == NOTHING_KNOWN
    assert find_row(NOTHING_KNOWN, GOOD, 31).row is None


def test_versions_that_belong_together_are_verified():
    match = find_row(MUSA, GOOD, 31)
    assert match.verified and match.row is not None and match.row.id == "m27"


@pytest.mark.parametrize(
    ("changes", "arch", "wrong", "unknown"),
    [
        ({"driver": "2.7.2"}, 31, ("driver",), ()),
        ({"driver": None}, 31, (), ("driver",)),
        ({"torch": "2.9.1"}, 31, ("torch",), ()),
        ({}, 21, ("arch",), ()),
        ({}, 0, (), ("arch",)),
        ({"sdk": "5.2.0", "torch": "2.11.0.post2", "plugin": "2.11.0.post2"}, 31, (), ("driver",)),
        ({"sdk": "5.2.0", "torch": "2.11.0", "plugin": "2.11.0.post1"}, 22, (), ("driver", "arch")),
    ],
)
def test_what_contradicts_and_what_nobody_said_are_told_apart(changes, arch, wrong, unknown):
    match = find_row(MUSA, GOOD | changes, arch)
    assert (match.wrong, match.unknown) == (wrong, unknown) and not match.verified


def test_a_plug_in_may_carry_another_patch_number_than_its_torch():
    assert published_together(MUSA, "2.7.0", "2.7.1")
    assert not published_together(MUSA, "2.7.1", "2.7.0")
    assert not published_together(MUSA, "2.5.0", "2.7.1")


def test_a_quirk_holds_within_its_versions_only():
    name = "module_memory_calls"
    assert name in names({"plugin": "2.11.0.post1+musa5.2.0"})
    assert name not in names({"plugin": "2.11.0.post2+musa5.2.0"})
    assert "out_dtype_garbage" not in names({"plugin": "2.9.1"})
    assert "graphs_off" in names(GOOD, 22) and "graphs_off" not in names(GOOD, 31)


@given(
    versions=st.fixed_dictionaries({"plugin": VERSIONS, "sdk": VERSIONS}),
    arch=st.sampled_from([0, 21, 22, 31]),
)
def test_knowing_less_never_turns_a_workaround_off(versions, arch):
    on = names(versions, arch)
    assert on <= names({**versions, "plugin": None}, arch)
    assert on <= names({**versions, "sdk": None}, arch)
    assert on <= names(versions, 0)
    assert names({}, 0) == {quirk.name for quirk in MUSA.quirks}


def test_a_failing_combination_needs_all_its_facts_and_is_suspected_with_some():
    others = {"sdk": "4.3.5", "plugin": "2.7.1", "mooncake": ""}
    facts = {"kernel": "5.15.0-127-generic", "driver": "2.7.0-rc3-0822", **others}
    assert [bad.name for bad in known_bad(MUSA, facts)] == ["kernel and driver"]
    assert known_bad(MUSA, facts | {"driver": None}) == ()
    assert [bad.name for bad in possibly_bad(MUSA, facts | {"driver": None})] == [
        "kernel and driver"
    ]
    assert possibly_bad(MUSA, facts | {"driver": "3.3.5"}) == ()


@given(
    facts=st.fixed_dictionaries(
        {
            "kernel": st.sampled_from([None, "5.15.0-127-generic", "6.1.0"]),
            "driver": st.sampled_from([None, "", "2.7.0-rc3-0822", "3.3.5"]),
            "sdk": st.sampled_from([None, "4.0.1", "4.2.0", "4.3.5"]),
            "plugin": st.sampled_from([None, "", "1.3.0", "2.7.1"]),
            "mooncake": st.sampled_from([None, "", "0.0.0.1", "0.3.6"]),
        }
    ),
    name=st.sampled_from(["kernel", "driver", "sdk", "plugin", "mooncake"]),
)
def test_a_failure_is_never_ruled_out_by_what_is_not_known(facts, name):
    failing = {bad.name for bad in known_bad(MUSA, facts)}
    suspected = {bad.name for bad in possibly_bad(MUSA, facts)}
    assert not failing & suspected
    less = {bad.name for bad in possibly_bad(MUSA, facts | {name: None})}
    still = {bad.name for bad in known_bad(MUSA, facts | {name: None})}
    assert failing | suspected <= less | still
    touched = {bad.name for bad in MUSA.bad if name in bad.when}
    assert less & touched <= less and not still & touched


def test_with_nothing_known_nothing_is_ruled_out_and_what_is_not_there_cannot_fail():
    assert possibly_bad(MUSA, {}) == tuple(MUSA.bad) and known_bad(MUSA, {}) == ()
    gone = dict.fromkeys(("kernel", "driver", "sdk", "plugin", "mooncake"), "")
    assert possibly_bad(MUSA, gone) == known_bad(MUSA, gone) == ()


def test_releases_compare_with_their_posts():
    ordered = ["2.9.1", "2.9.1.post1", "2.11.0", "2.11.0.post1", "2.11.0.post2+musa5.2.0", "2.13"]
    assert sorted(ordered, key=release) == ordered
    assert release("nightly") == ()
    assert (
        local_part("2.11.0+musa5.2.0", "musa") == "5.2.0" and local_part("2.13+cpu", "musa") == ""
    )
