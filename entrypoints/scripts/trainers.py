"""Hugging Face's Trainer and Lightning's: exact steps, and the save of `on_stop: save`.

A callback joins every new Trainer. With `on_stop: save` the callback handles SIGTERM when training begins, has all
ranks agree on the last step, saves by the library's own means, and exits with the code for a saved job.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import events
from ..rank import variables
from . import streams
from .steps import Steps

if TYPE_CHECKING:
    from ..rank.agree import Agreement

EXIT_SAVED = 75
FIRST_SAVE_S = 30.0  # assumed for the first save; at most a tenth of the time left
_LINE_S = 2.0  # between the lines of Lightning's steps
_FIRST_STEPS = 10  # of a training: each of the first steps is reported
_NAMES = {"learning_rate": "lr"}


class Stopping:
    """The ranks' agreement on the last step. Without `on_stop: save` the training never stops early."""

    def __init__(self, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self.has_trainer = False
        self._agreement: Agreement | None = None
        self._group: Any = None
        self._begin_s = 0.0  # of the step under way

    def begin(self) -> None:
        """Handle SIGTERM from the start of a training, after the libraries' own handlers; collective."""
        self._begin_s = 0.0
        if not self.is_wanted:
            return
        import torch.distributed as dist

        from ..rank.agree import Agreement

        meets = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if meets and self._group is None:
            self._group = dist.new_group(backend="gloo")  # NCCL cannot sum numbers of the CPU
        self._agreement = Agreement(variables.deadline_s(os.environ), self._group, is_alone=not meets)
        self._agreement.start(dist.get_rank() if meets else 0, None, FIRST_SAVE_S)

    def end(self) -> None:
        """Let SIGTERM end the script again: after the training all data are saved."""
        if self._agreement is not None:
            self._agreement = None
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def step(self) -> str | None:
        """Count a step, and return the reason to stop, the same on all ranks; collective."""
        now_s = time.monotonic()
        step_s, self._begin_s = (now_s - self._begin_s if self._begin_s else 0.0), now_s
        if self._agreement is None or not self._agreement.is_due():
            return None
        self._agreement.begin(step_s)
        return self._agreement.finish().stop

    def saved(self, begin_s: float) -> None:
        """Note the time of a save, begun at `begin_s` of the monotonic clock."""
        if self._agreement is not None:
            self._agreement.save_s = time.monotonic() - begin_s

    def leave(self, step: int, path: str, reason: str) -> None:
        """Report the save and end the script, after all ranks have called; collective."""
        import torch.distributed as dist

        if self._group is not None:
            dist.barrier(self._group)
        if os.environ.get("RANK", "0") == "0":
            saved = events.format_line("checkpoint", f"saved {path}", {"step": step, "path": path})
            text = f"stopped at step {step} ({reason}), saved; a new start resumes from this checkpoint"
            line = events.format_line("preempt", text, {"step": step, "reason": reason, "saved": True, "path": path})
            streams.say(f"{saved}\n{line}\n")
        raise SystemExit(EXIT_SAVED)


def hugging_face(module: ModuleType, steps: Steps, stopping: Stopping) -> None:
    """Add the callback to transformers' Trainer, the base of TRL's trainers."""

    class Callback(module.TrainerCallback):  # type: ignore[name-defined, misc]
        """Stops a training."""

        reason: str | None = None
        save_s = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stopping.begin()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stopping.end()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.reason = stopping.step()
            self.save_s = time.monotonic()
            if self.reason:
                control.should_save = control.should_training_stop = True
                control.should_evaluate = False

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.save_s = time.monotonic()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.reason:
                path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                stopping.leave(state.global_step, str(path), self.reason)
            stopping.saved(self.save_s)

    def joined(trainer: Any) -> None:
        stopping.has_trainer = True
        trainer.add_callback(Callback())
        steps.library = lambda: _of_state(trainer.state)

    _after_init(module.Trainer, joined)


def _of_state(state: Any) -> dict[str, Any]:
    """Return a Trainer's newest figures, in full precision, by the names in our events."""
    newest = state.log_history[-1] if state.log_history else {}
    figures = {_NAMES.get(name, name): value for name, value in newest.items()}
    return figures | {"step": state.global_step, "total": state.max_steps or None}


def lightning(module: ModuleType, steps: Steps, stopping: Stopping) -> None:
    """Add the callback to Lightning's Trainer, of either package (lightning, pytorch_lightning)."""

    class Callback(module.Callback):  # type: ignore[name-defined, misc]
        """Reports steps, and stops a training."""

        first = step = 0
        due_s = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            stopping.begin()
            steps.is_off = True
            self.first = self.step = trainer.global_step

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
            if trainer.global_step == self.step:  # between two steps: gradients are summed up
                return
            self.step = trainer.global_step
            is_due = time.monotonic() > self.due_s or self.step <= self.first + _FIRST_STEPS
            if trainer.is_global_zero and (is_due or self.step == trainer.estimated_stepping_batches):
                self.print_step(trainer, outputs, rest[-1])
            if reason := stopping.step():
                checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
                path = Path(checkpoints or Path(trainer.default_root_dir) / "checkpoints") / "cloudtrain-stop.ckpt"
                trainer.save_checkpoint(path)
                stopping.leave(self.step, str(path), reason)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            stopping.end()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            scores = {k: float(v) for k, v in trainer.callback_metrics.items() if "val" in k}
            if trainer.is_global_zero and not trainer.sanity_checking and scores:
                words = " ".join(f"{name} {value:.4g}" for name, value in scores.items())
                fields = {"step": trainer.global_step, "metrics": scores}
                streams.say(events.format_line("eval", f"step {trainer.global_step} {words}", fields) + "\n")

        def print_step(self, trainer: Any, outputs: Any, batch: int) -> None:
            self.due_s = time.monotonic() + _LINE_S
            total = trainer.estimated_stepping_batches
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            part = (batch + 1) / trainer.num_training_batches  # 0 of a loader without a length
            figures = {"epoch": round(trainer.current_epoch + part, 4)} if part else {}
            figures |= {} if loss is None else {"loss": float(loss)}
            streams.say(steps.line(self.step, None if total == float("inf") else int(total), figures))

    def joined(trainer: Any) -> None:
        stopping.has_trainer = True
        trainer.callbacks.insert(0, Callback())

    _after_init(module.Trainer, joined)


def _after_init(trainer: Any, action: Callable[[Any], None]) -> None:
    """Call the action with every new Trainer, of subclasses too."""
    init = trainer.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        action(self)

    trainer.__init__ = made
