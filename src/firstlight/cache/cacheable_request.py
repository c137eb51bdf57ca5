"""Owns what the cache reads of a request; knows nothing of how requests are served."""

from collections.abc import Sequence
from typing import Protocol

from firstlight.cache.prefix_index import MediaSpan, PrefixChain


class CacheableRequest(Protocol):
    """What the cache reads of a request; `prefix_chain` is written by the manager alone."""

    request_id: str
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    prefix_chain: PrefixChain | None

    @property
    def salt(self) -> str:
        """Requests of different salts share nothing."""
        ...

    @property
    def media(self) -> Sequence[MediaSpan]:
        """The images and other media behind placeholder tokens of the prompt."""
        ...

    @property
    def most_reused(self) -> int:
        """Tokens, from the first on, that may be found instead of computed; all known ones but
        where computing them gives more than state, as for prompt log-probabilities.
        """
        ...

    @property
    def expects_reuse(self) -> bool:
        """True when its sender says that other requests will begin alike."""
        ...
