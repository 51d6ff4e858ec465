"""Vertex AI's side, against the stand-in that executes: what commands cost, and that no line is lost or late.

The stand-in (tests/doubles) serves Google's unmodified clients under Google's real host names, over TLS, gRPC and REST,
and misbehaves as services do. It is no Google Cloud: it proves our side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clouds import add_times
from report import Report
from vertex_submits import project

from cloudtrain.entrypoints import events
from doubles.google.handle import Google


def cost() -> Report:
    """Processor time of whole commands; and the calls that a submit makes."""
    report = Report("Vertex AI: processor time of whole commands, medians of 7")
    with project() as (box, google):
        box.call("submit", "-d", "-y", "--name", "told")
        google.begin("told-1")
        google.write_log("told-1", *(_line(0, n, f"line {n}") for n in range(1, 1001)), task="workerpool0-0")
        # Whoever asks so often would have to wait for its turn at Cloud Logging: a pass every few seconds has not.
        lines = {
            "submit --dry-run": (0.25, ["submit", "--dry-run"]),
            "logs": (None, ["logs", "told"]),
            "status": (None, ["status", "told"]),
            "submit -d": (None, ["submit", "-d", "-y"]),
        }
        add_times(report, box, lines)
        before = len(google.journal())
        box.call("submit", "-d", "-y")
        calls = [f"{call['operation']} ({call['protocol']})" for call in google.journal()[before:]]
        report.notes.append(f"a submit whose code is there already makes {len(calls)} calls: {', '.join(calls)}")
    return report


def lines(total: int = 12_000, seconds: float = 120.0) -> Report:
    """Follow two replicas whose lines come late, twice, and under other keys; count what came, how soon, at what calls.

    Late are 3 % of the lines, by 6 to 20 s: an assumption (shared with the published comparison of followers).
    """
    report = Report(f"Vertex AI: {total:,} lines of 2 replicas in {seconds:.0f} s, 3 % late, others repeated")
    with project() as (box, google):
        google.settings(log_late_share=0.03, log_late_s=(6, 20), log_duplicate_share=0.02, log_resent_share=0.02)
        google.settings(log_ingest_s=0.5)
        for kind, every in (("429", 17), ("503", 13), ("drop", 19)):
            google.fault("logging.list", kind, every=every)
        box.call("submit", "-d", "-y", "--name", "lines")
        google.begin("lines-1")
        process = box.start("logs", "-f", "lines", "--raw", "--json")
        came: list[tuple[float, int, float, int]] = []
        reading = threading.Thread(target=_read, args=(process, came))
        reading.start()
        time.sleep(8)  # a job's start is slower than ours
        google.clear_journal()
        sent = _write(google, total // 2, seconds)
        google.end("lines-1")
        code = process.wait(timeout=180)
        reading.join()
        numbers = [(node, number) for _, node, _, number in came]
        report.count("lost", len(sent - set(numbers)), 0)
        report.count("repeated", len(numbers) - len(set(numbers)), 0)
        report.count("exit code of the follower", code, 0)
        delays = sorted(seen_s - sent_s for seen_s, _, sent_s, _ in came)
        p50, p95 = delays[len(delays) // 2], delays[len(delays) * 95 // 100]
        report.timing("from a line's printing to the screen, p50", f"{p50:.1f} s", "<= 4 s", ok=p50 <= 4)
        asked = [call["time"] for call in google.journal("logging.list")]
        most = max(sum(0 <= other - when < 60 for other in asked) for when in asked)
        report.count("minutes with more than 30 list calls", int(most > 30), 0)
        turned = sum(a > b for node in (0, 1) for a, b in pairwise([n for at, n in numbers if at == node]))
        report.notes.append(f"p95 {p95:.1f} s; at most {most} list calls in a minute, {len(asked)} in all")
        report.notes.append(f"{turned} lines came after a later one of their own replica, being late themselves")
    return report


def _read(process: subprocess.Popen[str], came: list[tuple[float, int, float, int]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        told = json.loads(line)
        if told["text"].startswith("at "):
            _, sent_s, number = told["text"].split()
            came.append((time.time(), told["node"], float(sent_s), int(number)))


def _write(google: Google, each: int, seconds: float) -> set[tuple[int, int]]:
    """Write the replicas' lines evenly, then their last words; return node and number of each."""
    sent, begin_s, done = set(), time.monotonic(), 0
    while done < each:
        due = min(each, int(each * (time.monotonic() - begin_s) / seconds) + 1)
        for node in (0, 1):
            texts = [_line(node, n, f"at {time.time():.3f} {n}") for n in range(done + 1, due + 1)]
            google.write_log("lines-1", *texts, task=f"workerpool{node}-0")
            sent |= {(node, n) for n in range(done + 1, due + 1)}
        done = due
        time.sleep(0.05)
    for node in (0, 1):
        fields = {"node": node, "final": True, "life": f"life{node}", "lines": each}
        google.write_log("lines-1", events.format_line("end", "it has ended", fields), task=f"workerpool{node}-0")
    return sent


def _line(node: int, number: int, text: str) -> str:
    """Return a line as entrypoints/container/log_relay.py writes it."""
    mark = {"l": f"life{node}", "n": number, "t": int(time.time() * 1000)}
    return json.dumps({"severity": "INFO", "message": f"[{node}] {text}", "ct": mark})


if __name__ == "__main__":
    results = [cost(), lines()]
    for result in results:
        result.show()
    sys.exit(any(result.failed for result in results))
