from firstlight.runner.protocol import StepDone, joint_result
from firstlight.schedule.step import FailedRow, SampledToken, StepResult


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
