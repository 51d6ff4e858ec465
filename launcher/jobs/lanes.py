"""Tasks for the backends: each backend is a lane with threads of its own, and a slow lane delays no different lane."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Lanes"]

Task = TypeVar("Task")


@dataclass
class _Lane(Generic[Task]):
    tasks: dict[str, tuple[float, Task]] = field(default_factory=dict)  # by key; with the time when the task is due
    threads: list[threading.Thread] = field(default_factory=list)
    busy: int = 0


class Lanes(Generic[Task]):
    """Runs tasks when due, with up to `at_once` threads for each lane; call `close` at the end.

    `work` runs once in each thread: it iterates over the tasks, and may `put` a task again. A task replaces a waiting
    task with the same key.
    """

    def __init__(self, work: Callable[[Iterator[Task]], None], name: str, at_once: int = 1) -> None:
        self._work, self._name, self._at_once = work, name, at_once
        self._lanes: dict[str, _Lane[Task]] = {}
        self._changed = threading.Condition()
        self.is_closing = threading.Event()

    def put(self, name: str, key: str, task: Task, in_s: float = 0.0) -> None:
        """Run the task in the lane in so many seconds."""
        with self._changed:
            lane = self._lanes.setdefault(name, _Lane())
            lane.tasks.pop(key, None)
            lane.tasks[key] = (time.monotonic() + in_s, task)
            if len(lane.threads) < min(self._at_once, len(lane.tasks) + lane.busy) and not self.is_closing.is_set():
                title = f"{self._name} of {name}"
                run = contextvars.copy_context().run  # messages go where the caller's messages go
                thread = threading.Thread(target=run, args=(self._work, self._due(lane)), name=title, daemon=True)
                thread.start()
                lane.threads.append(thread)  # only now: Ctrl-C may come in between, and `close` joins started threads
            self._changed.notify_all()

    def count(self, name: str) -> int:
        """Return the number of the lane's waiting tasks."""
        return len(self._lanes[name].tasks)

    def keep_only(self, keys: set[str]) -> None:
        """Drop all waiting tasks with different keys."""
        with self._changed:
            for lane in self._lanes.values():
                lane.tasks = {key: task for key, task in lane.tasks.items() if key in keys}

    def hurry(self) -> None:
        """Make all waiting tasks due now."""
        with self._changed:
            for lane in self._lanes.values():
                lane.tasks = {key: (0.0, task) for key, (_, task) in lane.tasks.items()}
            self._changed.notify_all()

    def drain(self, wait_s: float | None = None) -> None:
        """Wait at most `wait_s` for the end of all tasks."""
        with self._changed:
            self._changed.wait_for(lambda: not any(lane.tasks or lane.busy for lane in self._lanes.values()), wait_s)

    def close(self, wait_s: float) -> None:
        """End the threads, waiting at most `wait_s`; tasks that have not begun are dropped."""
        end_s = time.monotonic() + wait_s
        self.is_closing.set()
        with self._changed:
            self._changed.notify_all()
        for thread in [thread for lane in list(self._lanes.values()) for thread in lane.threads]:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _due(self, lane: _Lane[Task]) -> Iterator[Task]:
        """Yield the lane's tasks when due, first the task that has waited longest, until `close`."""
        while True:
            with self._changed:
                while (key := _first(lane)) is None and not self.is_closing.is_set():
                    next_s = min((due_s for due_s, _ in lane.tasks.values()), default=None)
                    self._changed.wait(None if next_s is None else max(0.0, next_s - time.monotonic()))
                if key is None or self.is_closing.is_set():
                    return
                task = lane.tasks.pop(key)[1]
                lane.busy += 1
            try:
                yield task
            finally:
                with self._changed:
                    lane.busy -= 1
                    self._changed.notify_all()


def _first(lane: _Lane[Task]) -> str | None:
    now_s = time.monotonic()
    return next((key for key, (due_s, _) in lane.tasks.items() if due_s <= now_s), None)
