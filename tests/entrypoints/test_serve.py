"""The server of a model folder: contracts, hostile requests, limits, batches, the drain."""

import contextlib
import errno
import http.client
import io
import json
import os
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cloudtrain.entrypoints.export import loading
from cloudtrain.entrypoints.models import folder as folders
from cloudtrain.entrypoints.serve.__main__ import _folder, main
from cloudtrain.entrypoints.serve.connections import ConnectionLimits
from cloudtrain.entrypoints.serve.engine import Engine, open_engine
from cloudtrain.entrypoints.serve.routes import Routes
from cloudtrain.entrypoints.serve.server import ModelServer, ServeLimits
from doubles import warmpython
from doubles.modelfolders import write_traced
from doubles.waiting import until

SERVER = (*warmpython.TRAINER, "cloudtrain.entrypoints.serve.engine", "torch.export")
Ask = Callable[..., tuple[int, Any]]
Serve = Callable[..., "Served"]
Start = Callable[..., warmpython.Process]


class Sums(torch.nn.Module):
    """Adds up the words' values, times the scale; refuses words above 9 as an embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Embedding(10, 2)
        self.values.weight.data = torch.arange(20.0).view(10, 2)

    def forward(self, words: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `sums` (B, 2) and `count` (B,)."""
        return {"sums": self.values(words).sum(1) * scale[:, None], "count": (words > 0).sum(1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with a traced model."""
    path = tmp_path_factory.mktemp("served") / "model"
    samples = lambda n: {"words": torch.ones(n, 3, dtype=torch.int64), "scale": torch.ones(n)}  # noqa: E731
    return write_traced(path, "sums", Sums().eval(), samples)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    """Return the model, loaded."""
    return open_engine(model, most_rows=4)


class Served(ModelServer):
    """A server in a thread. Names of connection limits and of server limits may be mixed."""

    def __init__(self, engine: Engine | None, **limits: Any) -> None:
        of_connections = {name: limits.pop(name) for name in ConnectionLimits.__annotations__ & limits.keys()}
        routes = Routes("/health", "/predict")
        routes.engine = engine
        super().__init__(routes, "127.0.0.1", 0, ServeLimits(connections=ConnectionLimits(**of_connections), **limits))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def drain(self) -> int:
        """End the server as SIGTERM does; return the number of requests that were cut off."""
        self.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.unfinished


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a server with an engine and limits; all servers end with the test."""
    started: list[Served] = []

    def start(engine: Engine | None, **limits: Any) -> Served:
        started.append(Served(engine, **{"drain_s": 1.0, **limits}))
        return started[-1]

    yield start
    for server in started:
        server.drain()


@pytest.fixture(scope="module")
def ask(engine: Engine) -> Iterator[Ask]:
    """Return a function that asks a ready server: ask(path, body) -> status, JSON."""
    server = Served(engine)
    yield lambda path, body=None, method=None: asked(server.port, path, body, method)
    server.drain()


def asked(port: int, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """Return status and JSON of an answer; a body that is neither bytes nor None is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, data)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


INSTANCES = {"instances": [{"words": [1, 2, 3], "scale": 1}, {"words": [0, 0, 9], "scale": 0.5}]}
PREDICTIONS = [{"output.sums": [12.0, 15.0], "output.count": 3}, {"output.sums": [9.0, 10.5], "output.count": 1}]
V2 = {
    "id": "a",
    "inputs": [
        {"name": "words", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]},
        {"name": "scale", "shape": [1], "datatype": "FP32", "data": [2]},
    ],
}


@pytest.mark.parametrize("path", ["/invocations", "/predict", "/score"])
def test_clouds_paths_answer_instances(ask: Ask, path: str) -> None:
    """SageMaker's, Vertex AI's and Azure ML's paths give a prediction for each instance."""
    assert ask(path, INSTANCES) == (200, {"predictions": PREDICTIONS})


@pytest.mark.parametrize(
    "path", ["/ping", "/health", "/", "/v2/health/ready", "/v2/health/live", "/v2/models/sums/ready"]
)
def test_health_paths_answer(ask: Ask, path: str) -> None:
    """Every platform's health path says 200 for a ready model, to GET and HEAD."""
    assert ask(path)[0] == 200
    assert ask(path, None, "HEAD") == (200, None)


def test_open_inference_protocol(ask: Ask, engine: Engine) -> None:
    """Metadata and inference have the protocol's fields; outputs can be chosen."""
    about = ask(f"/v2/models/sums/versions/{engine.version}")[1]
    assert (about["name"], about["platform"]) == ("sums", "pytorch_pt2")
    assert about["inputs"][0] == {"name": "words", "datatype": "INT64", "shape": [-1, 3]}
    status, found = ask("/v2/models/sums/infer", V2)
    assert (status, found["model_name"], found["id"]) == (200, "sums", "a")
    assert found["outputs"][0] == {"name": "output.sums", "shape": [1, 2], "datatype": "FP32", "data": [24.0, 30.0]}
    chosen = ask("/v2/models/sums/infer", {**V2, "outputs": [{"name": "output.count"}]})[1]
    assert [each["name"] for each in chosen["outputs"]] == ["output.count"]
    assert ask("/invocations", V2)[1]["outputs"] == found["outputs"]


def with_input(index: int, **changes: Any) -> dict[str, Any]:
    """Return the protocol's request with changes in one input."""
    return {"inputs": [{**each, **changes} if i == index else each for i, each in enumerate(V2["inputs"])]}


HOSTILE = [
    (b"", "is no JSON"),
    (b"{", "is no JSON"),
    (b"\xff\xfe", "is no JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b"[" + b"1" * 1_000_000 + b"]", "is no JSON"),
    (b'{"instances": [NaN]}', "NaN is no JSON number"),
    ({}, "expected"),
    ([], "no sample"),
    ({"instances": []}, "no sample"),
    ({"instances": 3}, "expected"),
    ({"instances": [1]}, "instance 0 must be an object"),
    ({"instances": [{"words": [1, 2, 3]}]}, "instance 0 must be an object with words, scale"),
    ({"instances": [{"words": [1, 2], "scale": 1}]}, "words has the shape 1x2; expected anyx3"),
    ({"instances": [{"words": [[1, 2, 3]], "scale": 1}]}, "words has the shape 1x1x3"),
    ({"instances": [{"words": [1, 2, "3"], "scale": 1}]}, "no even list of numbers"),
    ({"instances": [{"words": [1, 2, None], "scale": 1}]}, "no even list of numbers"),
    ({"instances": [{"words": [1, 2, 3.5], "scale": 1}]}, "has the type int64"),
    ({"instances": [{"words": [1, 2, 2**70], "scale": 1}]}, "no even list of numbers"),
    ({"instances": [{"words": [1, 2, 3], "scale": 1}, {"words": [1], "scale": 1}]}, "no even list of numbers"),
    ({"instances": [{"words": [1, 2, 99], "scale": 1}]}, "the model refuses the values: index out of range"),
    ({"instances": [{"words": [1, 2, 3], "scale": 1e308}]}, "scale has values outside float32"),
    ({"inputs": 3}, "expected"),
    ({"inputs": [V2["inputs"][0]]}, "expected the inputs words, scale, found words"),
    ({"inputs": [V2["inputs"][0]] * 2}, "expected the inputs"),
    (with_input(0, shape=[1, 4]), "has 3 values, and its shape has 4"),
    (with_input(0, shape=[-1, 3]), "must be a list of whole numbers"),
    (with_input(0, shape="x"), "must be a list of whole numbers"),
    (with_input(0, shape=[2**40 - 1] * 100_000), "the shape of words has 100000 sides; expected 2"),
    (with_input(0, name=["words"]), "expected the inputs words, scale, found scale"),
    (with_input(0, datatype=[["INT64"]]), "words has the datatype INT64"),
    (with_input(0, datatype="FP32"), "has the datatype INT64"),
    (with_input(0, data={}), "must be a list"),
    (with_input(1, data=json.loads("[" * 70 + "1" + "]" * 70)), "no even list of numbers"),
    (with_input(1, shape=[2], data=[1, 1]), "different numbers of samples: 1, 2"),
    ({**V2, "outputs": [{"name": "other"}]}, "the outputs are output.sums, output.count"),
    ({**V2, "outputs": [3]}, "the outputs are"),
    ({**V2, "outputs": [{"name": ["output.count"]}]}, "the outputs are"),
    ({**V2, "outputs": [{"name": "output.count"}] * 2}, "each at most once"),
]


@pytest.mark.parametrize(("body", "reason"), HOSTILE)
def test_hostile_body_is_a_400_with_the_reason(ask: Ask, body: Any, reason: str, capfd: Any) -> None:
    """Any body that the model cannot take gets 400 with a message, soon; the server prints nothing and goes on."""
    began_s = time.process_time()
    status, found = ask("/invocations", body)
    assert time.process_time() - began_s < 5  # the product of 100,000 sides takes 40 s
    assert (status, reason in found["error"]) == (400, True), found
    assert ask("/invocations", INSTANCES)[0] == 200
    assert capfd.readouterr().err == ""


def test_wrong_paths_and_methods(ask: Ask) -> None:
    """An unknown path or model is a 404, a wrong method a 405."""
    assert ask("/nothing")[0] == 404
    assert ask("/v2/models/other")[0] == 404
    assert ask("/v2/models/other/infer", V2)[0] == 404
    assert ask("/v2/models/sums/versions/9/infer", V2)[0] == 404
    assert ask("/v2/models/sums/versions/9/ready")[0] == 404
    assert ask("/invocations")[0] == 405
    assert ask("/ping", {})[0] == 405


class Faulty:
    """A call of a model that lacks memory, or returns NaN."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise the error of torch for lack of memory, or return NaN."""
        if self.fault == "memory":
            torch.empty(1 << 60)
        return {"output.sums": torch.full((len(values["scale"]), 2), torch.nan)}


@pytest.mark.parametrize("fault", ["memory", "NaN"])
def test_fault_of_the_model_is_a_500(
    model: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, fault: str, capfd: Any
) -> None:
    """A sound request is no bad request if the model lacks memory or returns NaN; the log has the reason."""
    monkeypatch.setattr("cloudtrain.entrypoints.export.loading.pt2", lambda path: Faulty(fault))
    status, found = asked(serve(open_engine(model, most_rows=4)).port, "/invocations", INSTANCES)
    assert (status, ("NaN" if fault == "NaN" else "its log") in found["error"]) == (500, True)
    assert ("alloc" in capfd.readouterr().err) == (fault == "memory")


def test_link_is_followed_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that moves after the verification changes no model: name and results are of the same folder."""
    (tmp_path / "current").symlink_to(model)
    verify = folders.verify

    def move(path: Path) -> folders.ModelFolder:
        found = verify(path)
        (tmp_path / "next").symlink_to(tmp_path / "other")
        (tmp_path / "next").replace(tmp_path / "current")
        return found

    monkeypatch.setattr(folders, "verify", move)
    engine = open_engine(tmp_path / "current", most_rows=4)
    assert engine.run({"words": torch.ones(1, 3, dtype=torch.int64), "scale": torch.ones(1)})["output.count"] == 3


def test_large_body_gets_its_413(serve: Serve, engine: Engine) -> None:
    """A client that sends 20 MB before the answer is read, as Python's urllib does, reads 413."""
    port = serve(engine).port
    assert asked(port, "/invocations", b"x" * 20_000_000)[0] == 413


def raw(port: int, data: bytes) -> bytes:
    """Return everything that the server sends after the bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


HOST = b"Host: x\r\n"
POST = b"POST /invocations HTTP/1.1\r\n" + HOST
HEADS = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
    (b"GET http://x/ping HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505),
    (b"GET / HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n" + HOST + b"spaced : x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n" + HOST + b"folded: x\r\n y\r\n\r\n", 400),
    (b"GET /ping HTTP/1.1\r\n" + HOST + b"X: a\nContent-Length: 40\r\n\r\n", 400),
    (b"GET /ping HTTP/1.1\n" + HOST + b"\r\n", 400),
    (b"GET /ping HTTP/1.1\r\n" + HOST + b"\n", 400),
    (b"GET /ping HTTP/1.1\r\n" + HOST + b"X: a\rContent-Length: 40\r\n\r\n", 400),
    (POST + b"X: a\nContent-Length: 2\r\n\r\n{}", 400),
    (POST + b"Content-Length: 2\n\r\n{}", 400),
    (POST + b"\r\n", 411),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    (POST + b"Content-Length: -1\r\n\r\n", 400),
    (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
    (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (POST + b"Content-Length: 5000\r\n\r\n" + b"x" * 5000, 413),
    (b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000, 431),
    (b"GET / HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n", 408),
    (POST + b"Content-Length: 10\r\n\r\nhalf", 408),
]


@pytest.mark.parametrize(("data", "status"), HEADS)
def test_faulty_head_is_refused(serve: Serve, engine: Engine, data: bytes, status: int) -> None:
    """Each fault of HTTP has its status; the connection ends after a single answer, whatever follows."""
    port = serve(engine, body_bytes=1000, body_s=0.2, head_s=0.2).port
    found = raw(port, data if status == 408 else data + b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" * (b"\r\n\r\n" in data))
    assert found.startswith(f"HTTP/1.1 {status} ".encode()), found
    assert b"connection: close" in found.lower()
    assert b'{"error":' in found
    assert found.count(b"HTTP/1.1 ") == 1


def test_pipelined_requests_are_answered_in_order(serve: Serve, engine: Engine) -> None:
    """Two requests in one packet give two answers on one connection."""
    body = json.dumps(INSTANCES).encode()
    post = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    found = raw(serve(engine).port, post + b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert found.index(b"predictions") < found.index(b"cloudtrain")


def test_client_that_waits_for_100_is_told_to_go_on(serve: Serve, engine: Engine) -> None:
    """curl sends a large body only after `100 Continue`."""
    body = json.dumps(INSTANCES).encode()
    head = f"{POST.decode()}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n"
    with socket.create_connection(("127.0.0.1", serve(engine).port), timeout=20) as connection:
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n")
        connection.sendall(body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_reset_connections_leave_the_server_alone(serve: Serve, engine: Engine) -> None:
    """A hundred clients that reset their connections in a request leave no connection behind."""
    server = serve(engine, connections=200)
    for _ in range(100):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(POST + b"Content-Length: 100\r\n\r\nhalf")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    assert asked(server.port, "/invocations", INSTANCES)[0] == 200
    assert server.drain() == 0


class Gate:
    """A model whose calls wait, and that notes the number of samples of each call."""

    def __init__(self, engine: Engine) -> None:
        self.open, self.entered, self.rows = threading.Event(), threading.Semaphore(0), list[int]()
        self._inner, self.engine = engine._call, engine
        engine._call = self

    def __call__(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's result, once the gate is open."""
        self.rows.append(len(values["scale"]))
        self.entered.release()
        assert self.open.wait(20)
        return self._inner(values)


@pytest.fixture
def gate(model: Path) -> Iterator[Gate]:
    """Return a model of its own whose calls wait for `open`."""
    found = Gate(open_engine(model, most_rows=4))
    yield found
    found.open.set()


def in_thread(do: Callable[[], Any]) -> Callable[[], Any]:
    """Run the function in a thread; return a function that waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(do()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(20)
        return found[0]

    return result


def test_waiting_requests_share_a_call(gate: Gate, serve: Serve) -> None:
    """Requests that wait for a busy model are joined to batches of at most four; a faulty one spoils no other."""
    port = serve(gate.engine).port
    one = {"instances": INSTANCES["instances"][:1]}
    bad = {"instances": [{"words": [1, 2, 99], "scale": 1}]}
    first = in_thread(lambda: asked(port, "/invocations", one))
    gate.entered.acquire()
    others = [in_thread(lambda body=body: asked(port, "/invocations", body)) for body in [one, one, bad, one, one]]
    until(lambda: len(gate.engine._waiting) == 5)
    gate.open.set()
    assert [first()[0], *sorted(each()[0] for each in others)] == [200, 200, 200, 200, 200, 400]
    assert gate.rows[0] == 1
    assert gate.rows[1] == 4
    assert all(each()[1]["predictions"] == PREDICTIONS[:1] for each in others if each()[0] == 200)


def test_model_without_a_side_for_samples_is_called_for_each_request(model: Path, tmp_path: Path) -> None:
    """Without a side for samples requests share no call, and `instances` are refused with the protocol's path."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["inputs"][1]["is_batched"] = False
    (copy / "config.json").write_text(json.dumps(config))
    folders.write_sums(copy, {})
    engine = open_engine(copy, most_rows=4)
    routes = Routes()
    routes.engine = engine
    assert not engine.batches
    assert routes.answer("POST", "/v2/models/sums/infer", json.dumps(V2).encode()).status == 200
    refused = routes.answer("POST", "/invocations", json.dumps(INSTANCES).encode())
    assert (refused.status, "/v2/models/NAME/infer" in refused.body["error"]) == (400, True)


def test_requests_above_the_limit_get_503(gate: Gate, serve: Serve) -> None:
    """With two requests at once allowed, the third is refused at once, and health still answers."""
    port = serve(gate.engine, concurrency=1).port
    first = in_thread(lambda: asked(port, "/invocations", INSTANCES))
    gate.entered.acquire()
    assert asked(port, "/invocations", INSTANCES) == (503, {"error": "too many requests at once"})
    assert asked(port, "/ping")[0] == 200
    gate.open.set()
    assert first()[0] == 200


def test_connections_above_the_limit_get_503(gate: Gate, serve: Serve) -> None:
    """If every connection has a request under way, a further connection is answered with 503 and closed."""
    port = serve(gate.engine, connections=1).port
    first = in_thread(lambda: asked(port, "/invocations", INSTANCES))
    gate.entered.acquire()
    assert raw(port, b"").startswith(b"HTTP/1.1 503")
    gate.open.set()
    assert first()[0] == 200


@pytest.mark.parametrize(
    "sent", [b"", b"GET /ping HTT", POST + b"Content-Length: 100\r\n\r\n{", b"GET /ping HTTP/1.1\r\n" + HOST + b"\r\n"]
)
def test_silent_connections_give_way(serve: Serve, engine: Engine, sent: bytes) -> None:
    """Connections with no byte, half a head, half a body or an old answer hold up nobody; the oldest ends first."""
    server = serve(engine, connections=20, concurrency=4)
    port = server.port
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(40)]
        for connection in silent:
            with contextlib.suppress(OSError):
                connection.sendall(sent)
        if sent.endswith(b"\r\n\r\n"):  # with every connection at its answer, a further one is refused
            assert silent[-1].recv(1, socket.MSG_PEEK)
            until(lambda: all(each.phase != "answer" for each in list(server.server_state.connections)))
        for _ in range(3):
            assert asked(port, "/ping")[0] == 200
            assert asked(port, "/invocations", INSTANCES)[0] == 200
        with contextlib.suppress(ConnectionResetError):
            while silent[0].recv(1000):
                pass
        silent[-1].settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            assert silent[-1].recv(1000)  # an answer, but no end


def test_unfinished_bodies_have_a_bound_together(serve: Serve, engine: Engine) -> None:
    """If unfinished bodies take as much memory as all bodies in work may, the oldest is refused."""
    port = serve(engine, concurrency=1, body_bytes=1_000_000).port
    head = POST + b"Content-Length: 1000000\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as old,
        socket.create_connection(("127.0.0.1", port), timeout=20) as new,
    ):
        old.sendall(head + b"x" * 700_000)
        time.sleep(0.2)
        new.sendall(head + b"x" * 700_000)
        assert old.recv(100).startswith(b"HTTP/1.1 503")
        new.sendall(b"x" * 300_000)
        assert new.recv(100).startswith(b"HTTP/1.1 400")


def test_answer_that_nobody_reads_ends(serve: Serve, model: Path) -> None:
    """A client that asks for answers and never reads them loses the connection after the time limit."""
    server = serve(None, body_s=0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = b"GET /v2/models/sums HTTP/1.1\r\n" + HOST + b"\r\n"
        connection.setblocking(False)

        def flood() -> None:
            with contextlib.suppress(OSError):  # both buffers are full, or the connection is gone
                while True:
                    connection.send(request * 200)

        until(lambda: flood() or not server.server_state.connections)


def test_client_that_ends_its_side_gets_its_answer(gate: Gate, serve: Serve) -> None:
    """`nc -N` and some proxies end their side of a connection after the request."""
    body = json.dumps(INSTANCES).encode()
    with socket.create_connection(("127.0.0.1", serve(gate.engine).port), timeout=20) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        gate.entered.acquire()
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        gate.open.set()
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_drain_finishes_the_request_under_way(gate: Gate, serve: Serve) -> None:
    """The drain closes idle connections, answers the running request, and then takes no connection."""
    server = serve(gate.engine)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as idle:
        first = in_thread(lambda: asked(server.port, "/invocations", INSTANCES))
        gate.entered.acquire()
        drained = in_thread(server.drain)
        assert idle.recv(1) == b""
    gate.open.set()
    assert (first()[0], drained()) == (200, 0)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)


def test_drain_is_not_ready_and_ends_under_new_connections(
    gate: Gate, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that connect without a pause hold up no drain, and a request under way sees readiness as 503."""
    monkeypatch.setattr("cloudtrain.entrypoints.serve.server._GRACE_S", 3.0)  # the probe ends its request in this time
    # The probe must not give way to the connections that a slow server takes at once.
    server, ended = serve(gate.engine, drain_s=30.0, connections=1000), threading.Event()
    first = in_thread(lambda: asked(server.port, "/invocations", INSTANCES))
    gate.entered.acquire()

    def connect() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", server.port), timeout=1).close()

    clients = [in_thread(connect) for _ in range(2)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as probe:
        probe.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n")  # the rest follows in the drain
        until(lambda: any(each.phase == "head" for each in list(server.server_state.connections)))
        drained, begin_s = in_thread(server.drain), time.monotonic()
        until(lambda: server._routes.is_draining)
        probe.sendall(b"\r\n")
        assert probe.recv(100).startswith(b"HTTP/1.1 503")
    gate.open.set()
    assert (first()[0], drained()) == (200, 0)
    assert time.monotonic() - begin_s < 20
    ended.set()
    for each in clients:
        each()


def test_drain_under_load_resets_no_request(serve: Serve, engine: Engine) -> None:
    """Of clients that ask without a pause, each request is answered, or its connection was refused, or ended before."""
    server, faults, answered = serve(engine, drain_s=20.0), list[str](), list[int]()
    body = json.dumps(INSTANCES).encode()
    data = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def load(keeps: bool) -> None:
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            except OSError:
                return
            with connection:
                is_fresh = True
                while is_fresh or keeps:
                    answer = b""
                    try:
                        connection.sendall(data)
                        while not answer.endswith(b"]}") and (part := connection.recv(4096)):
                            answer += part
                    except OSError as error:
                        faults.append(str(error))
                        return
                    if not (answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"]}")):
                        faults.append(repr(answer))
                        return
                    answered.append(1)
                    is_fresh = False
                    if b"connection: close" in answer.lower():
                        return

    clients = [in_thread(lambda keeps=number % 2 == 0: load(keeps)) for number in range(6)]
    time.sleep(0.5)
    assert server.drain() == 0
    for client in clients:
        client()
    assert len(answered) > 20
    assert faults == []


def test_client_is_not_connected_after_the_last_accept(
    serve: Serve, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that comes before the close is not connected, since the close would reset its request."""
    server, came = serve(engine), list[int]()
    until(lambda: server.started)
    close = server.servers[0].close

    def late() -> None:
        with socket.socket() as client:
            client.settimeout(0.2)
            came.append(client.connect_ex(("127.0.0.1", server.port)))
        close()

    monkeypatch.setattr(server.servers[0], "close", late)
    assert server.drain() == 0
    assert came[0] == errno.EAGAIN  # it still tries


def test_drain_needs_no_filter(serve: Serve, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without packet filters, as some sandboxes have, ends the server in order."""
    monkeypatch.setattr("cloudtrain.entrypoints.serve.server._SO_ATTACH_FILTER", 9999)
    assert serve(engine).drain() == 0


def test_server_is_not_ready_before_its_model(serve: Serve) -> None:
    """While files are verified, the server lives, and refuses predictions with 503."""
    port = serve(None).port
    assert asked(port, "/v2/health/live")[0] == 200
    assert [asked(port, path)[0] for path in ("/ping", "/v2/health/ready", "/v2/models/sums")] == [503] * 3
    assert asked(port, "/invocations", INSTANCES)[0] == 503


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the server's process on a free port; all processes end with the test."""
    started: list[warmpython.Process] = []

    def begin(*args: str, **env: str) -> warmpython.Process:
        words = ["-m", "cloudtrain.entrypoints.serve", *args, "--port", "0"]
        started.append(warmpython.Process(words, tmp_path, {**os.environ, **env}, SERVER))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(20)


def ready_port(process: warmpython.Process) -> int:
    """Return the port of a process that has become ready."""
    line = process.stderr.readline()
    assert line.startswith("ready: sums (pt2, "), line
    return int(line.rpartition(":")[2])


def test_sigterm_ends_the_process_within_five_seconds(model: Path, start: Start) -> None:
    """The process answers, also with an idle connection open, and ends with exit code 0 after SIGTERM."""
    process = start(str(model))
    port = ready_port(process)
    with socket.create_connection(("127.0.0.1", port), timeout=20):
        assert asked(port, "/invocations", INSTANCES) == (200, {"predictions": PREDICTIONS})
        begin_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert time.monotonic() - begin_s < 5


@pytest.mark.parametrize("kind", ["AIP_STORAGE_URI", "AZUREML_MODEL_DIR"])
def test_platforms_variable_names_the_folder(model: Path, start: Start, kind: str) -> None:
    """Vertex AI's model comes from its store, Azure ML's lies in a folder inside; Vertex AI's routes are followed."""
    uri = f"file://{model}" if kind == "AIP_STORAGE_URI" else str(model.parent)
    port = ready_port(start("--host", "127.0.0.1", **{kind: uri, "AIP_HEALTH_ROUTE": "/h", "AIP_PREDICT_ROUTE": "/p"}))
    assert asked(port, "/h")[0] == 200
    assert asked(port, "/p", INSTANCES)[0] == 200


@pytest.mark.parametrize(
    ("words", "env", "reason"),
    [
        (["--port", "99999"], {}, "`99999` is no port"),
        ([], {"AIP_HTTP_PORT": "abc"}, "`abc` is no port"),
        (["--threads", "100000"], {}, "`100000` is no number from 1 to"),
        (["--threads", "0"], {}, "`0` is no number from 1 to"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], env: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A port or a number of threads that cannot be is refused in one line, before any work."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as raised:
        main(["missing", *words])
    assert (raised.value.code, reason in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_used_port_is_named_once(capsys: Any, monkeypatch: pytest.MonkeyPatch, host: str, shown: str) -> None:
    """The message has the address once, in the form of a URL."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        port = other.getsockname()[1]
        assert main(["missing", "--host", host, "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"error: {shown}:{port} cannot be listened on: Address already in use\n"


def test_refused_model_of_a_store_leaves_no_copy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Vertex AI's variable names a damaged model: the copy is gone after the refusal."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "check.json").write_text("{}")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("AIP_STORAGE_URI", f"file://{copy}")
    assert main(["--host", "127.0.0.1", "--port", "0"]) == 1
    assert "check.json is damaged" in capsys.readouterr().err
    assert list((tmp_path / "scratch").iterdir()) == []


def test_name_of_a_store_outside_the_folder_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's names may be any text: the server writes no file outside of its copy, and refuses the model."""
    store = SimpleNamespace(names=lambda prefix: ["../evil"], get=lambda name, path: path.write_text("x"))
    monkeypatch.setattr("cloudtrain.entrypoints.serve.__main__.open_store", lambda uri: store)
    monkeypatch.setenv("AIP_STORAGE_URI", "gs://bucket/model")
    with pytest.raises(folders.ModelFolderError, match="outside the folder"):
        _folder(None, tmp_path / "scratch")
    assert not (tmp_path / "evil").exists()


def spoiled(model: Path, place: Path, changes: dict[str, bytes]) -> Path:
    """Return a copy of the model folder with changed or further members of model.pt2, and with right checksums."""
    folder = Path(shutil.copytree(model, place))
    with zipfile.ZipFile(model / "model.pt2") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
        for name, data in {**members, **{f"model/{name}": data for name, data in changes.items()}}.items():
            archive.writestr(name, data)
    folders.write_sums(folder, {})
    return folder


class Canary:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


CONFIG_WITH_PICKLE = {
    "config": {"w": {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}}
}


@pytest.mark.parametrize(
    ("member", "config"),
    [
        ("data/sample_inputs/model.pt", None),
        ("data/weights/model.pt", None),
        ("data/weights/weight_0", CONFIG_WITH_PICKLE),
        ("data/constants/opaque_obj_0", None),
        ("data/aotinductor/model/run.so", None),
    ],
)
def test_archive_with_a_pickle_is_refused_before_a_load(
    model: Path, tmp_path: Path, member: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check and the server refuse a traced model with a pickle or native code, and torch never opens the file."""
    pickled = io.BytesIO()
    torch.save(Canary(tmp_path / "canary"), pickled)
    changes = {member: pickled.getvalue()}
    if config is not None:
        changes["data/weights/model_weights_config.json"] = json.dumps(config).encode()
    folder = spoiled(model, tmp_path / "model", changes)
    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "load", lambda path: pytest.fail("torch has opened the archive"))
        with pytest.raises(folders.ModelFolderError, match=f"holds a pickle or native code.*{member.split('/')[1]}"):
            open_engine(folder, most_rows=4)
    assert not (tmp_path / "canary").exists()
    assert open_engine(spoiled(model, tmp_path / "whole", {}), most_rows=4).form == "pt2"


def test_no_pickle_is_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced model has no sample inputs; a model with a weight that torch pickles is not written."""
    with zipfile.ZipFile(model / "model.pt2") as archive:
        assert archive.read("model/data/sample_inputs/model.pt") == b""
    monkeypatch.setattr("torch.export.pt2_archive._package._should_use_pickle", lambda tensor: True)
    program = torch.export.export(Sums(), (torch.ones(1, 3, dtype=torch.int64), torch.ones(1)))
    with pytest.raises(folders.ModelFolderError, match="holds a pickle"):
        loading.save_pt2(program, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["parent", "absolute", "link"])
def test_task_outside_the_folder_is_refused(model: Path, tmp_path: Path, kind: str) -> None:
    """A task that the checksums do not cover is never run, whatever leads to the file."""
    outside = tmp_path / "outside_task.py"
    outside.write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "model.pt2").unlink()
    (folder / "code").mkdir()
    (folder / "code" / "link.py").symlink_to(outside)
    config = json.loads((folder / "config.json").read_text())
    config["task"] = {"parent": "../../outside_task.py", "absolute": str(outside), "link": "link.py"}[kind]
    (folder / "config.json").write_text(json.dumps({**config, "params": {}}))
    with pytest.raises(folders.ModelFolderError, match="names a task outside the folder"):
        loading.task(folder)
    if kind != "link":
        (folder / "code" / "link.py").unlink()
        folders.write_sums(folder, {})
        with pytest.raises(folders.ModelFolderError, match="names a task outside the folder"):
            open_engine(folder, most_rows=4)
    assert not (tmp_path / "canary").exists()


def test_damaged_folder_is_never_ready(model: Path, tmp_path: Path, start: Start) -> None:
    """One changed byte ends the process with exit code 1 and the file's name."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    data = bytearray((copy / "model.pt2").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "model.pt2").write_bytes(data)
    process = start(str(copy))
    said = process.communicate(30)[1]
    assert process.returncode == 1
    assert "model.pt2 is damaged" in said
    assert "ready" not in said
