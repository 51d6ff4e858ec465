"""Judge each start of a rehearsal, as expected or with a fault; the verdict with the facts checked and not checked."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.entrypoints.contract import ALONE, has_checkpoint
from cloudtrain.entrypoints.format import counted, first_of

from ..text.visible import shown
from .stage import MOST_TOLERANCE
from .starts import StartResult

MOST_NAMES = 6  # of files that would be lost
ROUNDING = 1e-3  # relative to the loss: with more than two ranks the order of a sum is not fixed (docs/training.md)


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
    is_task: bool = True
    ranks: int = 1
    is_asked_to_prove: bool = False  # with an interruption
    needs_group: bool = False  # of all ranks, which a script must join
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
        same = ("bundle_sha256", "interrupted_step", "saved_step", "resumed_step", "next_step", "left_s", "grace_s")
        return {
            "backend": self.backend,
            "ok": self.is_right,
            "proven": self.is_proven if self.is_asked_to_prove else None,
            "verdict": self.headline(),
            **{name: getattr(self, name) for name in (*same, "seconds")},
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


def ran(verdict: Verdict, ended: StartResult) -> bool:
    """Judge a start without interruption: a task must end as done, a script must leave when asked to stop."""
    if not _started(verdict, ended) or not _stepped(verdict, ended):
        return False
    last, ranks = ended.account.last_step, counted(verdict.ranks, "rank")
    verdict.words = f"{_reported(ended.account.steps)} on {ranks}" if last else ranks
    is_cut = ended.is_late or ended.left_s is not None
    is_saved = any(report.unkept for report in ended.exits) or has_checkpoint(ended.laid_out.checkpoints)
    if is_cut and not verdict.is_task and not is_saved:
        by = f"by step {last}" if last else f"in {ended.seconds:.0f} s"
        verdict.not_checked.insert(0, f"its files: {by} no save was seen (--steps N, for a step after the first save)")
    judge = _done if verdict.is_task or ended.left_s is None else _left
    return judge(verdict, ended) and _kept(verdict, ended)


def interrupted(verdict: Verdict, ended: StartResult, preempt_at: int) -> bool:
    """Judge the interrupted start: the job must start, reach the step, save, and leave in time."""
    if not _started(verdict, ended) or not _stepped(verdict, ended):
        return False
    if ended.left_s is None:
        words = f"the job was over before it could be interrupted at step {preempt_at}"
        return _wrong(verdict, ended, "interrupted", f"{words}: choose an earlier one")
    verdict.interrupted_step = ended.account.last_step
    if ended.is_killed:
        verdict.found("interrupted", f"killed at step {ended.account.last_step}, without a notice")
    elif not _left(verdict, ended) or not _kept(verdict, ended):
        return False
    if not has_checkpoint(ended.laid_out.checkpoints):
        hint = "; checkpoint.every_steps says how often" if ended.is_killed and verdict.is_task else ""
        words = f"nothing was saved by step {ended.account.last_step or 0}{hint}"
        if not verdict.is_task and not ended.is_killed:
            words = f"no file of the script was kept by the stop at step {ended.account.last_step or 0}: interrupt the "
            words += "script after its first save (--preempt-at N), name the checkpoints in `keep`, or save into "
            words += "CLOUDTRAIN_CHECKPOINT_DIR"
        return _wrong(verdict, ended, "saved", words)
    saves = (event for event in ended.account.events if event["e"] in ("checkpoint", "preempt") and event.get("path"))
    verdict.saved_step = max((event["step"] for event in saves if isinstance(event.get("step"), int)), default=None)
    at = "" if verdict.saved_step is None else f" at step {verdict.saved_step}"
    return verdict.found("saved", f"saved{at}")


def resumed(verdict: Verdict, first: StartResult, second: StartResult) -> bool:
    """Judge the resumed start: a task by the checkpoint that it names, a script by its reported steps."""
    begins = min(second.account.steps, default=None)
    if second.is_late:
        return _wrong(verdict, second, "resumed", "started again, it made no progress in time")
    if second.state == "failed" and (second.left_s is None or begins is None):
        return _wrong(verdict, second, "resumed", "started again, it fails")
    if verdict.is_task:
        return _took_up(verdict, first, second) and _done(verdict, second)
    if begins is None or not first.account.steps:
        which = "the script" if begins is None else "its first start"
        words = f"whether the job continues is not known: {which} reported no steps (docs/rehearse.md: event lines)"
        return _wrong(verdict, second, "resumed", words)
    if begins <= min(first.account.steps):
        return _wrong(verdict, second, "resumed", f"started again, the script began again at step {begins}")
    verdict.next_step, last = begins, max(first.account.steps)
    words = f"started again, the script continues: its first reported step is {begins}"
    if begins <= last:
        words += f"; the steps after its last save, up to step {last}, are repeated"
    return verdict.found("resumed", words)


def _took_up(verdict: Verdict, first: StartResult, second: StartResult) -> bool:
    """Judge the checkpoint that a task resumed from."""
    event = next((event for event in second.account.events if event["e"] == "start"), {})
    saved, went_on = verdict.saved_step, event.get("resumed_from")
    if went_on is None:
        return _wrong(verdict, second, "resumed", "started again, it began at step 0 again")
    verdict.resumed_step = went_on
    words = f"started again, it continues from step {went_on}"
    # After a kill, the last checkpoint may not yet be where the next start looks.
    if saved is not None and went_on < saved and not first.is_killed:
        return _wrong(verdict, second, "resumed", f"{words}, not from what it saved at step {saved}")
    return verdict.found("resumed", words)


def compared(
    verdict: Verdict, first: StartResult, second: StartResult, whole: StartResult, tolerance: float, *, is_exact: bool
) -> bool:
    """Compare the losses after the resume with those of a run without interruption; a script's must be equal.

    Two runs of a script that differ before the interruption, by more than `tolerance`, prove nothing.
    """
    before, after = _apart(first, whole), _apart(second, whole)
    if not after:
        if verdict.is_task:
            return _wrong(verdict, whole, "losses", "the run without interruption did not get as far")
        return _by_steps_alone(verdict, "no losses of the same steps are reported")
    allowed = tolerance or (0.0 if is_exact or not verdict.is_task else ROUNDING)
    if not verdict.is_task and not before:
        return _by_steps_alone(verdict, "no loss was reported before the interruption")
    limit = f"more than --tolerance {tolerance:g} allows" if tolerance else ""
    if not verdict.is_task and max(before.values()) > allowed:
        more = f", {limit}" if limit else ", too"
        return _by_steps_alone(verdict, f"two runs of the script differ before the interruption{more}")
    step, worst = max(after.items(), key=lambda item: (item[1] > allowed, -item[0]))
    if worst > allowed:
        pair = f"{second.account.steps[step]:.7g} and not {whole.account.steps[step]:.7g}"
        gap = f" by {100 * worst:.3g} %, {limit}" if limit else ""
        verdict.hint = "is the optimizer's state, the schedule, the order of the samples or a random state not saved?"
        if worst > MOST_TOLERANCE:
            verdict.hint += " If a resume repeats the seed, losses of small batches differ by more than any --tolerance"
        elif not limit:
            verdict.hint += " A script whose runs differ a little needs --tolerance"
        return _wrong(verdict, second, "losses", f"the losses differ after the resume{gap}: at step {step} {pair}")
    within = f"equal within {100 * max(after.values()):.1g} % ({100 * allowed:g} % is allowed)"
    steps = f"steps {min(after)} to {max(after)}" if len(after) > 1 else f"step {step}"
    words = f"losses of {steps} {within if allowed else 'equal bit for bit'}"
    verdict.words = _proof(verdict, f", {words}")
    return verdict.found("losses", f"{words} to a run without interruption")


def _by_steps_alone(verdict: Verdict, why: str) -> bool:
    """Record that the script continues its steps, and that the training state was not checked."""
    verdict.not_checked.insert(0, f"whether the weights and the optimizer's state come back: {why}")
    verdict.words = _proof(verdict, ", by its steps alone")
    words = f"losses cannot be compared: {why}; only the step numbers show that the job continues"
    return verdict.found("losses", words)


def _apart(one: StartResult, other: StartResult) -> dict[int, float]:
    """Return the relative difference of two runs' losses, by step."""
    found = {}
    for step, loss in one.account.steps.items():
        theirs = other.account.steps.get(step)
        if loss is not None and theirs is not None:
            found[step] = 0.0 if loss == theirs else abs(loss - theirs) / max(abs(loss), abs(theirs), 1e-12)
            found[step] = math.inf if math.isnan(found[step]) else found[step]
    return found


