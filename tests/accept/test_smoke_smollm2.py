"""SmolLM2, of which the generic profile knows nothing, passes it as a service of text."""

from pathlib import Path

import pytest

from firstlight.accept.smoke import SmokeSettings, run_smoke
from live_service import LiveService

pytestmark = pytest.mark.thorough


def test_it_passes_the_profile_for_unknown_models(smollm2_gguf: Path, tmp_path: Path) -> None:
    flags = ("--kv-budget-bytes", "512MiB", "--threads", "1")
    live = LiveService(smollm2_gguf, tmp_path / "log", *flags)
    try:
        settings = SmokeSettings(live.wait_ready().url, profile="unknown", timeout_seconds=300)
        report = run_smoke(settings)
    finally:
        live.close()
    assert [(check.name, check.detail) for check in report.failed] == []
    images = next(check for check in report.all_checks if check.name == "images are read")
    assert images.status == "unknown" and "text only" in images.detail
