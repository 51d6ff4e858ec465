"""The verdict of a rehearsal, with the facts checked and not checked: for people on a single screen, and for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..text.visible import shown

MOST_TOLERANCE = 0.1  # a share of the loss; a larger tolerance would be no proof


@dataclass(frozen=True)
class Finding:
    """A checked fact, by its name in JSON, and the result."""

    name: str
    is_right: bool
    words: str


@dataclass
class Verdict:
    """A backend's verdict."""

    backend: str
    bundle_sha256: str = ""
    is_asked_to_prove: bool = False  # with an interruption
    findings: list[Finding] = field(default_factory=list)
    scaled: tuple[str, ...] = ()  # differences from the plan
    not_checked: list[str] = field(default_factory=list)
    interrupted_step: int | None = None  # the last step reported before the interruption
    saved_step: int | None = None  # of the checkpoint that a task saved
    resumed_step: int | None = None  # of the checkpoint that a task resumed from
    next_step: int | None = None  # the first after the interruption of a script, which names no checkpoint
    left_s: float | None = None  # that the nodes took to leave
    grace_s: float | None = None  # that the nodes had to leave
    words: str = ""  # of the proof
    failure: dict[str, Any] | None = None  # the first failing rank's error
    tail: list[str] = field(default_factory=list)
    hint: str = ""
    folder: str | None = None
    seconds: float = 0.0

    def found(self, name: str, words: str, *, is_right: bool = True) -> bool:
        """Store a finding; return whether the finding is right."""
        self.findings.append(Finding(name, is_right, words))
        return is_right

    @property
    def is_right(self) -> bool:
        """Whether all findings are right."""
        return bool(self.findings) and all(finding.is_right for finding in self.findings)

    @property
    def is_proven(self) -> bool:
        """Whether the rehearsal has shown that an interrupted job resumes."""
        return self.is_asked_to_prove and self.is_right

    def dump(self) -> dict[str, Any]:
        """Return the verdict for JSON."""
        return {
            "backend": self.backend,
            "ok": self.is_right,
            "proven": self.is_proven if self.is_asked_to_prove else None,
            "verdict": self.headline(),
            "bundle_sha256": self.bundle_sha256,
            "interrupted_step": self.interrupted_step,
            "saved_step": self.saved_step,
            "resumed_step": self.resumed_step,
            "next_step": self.next_step,
            "left_s": self.left_s,
            "grace_s": self.grace_s,
            "seconds": self.seconds,
            "checked": [{"name": one.name, "ok": one.is_right, "found": one.words} for one in self.findings],
            "scaled": list(self.scaled),
            "not_checked": self.not_checked,
            "error": self.failure,
            "hint": self.hint or None,
            "folder": self.folder,
        }

    def headline(self) -> str:
        """Return the verdict in one line."""
        if self.is_right:
            return f"proven: {self.words}" if self.is_asked_to_prove else f"it runs: {self.words}"
        found = next((finding for finding in self.findings if not finding.is_right), None)
        wrong = "no result" if found is None else found.words
        wrong += f": {self._failed()}" if self.failure is not None else ""
        runs = found is not None and found.name in ("interrupted", "kept")
        head = "not proven" if self.is_asked_to_prove else "it runs, but" if runs else "it does not run"
        return f"{head}: {wrong}"

    def lines(self) -> list[str]:
        """Return lines for people: facts checked and not checked, and the verdict last, where readers look."""
        scaled = f", as {', '.join(self.scaled)}" if self.scaled else ""
        shown = [f"{self.backend}, rehearsed here in {self.seconds:.0f} s{scaled}"]
        # A failure ends the rehearsal: the headline contains the words of the failed check.
        shown += [f"  ok    {one.words}" if one.is_right else f"  FAIL  {one.name}" for one in self.findings]
        shown += [f"not checked: {'; '.join(self.not_checked)}"] if self.not_checked else []
        shown += self._cause()
        shown += [f"all logs are in {self.folder}"] if self.folder else []
        return [*shown, self.headline()]

    def _cause(self) -> list[str]:
        if self.is_right:
            return []
        # The headline has the message, which may also end a traceback or a rank's warning.
        message = str((self.failure or {}).get("message") or "").rpartition("; ")[2]
        shown = [f"  | {line}" for line in self.tail if not message or not line.endswith(message)]
        shown += [f"hint: {self.hint}"] if self.hint else []
        return shown if self.folder else [*shown, "(--keep keeps the folder with all logs)"]

    def _failed(self) -> str:
        """Return the first failing rank's exception in one line."""
        assert self.failure is not None
        rank = self.failure.get("rank")
        kind = f"{self.failure['type']}: " if self.failure.get("type") else ""
        message = f"{'a node' if rank is None else f'rank {rank}'}: {kind}{self.failure.get('message')}"
        return shown(message, colour=False)  # text from the job itself
