"""The bundled k3-mini passes its smoke profile at every layout; copies damaged in one way, and
services that alter its answers, fail the check that is there for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from altered_service import Answers, altered
from firstlight.accept.report import Report
from firstlight.accept.smoke import SmokeSettings, run_smoke
from firstlight.accept.smoke_abilities import IMAGES, REASONING, TOOLS
from k3_mini_copies import BUNDLED, DAMAGES, copy_k3_mini
from live_service import LiveService

pytestmark = pytest.mark.slow
FLAGS = ("--kv-budget-bytes", "64MiB", "--threads", "1", "--served-model-name", "k3-mini")


def smoke(url: str, profile: str = "k3-mini") -> Report:
    return run_smoke(SmokeSettings(url, profile=profile, timeout_seconds=120))


def failed(report: Report) -> dict[str, str]:
    return {check.name: check.detail for check in report.failed}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    live = LiveService(BUNDLED, tmp_path_factory.mktemp("k3-mini") / "log", *FLAGS)
    try:
        yield live.wait_ready().url
    finally:
        live.close()


@pytest.fixture(scope="module")
def kept() -> Answers:
    """What the service answered, so that a smoke run of each altered one asks it only once."""
    return {}


def smoke_started(model: Path, log: Path, *flags: str) -> Report:
    live = LiveService(model, log, *FLAGS, *flags)
    try:
        return smoke(live.wait_ready().url)
    finally:
        live.close()


def test_it_passes_with_every_check_decided(service: str) -> None:
    report = smoke(service)
    assert [(c.name, c.detail) for c in report.all_checks if c.status != "ok"] == []
    told = [row for row in report.data["answers"] if row["shown"]]
    assert any(row["images"] for row in told) and any(row["calls"] for row in told)


@pytest.mark.thorough
@pytest.mark.parametrize("flags", ["--tp 2", "--tp 4", "--dtype bfloat16"])
def test_it_passes_when_cut_or_rounded(tmp_path: Path, flags: str) -> None:
    assert failed(smoke_started(BUNDLED, tmp_path / "log", *flags.split())) == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("damage", "checks"),
    [
        ("layers swapped", {"lookup", "likelihood of lists", "likelihood of other text"}),
        ("expert doubled", {"likelihood of other text"}),
        ("images are zeros", {"answers depend on the image", "digits", "shapes"}),
        ("wrong template", {"lookup", "digits", "small text", "tool"}),
    ],
)
def test_a_damaged_copy_fails(tmp_path: Path, damage: str, checks: set[str]) -> None:
    model = copy_k3_mini(tmp_path / "model", damage)
    assert checks <= set(failed(smoke_started(model, tmp_path / "log")))


def test_every_damage_is_tried() -> None:
    tried = test_a_damaged_copy_fails.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {damage for damage, _ in tried} == set(DAMAGES)


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("same answer", {"digits", "lookup", "answers depend on the image"}),
        ("streamed reasoning differs", {"stream equals whole: an answer about an image"}),
        (
            "streamed call differs",
            {"tool calls are well-formed", "stream equals whole: a tool call"},
        ),
        ("calls are no JSON", {TOOLS, "tool"}),
        ("thoughts as text", {REASONING}),
        ("blind", {"answers depend on the image", "digits", "shapes"}),
        ("text only", {IMAGES}),
    ],
)
def test_an_altered_service_fails(
    service: str, kept: Answers, fault: str, checks: set[str]
) -> None:
    with altered(service, fault, kept) as url:
        assert checks <= set(failed(smoke(url)))


def test_what_alters_nothing_passes(service: str, kept: Answers) -> None:
    for _ in range(2):  # asked of the service, then answered from what it said
        with altered(service, "nothing", kept) as url:
            assert failed(smoke(url)) == {}


def test_text_only_is_told_and_not_failed_where_no_images_are_demanded(
    service: str, kept: Answers
) -> None:
    with altered(service, "text only", kept) as url:
        checks = {check.name: check for check in smoke(url, "unknown").all_checks}
    assert checks["images are read"].status == "unknown"
    assert "text only" in checks["images are read"].detail
    assert "images" not in checks
