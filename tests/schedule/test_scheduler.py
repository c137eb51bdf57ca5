from typing import Any

import pytest

from firstlight.schedule.request import FinishReason
from firstlight.schedule.step import SampledToken, StepResult


def prompt(count: int, family: int = 0) -> list[int]:
    return [(5 * i + 11 * family) % 50 for i in range(count)]


def test_a_prompt_is_computed_in_chunks_and_sampled_once_at_its_end(make_service: Any) -> None:
    service = make_service()
    request_id = service.add(prompt(19), max_tokens=2)
    plans = [service.step() for _ in range(4)]
    spans = [(s.start, s.count, s.sample) for plan in plans for s in plan.steps]
    assert spans == [(0, 8, False), (8, 8, False), (16, 3, True), (19, 1, True)]
    assert [len(plan.new) for plan in plans] == [1, 0, 0, 0]
    assert service.output(request_id) == service.expected(request_id)
    assert service.updates[request_id][-1].finish is FinishReason.LENGTH


def test_a_plan_holds_differences_only(make_service: Any) -> None:
    service = make_service()
    service.add(prompt(7), max_tokens=6)
    plans = [service.step() for _ in range(4)]
    assert plans[0].new[0].blocks == [[1, 2], [1, 2]]
    assert plans[0].new[0].token_ids == prompt(7)
    steps = [plan.steps[0] for plan in plans]
    assert [len(step.new_tokens) for step in steps] == [0, 1, 1, 1]
    assert [step.new_blocks for step in steps] == [[], [], [[3], [3]], []]


def test_answers_go_on_while_a_long_prompt_is_computed(make_service: Any) -> None:
    service = make_service()
    talking = [service.add(prompt(3, family), max_tokens=20) for family in (1, 2)]
    service.step()
    service.add(prompt(50), max_tokens=1)
    for length in range(2, 9):
        assert service.step().num_tokens > 2
        assert [len(service.output(one)) for one in talking] == [length, length]


def test_a_short_prompt_overtakes_long_ones(make_service: Any) -> None:
    service = make_service(num_blocks=80, max_sequences=8, max_batch_tokens=16, chunk_tokens=8)
    for family in (1, 2, 3):
        service.add(prompt(55, family), max_tokens=1)
    for _ in range(3):
        service.step()
    short = service.add(prompt(6), max_tokens=1)
    plan = service.step()
    assert service.output(short) == service.expected(short)
    assert [step.count for step in plan.steps] == [8, 2, 6]
    service.run()


def test_the_first_of_all_is_not_starved_by_shorter_ones(make_service: Any) -> None:
    service = make_service(num_blocks=200, max_sequences=8, max_batch_tokens=8, chunk_tokens=8)
    first = service.add(prompt(50), max_tokens=1)
    for step in range(20):
        service.add(prompt(12, step + 1), max_tokens=1)
        service.step()
    assert service.updates[first] and service.updates[first][-1].finish is FinishReason.LENGTH
    service.run()


def test_requests_start_by_priority_then_arrival(make_service: Any) -> None:
    service = make_service(max_sequences=1)
    names = [service.add([n], max_tokens=1, priority=p) for n, p in enumerate((1, 0, 1, -1))]
    started: list[str] = []
    while service.scheduler.has_work:
        started += [new.request_id for new in service.step().new]
    assert started == [names[3], names[1], names[0], names[2]]


def test_the_last_running_request_yields_and_gives_the_same_output(make_service: Any) -> None:
    service = make_service(num_blocks=9)
    old = service.add(prompt(10, 1), max_tokens=20)
    young = service.add(prompt(10, 2), max_tokens=20)
    service.step(), service.step()
    yielding = service.request(young)
    service.run()
    assert yielding.num_preemptions == service.scheduler.counts.preemptions > 0
    for one in (old, young):
        assert service.output(one) == service.expected(one)
    finished = [service.updates[one][-1].finish for one in (old, young)]
    assert finished == [FinishReason.LENGTH, FinishReason.LENGTH]


