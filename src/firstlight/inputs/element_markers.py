"""Owns the ids of the tokens that mark the elements of an answer, and elements in grammars.
It knows nothing of what elements there are.
"""

from typing import NamedTuple


class ElementMarkers(NamedTuple):
    """Token ids: an element begins with open, name, sep and ends with close, name, sep."""

    open: int
    close: int
    sep: int

    def opened(self, name: str) -> str:
        """The begin of an element without attributes, as a grammar's expression."""
        return f'<[{self.open}]> "{name}" <[{self.sep}]>'

    def closed(self, name: str) -> str:
        """The end of an element, as a grammar's expression."""
        return f'<[{self.close}]> "{name}" <[{self.sep}]>'
