"""Owns the judgement of answers: right ones by group, and the ways in which a broken model shows.

Knows nothing of HTTP; it reads replies to samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firstlight.accept.report import Check
from firstlight.accept.samples import Profile, Sample, calls_problem, is_right
from firstlight.accept.smoke_service import Reply

LONGEST_LOOP_UNIT = 12
LEAST_LOOP_CHARACTERS = 16
_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|\[/?INST\]|</?s>|<<SYS>>|<(?:start|end)_of_turn>|<\uff5c[^<>]{1,40}\uff5c>"
)
_ROLE_LINE = re.compile(r"(?:^|\n)(?:system|user|assistant|human|model)\s*\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answered:
    """A sample with the reply it got; `problem` says why there is none."""

    sample: Sample
    reply: Reply | None
    problem: str = ""

    @property
    def text(self) -> str:
        """The text of the answer; empty without one."""
        return self.reply.text if self.reply else ""

    @property
    def undecided(self) -> bool:
        """Whether the token limit came while the model was still reasoning."""
        return self.reply is not None and self.reply.still_reasoning

    @property
    def wrong(self) -> str:
        """What is wrong with the answer, in words; empty when it is right."""
        if self.reply is None:
            return self.problem
        sample, reply = self.sample, self.reply
        if sample.calls is not None and (found := calls_problem(sample.calls, reply.calls)):
            return found
        if sample.reasoning is not None and reply.reasoning != sample.reasoning:
            return f"reasoning {reply.reasoning[:80]!a}, not {sample.reasoning[:80]!a}"
        if not is_right(sample, reply.text):
            return f"got {reply.text[:80]!a}"
        if sample.finish_reason and reply.finish_reason != sample.finish_reason:
            return f"finish_reason {reply.finish_reason!a}, not {sample.finish_reason!a}"
        counted = reply.usage.prompt if reply.usage else None
        if sample.prompt_tokens is not None and counted != sample.prompt_tokens:
            return f"{counted} prompt tokens, not {sample.prompt_tokens}: template or tokenizer"
        return ""


def judge_groups(profile: Profile, answered: Sequence[Answered]) -> list[Check]:
    """One check for each group of samples that was asked."""
    checks = []
    for group in profile.groups:
        members = [one for one in answered if one.sample.group == group.name]
        if members:
            checks.append(_judge_group(group.name, group.need, members))
    return checks


def _judge_group(name: str, need: float, members: Sequence[Answered]) -> Check:
    decided = [one for one in members if not one.undecided]
    if not decided:
        fix = "allow more tokens for an answer"
        return Check(name, "unknown", "the model was still reasoning at the token limit", fix)
    wrong = [one for one in decided if one.wrong]
    num_right = len(decided) - len(wrong)
    detail = f"{num_right} of {len(decided)} right"
    if wrong:
        detail += "; " + "; ".join(f"{one.sample.name}: {one.wrong}" for one in wrong[:3])
    if num_right < need * len(decided):
        fix = "compare token ids of the prompt first, then log-probabilities with a reference"
        return Check(name, "fail", detail, fix)
    return Check(name, "warn" if wrong else "ok", detail)


def judge_health(answered: Sequence[Answered]) -> list[Check]:
    """The checks that a degenerate model fails whatever it was asked."""
    replied = [one for one in answered if one.reply is not None and not one.undecided]
    if not replied and any(one.undecided for one in answered):
        return [Check("answers came", "unknown", "all ended while reasoning", "allow more tokens")]
    if not replied:
        return [Check("answers came", "fail", "no sample was answered")]
    return [check(replied) for check in _HEALTH]


def _verdict(name: str, bad: Sequence[Answered], good: str, fix: str) -> Check:
    if not bad:
        return Check(name, "ok", good)
    shown = "; ".join(f"{one.sample.name}: {one.text[:60]!a}" for one in bad[:2])
    return Check(name, "fail", f"{len(bad)} answers; {shown}", fix)


def _judge_text(answered: Sequence[Answered]) -> Check:
    bad = [one for one in answered if not _has_text(one)]
    fix = "look for an end token at once, special tokens dropped, or split UTF-8"
    return _verdict("answers hold text", bad, f"{len(answered)} answers", fix)


def _has_text(one: Answered) -> bool:
    called = one.reply is not None and bool(one.reply.calls)
    return (bool(one.text.strip()) or called) and "\ufffd" not in one.text


def _judge_variety(answered: Sequence[Answered]) -> Check:
    name = "answers depend on the prompt"
    num_prompts = len({(one.sample.prompt, one.sample.images) for one in answered})
    num_texts = len({one.reply.told.strip() for one in answered if one.reply})
    if num_prompts < 2:
        return Check(name, "unknown", "one prompt only")
    detail = f"{num_texts} different answers to {num_prompts} prompts"
    if num_texts * 2 <= num_prompts:
        return Check(name, "fail", detail, "does the prompt reach the model? NaN logits?")
    return Check(name, "ok", detail)


def _judge_sight(answered: Sequence[Answered]) -> Check:
    name = "answers depend on the image"
    asked: dict[tuple[object, ...], list[Answered]] = {}
    for one in answered:
        if one.sample.images:
            asked.setdefault((one.sample.prompt, one.sample.effort), []).append(one)
    several = {key: ones for key, ones in asked.items() if len({o.sample.accept for o in ones}) > 1}
    if not several:
        return Check(name, "unknown", "no question has two answers by its image")
    fix = "do the image's features reach the model, in the right place? are they all zero?"
    for (prompt, _), ones in several.items():
        if len({one.text.strip() for one in ones}) == 1:
            detail = f"{prompt!a}: {ones[0].text[:60]!a} to {len(ones)} different images"
            return Check(name, "fail", detail, fix)
    return Check(name, "ok", f"{len(several)} questions, each with several images")


def _judge_loops(answered: Sequence[Answered]) -> Check:
    bad = [one for one in answered if is_loop(one.text)]
    fix = "look for NaN logits, a wrong position or cache, or broken weights"
    return _verdict("no token loops", bad, "no answer repeats a token to its end", fix)


def is_loop(text: str) -> bool:
    """Whether the end of a text repeats up to 12 characters at least 4 times over half of it."""
    text = text.strip()
    for unit in range(1, LONGEST_LOOP_UNIT + 1):
        run = 0
        while run + unit < len(text) and text[-1 - run] == text[-1 - run - unit]:
            run += 1
        covered = run + unit
        needed = max(4 * unit, LEAST_LOOP_CHARACTERS, len(text) / 2)
        if run and covered >= needed:
            return True
    return False


def _judge_echo(answered: Sequence[Answered]) -> Check:
    bad = [one for one in answered if _echoes(one)]
    return _verdict("answers are not the prompt", bad, "none", "is the prompt cut off the answer?")


def _echoes(one: Answered) -> bool:
    prompt, text = one.sample.prompt.strip(), one.text.strip()
    return prompt in text if one.sample.api == "chat" else text.startswith(prompt)


def _judge_control(answered: Sequence[Answered]) -> Check:
    bad = [one for one in answered if leaks_control(one.text, one.sample.api == "chat")]
    fix = "check the chat template, the stop tokens and that special tokens are not printed"
    return _verdict("no control strings", bad, "none", fix)


def leaks_control(text: str, chat: bool) -> bool:
    """Whether a text shows template markup, or in chat a line that is only the name of a role."""
    return bool(_CONTROL.search(text) or (chat and _ROLE_LINE.search(text)))


def _judge_stop(answered: Sequence[Answered]) -> Check:
    name = "answers end themselves"
    asked = [one for one in answered if one.sample.must_stop]
    if not asked:
        return Check(name, "unknown", "no chat answer was asked for")
    bad = [one for one in asked if one.reply and one.reply.finish_reason != "stop"]
    fix = "check the end-of-turn token of the template against the stop tokens in use"
    return _verdict(name, bad, f"{len(asked)} answers ended with 'stop'", fix)


_HEALTH: tuple[Callable[[Sequence[Answered]], Check], ...] = (
    _judge_text,
    _judge_variety,
    _judge_sight,
    _judge_loops,
    _judge_echo,
    _judge_control,
    _judge_stop,
)
