"""Tables of what was measured, each row with its target and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PASS, BELOW, FAIL, PLAIN = "PASS", "below target", "FAIL", ""


@dataclass
class Report:
    """One benchmark's rows. A timing that misses its target is said; a count that does makes the run fail."""

    title: str
    head: Sequence[str] = ("what", "measured", "target", "")
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    def timing(self, what: str, measured: str, target: str = "", *, ok: bool | None = None) -> None:
        """Add a figure; `ok` None is one without a target."""
        self.rows.append((what, measured, target, PLAIN if ok is None else PASS if ok else BELOW))

    def count(self, what: str, measured: object, target: object) -> None:
        """Add a count, which has to be equal to its target."""
        ok = measured == target
        self.failed = self.failed or not ok
        self.rows.append((what, str(measured), str(target), PASS if ok else FAIL))

    def show(self) -> None:
        """Print the table."""
        print(f"\n{self.title}")
        widths = [max(len(row[i]) for row in [self.head, *self.rows]) for i in range(len(self.head))]
        for row in [self.head, *self.rows]:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for note in self.notes:
            print(f"  {note}")
