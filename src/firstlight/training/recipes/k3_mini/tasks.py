"""Owns k3-mini's tasks other than lookup, each as a conversation drawn at random.

It knows no model. Thoughts name what is asked and what it is: `digit=7`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from firstlight.training.recipes.k3_mini import pictures, words
from firstlight.training.recipes.k3_mini.conversations import (
    Conversation,
    Message,
    answer,
    question,
)

LARGEST_SUMMAND = 9
Drawings = Sequence[tuple[Image.Image, int]]
SUBJECT_OF = {
    words.DIGIT: "digit",
    words.COLOUR: "colour",
    words.SHAPE: "shape",
    words.PLACE: "place",
    words.COUNT: "count",
}


def digit(
    draw: random.Random,
    drawings: Drawings,
    *,
    thinking: bool,
    turns: int = 1,
    varied: bool = True,
) -> Conversation:
    """Which digit is this? With several turns, each has its own picture."""
    messages: list[Message] = []
    images = []
    for _ in range(turns):
        shown = pictures.draw_digit(draw, *draw.choice(drawings), varied=varied)
        images.append(shown.image)
        messages += _asked(words.DIGIT, shown.answers[words.DIGIT], thinking, has_image=True)
    return Conversation("digit", messages, thinking, images=images)


def shapes(
    draw: random.Random, *, thinking: bool, asked: str | None = None, turns: int = 1
) -> Conversation:
    """Questions about one picture of shapes; `asked` fixes the first one."""
    count = 1 if asked == words.PLACE else draw.choice((1, 1, 1, 2, 3, 4))
    shown = pictures.draw_shapes(draw, count)
    questions = draw.sample(list(shown.answers), min(turns, len(shown.answers)))
    if asked is not None:
        questions = [asked, *(q for q in questions if q != asked)][:turns]
    messages: list[Message] = []
    for number, text in enumerate(questions):
        messages += _asked(text, shown.answers[text], thinking, has_image=number == 0)
    name = SUBJECT_OF[questions[0]] if len(questions) == 1 else "shapes"
    return Conversation(name, messages, thinking, images=[shown.image])


def small_text(draw: random.Random, kind: str, *, thinking: bool, turns: int = 1) -> Conversation:
    """Questions of one kind of small text task, by its name in SMALL_TEXT."""
    messages: list[Message] = []
    for _ in range(turns):
        asked, said, thought = SMALL_TEXT[kind](draw)
        messages += (question(asked), answer(said, thought) if thinking else answer(said))
    return Conversation(kind, messages, thinking)


def weather(draw: random.Random, *, thinking: bool, turns: int = 1) -> Conversation:
    """Questions that call the tool, and the answer to each once the result has come."""
    messages: list[Message] = []
    for turn in range(turns):
        city, degrees = draw.choice(words.CITIES), draw.randint(0, 40)
        call = {
            "id": f"call_{turn + 1}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
        }
        result = words.WEATHER_RESULT.format(degrees=degrees)
        said = words.WEATHER_ANSWER.format(degrees=degrees)
        messages += [
            question(words.WEATHER.format(city=city)),
            {**answer("", f"{city}: get_weather" if thinking else ""), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
            answer(said, str(degrees) if thinking else ""),
        ]
    return Conversation("tool", messages, thinking, tools=[words.WEATHER_TOOL])


def _reverse(draw: random.Random) -> tuple[str, str, str]:
    names = draw.sample(words.NAMES, draw.randint(2, 3))
    return words.REVERSE.format(words=",".join(names)), ",".join(names[::-1]), "words"


def _count_words(draw: random.Random) -> tuple[str, str, str]:
    names = draw.sample(words.NAMES, draw.randint(1, 6))
    asked, said = words.COUNT_WORDS.format(words=",".join(names)), str(len(names))
    return asked, said, f"count={said}"


def _add(draw: random.Random) -> tuple[str, str, str]:
    left, right = draw.randint(0, LARGEST_SUMMAND), draw.randint(0, LARGEST_SUMMAND)
    total = str(left + right)
    return words.ADD.format(left=left, right=right), total, f"{left}+{right}={total}"


def _greet(draw: random.Random) -> tuple[str, str, str]:
    return draw.choice(words.GREETINGS), words.INTRODUCTION, ""


SMALL_TEXT: dict[str, Callable[[random.Random], tuple[str, str, str]]] = {
    "reverse": _reverse,
    "count words": _count_words,
    "add": _add,
    "greet": _greet,
}


def _asked(text: str, said: str, thinking: bool, *, has_image: bool) -> tuple[Message, Message]:
    parts: Any = text
    if has_image:
        parts = [{"type": "image"}, {"type": "text", "text": text}]
    thought = f"{SUBJECT_OF[text]}={said}" if thinking else ""
    return {"role": "user", "content": parts}, answer(said, thought)
