from typing import Any

import pytest

from firstlight.errors import RequestError
from firstlight.schedule.admission import Hold, RefusalCode
from firstlight.schedule.request import SamplingParams, SubmittedRequest


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "numbers"),
    [
        ([], 4, RefusalCode.EMPTY, ["one"]),
        ([5, -1], 4, RefusalCode.BAD_TOKEN, ["-1"]),
        ([5, 2**32], 4, RefusalCode.BAD_TOKEN, [str(2**32)]),
        ([1] * 60, 4, RefusalCode.TOO_LONG, ["60", "61"]),
        ([1] * 61, 0, RefusalCode.TOO_LONG, ["61", "60"]),
        ([1] * 48, 4, RefusalCode.TOO_LARGE, ["48", "49"]),
    ],
)
def test_what_can_never_be_served_is_refused_with_numbers(
    make_service: Any, prompt: list[int], max_tokens: int, code: RefusalCode, numbers: list[str]
) -> None:
    service = make_service(num_blocks=13)
    with pytest.raises(RequestError) as caught:
        service.add(prompt, max_tokens=max_tokens)
    assert caught.value.code == code.value and caught.value.parameter == "prompt"
    assert all(number in str(caught.value) for number in numbers)
    assert service.scheduler.counts.refused == {code.value: 1} and not service.scheduler.has_work
    service.scheduler.check_integrity()


def test_what_just_fits_is_served(make_service: Any) -> None:
    service = make_service(num_blocks=13)
    with_output, without = service.add([1] * 47), service.add([2] * 48, max_tokens=0)
    service.run()
    assert service.output(with_output) == service.expected(with_output)
    assert len(service.output(with_output)) == 1 and service.output(without) == []


def test_a_full_queue_refuses_until_somebody_starts(make_service: Any) -> None:
    service = make_service(max_waiting=2)
    service.add([1]), service.add([2])
    with pytest.raises(RequestError, match="2 requests are waiting") as caught:
        service.add([3])
    assert caught.value.code == "queue_full" and caught.value.parameter is None
    service.step()
    service.scheduler.add(
        SubmittedRequest(request_id="later", prompt_ids=[3], params=SamplingParams(max_tokens=1))
    )
    assert service.scheduler.counts.received == 4


def test_an_id_names_one_unfinished_request(make_service: Any) -> None:
    service = make_service()
    again = service.submitted[service.add([1, 2])]
    with pytest.raises(RequestError) as caught:
        service.scheduler.add(again)
    assert caught.value.code == "duplicate_request_id"
    service.run()
    service.updates[again.request_id].clear()
    service.scheduler.add(again)
    service.run()
    assert service.scheduler.counts.received == 3


def test_the_reason_for_waiting_is_told(make_service: Any) -> None:
    for limits, prompts, hold in (
        ({"max_sequences": 1}, ([1], [2]), Hold.NO_ROW),
        ({"max_batch_tokens": 8}, ([1] * 8, [2]), Hold.NO_TOKENS),
        ({"num_blocks": 5}, ([1] * 10, [2] * 10), Hold.NO_BLOCKS),
    ):
        service = make_service(**limits)
        for prompt in prompts:
            service.add(prompt)
        service.step()
        assert service.scheduler.counts.held_back == hold.value
        service.run()
        assert service.scheduler.counts.held_back is None


def test_nobody_is_admitted_while_a_running_request_is_short_of_blocks(make_service: Any) -> None:
    service = make_service(num_blocks=7, max_sequences=6)
    for first in (1, 2):
        service.add([first] * 7, max_tokens=17)
    contested = 0
    service.step()
    service.add([3], max_tokens=1, priority=1)
    while service.scheduler.has_work:
        plan = service.step()
        counts = service.scheduler.counts
        if counts.held_back == Hold.CONTESTED.value:
            contested += 1
            assert not plan.new
    assert contested and service.scheduler.counts.preemptions


def test_blocks_of_a_half_computed_prompt_are_not_given_to_a_newcomer(make_service: Any) -> None:
    service = make_service(num_blocks=13)
    service.add([1] * 36, max_tokens=1)
    service.add([2] * 12, max_tokens=1)
    service.step()
    assert service.scheduler.counts.held_back == Hold.NO_BLOCKS.value
    service.run()
    assert service.scheduler.counts.preemptions == 0
