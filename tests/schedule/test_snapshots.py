"""Recurrent state in the scheduler: where it is kept, resumed from, given up and never shared."""

from typing import Any

import pytest

from firstlight.schedule.admission import Hold
from firstlight.schedule.request import FinishReason, MediaItem


def prompt(count: int, family: int = 0) -> list[int]:
    return [(5 * i + 11 * family) % 50 for i in range(count)]


def spans(plans: list[Any]) -> list[tuple[int, int]]:
    return [(step.start, step.count) for plan in plans for step in plan.steps]


def test_a_prompt_is_cut_where_its_state_is_kept(make_service: Any) -> None:
    service = make_service(model="hybrid")
    first = service.add(prompt(15), max_tokens=2)
    plans = [service.step() for _ in range(4)]
    assert spans(plans) == [(0, 8), (8, 4), (12, 3), (15, 1)]
    assert [len(plan.saves) for plan in plans] == [0, 1, 0, 0]
    assert not any(plan.restores for plan in plans)
    assert service.output(first) == service.expected(first)


def test_a_repeated_prompt_resumes_from_the_snapshot(make_service: Any) -> None:
    service = make_service(model="hybrid")
    first = service.add(prompt(15))
    service.run()
    second = service.add(prompt(15))
    plan = service.step()
    assert spans([plan]) == [(12, 3)] and len(plan.restores) == 1 and not plan.saves
    service.run()
    assert service.output(first) == service.output(second) == service.expected(second)
    assert service.updates[second][-1].num_cached == 12
    assert service.cache.usage().slots.hits == 1


def test_a_conversation_goes_on_from_where_its_prompt_ended(make_service: Any) -> None:
    service = make_service(model="hybrid")
    first = service.add(prompt(15), max_tokens=9)
    service.run()
    longer = service.add([*prompt(15), *service.output(first), 1, 2, 3])
    service.run()
    assert service.output(longer) == service.expected(longer)
    assert service.updates[longer][-1].num_cached == 12  # pages reach further, the state does not


def test_the_next_turn_goes_on_from_the_end_of_the_last(make_service: Any) -> None:
    service = make_service(model="hybrid", turn_tokens=4)
    first = service.add(prompt(15), max_tokens=11)
    service.run()
    longer = service.add([*prompt(15), *service.output(first), 1, 2, 3])
    service.run()
    assert service.output(longer) == service.expected(longer)
    assert service.updates[longer][-1].num_cached == 24  # of 25 computed tokens


def test_a_turn_keeps_one_snapshot_however_long_it_is(make_service: Any) -> None:
    service = make_service(model="hybrid", turn_tokens=4)
    service.add(prompt(15), max_tokens=40)
    plans = []
    while service.scheduler.has_work:
        plans.append(service.step())
    slots = service.cache.usage().slots
    assert sum(len(plan.saves) for plan in plans) == 11 and slots.cached == 2
    assert slots.evictions == 0


def test_a_turn_that_was_resumed_from_is_kept(make_service: Any) -> None:
    service = make_service(model="hybrid", turn_tokens=4)
    first = service.add(prompt(15), max_tokens=30)
    while len(service.output(first)) < 4:
        service.step()
    fork = service.add([*prompt(15), *service.output(first), 7, 7, 7])
    service.run()
    assert service.updates[fork][-1].num_cached == 16
    again = service.add([*prompt(15), *service.output(first)[:4], 9])
    service.run()
    assert service.updates[again][-1].num_cached == 16
    assert service.output(again) == service.expected(again)


def test_shared_text_gets_a_snapshot_when_it_is_seen_again(make_service: Any) -> None:
    service = make_service(model="hybrid", num_blocks=65)
    found = []
    for family in (1, 2, 3, 4):
        one = service.add([*prompt(21), *prompt(9, family)])
        service.run()
        assert service.output(one) == service.expected(one)
        found.append(service.updates[one][-1].num_cached)
    assert found == [0, 0, 20, 20]


def test_a_hint_keeps_every_end_of_a_block_and_prefers_it(make_service: Any) -> None:
    service = make_service(model="hybrid", num_slots=4)
    hinted = service.add(prompt(11), max_tokens=6, cache_hint="conversation")
    service.run()
    for family in (1, 2):  # more snapshots of equal length than there are slots
        service.add(prompt(11, family))
        service.run()
    longer = service.add([*prompt(11), *service.output(hinted), 1])
    service.run()
    assert service.updates[longer][-1].num_cached == 16
    assert service.output(longer) == service.expected(longer)


def test_a_prefix_without_a_snapshot_of_its_own_is_computed(make_service: Any) -> None:
    service = make_service(model="hybrid")
    service.add(prompt(22))
    service.run()
    shorter = service.add(prompt(15))
    service.run()
    assert service.output(shorter) == service.expected(shorter)
    assert service.updates[shorter][-1].num_cached == 0


