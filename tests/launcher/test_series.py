"""The series of a job's events: each event stored once despite many polls, and bounded for any script."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent import node_logs
from cloudtrain.entrypoints.events import format_line
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import follow
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.logs.view import View
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.registry import Registry


def step(number: int, **fields: Any) -> str:
    """Return the line of a step."""
    return format_line("step", f"step {number}", {"step": number, **fields})


def stored(job_id: str) -> series.Series:
    """Return the stored series."""
    return series.read(Registry().database, job_id)


def put(attempt: int, lines: list[str], job_id: str = "one") -> None:
    """Store the events of the lines, as a poll of the job does."""
    database = Registry().database
    with database.transaction():
        series.append(database, job_id, series.gather(attempt, [(line, 10.0) for line in lines]))


@pytest.fixture
def running(seed: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that seeds a running job with the lines of rank 0, and returns the path of the log."""

    def put_job(text: str) -> Path:
        job = seed("one", State("running", started_s=1000.0), {"0": text})
        monkeypatch.setattr(backends.load("local"), "state", lambda ref: State("running", started_s=1000.0))
        return Path(job.attempt.ref["folder"]) / "node-0" / "log" / "rank-0.log"

    return put_job


def look() -> None:
    """Poll the job once."""
    registry = Registry()
    refresh(registry, registry.find("one"))


def test_series_has_steps_and_marks(home: Path) -> None:
    """Points are ordered by attempt and time; steps have only numbers, an `eval` has its metrics."""
    lines = [format_line("start", "", {"device": "cpu"}), step(1, loss=2.5, lr=0.1, note="no number")]
    put(
        1, [*lines, format_line("eval", "", {"step": 1, "accuracy": 0.5, "metrics": {"accuracy": 0.5}, "seconds": 2.0})]
    )
    put(2, [step(1, loss=2.0)])
    found = stored("one")
    assert [(point.attempt, point.kind, point.step) for point in found.points] == [
        (1, "start", None), (1, "step", 1), (1, "eval", 1), (2, "step", 1),
    ]  # fmt: skip
    assert found.steps[0].fields == {"loss": 2.5, "lr": 0.1}
    assert found.marks[1].fields == {"metrics": {"accuracy": 0.5}, "seconds": 2.0}


def test_poll_stores_each_event_once(running: Callable[[str], Path]) -> None:
    """The second poll begins at the end of the first poll."""
    log = running("".join(f"{step(n, loss=1 / n)}\n" for n in range(1, 4)))
    look()
    with log.open("a") as file:
        file.write(step(4, loss=0.25) + "\n")
    look()
    look()
    assert [point.step for point in stored("one").steps] == [1, 2, 3, 4]


def test_slow_poll_or_a_poll_without_news_stores_nothing(registry: Registry, running: Callable[[str], Path]) -> None:
    """Two polls have read the same lines: the later store changes nothing; a poll without news writes nothing."""
    running("".join(f"{step(n, loss=1 / n)}\n" for n in range(1, 4)))
    before = registry.find("one")
    look()
    refresh(registry, before)  # as a poll that began before the first poll ended
    assert [point.step for point in stored("one").steps] == [1, 2, 3]
    assert registry.find("one").attempt.progress["step"] == 3
    version = registry.database.execute("PRAGMA data_version")[0][0]
    look()
    assert registry.database.execute("PRAGMA data_version")[0][0] == version


