from firstlight.schedule.request import Request, SamplingParams, SubmittedRequest
from firstlight.schedule.step_draft import StepDraft


def make_request(row: int) -> Request:
    params = SamplingParams(max_tokens=4)
    submitted = SubmittedRequest(request_id=f"r{row}", prompt_ids=[1, 2, 3], params=params)
    request = Request(submitted, arrival=row)
    request.row = row
    return request


def test_what_is_taken_back_leaves_no_step_and_gives_its_tokens_back() -> None:
    draft, first, second = StepDraft(1, budget=10), make_request(0), make_request(1)
    draft.add_new(first, 3, [[1]])
    draft.add(second, 2, [])
    assert draft.budget == 5
    draft.remove(second)
    draft.remove(second)
    plan = draft.to_plan([7])
    assert draft.budget == 7 and [step.row for step in plan.steps] == [0]
    assert (plan.step, plan.released, plan.num_tokens) == (1, [7], 3)
