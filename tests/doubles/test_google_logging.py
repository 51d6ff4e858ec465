"""Cloud Logging of Google's stand-in: entries, the filter language, pages, lateness, quota."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from doubles.google.errors import GoogleError
from doubles.google.logs import LogSettings, LogStore
from doubles.google.names import PROJECT

NAMES = [f"projects/{PROJECT}"]
START_S = 1_795_000_000.0
CHIEF, OTHER = "workerpool0-0", "workerpool1-0"


class Logs:
    """A store with a clock and settings that a test sets."""

    def __init__(self) -> None:
        self.now_s, self.settings = START_S, LogSettings(log_reads_a_minute=10_000)
        self.store = LogStore(lambda: self.settings, lambda: self.now_s)

    def set(self, **values: Any) -> None:
        """Change settings."""
        self.settings = replace(self.settings, **values)

    def list(self, text: str = "", **more: Any) -> list[dict[str, Any]]:
        """Return all entries that match a filter, page after page."""
        found: list[dict[str, Any]] = []
        body = {"resourceNames": NAMES, "filter": text, "pageSize": 1000, **more}
        while True:
            page = self.store.list_entries(body)
            found += page.get("entries", [])
            if not page.get("nextPageToken"):
                return found
            body["pageToken"] = page["nextPageToken"]

    def words(self, text: str = "", **more: Any) -> list[str]:
        """Return the messages of the entries."""
        return [message(entry) for entry in self.list(text, **more)]


def message(entry: dict[str, Any]) -> str:
    """Return an entry's message, from either kind of payload."""
    return str(entry["textPayload"] if "textPayload" in entry else entry["jsonPayload"].get("message"))


@pytest.fixture
def logs() -> Logs:
    """Return a store."""
    return Logs()


@pytest.mark.parametrize(
    ("line", "details", "severity", "payload"),
    [
        ("a line\n", {}, "INFO", {"levelname": "INFO", "message": "a line"}),
        (b"\xff", {"stream": "stderr"}, "ERROR", {"levelname": "ERROR", "message": "\ufffd"}),
        ('{"message": "m", "severity": "warning", "step": 3}', {}, "WARNING", {"message": "m", "step": 3}),
        ('{"message": "m", "severity": "loud"}', {}, "INFO", {"message": "m", "severity": "loud"}),
        ('{"a": NaN}', {}, "INFO", {"levelname": "INFO", "message": '{"a": NaN}'}),
        ("[1]", {"severity": "NOTICE"}, "NOTICE", {"levelname": "NOTICE", "message": "[1]"}),
    ],
)
def test_line_becomes_an_entry(logs: Logs, line: str, details: Any, severity: str, payload: dict[str, Any]) -> None:
    """A JSON object is the payload, and its severity the entry's; any different line is the payload's message."""
    logs.store.write("7", CHIEF, line, **details)
    (entry,) = logs.list()
    assert (entry["severity"], entry["jsonPayload"]) == (severity, payload)
    assert entry["logName"] == f"projects/{PROJECT}/logs/workerpool0-0"
    labels = {"job_id": "7", "task_name": CHIEF, "project_id": PROJECT}
    assert entry["resource"] == {"type": "ml_job", "labels": labels}


def test_message_of_the_service_is_text(logs: Logs) -> None:
    """A message of the service has the task `service` and a text payload."""
    logs.store.write("7", "service", "Job failed.", severity="ERROR")
    (entry,) = logs.list('resource.labels.task_name="service"')
    assert (entry["textPayload"], entry["severity"]) == ("Job failed.", "ERROR")


FILTERS = {
    'resource.type="ml_job" AND resource.labels.job_id="7"': "abcd",
    'resource.labels.job_id=("7" OR "8") AND resource.labels.task_name="WORKERPOOL1-0"': "de",
    "jsonPayload.step>=2": "b",
    "jsonPayload.step>=1 AND jsonPayload.step<=1.5": "",
    "jsonPayload.step:*": "b",
    "NOT jsonPayload.step:* AND NOT resource.labels.job_id=8": "acd",
    'resource.labels.job_id="8" OR jsonPayload.step:* AND resource.type="ml_job"': "be",
    '(resource.labels.job_id="7" AND jsonPayload.step:*) OR resource.labels.job_id="8"': "be",
    f'timestamp>="{time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(START_S + 2))}"': "cde",
    f'timestamp<="{time.strftime("%Y-%m-%dT%H:%M:%S.5+00:00", time.gmtime(START_S + 1))}"': "ab",
    'resource.labels.job_id="9"': "",
    "": "abcde",
}


@pytest.mark.parametrize(("text", "found"), FILTERS.items())
def test_filter_finds(logs: Logs, text: str, found: str) -> None:
    """The filters of a follower work; NOT binds closest, then OR, then AND."""
    lines = [("7", CHIEF, "a", "stdout"), ("7", CHIEF, '{"message": "b", "severity": "WARNING", "step": 2}', "stdout")]
    lines += [("7", CHIEF, "c", "stderr"), ("7", OTHER, "d", "stdout"), ("8", OTHER, "e", "stdout")]
    for number, (job, task, line, stream) in enumerate(lines):
        logs.store.write(job, task, line, stream=stream, at_s=START_S + number)
    assert "".join(logs.words(text)) == found


