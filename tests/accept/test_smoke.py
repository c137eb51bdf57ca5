"""Holds that a sound service passes the smoke run and that each kind of broken one fails it."""

from collections.abc import Callable
from typing import Any

import pytest

from firstlight.accept.report import Report
from firstlight.accept.smoke import SmokeSettings, run_smoke
from firstlight.errors import EnvironmentProblem, UsageError

Start = Callable[..., Any]


def smoke(url: str) -> Report:
    return run_smoke(SmokeSettings(url, answer_tokens=64, timeout_seconds=20))


def test_a_sound_service_passes_every_check(start_service: Start) -> None:
    report = smoke(start_service("sees").url)
    unsure = {c.name for c in report.all_checks if c.status != "ok"}
    assert unsure == {"reasoning is told apart", "tool calls are well-formed"}
    assert report.failed == () and len(report.all_checks) > 30


def test_a_service_of_text_only_passes_and_is_called_so(start_service: Start) -> None:
    report = smoke(start_service().url)
    assert report.failed == ()
    told = {c.name: c.detail for c in report.all_checks if c.status == "unknown"}
    assert "text only: HTTP 400" in told["images are read"]


def test_a_service_with_chat_only_passes(start_service: Start) -> None:
    report = smoke(start_service("chat only").url)
    assert report.failed == ()
    assert "completions answers" in [c.name for c in report.all_checks if c.status == "unknown"]


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("crashes on images", "images are read"),
        ("constant", "answers depend on the prompt"),
        ("loops", "no token loops"),
        ("echo", "answers are not the prompt"),
        ("blind", "copying"),
        ("leaks control strings", "no control strings"),
        ("leaks instructions", "no control strings"),
        ("leaks roles", "no control strings"),
        ("never stops", "answers end themselves"),
        ("mangles UTF-8", "copying beyond ASCII"),
        ("stream differs", "stream equals whole (chat)"),
        ("no end of stream", "stream equals whole (completions)"),
        ("no stop", "stop strings are honoured"),
        ("long answers", "max_tokens is honoured"),
        ("wrong finish reason", "max_tokens is honoured"),
        ("usage does not add up", "usage adds up"),
        ("bad logprobs", "logprobs are sound"),
        ("one choice", "n = 2 gives two answers"),
        ("requests mix", "8 at once answer as alone"),
        ("breaks on disconnect", "a disconnect leaves the service answering"),
        ("any model", "refused: unknown model (chat)"),
        ("crashes on bad input", "refused: empty messages (chat)"),
        ("plain errors", "refused: a body that is no JSON"),
    ],
)
def test_a_broken_service_fails_the_check_of_its_fault(
    start_service: Start, fault: str, check: str
) -> None:
    report = smoke(start_service(fault).url)
    assert check in [failed.name for failed in report.failed]
    assert report.exit_code == 1


def test_a_service_that_is_blind_to_its_images_fails(start_service: Start) -> None:
    report = smoke(start_service("sees", "sees nothing").url)
    assert {c.name for c in report.failed} == {"answers depend on the image", "images"}


def test_nothing_listening_is_said_with_the_address() -> None:
    with pytest.raises(EnvironmentProblem, match=r"127\.0\.0\.1:9/v1/models"):
        smoke("http://127.0.0.1:9")


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"k3-mini, smollm2-135m, unknown"):
        run_smoke(SmokeSettings("http://127.0.0.1:9", profile="nope"))
