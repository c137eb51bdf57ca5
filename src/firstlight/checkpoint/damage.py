"""Owns the record of weights whose bits changed in memory; imports no tensor library."""

import msgspec


class Damage(msgspec.Struct, frozen=True):
    """A run of weights whose bits are not those of the baseline. `expert` is None outside experts;
    `granule` counts along the cut axis of the whole tensor, as pieces of the model's axis. Where
    packed values of several share their memory, `granules` says of how many."""

    rank: int
    unit: str
    tensor: str
    expert: int | None
    granule: int
    granules: int = 1

    def line(self) -> str:
        """Returns the damage as one line of text."""
        expert = "" if self.expert is None else f", expert {self.expert}"
        granule = f"granule {self.granule}"
        if self.granules > 1:
            granule = f"granules {self.granule} to {self.granule + self.granules - 1}"
        return f"rank {self.rank}: {self.unit}, {self.tensor}{expert}, {granule}"
