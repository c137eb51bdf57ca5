from firstlight.runner.protocol import StepDone, joint_result, joint_tiers
from firstlight.schedule.step import (
    FailedRow,
    LostUnit,
    SampledToken,
    StepResult,
    TierFlow,
    TierReport,
)


def done(rank, *failed, tokens=()):
    rows = [FailedRow(row, f"row {row} on rank {rank}") for row in failed]
    return StepDone(rank, StepResult(7, list(tokens), [], rows, 0.5), 0, 0)


def test_a_row_that_fails_on_any_rank_fails():
    tokens = [SampledToken(2, 11, None)]
    result = joint_result([done(0, 1, tokens=tokens), done(1, 1, 2), done(2)])
    assert [(row.row, row.reason) for row in result.failed] == [
        (1, "row 1 on rank 0"),
        (2, "row 2 on rank 1"),
    ]
    assert result.tokens == tokens and result.step == 7


def test_the_first_rank_answers_when_all_agree():
    reports = [done(0, 3), done(1, 3)]
    assert joint_result(reports) is reports[0].result


def test_state_beyond_the_device_is_there_when_all_ranks_have_it() -> None:
    reports = [
        TierReport([1, 2], [LostUnit(0, 7, "a bit flipped")], [TierFlow("host", True, 5, 1.0)]),
        TierReport([2, 3], [LostUnit(0, 7, "cut off"), LostUnit(1, 9, "full")]),
    ]
    joint = joint_tiers(reports)
    assert joint.pending == [1, 2, 3] and joint.flows == reports[0].flows
    assert {(one.group, one.unit) for one in joint.lost} == {(0, 7), (1, 9)}
