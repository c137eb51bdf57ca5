"""Owns how a fleet may be shared among ranks: every arrangement the model and the islands allow.

Knows neither memory nor time; what fits and what is best is judged elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from firstlight.errors import LayoutError
from firstlight.models.spec import ModelSpec
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import check_layout, legal_degrees, legal_expert_degrees


@dataclass(frozen=True)
class Arrangement:
    """`replicas` independent copies of the model, each laid out alike.

    `context_parallel` ranks of each TP group share out the latent cache (1: each holds all of it).
    """

    layout: Layout
    replicas: int = 1
    context_parallel: int = 1

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.replicas * self.layout.world_size

    def sequences_each(self, concurrency: int) -> int:
        """Sequences of so many that the fullest data-parallel part has at once."""
        return -(-concurrency // (self.replicas * self.layout.dp))

    @property
    def text(self) -> str:
        """The degrees that are not 1, in words of the command line."""
        layout = self.layout
        named = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep}
        named |= {"dcp": self.context_parallel, "replicas": self.replicas}
        return " x ".join(f"{k} {v}" for k, v in named.items() if v > 1 or k == "tp")


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Returns every divisor, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def arrangements(
    spec: ModelSpec, devices: int, *, island: int | None = None, context_parallel: bool = False
) -> Iterator[Arrangement]:
    """Yields every arrangement that uses all devices and that the model can be cut by.

    With an `island`, tensor parallel groups lie within one or take whole ones. Attention is
    data-parallel only beside experts, which its ranks share; a dense model's copies are replicas.
    """
    facts = spec.facts
    ways = set(legal_expert_degrees(facts.axes, max(64, devices)))
    latent = any(state.kind == "latent" for state in spec.states)
    for tp in legal_degrees(facts.axes, devices):
        if devices % tp or (island is not None and island % tp and tp % island):
            continue
        shared = divisors(tp) if context_parallel and latent else (1,)
        for pp in divisors(devices // tp):
            if pp > facts.num_layers:
                break
            for dp in divisors(devices // tp // pp) if facts.num_experts else (1,):
                replicas = devices // (tp * pp * dp)
                for ep in _expert_degrees(tp * dp, facts.num_experts, ways):
                    for cp in shared:
                        yield Arrangement(Layout(tp=tp, pp=pp, dp=dp, ep=ep), replicas, cp)


def _expert_degrees(group: int, experts: int, ways: set[int]) -> Iterator[int]:
    if not experts:
        yield 1
        return
    for ep in divisors(group):
        if experts % ep == 0 and group // ep in ways:
            yield ep


def check(spec: ModelSpec, layout: Layout) -> str:
    """Returns why the model cannot be cut so, empty when it can."""
    try:
        check_layout(spec.facts, layout)
    except LayoutError as error:
        return str(error)
    return ""
