"""Owns the arithmetic of a layout: which degrees, which rank sits where; knows no tensor and no
device.

World = PP x DP x TP. EP adds no ranks: it divides DP x TP; experts are cut EP ways by id and
DP x TP / EP ways by width.
"""

from dataclasses import dataclass

from firstlight.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """Degrees of tensor, pipeline, data (attention) and expert parallelism."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.dp * self.tp) % self.ep:
            raise LayoutError(
                f"ep {self.ep} must divide dp x tp = {self.dp * self.tp}: experts add no ranks"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def expert_tp(self) -> int:
        """How many ways the width of one expert is cut."""
        return self.dp * self.tp // self.ep

    def place(self, rank: int) -> "Place":
        """Returns the coordinates of a rank: TP is innermost, then DP, then PP."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside this layout of {self.world_size} ranks")
        stage, inner = divmod(rank, self.dp * self.tp)
        return Place(
            layout=self,
            rank=rank,
            pp_index=stage,
            dp_index=inner // self.tp,
            tp_index=inner % self.tp,
            ep_index=inner // self.expert_tp,
            expert_tp_index=inner % self.expert_tp,
        )


@dataclass(frozen=True)
class Place:
    """One rank's coordinates in its layout."""

    layout: Layout
    rank: int
    pp_index: int
    dp_index: int
    tp_index: int
    ep_index: int
    expert_tp_index: int

    def experts(self, num_experts: int) -> range:
        """Returns which of a model's experts this rank holds: a run of equal length by EP index."""
        count = num_experts // self.layout.ep
        return range(count * self.ep_index, count * (self.ep_index + 1))


def stage_layers(num_layers: int, layout: Layout, pp_index: int) -> range:
    """Returns the layers a pipeline stage owns: contiguous, the earlier stages at most one longer.

    Raises LayoutError when there are more stages than layers.
    """
    if layout.pp > num_layers:
        raise LayoutError(f"pp {layout.pp} exceeds the model's {num_layers} layers")
    base, extra = divmod(num_layers, layout.pp)
    start = pp_index * base + min(pp_index, extra)
    return range(start, start + base + (1 if pp_index < extra else 0))
