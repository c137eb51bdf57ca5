"""Owns where a long text is cut before it is tokenised, so that no piece costs quadratic time.
It knows nothing of vocabularies; the cut places are part of a tokenizer's definition.
"""

import re
from collections.abc import Iterator

CHUNK_CHARACTERS = 400_000
RUN_CHARACTERS = 25_000

_RUNS = re.compile(r"\s+|\S+")


def forced_cuts(text: str) -> Iterator[tuple[int, int]]:
    """Character ranges [start, end) that tile `text` and are tokenised each on its own.

    A text is cut every 400,000 characters, and within such a chunk after each 25,000 characters of
    an unbroken run of white space or of anything else.
    """
    for begin in range(0, len(text), CHUNK_CHARACTERS):
        end = min(begin + CHUNK_CHARACTERS, len(text))
        start = begin
        for cut in _run_cuts(text, begin, end):
            yield start, cut
            start = cut
        yield start, end


def _run_cuts(text: str, begin: int, end: int) -> Iterator[int]:
    if end - begin <= RUN_CHARACTERS:
        return
    for run in _RUNS.finditer(text, begin, end):
        yield from range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS)
