"""The seeded differences of the clouds' stand-ins: changes of documents, lines of containers, lists of the store."""

from typing import Any

import pytest

from doubles.kit.differences import REQUEST, Changes, Differs, Heard, Listing, newest

DOCUMENT = {
    "limit": "90s",
    "count": 2,
    "at": "2026-11-30T20:00:00Z",
    "tags": [{"Key": "a"}, {"Key": "b"}],
    "state": "On",
}


def changed(path: str, how: str, value: Any = None) -> Any:
    """Return the document after one change of an answer."""
    changes = Changes()
    changes.add({"operations": ["jobs.*"], "path": path, "how": how, "value": value})
    return changes.applied(["jobs.get"], "answer", DOCUMENT)


@pytest.mark.parametrize(
    ("path", "how", "value", "expected"),
    [
        ("limit", "scale", 2, {"limit": "180s"}),
        ("limit", "up", 60, {"limit": "120s"}),
        ("count", "down", 60, {"count": 0}),
        ("at", "shift", 3600, {"at": "2026-11-30T21:00:00Z"}),
        ("tags/0", "drop", None, {"tags": [{"Key": "b"}]}),
        ("tags/*/Key", "set", "c", {"tags": [{"Key": "c"}, {"Key": "c"}]}),
        ("state", "word", {"On": "Off"}, {"state": "Off"}),
        ("limit", "cut", 1, {"limit": "9"}),
        ("absent", "scale", 2, {}),
    ],
)
def test_change_alters_the_values_at_its_path(path: str, how: str, value: Any, expected: dict[str, Any]) -> None:
    """All other values stay, and so does the document of the caller."""
    before = repr(DOCUMENT)
    assert changed(path, how, value) == DOCUMENT | expected
    assert repr(DOCUMENT) == before


def test_change_counts_its_calls() -> None:
    """`after` lets calls through, `count` limits the changed ones; a request is not an answer."""
    changes = Changes()
    changes.add({"operations": ["get"], "path": "count", "how": "set", "value": 9, "after": 1, "count": 1})
    assert [changes.applied(["get"], "answer", DOCUMENT)["count"] for _ in range(3)] == [2, 9, 2]
    assert changes.applied(["get"], REQUEST, DOCUMENT) is DOCUMENT
    with pytest.raises(ValueError, match="`how` is one of"):
        changes.add({"operations": ["get"], "path": "count", "how": "odd"})


def test_lines_are_lost_doubled_and_kill() -> None:
    """A container is killed once for each job, after the line has arrived."""
    killed: list[int] = []
    settings = Differs(log_lost="lost", log_doubled="twice", kill_at="end")
    heard = Heard(lambda: settings, set(), "job", lambda: killed.append(1))
    assert list(heard.told([b"a", b"lost", b"twice", b"end", b"end"])) == [b"a", b"twice", b"twice", b"end", b"end"]
    assert killed == [1]
    assert heard.read(b"x lo") + heard.read(b"st\ny\nz") + heard.read(b"") == b"y\nz"


def test_list_is_consistent_only_later() -> None:
    """A fresh object is missing; a removed object that the list had is still there."""
    listing = Listing(lambda: 60.0)
    assert listing.told("b", [("old", 1, 0.0), ("new", 2, 1e12)], "") == [("old", 1)]
    assert listing.told("b", [], "") == [("old", 1)]
    assert listing.told("b", [], "x") == []
    assert Listing(lambda: 0.0).told("b", [("new", 2, 1e12)], "") == [("new", 2)]


def test_newest_checkpoint_of_each_place() -> None:
    """Only the files of the step with the highest number."""
    names = ["a/step-9/x", "a/step-10/x", "a/step-10/y", "b/step-2/x", "a/other"]
    assert newest(names) == ["a/step-10/x", "a/step-10/y", "b/step-2/x"]