@pytest.mark.parametrize(
    "text",
    [
        *("word", '"word"', 'resource.type="a" and resource.type="b"', 'resource.type="a" resource.type="b"'),
        *('resource.zone="a"', 'resource.type>="a"', "severity>=ERROR", 'timestamp>="yesterday"'),
        *('jsonPayload.message=~"x.*"', 'jsonPayload.message>="x"', '(resource.type="a"', "resource.type=a)"),
        *("resource.type=a AND", "NOT", 'log_id("x")', "timestamp"),
        "x" * 20_001,
    ],
)
def test_unknown_filter_is_refused(logs: Logs, text: str) -> None:
    """An unknown filter is an error, and never matches everything or nothing."""
    with pytest.raises(GoogleError, match="filter") as caught:
        logs.list(text)
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"pageSize": 1001}, "INVALID_ARGUMENT"),
        ({"pageSize": -1}, "INVALID_ARGUMENT"),
        ({"orderBy": "timestamp desc"}, "INVALID_ARGUMENT"),
        ({"resourceNames": []}, "INVALID_ARGUMENT"),
        ({"pageToken": "x"}, "INVALID_ARGUMENT"),
        ({"page_size": 5}, "INVALID_ARGUMENT"),
        ({"resourceNames": ["projects/another"]}, "PERMISSION_DENIED"),
    ],
)
def test_invalid_request_is_refused(logs: Logs, changes: dict[str, Any], code: str) -> None:
    """A request with too large values, unknown fields or another project is an error."""
    with pytest.raises(GoogleError) as caught:
        logs.store.list_entries({"resourceNames": NAMES, **changes})
    assert caught.value.code == code


def test_page_continues_after_the_last_page(logs: Logs) -> None:
    """A full page has a token, which is valid for the same filter only; the last page may be empty."""
    logs.store.write_lines("7", CHIEF, ["a", "b", "c", "d"])
    body: dict[str, Any] = {"resourceNames": NAMES, "filter": 'resource.type="ml_job"', "pageSize": 2}
    first = logs.store.list_entries(body)
    second = logs.store.list_entries({**body, "pageToken": first["nextPageToken"]})
    assert [message(entry) for entry in second["entries"]] == ["c", "d"]
    assert logs.store.list_entries({**body, "pageToken": second["nextPageToken"]}) == {}
    with pytest.raises(GoogleError, match="page_token"):
        logs.store.list_entries({**body, "filter": "", "pageToken": first["nextPageToken"]})


def test_short_and_empty_pages_lose_no_entries(logs: Logs) -> None:
    """Short and empty pages have a token too: no entry is lost."""
    logs.store.write_lines("7", CHIEF, "abcdefg")
    logs.set(log_page_cap=2, log_empty_every=2)
    assert len(logs.store.list_entries({"resourceNames": NAMES})["entries"]) == 2
    assert set(logs.store.list_entries({"resourceNames": NAMES})) == {"nextPageToken"}
    assert logs.words() == list("abcdefg")


def test_late_entries_appear_in_timestamp_order(logs: Logs) -> None:
    """Entries become visible by their arrival time, and are sorted by their own time."""
    logs.set(log_ingest_s=1.0, log_late_share=0.5, log_late_s=(6.0, 20.0))
    logs.store.write_lines("7", CHIEF, [str(number) for number in range(100)])
    assert logs.words() == []
    logs.now_s += 1.5
    some = logs.words()
    assert 20 < len(some) < 80
    logs.now_s += 5.4
    assert logs.words() == some
    logs.now_s += 15
    assert logs.words() == [str(number) for number in range(100)]
    assert all(entry["receiveTimestamp"] > entry["timestamp"] for entry in logs.list())


def test_both_kinds_of_duplicates_are_listed(logs: Logs) -> None:
    """A duplicate is the same entry listed twice, or one line in two entries."""
    logs.set(log_duplicate_share=1.0)
    logs.store.write("7", CHIEF, "twice")
    first, second = logs.list()
    assert first == second
    logs.set(log_duplicate_share=0.0, log_resent_share=1.0)
    logs.store.write("8", CHIEF, "again")
    first, second = logs.list('resource.labels.job_id="8"')
    assert (first["timestamp"], message(first)) == (second["timestamp"], message(second))
    assert first["insertId"] != second["insertId"]


@pytest.mark.parametrize("line", ["äöü" * 20, '{"message": "' + "äöü" * 20 + '", "step": 1}'])
def test_long_line_is_split(logs: Logs, line: str) -> None:
    """Parts end between characters; an index of 0 is left out, as JSON omits zeros."""
    logs.set(log_entry_bytes=31)
    logs.store.write("7", CHIEF, line)
    parts = logs.list()
    assert "".join(message(part) for part in parts) == "äöü" * 20
    assert [part["split"].get("index") for part in parts] == [None, 1, 2, 3]
    assert {(part["split"]["uid"], part["split"]["totalSplits"]) for part in parts} == {(parts[0]["split"]["uid"], 4)}
    assert max(len(message(part).encode()) for part in parts) <= 31
    assert len({part["insertId"] for part in parts}) == 4


def test_reads_are_limited_per_minute(logs: Logs) -> None:
    """The 61st read is refused without Retry-After; a minute after the first read the next succeeds."""
    logs.set(log_reads_a_minute=60)
    for _ in range(60):
        logs.list()
        logs.now_s += 0.5
    with pytest.raises(GoogleError, match="Read requests per minute") as caught:
        logs.list()
    assert (caught.value.code, caught.value.status, caught.value.headers) == ("RESOURCE_EXHAUSTED", 429, {})
    logs.now_s = START_S + 60
    logs.list()
    with pytest.raises(GoogleError, match="Read requests per minute"):
        logs.list()
