"""Files that a node without a shared disk downloads before the job, and the exit report at the job's end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.container import inputs
from cloudtrain.entrypoints.container.inputs import StagingError
from cloudtrain.entrypoints.contract import (
    ContainerOrder,
    ExitReport,
    FetchedInput,
    JobSpec,
    Places,
    SyncedFolder,
    sign_of,
)
from cloudtrain.entrypoints.stores import google_http
from doubles.google.handle import Google
from doubles.google.names import BUCKET

ORDER, ENDED = f"gs://{BUCKET}/jobs/j/order.json", f"gs://{BUCKET}/jobs/j/ended-0.json"


@pytest.fixture
def store(google_store: Google, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> Google:
    """Return a bucket, for a machine with a metadata server, with short retries."""
    monkeypatch.setattr(google_http, "PAUSE_S", 0.01)
    monkeypatch.setattr(google_http, "LONGEST_PAUSE_S", 0.02)
    return google_store


def spec(*, back: bool = True, **fetched: Any) -> ContainerOrder:
    """Return the relevant part of an order."""
    carried = SyncedFolder("checkpoints", f"gs://{BUCKET}/ckpt/j", back=back)
    mounts = {name: FetchedInput(**told) for name, told in fetched.items()}
    return replace(order(), fetched=mounts, carried=(carried,))


def order(fence: str = "mark-1") -> ContainerOrder:
    """Return an order with only the required fields."""
    places = Places(own="own", bundle="bundle", checkpoints="checkpoints", output="output")
    limits: dict[str, Any] = {"deadline_s": 1, "max_duration_s": 1, "limit_reason": "budget", "grace_s": 1}
    job, more = JobSpec(job="é"), {"environment": {}, "bundle_sha256": "0", "join_timeout_s": 1}
    return ContainerOrder(job=job, places=places, fence=fence, **limits, **more)


def refused(*args: Any) -> StagingError:
    """Return the StagingError of reading the order or of downloading the spec's inputs."""
    with pytest.raises(StagingError) as raised:
        inputs.order(*args) if isinstance(args[0], str) else inputs.bring_in(*args)
    return raised.value


def test_order_of_this_send(store: Google) -> None:
    """The order of this submit is read whole."""
    store.put_object("jobs/j/order.json", json.dumps(order().dump() | {"record": {}}))
    assert inputs.order(ORDER, "mark-1") == order()


@pytest.mark.parametrize(
    ("fence", "words"),
    [
        ("mark-2", "a later submit of this job replaced this one, which must not run"),
        (None, "the container order was withdrawn: this job must not run"),
    ],
)
def test_order_that_does_not_hold_is_refused(store: Google, fence: str | None, words: str) -> None:
    """The job came late, or twice, or the sender knows that it does not run: a new start would not fix the error."""
    if fence is not None:
        store.put_object("jobs/j/order.json", json.dumps({"fence": fence}))
    error = refused(ORDER, "mark-1")
    assert (str(error), error.reason) == (words, "superseded")


@pytest.mark.parametrize(
    ("kind", "reason"), [("403", "error"), ("503", "node_failure"), ("drop", "node_failure"), ("401", "error")]
)
def test_order_that_cannot_be_read(store: Google, kind: str, reason: str) -> None:
    """A network fault may pass by the next start; a missing role does not by itself."""
    store.put_object("jobs/j/order.json", json.dumps({"fence": "mark-1"}))
    store.fault("storage.*", kind, containers=True)
    error = refused(ORDER, "mark-1")
    assert (str(error).startswith("cannot read the job's order: "), error.reason) == (True, reason)


def test_input_is_a_folder_or_a_file(store: Google, tmp_path: Path) -> None:
    """Folders and files arrive as in the bucket, with empty files and special names."""
    for name in ("data/a", "data/b c/é.txt", "data/empty", "database/x"):
        store.put_object(name, "" if name.endswith("empty") else name)
    told = spec(
        train={"uri": f"gs://{BUCKET}/data", "mounted": None},
        one={"uri": f"gs://{BUCKET}/data/b c/é.txt", "mounted": None},
        slash={"uri": f"gs://{BUCKET}/data/", "mounted": None},
    )
    places = {name: Path(place) for name, place in inputs.bring_in(told, tmp_path).places.inputs.items()}
    for name in ("train", "slash"):
        found = {path.relative_to(places[name]).as_posix(): path.read_text() for path in places[name].rglob("*.*")}
        assert found == {"b c/é.txt": "data/b c/é.txt"}
        assert ((places[name] / "a").read_text(), (places[name] / "empty").read_text()) == ("data/a", "")
        assert not (places[name] / "x").exists()
    assert places["one"].read_text() == "data/b c/é.txt"