def test_who_scores_its_prompt_is_swapped_and_goes_on_where_it_was(make_service: Any) -> None:
    service = make_service(num_blocks=9, tiers={"host": 20, "disk": 0})
    service.add(prompt(10, 1), max_tokens=20)
    young = service.add(prompt(10, 2), max_tokens=20, prompt_logprobs=1)
    service.step(), service.step()
    yielding = service.request(young)
    service.run()
    counts = service.scheduler.counts
    assert yielding.num_preemptions == counts.swaps > 0
    assert counts.computed_tokens == 2 * (10 + 20 - 1), "no token was computed twice"
    scores = [part for update in service.updates[young] if (part := update.prompt_logprobs)]
    assert sum(len(part.tokens) for part in scores) == 10 - 1
    assert service.output(young) == service.expected(young)


def test_who_yields_after_being_planned_is_taken_out_of_the_plan(make_service: Any) -> None:
    service = make_service(num_blocks=20, chunk_tokens=1)
    talking = [service.add(prompt(2, family), max_tokens=40) for family in (1, 2)]
    for _ in range(6):
        service.step()
    urgent = service.add(prompt(40, 3), max_tokens=1, priority=-1)
    while not service.output(urgent):
        assert service.step().num_tokens >= 1
    assert service.scheduler.counts.preemptions
    service.run()
    for one in (*talking, urgent):
        assert service.output(one) == service.expected(one)


def test_a_repeated_prompt_is_found_in_the_cache(make_service: Any) -> None:
    service = make_service()
    first = service.add(prompt(18))
    service.run()
    second = service.add(prompt(18))
    plan = service.step()
    assert [(s.start, s.count) for s in plan.steps] == [(16, 2)]
    service.run()
    assert service.output(first) == service.output(second) == service.expected(second)
    assert service.updates[second][-1].num_cached == 16
    counts = service.scheduler.counts
    assert (counts.prompt_tokens, counts.cached_tokens) == (36, 16)


def test_growth_ends_at_the_context(make_service: Any) -> None:
    service = make_service(context_length=12)
    request_id = service.add(prompt(10), max_tokens=99)
    service.run()
    assert len(service.output(request_id)) == 2
    assert service.updates[request_id][-1].finish is FinishReason.LENGTH


def test_an_end_token_ends_it_after_the_least_output(make_service: Any) -> None:
    service = make_service()
    plain = service.add(prompt(5), max_tokens=9)
    service.run()
    output = service.output(plain)
    stopped = service.add(prompt(5), max_tokens=9, end_token_ids=tuple(output))
    longer = service.add(prompt(5), max_tokens=9, end_token_ids=tuple(output), min_tokens=4)
    service.run()
    assert service.output(stopped) == output[:1] and service.output(longer) == output[:4]
    assert service.updates[longer][-1].finish is FinishReason.STOP


def test_a_prompt_without_output_is_computed_and_ends(make_service: Any) -> None:
    service = make_service()
    request_id = service.add(prompt(10), max_tokens=0, prompt_logprobs=1)
    plans = [service.step(), service.step()]
    assert not any(step.sample for plan in plans for step in plan.steps)
    scores = [u.prompt_logprobs for u in service.updates[request_id] if u.prompt_logprobs]
    assert [(part.first, len(part.tokens)) for part in scores] == [(1, 8), (9, 1)]
    assert service.updates[request_id][-1].finish is FinishReason.LENGTH
    assert not service.scheduler.has_work


def test_a_failed_row_ends_alone_and_is_not_reused(make_service: Any) -> None:
    service = make_service()
    failing, other = service.add(prompt(12)), service.add(prompt(12))
    service.rank.poison[failing] = 12
    service.run()
    last = service.updates[failing][-1]
    assert (last.finish, last.error) == (FinishReason.ERROR, "logits are not finite")
    assert service.output(other) == service.expected(other)
    again = service.add(prompt(12))
    service.run()
    assert service.output(again) == service.expected(again)


