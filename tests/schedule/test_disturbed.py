"""Arrivals, cancels, prefix hits, preemptions and failed rows in any order change no output."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.errors import RequestError
from firstlight.schedule.request import FinishReason, MediaItem
from firstlight.schedule.scheduler import LOST_AGAIN

TEXTS = [[(7 * i * i + 3 * family) % 50 for i in range(30)] for family in range(2)]


def image(first: int, count: int, digest: str) -> MediaItem:
    return MediaItem(first=first, count=count, digest=digest, grid=(1, 2, 2), patches=b"")


# One image more, another image, the same one elsewhere: the text before them is the same.
IMAGES = [
    (image(6, 5, "a"),),
    (image(6, 5, "a"), image(13, 2, "b")),
    (image(6, 5, "a"), image(13, 2, "c")),
    (image(7, 5, "a"),),
]

arrivals = st.fixed_dictionaries(
    {
        "family": st.sampled_from([0, 0, 0, 0, 1]),
        "length": st.one_of(st.sampled_from([11, 12, 18, 25]), st.integers(1, 30)),
        "own_tail": st.one_of(st.just([]), st.lists(st.integers(0, 49), max_size=3)),
        "max_tokens": st.sampled_from([0, 1, 5, 20, 40, 40]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "salt": st.sampled_from(["", "", "", "", "", "other"]),
        "cache_hint": st.sampled_from(["", "", "key"]),
        "media": st.sampled_from([(), (), (), (), (), *IMAGES]),
        "end_token_ids": st.sampled_from([(), (), (3, 14, 15)]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "poison_after": st.sampled_from([None] * 12 + [-20, -3, -2, 0, 1, 5]),
    }
)
cancels = st.tuples(st.sampled_from(["cancel", "cancel under way"]), st.integers(0, 10**6))
programs = st.lists(
    st.one_of(arrivals, arrivals, arrivals, cancels, st.integers(1, 6)), min_size=20, max_size=50
)
shapes = st.fixed_dictionaries(
    {
        "capacity": st.integers(30, 60),
        "block_size": st.sampled_from([1, 2, 4, 5]),
        "model": st.sampled_from(
            ["paged", "windows", "hybrid window", "hybrid", "hybrid", "two recurrent"]
        ),
        "num_slots": st.sampled_from([2, 3, 3, 4, 4, 5, 7, 8, 10, 16]),
        "window_spare": st.sampled_from([None, 0, 1, 4, 9]),
        "turn_tokens": st.sampled_from([1, 6, 64]),
        "max_sequences": st.sampled_from([1, 4, 6, 6]),
        "max_batch_tokens": st.integers(6, 20),
        "chunk_tokens": st.integers(1, 6),
        "context_length": st.sampled_from([32, 60]),
        "tiers": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {
                    "host": st.sampled_from([0, 1, 2, 5, 12]),
                    "disk": st.sampled_from([0, 0, 3, 9, 40]),
                    "seed": st.integers(0, 99),
                    "slowest": st.sampled_from([0, 0, 1, 4]),
                    "lost_share": st.sampled_from([0.0, 0.0, 0.02, 0.3]),
                    "seconds": st.sampled_from([1.0, 1.0, 1.0, 0.0]),
                }
            ),
        ),
        "prompt_share": st.sampled_from([1.0, 1.0, 0.3, 0.01]),
        "allocator": st.sampled_from(["paged", "dynamic"]),
    }
)


def arrive(service: Any, arrival: dict[str, Any]) -> None:
    fields = dict(arrival)
    family, length = fields.pop("family"), fields.pop("length")
    prompt = TEXTS[family][:length] + fields.pop("own_tail")
    poison_after = fields.pop("poison_after")
    request_id = f"r{len(service.submitted)}"
    try:
        service.add(prompt, **fields)
    except RequestError:
        del service.submitted[request_id], service.updates[request_id]
        service.submitted[request_id + " refused"] = None  # ids stay unique
    else:
        if poison_after is not None:
            service.rank.poison[request_id] = len(prompt) + poison_after


def perform(service: Any, action: Any) -> None:
    if isinstance(action, dict):
        arrive(service, action)
    elif isinstance(action, int):
        for _ in range(action):
            service.step()
    elif service.updates:
        victim = list(service.updates)[action[1] % len(service.updates)]
        if action[0] == "cancel under way":
            service.begin()
        service.cancel(victim)
        service.finish()


def check_outputs(service: Any) -> None:
    for request_id, updates in service.updates.items():
        output, expected = service.output(request_id), service.expected(request_id)
        finish = updates[-1].finish
        if finish in (FinishReason.CANCELLED, FinishReason.ERROR):
            assert output == expected[: len(output)]
        else:
            assert output == expected and finish is not None
        failed = request_id in service.rank.poison or updates[-1].error == LOST_AGAIN
        assert failed or finish is not FinishReason.ERROR, "a failure spread to another request"
        assert updates[-1].num_cached < len(service.submitted[request_id].prompt_ids)


def check_scores(service: Any) -> None:
    """Prompt log-probabilities come once each, in order, and all of them if it completes."""
    for request_id, updates in service.updates.items():
        parts = [update.prompt_logprobs for update in updates if update.prompt_logprobs]
        tokens = [score.token_id for part in parts for score in part.tokens]
        prompt = service.submitted[request_id].prompt_ids
        wanted = service.submitted[request_id].params.prompt_logprobs is not None
        assert tokens == (prompt[1 : len(tokens) + 1] if wanted else [])
        assert [part.first for part in parts] == [
            1 + sum(len(part.tokens) for part in parts[:i]) for i in range(len(parts))
        ]
        if wanted and updates[-1].finish in (FinishReason.STOP, FinishReason.LENGTH):
            assert len(tokens) == len(prompt) - 1


def check_idle(service: Any) -> None:
    counts, usage = service.scheduler.counts, service.cache.usage()
    assert service.scheduler.schedule() is None
    assert counts.waiting == counts.running == usage.num_requests == 0
    assert all(group.used == 0 for group in usage.groups)
    assert not any(place.held for group in usage.groups for place in group.far)
    assert counts.received == sum(counts.finished.values()) + sum(counts.refused.values())
    assert counts.output_tokens == sum(map(len, map(service.output, service.updates)))


def check_emptied(service: Any) -> None:
    """Whatever is not empty after all was forgotten is leaked."""
    service.cache.forget("other weights")
    service.scheduler.check_integrity()
    groups = service.cache.usage().groups
    assert all(group.empty == group.usable for group in groups)
    assert all(place.empty == place.usable for group in groups for place in group.far)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(shape=shapes, program=programs)
def test_any_program_gives_undisturbed_outputs(
    make_service: Any, shape: dict[str, Any], program: list[Any]
) -> None:
    num_blocks = 1 + shape.pop("capacity") // shape["block_size"]
    service = make_service(num_blocks=num_blocks, **shape)
    for action in program:
        perform(service, action)
        service.scheduler.check_integrity()
    # The first request advances in every step and is never preempted, so this many steps do; with
    # tiers it may wait for what is slow or lost.
    rest = [service.submitted[key] for key in service.updates]
    most = sum(len(one.prompt_ids) + one.params.max_tokens for one in rest)
    most *= 1 if service.rank.far is None else 10
    service.run(most_steps=service.num_steps + most)
    check_outputs(service)
    check_scores(service)
    check_idle(service)
    check_emptied(service)
