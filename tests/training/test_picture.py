"""The picture of a loss is well-formed and shows what the numbers say."""

import xml.etree.ElementTree as tree

import pytest

from firstlight.training.picture import HEIGHT, WIDTH, Mark, loss_svg

SVG = "{http://www.w3.org/2000/svg}"


def line_of(text: str) -> list[tuple[float, float]]:
    (line,) = tree.fromstring(text).iter(f"{SVG}polyline")
    return [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]


def test_a_falling_loss_goes_down_within_the_frame() -> None:
    points = line_of(loss_svg([(n, 10.0 / (n + 1)) for n in range(5000)], [], "run"))
    assert len(points) <= 400 and points == sorted(points)
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # y counts downward
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in points)


@pytest.mark.parametrize("history", [[], [(0, 1.0)], [(0, float("nan"))], [(3, 0.5), (4, 0.5)]])
def test_short_and_broken_histories_draw(history: list[tuple[int, float]]) -> None:
    assert tree.fromstring(loss_svg(history, [Mark(0, "a")], "run")).tag == f"{SVG}svg"


def test_names_are_escaped_and_marks_outside_left_out() -> None:
    text = loss_svg([(0, 1.0), (9, 0.1)], [Mark(0, "a<b"), Mark(50, "later")], "x & y")
    words = [element.text for element in tree.fromstring(text).iter(f"{SVG}text")]
    assert "a<b" in words and "x & y" in words and "later" not in words
