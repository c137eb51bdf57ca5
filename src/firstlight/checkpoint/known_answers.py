"""Owns the file of known answers in a store: its records and how it is read; torch-free."""

from pathlib import Path

import msgspec

from firstlight.checkpoint.store_names import ANSWERS_FOLDER
from firstlight.errors import StoreError

FILE_NAME = "known.json"
VERSION = 1


class KnownCase(msgspec.Struct, frozen=True):
    """One teacher-forced sequence. Entry i of each list is about the token after `token_ids[i]`.

    `top1` is the most likely token, `margins` its lead over the second in log-probability,
    `logprobs` the log-probability of the token that really follows (natural log).
    """

    name: str
    token_ids: list[int]
    top1: list[int]
    margins: list[float]
    logprobs: list[float]


class KnownAnswers(msgspec.Struct, frozen=True):
    """All cases, and the largest difference in log-probability seen per dtype on them.

    The spread of float32 is its distance from float64, that of others their distance from float32.
    """

    version: int
    source: str
    spread: dict[str, float]
    cases: list[KnownCase]


def read_answers(store: Path) -> KnownAnswers | None:
    """Returns a store's known answers, None when it has none.

    Raises StoreError when the file is there and cannot be read.
    """
    path = store / ANSWERS_FOLDER / FILE_NAME
    if not path.exists():
        return None
    try:
        answers = msgspec.json.decode(path.read_bytes(), type=KnownAnswers)
    except msgspec.DecodeError as error:
        raise StoreError(f"{path}: not readable as known answers: {error}") from error
    if answers.version != VERSION:
        raise StoreError(f"{path}: version {answers.version}, this program reads {VERSION}")
    return answers