def test_mounted_input_is_read_in_place(store: Google, tmp_path: Path) -> None:
    """A mounted input is used in place, or copied if the machine has no mount."""
    mount = tmp_path / "gcs"
    mount.mkdir()
    store.put_object("data/a", "x")
    told = spec(
        here={"uri": f"gs://{BUCKET}/data", "mounted": str(mount)},
        there={"uri": f"gs://{BUCKET}/data", "mounted": "/gcs-that-is-not-there/x"},
    )
    places = inputs.bring_in(told, tmp_path).places
    assert places.inputs == {"here": str(mount), "there": str(tmp_path / "inputs" / "there")}
    assert (tmp_path / "inputs" / "there" / "a").read_text() == "x"


@pytest.mark.parametrize(
    ("kind", "words", "reason"),
    [
        (None, "the input train: there is nothing at gs://", "error"),
        ("403", "cannot fetch the input train: ", "error"),
        ("503", "cannot fetch the input train: ", "node_failure"),
    ],
)
def test_input_failure_is_reported(store: Google, tmp_path: Path, kind: str | None, words: str, reason: str) -> None:
    """The message names the input, and the error knows whether a new start may help."""
    if kind is not None:
        store.put_object("data/a", "x")
        store.fault("storage.*", kind, containers=True)
    error = refused(spec(train={"uri": f"gs://{BUCKET}/data", "mounted": None}), tmp_path)
    assert (str(error).startswith(words), error.reason) == (True, reason), error


def test_folder_is_restored_only_if_requested(store: Google, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With `back` the folder is restored; a first start has no files and prints no line."""
    inputs.bring_in(spec(), tmp_path)
    assert capfd.readouterr().out == ""
    store.put_object("ckpt/j/step-5/model", "weights")
    inputs.bring_in(spec(back=False), tmp_path)
    assert not (tmp_path / "checkpoints" / "step-5").exists()
    inputs.bring_in(spec(), tmp_path)
    assert (tmp_path / "checkpoints" / "step-5" / "model").read_text() == "weights"
    assert "fetched the folder checkpoints: 1 files" in capfd.readouterr().out


ERROR = {"rank": 1, "kind": "error", "type": "ValueError", "message": "é" * 5000, "traceback": "t", "secret": "s"}
VERDICT = ExitReport("failed", "error", ERROR, restarts=2, resumable=True)


def test_exit_report_has_the_launchers_fields(store: Google) -> None:
    """The report has all of these fields, at any length, and no further fields of the verdict."""
    inputs.report(ENDED, VERDICT)
    told = json.loads(store.object("jobs/j/ended-0.json") or "")
    assert told == {
        "state": "failed",
        "reason": "error",
        "resumable": True,
        "restarts": 2,
        "rank": 1,
        "kind": "error",
        "type": "ValueError",
        "message": "é" * 5000,
        "traceback": "t",
    }


def test_exit_report_of_an_earlier_container_is_removed(store: Google, capfd: pytest.CaptureFixture[str]) -> None:
    """A missing report is no error, and the container starts and ends even if the bucket denies access."""
    inputs.report(ENDED, ExitReport("failed", "node_failure", {"kind": "signal", "signal": "SIGABRT", "step": 10}))
    assert sign_of(inputs.retract(ENDED)) == (10, "signal", "SIGABRT")
    assert store.object("jobs/j/ended-0.json") is None
    inputs.retract(ENDED)
    store.fault("storage.*", "403", containers=True)
    inputs.retract(ENDED)
    inputs.report(ENDED, VERDICT)
    assert "the exit report cannot be written" in capfd.readouterr().out
