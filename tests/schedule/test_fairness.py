"""Who gets the tokens of a step: no answer is stalled, no prompt starves, the oldest goes on."""

from typing import Any

import pytest


def prompt(count: int, family: int = 0) -> list[int]:
    return [(5 * i + 11 * family) % 50 for i in range(count)]


def counts(service: Any, plan: Any) -> dict[str, int]:
    """Tokens each request computes in a step."""
    names = {request.row: request.request_id for request in service.scheduler._running}
    return {names[step.row]: step.count for step in plan.steps}


@pytest.mark.parametrize(("share", "most"), [(1.0, 15), (0.5, 8), (0.25, 4), (0.01, 1)])
def test_prompts_get_their_share_beside_answers(make_service: Any, share: float, most: int) -> None:
    service = make_service(num_blocks=65, chunk_tokens=16, prompt_share=share)
    answer = service.add(prompt(3), max_tokens=30)
    service.step()
    long = service.add(prompt(50, 1), max_tokens=2)
    first = counts(service, service.begin())
    assert (first[answer], first[long]) == (1, most)
    service.finish()
    service.run()
    for one in (answer, long):
        assert service.output(one) == service.expected(one)


def test_alone_a_prompt_gets_the_whole_step(make_service: Any) -> None:
    service = make_service(chunk_tokens=16, prompt_share=0.1)
    one = service.add(prompt(40))
    assert counts(service, service.begin()) == {one: 16}
    service.finish()


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_answers_get_a_token_in_every_step_whatever_prompts_come(
    make_service: Any, share: float
) -> None:
    service = make_service(num_blocks=129, max_sequences=8, prompt_share=share)
    answers = [service.add(prompt(2, family), max_tokens=20) for family in range(3)]
    service.step()
    for family in range(3, 8):
        service.add(prompt(40, family), max_tokens=1)
    for _ in range(15):
        planned = counts(service, service.begin())
        assert all(planned[one] == 1 for one in answers)
        service.finish()


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_short_prompt_does_not_queue_behind_long_ones(make_service: Any, share: float) -> None:
    service = make_service(num_blocks=129, max_sequences=8, prompt_share=share)
    for family in range(3):
        service.add(prompt(50, family), max_tokens=1)
    service.step()
    short, began = service.add(prompt(5, 7), max_tokens=1), service.num_steps
    while not service.output(short):
        service.step()
    assert service.num_steps - began <= 3


def test_the_first_of_a_priority_advances_while_others_keep_coming(make_service: Any) -> None:
    """A stream of newcomers that each want the whole cache cannot hold it up."""
    service = make_service(num_blocks=13, max_sequences=4, prompt_share=0.25)
    old = service.add(prompt(30), max_tokens=12)
    for family in range(1, 30):
        service.add(prompt(30, family), max_tokens=12)
        service.step()
    assert service.output(old) == service.expected(old)
    service.run(5000)
    assert all(service.output(one) == service.expected(one) for one in service.updates)