def test_a_rank_that_forgets_a_token_ends_the_request_with_an_error(make_service: Any) -> None:
    service = make_service()
    request_id = service.add(prompt(3))
    plan = service.scheduler.schedule()
    updates = service.scheduler.update(StepResult(plan.step, [], [], [], 0.0))
    assert [(u.request_id, u.finish) for u in updates] == [(request_id, FinishReason.ERROR)]
    assert not service.scheduler.has_work


@pytest.mark.parametrize("moment", ["waiting", "prompt", "answering", "under way", "finished"])
def test_cancel_gives_everything_back_at_any_moment(make_service: Any, moment: str) -> None:
    service = make_service(max_sequences=1)
    if moment == "waiting":
        service.add(prompt(30), max_tokens=30)
        service.step()
    request_id = service.add(prompt(10), max_tokens=3)
    steps = {"waiting": 0, "prompt": 1, "answering": 3, "under way": 1, "finished": 9}[moment]
    for _ in range(steps):
        service.step()
    if moment == "under way":
        service.begin()
    service.cancel(request_id, request_id, "unknown")
    service.finish()
    done = FinishReason.LENGTH if moment == "finished" else FinishReason.CANCELLED
    assert service.updates[request_id][-1].finish is done
    service.run()
    assert all(group.used == 0 for group in service.cache.usage().groups)


def test_rows_are_released_to_the_ranks_before_they_are_used_again(make_service: Any) -> None:
    service = make_service(max_sequences=2)
    first = service.add(prompt(4), max_tokens=1)
    assert service.step().released == []
    assert service.scheduler.schedule() is None
    second = service.add(prompt(4, 1), max_tokens=1)
    plan = service.step()
    assert plan.released == [0] and plan.new[0].row == 0
    for one in (first, second):
        assert service.output(one) == service.expected(one)


def test_a_result_must_answer_the_step_under_way(make_service: Any) -> None:
    service = make_service()
    service.add(prompt(4))
    plan = service.scheduler.schedule()
    with pytest.raises(AssertionError):
        service.scheduler.schedule()
    with pytest.raises(AssertionError):
        service.scheduler.update(StepResult(plan.step + 1, [], [], [], 0.0))


def test_a_token_that_was_not_asked_for_is_ignored(make_service: Any) -> None:
    service = make_service()
    request_id = service.add(prompt(12))
    plan = service.scheduler.schedule()
    stray = SampledToken(plan.steps[0].row, 7, None)
    assert service.scheduler.update(StepResult(plan.step, [stray], [], [], 0.0)) == []
    assert service.request(request_id).num_output == 0


@pytest.mark.parametrize("damage", ["row", "queue", "count", "blocks"])
def test_check_integrity_finds_damage(make_service: Any, damage: str) -> None:
    service = make_service()
    request = service.request(service.add(prompt(4)))
    service.step()
    scheduler = service.scheduler
    if damage == "row":
        scheduler._rows.take()
    elif damage == "queue":
        scheduler._waiting.add(request)
    elif damage == "count":
        scheduler._tally.received += 1
    else:
        service.cache.release(request)
    with pytest.raises(AssertionError):
        scheduler.check_integrity()


@pytest.mark.parametrize("model", ["paged", "hybrid"])
def test_others_advance_beside_a_request_longer_than_the_device(
    make_service: Any, model: str
) -> None:
    far = {"host": 8, "disk": 80}
    service = make_service(
        num_blocks=25, tiers=far, model=model, context_length=300, chunk_tokens=8
    )
    long = service.add(prompt(240, 1), max_tokens=8)
    service.step()
    others = [service.add(prompt(9, n), max_tokens=6) for n in (2, 3)]
    while not all(service.updates[one] and service.updates[one][-1].finish for one in others):
        before = service.request(long).num_computed
        service.step()
        assert service.request(long).num_computed > before, "the oldest always advances"
    assert not service.output(long), "others ended while the long prompt was computed"
    service.run()
    for one in (long, *others):
        assert service.output(one) == service.expected(one)
