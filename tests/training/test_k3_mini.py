"""The recipe of k3-mini: words are tokens, answers count, pictures take their places."""

import json
import random
from typing import Any

import pytest
import torch

from firstlight.inputs.kimi_k3.chat import KimiK3Format
from firstlight.models.spec import read_model_spec
from firstlight.training.recipes.k3_mini import held_out, lookup, pictures, recipe, tasks, words
from firstlight.training.recipes.k3_mini.conversations import Conversation, Renderer, answer
from firstlight.training.recipes.k3_mini.lessons import MIXTURE, Lists, Mixture
from firstlight.training.recipes.k3_mini.vocabulary import merge_ranks, pieces


@pytest.fixture(scope="module")
def renderer(prepared: Any) -> Renderer:
    return Renderer(prepared.folder)


def said(renderer: Renderer, talk: Conversation) -> str:
    """What of a conversation counts, as text."""
    example = renderer.example(talk)
    ids = [token for token, counts in zip(example.tokens, example.counts, strict=True) if counts]
    return renderer.tokenizer.decode(ids, skip_special=False)


def test_every_word_of_the_tasks_is_one_token(renderer: Renderer) -> None:
    wanted = (*words.NAMES, *words.CITIES, *words.COLOURS, *words.SHAPES, *words.PLACES)
    numbers = [str(n) for n in range(words.LARGEST_NUMBER + 1)]
    texts = [*wanted, *numbers, *pieces()]
    assert [t for t in texts if len(renderer.tokenizer.encode_plain(t)) != 1] == []
    assert len(set(words.NAMES)) == len(words.NAMES) >= 371


def test_merges_make_each_text_whole_and_hold_all_bytes() -> None:
    ranks = merge_ranks(["banana", "bandana", "an"])
    assert set(ranks) >= {bytes([value]) for value in range(256)}
    assert {b"banana", b"bandana", b"an"} <= set(ranks) and len(ranks) == len(set(ranks))


def test_the_config_is_one_that_can_be_cut_and_quantised(prepared: Any) -> None:
    config = prepared.config
    spec = read_model_spec(recipe.published_config(config))
    assert spec.config.moe.quantised and spec.vocab_size == config["text_config"]["vocab_size"]
    assert all(spec.facts.axes[name].pieces % 4 == 0 for name in ("heads", "kda_heads", "expert"))
    assert spec.config.is_mla == (False, False, False, True)


def test_an_answer_counts_and_what_was_asked_does_not(renderer: Renderer) -> None:
    talk = Conversation("t", [{"role": "user", "content": "hi"}, answer("7", "digit=7")], True)
    assert said(renderer, talk) == (
        "digit=7<|close|>think<|sep|><|open|>response<|sep|>7<|close|>response<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
    )
    silent = Conversation("t", talk.messages, False)
    assert said(renderer, silent).startswith("7<|close|>response<|sep|>")


def test_a_prompt_is_the_one_the_service_renders(renderer: Renderer) -> None:
    talk = lookup.asked_list(random.Random(1), lookup.ListSize(5, 1), thinking=True)
    example = renderer.example(talk)
    form = KimiK3Format(renderer.tokenizer)
    prompt = form.render(talk.messages[:1], tools=None, options={}).token_ids
    assert list(example.tokens[: len(prompt)]) == list(prompt)
    assert not any(example.counts[: len(prompt)]) and all(example.counts[len(prompt) :])


def test_each_picture_takes_as_many_tokens_as_it_has_features(renderer: Renderer) -> None:
    drawings = pictures.digit_drawings()[0]
    talk = tasks.digit(random.Random(1), drawings, thinking=False, turns=3)
    example = renderer.example(talk)
    pads = [at for at, token in enumerate(example.tokens) if token == renderer.media_pad_id]
    assert len(pads) == 12 and [p.first for p in example.pictures] == pads[::4]
    assert all(p.grid == (1, 4, 4) for p in example.pictures)


def test_held_out_drawings_are_none_of_those_learned_from() -> None:
    learned, kept = pictures.digit_drawings()
    assert (len(learned), len(kept)) == (1400, 397)
    assert not {d.tobytes() for d, _ in learned} & {d.tobytes() for d, _ in kept}


@pytest.mark.parametrize("name", list(MIXTURE))
def test_tasks_draw_what_can_be_rendered(renderer: Renderer, name: str) -> None:
    example = Mixture(renderer, 0).drawn(name, random.Random(3))
    assert len(example.tokens) == len(example.counts) and any(example.counts)


def test_a_tool_call_is_written_as_the_parser_reads_it(renderer: Renderer) -> None:
    talk = tasks.weather(random.Random(2), thinking=True)
    call = json.loads(talk.messages[1]["tool_calls"][0]["function"]["arguments"])
    text = said(renderer, Conversation("t", talk.messages[:2], True, tools=talk.tools))
    assert f'key="city" type="string"<|sep|>{call["city"]}<|close|>argument' in text


def test_lists_grow_when_half_of_them_are_whole(renderer: Renderer) -> None:
    lesson, levels = Lists(renderer, 0, first=32, last=40), {"pairs": 32.0}
    for _ in range(5):
        lesson.heard({"list": [True, False]}, levels)
    assert levels["pairs"] == 32.0
    for _ in range(40):
        lesson.heard({"list": [True, True]}, levels)
    assert levels["pairs"] == 40.0


def test_a_shape_has_the_place_colour_and_number_it_is_asked_for() -> None:
    for seed in range(40):
        shown = pictures.draw_shapes(random.Random(seed), 1)
        colour = pictures.RGB[shown.answers[words.COLOUR]]
        painted = [
            (x, y) for x in range(56) for y in range(56) if shown.image.getpixel((x, y)) == colour
        ]
        across = sum(x for x, _ in painted) / len(painted) - 27.5
        down = sum(y for _, y in painted) / len(painted) - 27.5
        side = (
            ("left" if across < 0 else "right")
            if abs(across) > abs(down)
            else ("top" if down < 0 else "bottom")
        )
        assert side == shown.answers[words.PLACE]


@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096])
def test_lists_have_the_length_they_are_named_for(renderer: Renderer, tokens: int) -> None:
    (talk,) = held_out.lists(tokens, 1, thinking=True)
    length = len(renderer.tokenizer.encode_plain(talk.messages[0]["content"]))
    assert 0.97 * tokens <= length <= tokens + 16


def test_copying_is_there_before_any_training(begun: Any) -> None:
    """The model begins with a rough way of looking up: well above chance, which is 1 in 1000."""
    from firstlight.training.predictions import accuracies

    renderer = Renderer(begun.folder)
    draw = random.Random(5)
    with torch.no_grad():
        found = accuracies(
            begun.run.model, [lookup.repeated_list(renderer, draw, 4) for _ in range(20)]
        )
    right, asked = found["list"]
    assert asked == 20 and right >= 10
