"""A trial of a script: its copy of the code, its kept files, and its newest figures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .. import atomic_json
from ..contract import RunSpec
from ..scripts.keep import FileKeeper, newest

_PROGRESS = "progress.json"
_OF_STEPS = {"e", "step", "max_steps", "step_s", "eta_s", "metrics"}
_CLOSE_S = 60.0  # for the last copies of kept files


def ended_at(folder: Path) -> tuple[int, float] | None:
    """Return step and metric of a trial whose script has ended by itself; None if the script goes on."""
    found = atomic_json.read_json(folder / _PROGRESS) or {}
    if not found.get("ended") or not isinstance(found.get("value"), int | float):
        return None
    return int(found.get("step") or 0), float(found["value"])


class ScriptTrial:
    """A trial of a script: its files and newest figures.

    The script pauses at its first metric at or after the rung's step. The controller then sends SIGTERM, as a platform
    does before it reclaims a machine; the script saves and leaves. The next segment starts the script with
    `resume_args`. `step` and `value` are those of the newest metric, also of earlier segments.

    `folder` is the trial's folder: the script's checkpoints are in `folder/checkpoints`. `has_begun`: whether this
    segment has reported a figure.
    """

    def __init__(self, run: RunSpec, work: Path, folder: Path, metric: str) -> None:
        """Copy the code into `work`, and bring the kept files back. Raises OSError."""
        self._run, self._folder, self._metric = run, folder, metric
        self.code, self.checkpoints = work / "code", folder / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        apart = {str(work.parent), str(folder.parent.parent)}  # of a controller that runs in its own job's folder
        shutil.copytree(
            Path.cwd(),
            self.code,
            symlinks=True,
            ignore=lambda place, names: [name for name in names if str(Path(place, name)) in apart],
        )
        found = atomic_json.read_json(folder / _PROGRESS) or {}
        self.step, self.value = int(found.get("step") or 0), found.get("value")
        self.has_begun = self._is_evaluated = False
        self.names = set[str]()  # of the figures so far
        self._keeper = FileKeeper(
            self.code / (run.workdir or ""), self.checkpoints, run.keep, work / "log" / "rank-0.log"
        )
        while not self._keeper.has_opened():
            pass  # each call waits
        if self._keeper.fault:
            raise OSError(self._keeper.fault)

    def note(self, fields: dict[str, Any]) -> None:
        """Note the figures of an event line. Once an evaluation has had the metric, steps do not count."""
        if fields["e"] not in ("step", "eval") or fields.get("step") is None:
            return
        self.has_begun = True
        self.names |= {*(fields.get("metrics") or ()), *({*fields} - _OF_STEPS)}
        evaluated = (fields.get("metrics") or {}).get(self._metric) if fields["e"] == "eval" else None
        self._is_evaluated = self._is_evaluated or evaluated is not None
        value = evaluated if self._is_evaluated else fields.get(self._metric)
        if isinstance(value, int | float):
            self.step, self.value = int(fields["step"]), float(value)

    def words(self) -> list[str]:
        """Return the program and its arguments; `resume_args` if the trial has a checkpoint."""
        return [self._run.target, *self._run.args, *(self._run.resume_args if newest(self.checkpoints) else ())]

    def environment(self) -> dict[str, str]:
        """Return the variables of the trial's folders."""
        found = newest(self.checkpoints)
        resume = {} if found is None else {"CLOUDTRAIN_RESUME_PATH": str(self.checkpoints / found[0])}
        own = {"CLOUDTRAIN_CODE_DIR": str(self.code), "CLOUDTRAIN_CHECKPOINT_DIR": str(self.checkpoints)}
        return {**own, **resume, "PWD": str(self.code)}

    def close(self, *, ended: bool = False) -> None:
        """Copy the last kept files, store the progress, and remove the copy of the code. `ended`: by itself."""
        self._keeper.close(_CLOSE_S)
        atomic_json.write_json(self._folder / _PROGRESS, {"step": self.step, "value": self.value, "ended": ended})
        shutil.rmtree(self.code, ignore_errors=True)
