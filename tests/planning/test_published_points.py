"""What others measured with Kimi K3, beside predictions whose constants come from elsewhere."""

import pytest

import planning_guides


@pytest.fixture(scope="module")
def points(k3_work):
    return {one.what: one for one in planning_guides.compared(k3_work)}


def test_weights_are_as_an_engine_reported_them(points):
    point = points["weights of a rank, 8xMI325X, tp 8"]
    assert abs(point.error) < 0.01


@pytest.mark.parametrize("concurrency", [1, 64])
def test_measured_tpot_lies_in_the_band(points, concurrency):
    point = points[f"TPOT, 8xB300, tp 8, 8K in, 1K out, concurrency {concurrency}"]
    assert point.predicted.holds(point.measured)


def test_one_stage_a_card_has_the_better_prompt_rate_as_was_measured(points):
    cut, staged = (
        points[f"prompt tokens/s a card, 16xGB200, {text}"] for text in ("tp 16", "tp 1 x pp 16")
    )
    assert cut.measured < staged.measured
    assert cut.predicted.expected < staged.predicted.expected


def test_verdicts_on_what_fits_agree_with_what_was_published(k3_work):
    assert [one.what for one in planning_guides.fits(k3_work) if not one.agrees] == []


def test_the_page_of_errors_shows_todays_predictions(k3_work):
    assert planning_guides.ERRORS.read_text() == planning_guides.errors_page(k3_work)


def test_the_guides_show_todays_planner():
    page = planning_guides.PLANNING.read_text()
    title, fleet, more = planning_guides.EXAMPLES[0]
    assert planning_guides.example(title, fleet, more) in page