def _proof(verdict: Verdict, losses: str) -> str:
    took = "" if verdict.left_s is None else f", left in {verdict.left_s:.1f} s of {verdict.grace_s:.0f}"
    if verdict.next_step is not None:
        return f"interrupted after step {verdict.interrupted_step}{took}, continued at step {verdict.next_step}{losses}"
    return f"saved at step {verdict.saved_step}{took}, resumed at {verdict.resumed_step}{losses}"


def _started(verdict: Verdict, ended: StartResult) -> bool:
    ranks, nodes = verdict.ranks, sum(len(node.agents) for node in ended.laid_out.nodes)
    missing = sorted(set(range(ranks)) - ended.account.ranks)
    if missing:
        late = "in time " if ended.is_late else ""
        few = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing[0]} to {missing[-1]}"
        return _wrong(verdict, ended, "started", f"{few} of {ranks} did not start {late}by the rendered command")
    shape = f"{counted(nodes, 'node')} x {counted(ranks // nodes, 'rank')}"
    began = any(event["e"] == "start" for event in ended.account.events)  # of a task, after its ranks have met
    has_met = ended.account.met >= set(range(ranks)) if verdict.needs_group else ranks > 1 and began
    return verdict.found("started", f"bundle unpacked, {shape} started by the rendered command{', and met' * has_met}")


