"""Which units lie beside each other."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from firstlight.runner.unit_places import runs


@given(st.sets(st.integers(0, 40)))
def test_runs_are_the_longest_without_a_gap(numbers: set[int]) -> None:
    units = sorted(numbers)
    found = [units[run] for run in runs(units)]
    assert [unit for run in found for unit in run] == units
    assert all(run == list(range(run[0], run[-1] + 1)) for run in found)
    assert all(before[-1] + 1 < run[0] for before, run in pairwise(found))
