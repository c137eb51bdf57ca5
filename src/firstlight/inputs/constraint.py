"""Owns which tokens may come next under a grammar, as a bit mask over the vocabulary.
It knows nothing of how a grammar came about, of requests, or of tensors.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from firstlight.errors import RequestError
from firstlight.inputs.tokenizer import Tokenizer


class ConstraintFactory:
    """Makes the constraints of one model; holds its vocabulary, so make one a process.

    Building it takes about a second for a real vocabulary; safe to use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the logits; `eos_ids` may come once the grammar is met."""
        if not eos_ids:
            raise RequestError("the model has no end token, so no grammar can be kept to")
        self._vocab_size = vocab_size
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, eos_ids))
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=list(eos_ids))

    def check(self, grammar: str) -> None:
        """Compiles the grammar; raises RequestError with what is wrong in it."""
        problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
        if problem:
            raise _refusal(problem)

    def constraint(self, grammar: str) -> "TokenConstraint":
        """A constraint at the beginning of an answer; raises RequestError for a bad grammar."""
        return TokenConstraint(LLMatcher(self._tokenizer, grammar, log_level=0), self._vocab_size)


class TokenConstraint:
    """Follows one answer through its grammar. `advance` with every token, `mask` for the next."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask_bytes = 4 * ((vocab_size + 31) // 32)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may come."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> bytes:
        """One bit a token, set where it may come next: bit i of little-endian 32-bit words.

        The mask has ceil(vocab_size / 32) words. Raises RequestError when the grammar became too
        costly to follow.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        return bytes(bits[: self._mask_bytes]).ljust(self._mask_bytes, b"\0")

    def advance(self, token_id: int) -> None:
        """Takes the next token; raises RequestError when the grammar does not allow it."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())


def _refusal(problem: str) -> RequestError:
    """The library's first line; behind it come its state and the whole grammar."""
    reason = problem.partition("<state>")[0].strip().partition("\n")[0]
    return RequestError(f"the grammar cannot be kept to: {reason}", code="bad_grammar")


class _Vocabulary:
    """A tokenizer as llguidance wants one: the bytes of each token, control tokens named apart."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted({*tokenizer.controls.values(), *eos_ids})
        self.tokens = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode_plain(plain)