def _stepped(verdict: Verdict, ended: StartResult) -> bool:
    steps, ranks, is_task = ended.account.steps, verdict.ranks, verdict.is_task
    if ended.account.odd_steps:
        return _wrong(verdict, ended, "steps", f"the loss is not finite at step {ended.account.odd_steps[0]}")
    if ended.state == "failed" and ended.left_s is None:
        done = f"after step {max(steps)}" if steps else "before its first step"
        return _wrong(verdict, ended, "steps", f"it failed {done}")
    if verdict.needs_group and (unmet := sorted(set(range(ranks)) - ended.account.met)):
        longer = "" if steps else "; a script that joins later needs a longer --timeout, such as 10m"
        verdict.hint = f"{ended.account.alone or ALONE}{longer}"
        which = f"rank {unmet[0]} has" if len(unmet) == 1 else f"{len(unmet)} of {ranks} ranks have"
        done = f"after {_reported(steps)}" if steps else f"in {ended.seconds:.0f} s"
        return _wrong(verdict, ended, "met", f"{which} joined no process group of all ranks {done}")
    if ended.is_late and ended.left_s is None and not steps and not is_task:
        words = f"it reported no step in {ended.seconds:.0f} s: it hangs, is slow, or prints no step that"
        more = "cloudtrain reads (docs/steps.md); --timeout gives it more time"
        return _wrong(verdict, ended, "steps", f"{words} {more}")
    if ended.is_late and ended.left_s is None:
        return _wrong(verdict, ended, "steps", f"it took too long: {len(steps)} steps in {ended.seconds:.0f} s")
    if not steps and is_task:
        return _wrong(verdict, ended, "steps", "no step completed")
    if not steps:
        verdict.not_checked.insert(0, "its steps: it reported no step until its end")
        return verdict.found("steps", "it runs; it reported no step until its end")
    losses = " with finite losses" if any(loss is not None for loss in steps.values()) else ""
    return verdict.found("steps", f"{_reported(steps)}{losses}")


def _kept(verdict: Verdict, ended: StartResult) -> bool:
    """Judge whether new files in the working directory would be lost with the nodes."""
    names = sorted({name for report in ended.exits for name in report.unkept})
    if not names:
        return True
    keys = ", ".join(names[:MOST_NAMES])
    files = f"{first_of(names, MOST_NAMES)} in the working directory would be lost"
    cure = f'write `keep: [{keys}]`, or `keep: ["!{names[0]}"]` for a file that may be lost'
    return _wrong(verdict, ended, "kept", f"{files}: {cure}")


def _left(verdict: Verdict, ended: StartResult) -> bool:
    """Judge how the job left when asked to stop."""
    laid_out = ended.laid_out
    verdict.left_s, verdict.grace_s = ended.left_s, laid_out.grace_s
    if ended.is_late:
        words = f"asked to stop, it had not left after {laid_out.grace_s:.0f} s, when the platform kills it"
        return _wrong(verdict, ended, "interrupted", words)
    if ended.state == "failed":
        return _wrong(verdict, ended, "interrupted", "asked to stop, it failed instead of leaving")
    wanted = laid_out.codes.get("interrupted")
    shown = "" if wanted is None else f", exit code {' and '.join(map(str, dict.fromkeys(ended.codes)))}"
    words = f"asked to stop ({laid_out.notice}), it left in {ended.left_s:.1f} s{shown}"
    if wanted is not None and ended.state == "stopped" and any(code != wanted for code in ended.codes):
        return _wrong(verdict, ended, "interrupted", f"{words}, where the platform needs {wanted}")
    return verdict.found("interrupted", words)


def _done(verdict: Verdict, ended: StartResult) -> bool:
    wanted = ended.laid_out.codes.get("done")
    shown = "" if wanted is None else f", exit code {' and '.join(map(str, dict.fromkeys(ended.codes)))}"
    if ended.state != "succeeded" or (wanted is not None and any(code != wanted for code in ended.codes)):
        return _wrong(verdict, ended, "ended", f"it ended as {ended.state or 'unknown'}{shown}")
    return verdict.found("ended", f"ended as done{shown}")


def _wrong(verdict: Verdict, ended: StartResult, name: str, words: str) -> bool:
    verdict.failure = ended.error
    verdict.tail = ended.tail
    return verdict.found(name, words, is_right=False)


def _reported(steps: Collection[int]) -> str:
    """Return `1 reported step (20)`, `2 reported steps (0 and 10)` or `5 reported steps (1 to 5)`."""
    ends = (min(steps), max(steps)) if len(steps) > 1 else steps
    return f"{counted(len(steps), 'reported step')} ({(' and ' if len(steps) == 2 else ' to ').join(map(str, ends))})"
