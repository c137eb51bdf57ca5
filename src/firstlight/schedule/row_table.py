"""Owns which row of the ranks' row tables each sequence has; knows no request."""


class RowTable:
    """Rows 0 to num_rows - 1. A row given back is named to the ranks once, in the next plan.

    It may be taken again for that same plan, because ranks drop released rows before they add new
    ones.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Takes the row given back last: few rows are touched while few sequences run."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Frees a row and notes it for `take_released`."""
        self._free.append(row)
        self._released.append(row)

    def take_released(self) -> list[int]:
        """Rows given back since the last call."""
        released, self._released = self._released, []
        return released

    def check_integrity(self, used: list[int]) -> None:
        """Checks that each row is either free or used, and by one sequence."""
        rows = sorted([*used, *self._free])
        assert rows == list(range(self.num_rows)), "a row is lost or used twice"