def test_text_before_another_image_is_shared_and_behind_it_is_not(make_service: Any) -> None:
    def image(first: int, digest: str) -> MediaItem:
        return MediaItem(first=first, count=4, digest=digest, grid=(1, 2, 2), patches=b"")

    service = make_service()
    cached = []
    for media in ((image(9, "a"),), (image(9, "a"),), (image(9, "b"),), (image(10, "a"),), ()):
        request_id = service.add(prompt(19), media=media)
        service.run()
        assert service.output(request_id) == service.expected(request_id)
        cached.append(service.updates[request_id][-1].num_cached)
    assert cached == [0, 16, 8, 8, 8]


def test_who_is_preempted_resumes_from_its_snapshot(make_service: Any) -> None:
    service = make_service(model="hybrid", num_blocks=11)
    old = service.add(prompt(10, 1), max_tokens=20)
    young = service.add(prompt(10, 2), max_tokens=20)
    yielding, resumed = None, []
    while service.scheduler.has_work:
        plan = service.step()
        yielding = yielding or service.request(young)
        resumed += [copy for new in plan.new for copy in plan.restores if new.request_id == young]
    assert yielding is not None and yielding.num_preemptions > 0 and resumed
    for one in (old, young):
        assert service.output(one) == service.expected(one)
    slots = service.cache.usage().slots
    assert slots.used == 0 and slots.hits >= len(resumed)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_snapshot_under_way_is_dropped_with_its_request(make_service: Any, end: str) -> None:
    service = make_service(model="hybrid")
    request_id = service.add(prompt(7))
    if end == "failed":
        service.rank.poison[request_id] = 4
    plan = service.begin()
    assert plan.saves
    if end == "cancelled":
        service.cancel(request_id)
    service.finish()
    slots = service.cache.usage().slots
    assert (slots.used, slots.cached) == (0, 0)
    again = service.add(prompt(7))
    service.run()
    assert service.output(again) == service.expected(again)
    assert service.updates[again][-1].num_cached == 0


def test_the_slot_of_a_save_under_way_is_given_away_when_its_request_is_cancelled(
    make_service: Any,
) -> None:
    service = make_service(model="hybrid", num_slots=3)
    leaving = service.add(prompt(7))
    target = service.begin().saves[0].target
    service.cancel(leaving)
    others = [service.add(prompt(7, family), max_tokens=6) for family in (1, 2)]
    service.finish()
    taken = {slots[0][0] for slots in (new.blocks for new in service.step().new)}
    assert target in taken
    service.run()
    for one in others:
        assert service.output(one) == service.expected(one)


def test_a_snapshot_goes_in_the_plan_that_restores_from_it(make_service: Any) -> None:
    service = make_service(model="hybrid", num_slots=3)
    service.add(prompt(7))
    service.run()
    again, other = service.add(prompt(7)), service.add(prompt(5, 1))
    plan = service.step()
    (restore,) = plan.restores
    assert [new.blocks[0] for new in plan.new] == [[restore.target], [restore.source]]
    service.run()
    for one in (again, other):
        assert service.output(one) == service.expected(one)


def test_two_equal_newcomers_share_the_last_snapshot(make_service: Any) -> None:
    service = make_service(model="hybrid", num_slots=3)
    service.add(prompt(7))
    service.run()
    both = [service.add(prompt(7), max_tokens=9) for _ in range(2)]
    plan = service.step()
    assert len(plan.new) == 2 and len(plan.restores) == 1  # the second lives in the snapshot's slot
    service.run()
    for one in both:
        assert service.output(one) == service.expected(one)
        assert service.updates[one][-1].num_cached == 4


def test_live_slots_have_priority_and_the_rest_wait(make_service: Any) -> None:
    service = make_service(model="hybrid", num_slots=3)
    requests = [service.add(prompt(9, family), max_tokens=3) for family in range(4)]
    held = set()
    while service.scheduler.has_work:
        service.step()
        held.add(service.scheduler.counts.held_back)
        assert len(service.scheduler._running) <= 2
    assert Hold.NO_SLOT.value in held
    for one in requests:
        assert service.output(one) == service.expected(one)
        assert service.updates[one][-1].finish is FinishReason.LENGTH


def test_a_model_without_recurrent_state_is_not_cut_and_copies_nothing(make_service: Any) -> None:
    service = make_service(model="paged", num_slots=0)
    service.add(prompt(15), max_tokens=1)
    plans = [service.step() for _ in range(2)]
    assert spans(plans) == [(0, 8), (8, 7)]
    assert not any(plan.restores or plan.saves for plan in plans)
    assert service.cache.usage().slots is None
