import pytest

from firstlight.errors import UsageError
from firstlight.schedule.settings import SchedulerSettings

GOOD = {
    "max_sequences": 4,
    "max_batch_tokens": 16,
    "chunk_tokens": 8,
    "max_waiting": 10,
    "context_length": 60,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_waiting": 0, "context_length": -1}, "max_waiting is 0.*context_length is -1"),
        ({"max_batch_tokens": 3, "chunk_tokens": 3}, "below max_sequences"),
        ({"chunk_tokens": 17}, "above max_batch_tokens"),
    ],
)
def test_limits_out_of_range_are_all_named(changes: dict[str, int], message: str) -> None:
    SchedulerSettings(**GOOD)
    with pytest.raises(UsageError, match=message):
        SchedulerSettings(**GOOD | changes)
