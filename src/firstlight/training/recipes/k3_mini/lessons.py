"""Owns k3-mini's lessons: lists repeated, pictures told by their features, and all tasks mixed.

A step's examples follow from its number, the seed and the levels alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.training.examples import Example, Picture
from firstlight.training.loop import Outcome, Scores, sequence_outcome
from firstlight.training.model import Trainable
from firstlight.training.recipes.k3_mini import lookup, pictures, tasks, words
from firstlight.training.recipes.k3_mini.conversations import Renderer

PAIRS = "pairs"  # level: pairs of the longest list
RIGHT = "right"  # level: moving share of lists answered whole
_MEMORY = 0.9
_NEXT = 0.5  # share of whole lists at which they grow

SHOWN_ANSWERS: Mapping[str, tuple[str, ...]] = {
    words.DIGIT: tuple("0123456789"),
    words.COLOUR: words.COLOURS,
    words.SHAPE: words.SHAPES,
    words.PLACE: words.PLACES,
    words.COUNT: tuple("1234"),
}


@dataclass(frozen=True)
class Lists:
    """Lists repeated in another order: the shortest way to learn matching by content. They grow
    by `growth` from `first` pairs to `last` while half of them are answered whole.
    """

    renderer: Renderer
    seed: int
    tokens: int = 2048
    first: int = 32
    last: int = 256
    growth: float = 1.2

    def outcome(self, model: Trainable, step: int, levels: dict[str, float]) -> Outcome:
        """Lists of one length, between half the present level and all of it."""
        draw = random.Random(f"lists-{self.seed}-{step}")
        most = int(levels.setdefault(PAIRS, float(self.first)))
        count = draw.randint(max(4, most // 2), most)
        sequences = max(1, self.tokens // (2 * count * lookup.TOKENS_OF_PAIR))
        examples = [lookup.repeated_list(self.renderer, draw, count) for _ in range(sequences)]
        return sequence_outcome(model, examples)

    def heard(self, scores: Scores, levels: dict[str, float]) -> None:
        """Lets lists grow."""
        whole = scores["list"]
        right = sum(whole) / len(whole)
        levels[RIGHT] = _MEMORY * levels.get(RIGHT, 0.0) + (1 - _MEMORY) * right
        if levels[RIGHT] > _NEXT and levels[PAIRS] < self.last:
            levels[PAIRS] = min(levels[PAIRS] * self.growth, float(self.last))
            levels[RIGHT] = 0.0


@dataclass(frozen=True)
class Tower:
    """Pictures alone: the mean of a picture's features shall point at the embeddings of the words
    that answer questions about it.
    """

    renderer: Renderer
    seed: int
    at_once: int = 64
    digits: float = 0.6
    sharpness: float = 0.4

    def outcome(self, model: Trainable, step: int, levels: dict[str, float]) -> Outcome:
        """Draws pictures and asks all that can be asked of them."""
        draw = random.Random(f"tower-{self.seed}-{step}")
        shown = [self.drawn(draw) for _ in range(self.at_once)]
        features_BD = self.features(model, shown)
        losses: list[Tensor] = []
        scores: dict[str, list[bool]] = {}
        for asked, known in SHOWN_ANSWERS.items():
            rows = [row for row, picture in enumerate(shown) if asked in picture.answers]
            if not rows:
                continue
            logits = features_BD[rows] @ self.directions(model, known).t() * self.sharpness
            right = torch.tensor([known.index(shown[row].answers[asked]) for row in rows])
            losses.append(functional.cross_entropy(logits, right, reduction="sum"))
            scores[asked] = (logits.argmax(-1) == right).tolist()
        return Outcome(torch.stack(losses).sum() / len(shown), 0, scores)

    def heard(self, scores: Scores, levels: dict[str, float]) -> None:
        """Pictures do not become harder."""

    def drawn(self, draw: random.Random) -> pictures.Shown:
        """A digit to learn from, or shapes."""
        if draw.random() < self.digits:
            learned, _ = pictures.digit_drawings()
            return pictures.draw_digit(draw, *draw.choice(learned), varied=True)
        return pictures.draw_shapes(draw, draw.choice((1, 1, 1, 2, 3, 4)))

    def features(self, model: Trainable, shown: Sequence[pictures.Shown]) -> Tensor:
        """The mean feature of each picture, [B, D]."""
        first = 0
        placed: list[Picture] = []
        for picture in shown:
            patches, size = self.renderer.picture(picture.image)
            placed.append(patches._replace(first=first))
            first += size
        _, rows = model.features(placed)
        mean_BD: Tensor = rows.view(len(shown), -1, rows.shape[1]).mean(1)
        return mean_BD

    def directions(self, model: Trainable, known: Sequence[str]) -> Tensor:
        """The embeddings of words, which this lesson leaves as they are."""
        ids = [self.renderer.single(word) for word in known]
        weight: Tensor = model.module.embed.weight
        return weight.detach()[ids]


MIXTURE: Mapping[str, float] = {
    "list": 0.05,
    "lookup": 0.18,
    "digit": 0.20,
    "shapes": 0.16,
    "reverse": 0.05,
    "count words": 0.10,
    "add": 0.10,
    "greet": 0.01,
    "tool": 0.15,
}


@dataclass(frozen=True)
class Mixture:
    """All tasks: shares are of the tokens of a step. Lists are asked about at every length up to
    `pairs`, some with `filler` lines among them, half of all conversations without thinking.
    """

    renderer: Renderer
    seed: int
    tokens: int = 2560
    pairs: int = 250
    filler: int = 60
    shares: Mapping[str, float] = field(default_factory=lambda: MIXTURE)

    def outcome(self, model: Trainable, step: int, levels: dict[str, float]) -> Outcome:
        """Draws examples by their shares until the step is full."""
        draw = random.Random(f"mixture-{self.seed}-{step}")
        examples: list[Example] = []
        spent = dict.fromkeys(self.shares, 0.0)
        # What a task has had so far in the run follows from its levels, so shares hold over steps.
        for name in spent:
            spent[name] = levels.get(f"spent {name}", 0.0)
        total = 0
        while total < self.tokens:
            name = min(spent, key=lambda task: (spent[task] / self.shares[task], task))
            example = self.drawn(name, draw)
            spent[name] += len(example.tokens)
            total += len(example.tokens)
            examples.append(example)
        least = min(spent[name] / self.shares[name] for name in spent)
        for name in spent:
            levels[f"spent {name}"] = spent[name] - least * self.shares[name]
        return sequence_outcome(model, examples)

    def heard(self, scores: Scores, levels: dict[str, float]) -> None:
        """The mixture stays as it is."""

    def drawn(self, name: str, draw: random.Random) -> Example:
        """One example of a task."""
        thinking = draw.random() < 0.5
        if name == "list":
            count = _log_uniform(draw, 8, self.pairs // 2)
            return lookup.repeated_list(self.renderer, draw, count)
        if name == "lookup":
            size = lookup.ListSize(
                pairs=_log_uniform(draw, 4, self.pairs),
                filler=draw.choice((0, 0, _log_uniform(draw, 1, self.filler))),
                turns=draw.choice((1, 4, 8)),
            )
            return self.renderer.example(lookup.asked_list(draw, size, thinking=thinking))
        if name == "digit":
            learned, _ = pictures.digit_drawings()
            turns = draw.choice((1, 3))
            talk = tasks.digit(draw, learned, thinking=thinking, turns=turns)
        elif name == "shapes":
            turns = draw.choice((1, 3))
            talk = tasks.shapes(draw, thinking=thinking, turns=turns)
        elif name == "tool":
            talk = tasks.weather(draw, thinking=thinking, turns=draw.choice((1, 3)))
        else:
            turns = draw.choice((1, 6))
            talk = tasks.small_text(draw, name, thinking=thinking, turns=turns)
        return self.renderer.example(talk)


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    drawn: float = least * (most / least) ** draw.random()
    return round(drawn)
