"""What a request is to the cache, and nothing else of it."""

from dataclasses import dataclass, field

from firstlight.cache.prefix_index import MediaSpan, PrefixChain


@dataclass
class Sequence:
    """The least a request is to the cache; all it knows when it is made is its prompt."""

    request_id: str
    token_ids: list[int]
    num_computed: int = 0
    prefix_chain: PrefixChain | None = None
    salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    most_reused: int = 2**40
    expects_reuse: bool = False
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)
