import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import UsageError
from firstlight.settings.objectives import OBJECTIVES, choose_limits

optional = st.one_of(st.none(), st.integers(1, 20000))


def test_steps_grow_from_latency_to_throughput() -> None:
    order = [choose_limits(name, max_sequences=64) for name in OBJECTIVES]
    assert list(OBJECTIVES) == ["latency", "balanced", "throughput"]
    assert order == sorted(order) and len({limits.chunk_tokens for limits in order}) == 3


@given(st.sampled_from(list(OBJECTIVES)), st.integers(1, 5000), optional, optional)
def test_what_is_given_stands_and_the_rest_fits_it(
    name: str, sequences: int, batch: int | None, chunk: int | None
) -> None:
    limits = choose_limits(
        name, max_sequences=sequences, max_batch_tokens=batch, chunk_tokens=chunk
    )
    assert batch in (None, limits.max_batch_tokens) and chunk in (None, limits.chunk_tokens)
    if batch is None:
        assert limits.max_batch_tokens >= max(sequences, limits.chunk_tokens)
    if chunk is None:
        assert limits.chunk_tokens <= limits.max_batch_tokens


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UsageError, match="fast is unknown; it is one of latency, balanced"):
        choose_limits("fast", max_sequences=1)
