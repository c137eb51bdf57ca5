"""Owns the record of one defect or remark about weights; knows no file and no presentation."""

from collections.abc import Iterable
from dataclasses import dataclass

from firstlight.errors import BadInput, TensorError

ERROR, WARNING, NOTE = "error", "warning", "note"
_LISTED = 50


@dataclass(frozen=True)
class Finding:
    """One thing found: `severity` is error, warning or note; `where` names file and tensor."""

    severity: str
    where: str
    what: str
    fix: str = ""

    def line(self) -> str:
        """Returns the finding as one line of text."""
        return f"{self.where}: {self.what}" + (f" ({self.fix})" if self.fix else "")


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings that forbid the use of the weights."""
    return [f for f in findings if f.severity == ERROR]


def refuse_errors(
    findings: Iterable[Finding], subject: str, *, kind: type[BadInput] = TensorError
) -> None:
    """Raises `kind` listing the findings of severity error (50 in full); does nothing without."""
    errors = errors_of(findings)
    if not errors:
        return
    lines = [f"  {f.line()}" for f in errors[:_LISTED]]
    if len(errors) > _LISTED:
        lines.append(f"  ... and {len(errors) - _LISTED} more; `firstlight inspect` lists them all")
    noun = "defect" if len(errors) == 1 else "defects"
    raise kind("\n".join([f"{subject}: {len(errors)} {noun}", *lines]))
