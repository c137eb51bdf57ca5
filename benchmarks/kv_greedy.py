"""Whether greedy decoding over caches of a byte a value goes on as it does over float ones.

Owns prompts and counts; `kv_int8` has the text and the sides. Every prompt is a part of the text,
and the first side continues it greedily. The others read the same prompt, chunk by chunk, and the
same tokens one by one: the first they would not have chosen is where their own continuation leaves.

    python benchmarks/kv_greedy.py [--prompts 32] [--prompt 512] [--tokens 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import torch

# isort: split
from kv_int8 import Reader, make_readers


def chosen(
    reader: Reader, prompt: list[int], given: list[int], *, count: int, chunk: int
) -> list[int]:
    """Returns the greedy token at each of `count` places behind a prompt, where the tokens that are
    read there are the given ones, or where none are given the chosen ones.
    """
    for first in range(0, len(prompt), chunk):
        carry = reader.read(prompt[first : first + chunk], first)
    found: list[int] = []
    for place in range(count):
        last = torch.tensor([len(carry[0]) - 1])
        found.append(int(reader.scores(carry, last)[0].argmax()))
        carry = reader.read([given[place] if given else found[-1]], len(prompt) + place)
    return found


def run(readers: dict[str, Reader], text: list[int], given: argparse.Namespace) -> None:
    """Prints for every other side how far it agrees with the first, after every prompt."""
    base, *others = readers
    # For every prompt: places with the same token, and those before the first other one.
    runs: dict[str, list[tuple[int, int]]] = {side: [] for side in others}
    space = (len(text) - given.prompt) // given.prompts
    for index in range(given.prompts):
        prompt = text[index * space : index * space + given.prompt]
        sizes = {"count": given.tokens, "chunk": given.chunk}
        want = chosen(readers[base], prompt, [], **sizes)
        for side in others:
            found = chosen(readers[side], prompt, want, **sizes)
            same = [one == other for one, other in zip(want, found, strict=True)]
            runs[side].append((sum(same), [*same, False].index(False)))
            print(tally(side, runs[side], given.tokens), flush=True)


def tally(side: str, counted: Sequence[tuple[int, int]], tokens: int) -> str:
    """Says what was counted of a side so far."""
    agreed, total = sum(same for same, _ in counted), len(counted) * tokens
    lengths = [before for _, before in counted]
    return (
        f"{side}: same token at {agreed} of {total} places ({agreed / total:.3%}), "
        f"{lengths.count(tokens)} of {len(counted)} continuations of {tokens} tokens the same, "
        f"median {median(lengths):.0f} before the first other"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--sides", default="float32,int8,fp8")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.inference_mode():
        length = given.prompt + given.tokens
        readers, text = make_readers(length, given.threads, given.sides.split(","))
        run(readers, text, given)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