def test_last_poll_continues_from_a_concurrent_poll(
    registry: Registry, running: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No poll follows the end: lines missed by the concurrent poll are stored too, each once."""
    log = running(f"{step(1, loss=1.0)}\n")
    before = registry.find("one")
    look()
    with log.open("a") as file:
        file.write(step(2, loss=0.5) + "\n")
    ended = State("succeeded", started_s=1000.0, ended_s=1060.0)
    monkeypatch.setattr(backends.load("local"), "state", lambda ref: ended)
    job = refresh(registry, before)
    assert [point.step for point in stored("one").steps] == [1, 2]
    assert (job.attempt.state.state, job.attempt.progress["step"]) == ("succeeded", 2)


@pytest.mark.slow
def test_many_processes_store_each_event_once(running: Callable[[str], Path], home: Path) -> None:
    """Six processes poll again and again while a job prints."""
    log = running("")
    (home / "local" / "one" / "attempt-1" / "node-0" / "exit.json").unlink()
    program = """
import sys, time
from cloudtrain.launcher import backend
from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs import follow
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.logs.view import View
from cloudtrain.launcher.store.registry import Registry
backend.load("local").state = lambda ref: State("running", started_s=1000.0)
registry = Registry()
print("up", flush=True)
while refresh(registry, registry.find("one")).attempt.progress.get("step", 0) < 300:
    pass
"""
    lookers = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for looker in lookers:
        looker.stdout.readline()
    for n in range(1, 301):
        with log.open("a") as file:
            file.write(step(n, loss=1 / n) + "\n")
    assert [looker.wait(60) for looker in lookers] == [0] * 6
    for looker in lookers:
        looker.stdout.close()
    assert [point.step for point in stored("one").steps] == list(range(1, 301))


def test_series_of_a_long_job_is_bounded_and_representative(home: Path) -> None:
    """First, last and every extreme step stay; the remaining steps are evenly spaced after any number of reductions."""
    losses = [10 / (n + 1) for n in range(30_000)]
    losses[12_345], losses[23_456] = 99.0, math.nan
    for begin in range(0, 30_000, 500):
        put(1, [step(n, loss=losses[n], samples_per_s=100.0 + n % 7) for n in range(begin, begin + 500)])
    steps = stored("one").steps
    assert 300 <= len(steps) <= series.MOST
    assert (steps[0].step, steps[-1].step) == (0, 29_999)
    kept = {point.step: point.fields["loss"] for point in steps}
    assert (kept[12_345], kept[23_456]) == (99.0, "nan")
    gaps = [after - before for before, after in zip(sorted(kept), sorted(kept)[1:], strict=False)]
    assert max(gaps) <= 3 * 30_000 / 187


def test_means_of_a_thinned_series_match_all_steps(home: Path) -> None:
    """Every hundredth step is slow and an extreme: the weighted mean of the rows left is the mean of all steps."""
    for begin in range(0, 20_000, 500):
        rates = {n: 20.0 if n % 100 == 99 else 100.0 for n in range(begin, begin + 500)}
        put(1, [step(n, samples_per_s=rate, loss=n / 20_000, checkpoint_s=1.0) for n, rate in rates.items()])
    steps = stored("one").steps
    assert sum(point.weight for point in steps) == 20_000
    assert len(steps) < series.MOST
    for some in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
        count = sum(point.weight for point in some)
        assert sum(point.weight * point.fields["samples_per_s"] for point in some) / count == pytest.approx(99.2, 0.002)
    assert {point.fields["checkpoint_s"] for point in steps} == {1.0}


def test_series_keeps_the_best_metric_of_a_diverged_job() -> None:
    """Non-finite figures come and go all the time; the best value of a seventh metric stays, from 1 of 5,000."""
    draw = random.Random(3)
    names = ("loss", "samples_per_s", "grad_norm")
    lines = [step(n, **{name: draw.choice(["nan", draw.random()]) for name in names}) for n in range(9000)]
    assert 250 < len(series.thinned(series.gather(1, [(line, 1.0) for line in lines]))) <= series.MOST
    metrics = {f"m{n}": 0.5 for n in range(7)}
    lines = [format_line("eval", "", {"step": n, "metrics": metrics | {"m6": float(n == 1234)}}) for n in range(5000)]
    points = series.thinned(series.gather(1, [(line, 1.0) for line in lines]))
    assert max((point.fields["metrics"]["m6"], point.step) for point in points) == (1.0, 1234)


@pytest.mark.parametrize("most", [2000, 250])
def test_thinned_points_respect_the_limit(most: int) -> None:
    """The limit holds even if every figure of every step is an extreme."""
    draw = random.Random(1)
    lines = [step(n, loss=draw.random(), samples_per_s=draw.random(), grad_norm=draw.random()) for n in range(9000)]
    points = series.thinned(series.gather(1, [(line, 1.0) for line in lines]), most)
    assert most / 4 < len(points) <= most
    assert (points[0].step, points[-1].step) == (0, 8999)


def test_series_bounds_marks(home: Path) -> None:
    """A script that evaluates and saves at each step leaves room for its steps."""
    lines = [step(n, loss=1.0) for n in range(3000)]
    lines += [format_line("checkpoint", "", {"step": n, "path": "p"}) for n in range(20_000)]
    lines += [format_line("eval", "", {"step": n, "metrics": {"accuracy": n / 20_000}}) for n in range(20_000)]
    put(1, lines)
    found = stored("one")
    assert len(found.points) <= series.MOST
    assert {"step", "checkpoint", "eval"} == {point.kind for point in found.points}
    assert found.marks[-1].fields["metrics"]["accuracy"] == 19_999 / 20_000


HOSTILE = [
    '{"e":["step"],"step":1}',
    '{"e":"step","step":"seven","loss":"low"}',
    '{"e":"step","step":1e400,"loss":NaN}',
    '{"e":"step","step":-1,"loss":-Infinity,"eta_s":"soon"}',
    '{"e":"step","step":%s,"loss":%s,"eta_s":%s}' % (("9" * 4000,) * 3),
    '{"e":"step","step":true,"loss":null,"</script><b>":1,"%s":2}' % ("x" * 9000),
    '{"e":"step","step":5,' + ",".join(f'"m{n}":{n}' for n in range(5000)) + "}",
    '{"e":"eval","metrics":[1,2],"step":{}}',
    '{"e":"eval","metrics":{"accuracy":"high","f1":NaN,"nested":' + "[" * 900 + "]" * 900 + "}}",
    '{"e":"error","message":"%s","traceback":"\\ud800 \\u0000 </script>"}' % ("A" * 100_000),
    '{"e":"start","a":' + "[" * 900 + "]" * 900 + "}",
    '{"e":"start","a":%s' % ("[" * 100_000),
    '{"e":"done","metrics":{"a":%s}}' % ("9" * 4000),
]


def test_hostile_job_breaks_neither_registry_nor_poll(running: Callable[[str], Path]) -> None:
    """After nonsense, huge fields and strings for numbers, the poll continues, and the stored data are small JSON."""
    running("".join(f"x  ::ct {tail}\n" for tail in HOSTILE) + step(9, loss=0.5) + "\n")
    look()
    points = stored("one").points
    assert points[-1].fields == {"loss": 0.5}
    assert all(len(json.dumps(point.fields, allow_nan=False)) < 30_000 for point in points)
    assert all(isinstance(value, int | float | str) for point in stored("one").steps for value in point.fields.values())


def test_ten_megabytes_of_events_are_read_in_bounded_memory(running: Callable[[str], Path], home: Path) -> None:
    """The events are thinned on arrival, and the registry stays small."""
    draw = random.Random(7)
    running("".join(f"{step(n, loss=draw.random(), lr=0.1, text='x' * 100)}\n" for n in range(60_000)))
    look()
    assert len(stored("one").points) <= series.MOST
    assert (home / "registry.sqlite").stat().st_size < 2_000_000


def test_poll_makes_only_the_lines_of_events(running: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's state needs the events of its log, not the other lines, however many."""
    running("".join(f"{step(n, loss=0.5)}\n" + "a line of the script\n" * 500 for n in range(3)))
    made: list[int] = []
    local, real = backends.load("local"), backends.load("local").logs_with  # type: ignore[attr-defined]

    def counted(*asked: Any) -> Any:
        page = real(*asked)
        made.append(len(page.lines))
        return page

    monkeypatch.setattr(local, "logs_with", counted)
    look()
    assert sum(made) == 3
    assert [point.step for point in stored("one").steps] == [0, 1, 2]


def test_backlog_of_steps_is_read_in_part(running: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of steps at once a few hundred are read: each counts for its stretch, and extreme losses stay."""
    losses = {n: {3333: "NaN", 4444: "99.5", 5555: "-7.25"}.get(n, "1.0") for n in range(9000)}
    running("".join(f'x  ::ct {{"e":"step","step":{n},"loss":{loss}}}\n' for n, loss in losses.items()))
    read: list[str] = []
    parse = events.parse
    monkeypatch.setattr(events, "parse", lambda line: read.append(line) or parse(line))
    look()
    steps = stored("one").steps
    assert len(set(read)) < 600
    assert sum(point.weight for point in steps) == 9000
    assert {3333, 4444, 5555, 0, 8999} <= {point.step for point in steps}
    assert {"nan", 99.5, -7.25} <= {point.fields["loss"] for point in steps}


@pytest.mark.parametrize("command", ["status", "wait", "follow"])
def test_command_reads_the_end_of_a_long_log(
    running: Callable[[str], Path], registry: Registry, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With the file of events that the agent has left, the log's size does not count; each event is stored."""
    monkeypatch.setattr(node_logs, "PAGE_BYTES", 1 << 16)
    log = running("".join(f"{step(n, loss=0.5)}\n" + "a line of the script\n" * 300 for n in range(400)))
    agent, read = node_logs.TimeIndex(log.parent), list[int]()
    for _ in range(1 + log.stat().st_size // node_logs.PAGE_BYTES):
        agent.note(1000.0)
    monkeypatch.setattr(backends.load("local"), "state", lambda ref: State("succeeded", started_s=1.0, ended_s=1000.0))
    real = node_logs._piece

    def counted(path: Path, offset: int, length: int) -> bytes:
        read.append(len(data := real(path, offset, length)))
        return data

    monkeypatch.setattr(node_logs, "_piece", counted)
    job = registry.find("one")
    if command == "status":
        refresh(registry, job)
    elif command == "wait":
        assert follow.wait(registry, [job], None, lambda job: None) == 0
    else:
        assert follow.follow(registry, job, View(), tail=10) == 0
    assert sum(read) < 3 * node_logs.PAGE_BYTES < log.stat().st_size / 10
    assert [point.step for point in stored("one").steps] == list(range(400))
