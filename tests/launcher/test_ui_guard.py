"""Access to the page, and the permissions of a browser, tested with the real server."""

import asyncio
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from uiserver import PATIENCE_S, Served, serving

from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.store.registry import Registry, this_process
from cloudtrain.launcher.text.extras import install
from cloudtrain.launcher.ui import server
from doubles.plans import plan_of
from doubles.waiting import until

PLAN = {"instances": 2, "nproc_per_node": 1, "ranks": 2, "hourly_usd": 1.5, "cap_s": 3600}
HOSTILE = "<script>alert(1)</script>"


def put(folder: Path, name: str, **more: Any) -> None:
    """Put an ended job with hostile texts into the registry."""
    registry = Registry(folder)
    state = State(
        "failed",
        "error",
        resumable=True,
        started_s=time.time() - 600,
        ended_s=time.time() - 60,
        error={"rank": 3, "type": "ValueError", "message": HOSTILE, "traceback": f"Traceback\n  {HOSTILE}"},
        detail=f"detail {HOSTILE}",
        url="javascript:alert(1)",
    )

    def make(job_id: str, number: int) -> Job:
        attempt = Attempt(job_id, number, "intent", plan_of(**PLAN), {"body": 1}, time.time() - 700, this_process())
        config = {"tags": {"team": f'"><img src=x onerror=alert(1)>{name}'}}
        return Job(job_id, name, "local", time.time() - 700, config, f"/x/{HOSTILE}/c.yaml", {}, attempt)

    job, _ = registry.add(name, make, exclusive=True, key=None)
    log = folder / "local" / name / "attempt-1" / "node-0" / "log"
    log.mkdir(parents=True)
    (log / "rank-0.log").write_text(f"hello\n{HOSTILE}\n\x1b[31mred\x1b[0m\n")
    (log.parent / "exit.json").write_text("{}")
    registry.mark_sent(job.attempt, {"folder": str(log.parents[1]), "nodes": 1, "checkpoint_dir": str(folder)})
    progress = {"step": 7, "max_steps": 10, "loss": 0.5, "run_url": "https://me:sesame@wandb.ai/a/runs/1?apiKey=sesame"}
    registry.set_state(job.attempt, more.get("state", state), progress)
    registry.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a server with an exchanged token and a job."""
    home = tmp_path_factory.mktemp("ui")
    put(home, "hostile")
    with serving(home) as found:
        found.enter()
        yield found


def test_server_is_private_to_the_machine_and_its_user(served: Served) -> None:
    """The server listens on loopback alone; the token has 256 bits, and every user can read the output of `ps`."""
    assert served.address.startswith("http://127.0.0.1:")
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    listening += [line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:] if " 0A " in line]
    assert [each for each in listening if each.endswith(f":{served.port:04X}")] == [f"0100007F:{served.port:04X}"]
    assert len(served.token) >= 43
    arguments = b"".join(path.read_bytes() for path in Path(f"/proc/{served.process.pid}").glob("task/*/../../cmdline"))
    assert arguments
    assert served.token.encode() not in arguments


@pytest.mark.parametrize(
    "path", ["/", "/?token=wrong", "/jobs/hostile", "/stream", "/static/ui.js", "/spend", "/nosuch"]
)
def test_request_without_the_token_is_refused(served: Served, path: str) -> None:
    """The refusal is the same for existing and missing paths."""
    answer = served.ask("GET", path)
    assert answer.status == 403
    assert "set-cookie" not in answer.headers
    assert served.ask("GET", path, {"cookie": served.cookie[:-1]}).status == 403


def test_cookies_of_foreign_programs_and_localhost_are_accepted(served: Served) -> None:
    """Browsers share cookies of all ports, in any form; users type `localhost` at the near end of an ssh tunnel."""
    for other in ('prefs={"a":1}', "a[b]=1", "flag", "x=two words", "y=\xe9"):
        assert served.ask("GET", "/spend", {"cookie": f"{other}; {served.cookie}; z=1"}).status == 200, other
    assert served.get("/", host=f"localhost:{served.port}").status == 200


def test_token_becomes_a_protected_cookie(tmp_path: Path) -> None:
    """The token leaves the address and works once; the next token is printed."""
    put(tmp_path, "job")
    with serving(tmp_path) as found:
        first = found.ask("GET", f"/jobs/job?x=1&token={found.token}")
        assert (first.status, first.headers["location"]) == (303, "/jobs/job?x=1")
        flags = {part.strip().lower() for part in first.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/"} <= flags
        assert found.token not in first.headers["set-cookie"]
        assert found.ask("GET", f"/?token={found.token}").status == 403
        found.cookie = first.headers["set-cookie"].partition(";")[0]
        assert found.get(f"/?token={found.token}").status == 303  # as with the back button of the browser
        code, stdout, stderr = found.end()
    assert (code, stdout) == (0, "")
    assert "for another browser: http://127.0.0.1" in stderr
    assert found.token not in stderr
    assert "the page is closed; the jobs continue" in stderr


@pytest.mark.parametrize("host", ["evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}"])
def test_foreign_host_is_refused(served: Served, host: str) -> None:
    """A rebound host name of a foreign site is refused, even with the cookie and the token."""
    name = host.format(port=served.port)
    assert served.get("/", host=name).status == 421
    assert served.ask("GET", f"/?token={served.token}", {"host": name}).status == 421


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        *(({"origin": "http://evil.example"}, {}), ({"origin": "null"}, {}), ({"origin": ""}, {})),
        *(({"origin": "http://127.0.0.1:1"}, {}), ({"sec-fetch-site": "cross-site"}, {})),
        *(({"sec-fetch-site": "same-site"}, {}), ({}, {"csrf": "wrong"}), ({}, {"csrf": ""}), ({"cookie": ""}, {})),
    ],
)
def test_form_of_a_foreign_page_is_refused(served: Served, headers: dict[str, str], fields: dict[str, str]) -> None:
    """Only our own page can stop or resume a job."""
    assert served.post("/jobs/hostile/stop", fields, headers).status == 403
    assert served.post("/jobs/hostile/resume", {"attempt": "2", **fields}, headers).status == 403


def test_own_form_is_accepted(served: Served) -> None:
    """The acceptance proves the cause of the refusals above; address, headers, and a form of any length are bounded."""
    answer = served.post("/jobs/hostile/stop", {})
    assert (answer.status, "there is nothing to stop" in answer.text) == (200, True), answer
    assert served.get(f"/?text={'x' * 5000}").status == 414
    assert served.post("/jobs/hostile/stop", {"x": "y" * 20_000}).status == 413
    assert served.post("/jobs/hostile/stop", {}, {"content-length": "nine"}).status in (400, 411)
    assert served.post("/jobs/hostile/stop", {f"x{n}": "" for n in range(30)}).status == 400
    assert served.get("/", **{"x-long": "y" * 70_000}).status in (400, 431)
    assert served.ask("DELETE", "/jobs/hostile", {"cookie": served.cookie}).status == 405


def test_resource_for_a_foreign_page_is_refused(served: Served) -> None:
    """A fetch of a foreign site is refused; a followed link is harmless, lacks the strict cookie, and reloads once."""
    assert served.get("/static/ui.js", **{"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status == 403
    assert served.get("/jobs/hostile/curves", **{"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}).status == 403
    assert served.get("/", **{"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status == 200
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    answer = served.ask("GET", "/jobs/hostile", visit)
    assert (answer.status, "hostile" in answer.text, 'content="0"' in answer.text) == (200, False, True)
    assert served.ask("GET", "/jobs/hostile", {**visit, "sec-fetch-site": "same-origin"}).status == 403


@pytest.mark.parametrize("path", ["/", "/jobs/hostile", "/spend", "/static/ui.js", "/nosuch", "/jobs/nosuch"])
def test_every_answer_has_security_headers(served: Served, path: str) -> None:
    """The headers forbid inline scripts, frames, referrers and foreign origins."""
    headers = served.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["x-frame-options"], headers["referrer-policy"]) == ("DENY", "no-referrer")
    assert headers["x-content-type-options"] == "nosniff"
    assert not [name for name in headers if name.startswith("access-control")]
    assert "server" not in headers


def test_failed_answer_has_security_headers(tmp_path: Path) -> None:
    """An internal fault has the same headers as every answer."""
    from cloudtrain.launcher.ui import app, guard
    from cloudtrain.launcher.ui.site import Site

    keys, told = guard.Keys(), []
    page = app.make(Site(keys, is_read_only=False, folder=tmp_path), 80)
    cast(Any, page.app).add_route("/broken", lambda request: 1 / 0)
    headers = [(b"host", b"127.0.0.1:80"), (b"cookie", f"{page.cookie}={keys.session}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/broken", "query_string": b"", "headers": headers}

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        told.append(message)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(page(scope, receive, send))
    assert told[0]["status"] == 500
    assert set(guard.HEADERS) <= {name.decode() for name, _ in told[0]["headers"]}


@pytest.mark.parametrize("path", ["/static/", "/static", "/static/../ui.py", "/static/%2e%2e%2fregistry.sqlite", "//x"])
def test_only_static_files_of_the_page_are_served(served: Served, path: str) -> None:
    """The server lists no folder, and serves no file outside."""
    assert served.get(path).status == 404


@pytest.mark.parametrize("path", ["/", "/jobs/hostile", "/spend?by=tag:team", "/compare?job=hostile&job=hostile"])
def test_texts_of_jobs_are_escaped(served: Served, path: str) -> None:
    """Errors, tags, folders and addresses of a job are not interpreted as HTML, and no link leads to a script."""
    text = served.get(path).text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "javascript:" not in text


def test_run_at_a_tracker_is_linked_without_secrets(served: Served) -> None:
    """The page links the run, and the report names it, without the user, the password and the query."""
    page, report = served.get("/jobs/hostile").text, served.get("/jobs/hostile/report").text
    assert '<a class="button" href="https://wandb.ai/a/runs/1" target="_blank" rel="noopener noreferrer">' in page
    assert "https://wandb.ai/a/runs/1" in report
    assert "sesame" not in page + report


def test_markup_and_logs_are_shown_as_text(served: Served) -> None:
    """The error contains the requested name escaped; a log is downloaded without colours, under the job's name."""
    answer = served.get("/jobs/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert (answer.status, "<script>alert" in answer.text) == (404, False)
    answer = served.get("/jobs/hostile/log")
    assert answer.text == f"[r0] hello\n[r0] {HOSTILE}\n[r0] red\n"
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["content-disposition"] == 'attachment; filename="hostile-attempt-1.log"'
    assert served.get("/jobs/hostile/log?grep=h.llo").text == "[r0] hello\n"
    assert served.get("/jobs/hostile/log?ranks=5").text == ""


@pytest.mark.parametrize(
    ("query", "status"), [("grep=(", 400), ("ranks=x", 400), ("node=-1", 400), ("attempt=2", 404), ("attempt=x", 400)]
)
def test_invalid_log_query_is_refused(served: Served, query: str, status: int) -> None:
    """The refusal has a message without a traceback."""
    answer = served.get(f"/jobs/hostile/log?{query}", accept="application/json")
    assert (answer.status, '"error":' in answer.text, "itself failed" in answer.text) == (status, True, False)


def test_read_only_page_has_no_buttons_and_accepts_no_form(tmp_path: Path) -> None:
    """The buttons are missing, not hidden."""
    put(tmp_path, "job")
    with serving(tmp_path, "--read-only") as found:
        found.enter()
        text = found.get("/jobs/job").text
        assert ("read-only" in text, "stop-button" in text, "resume-button" in text) == (True, False, False)
        assert found.post("/jobs/job/stop", {}).status in (404, 405)
        assert found.get("/jobs/job/resume").status == 404


def test_page_that_cannot_be_opened_is_reported(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An occupied port exits with 2; a missing extra is named with the command that installs the extra."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = cli("ui", "--no-open", "--port", str(taken.getsockname()[1]))
    assert (done.code, "cannot be opened" in done.stderr, "itself failed" in done.stderr) == (2, True, False)
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "starlette.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'starlette'\", name='starlette')\n"
    )
    done = cli("ui", "--no-open", env={"PYTHONPATH": str(folder)})
    monkeypatch.chdir(tmp_path)  # the hint's command depends on the working folder
    assert (done.code, install("server") in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({}, "linux", False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"}, "linux", False),
        ({}, "darwin", True),
    ],
)
def test_browser_is_opened_only_on_the_user_desktop(environ: dict[str, str], platform: str, expected: bool) -> None:
    """At the far end of ssh no browser is opened."""
    assert server.has_desktop(environ, platform) is expected


def test_tunnel_leads_to_the_host_of_the_ssh_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is the address that ssh has reached; the user of a container may be only a number."""
    command = server.tunnel({"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}, 8123)
    assert command.startswith("ssh -N -L 8123:127.0.0.1:8123 ")
    assert command.endswith("@10.0.0.2")
    monkeypatch.setattr("getpass.getuser", lambda: {}["uid not found"])
    assert server.tunnel({}, 8123) == f"ssh -N -L 8123:127.0.0.1:8123 {socket.gethostname()}"


def test_browser_opens_a_private_file_with_the_address(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The address is in no process's arguments; only its owner can read the file, and the first visit deletes it."""
    seen = tmp_path / "seen"
    browser = tmp_path / "a-browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}.part && mv {seen}.part {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    server._open("http://127.0.0.1:1/?token=secret&x=1")
    argument = until(lambda: seen.exists() and seen.read_text().strip())
    page = home / f"ui-{os.getpid()}.html"
    assert (argument, "secret" in argument) == (page.as_uri(), False)
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "url=http://127.0.0.1:1/?token=secret&amp;x=1" in page.read_text()
    server._forget_page()
    assert not page.exists()


def connect(served: Served, text: str = "") -> socket.socket:
    """Return a connection that has sent the text."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    connection.sendall(text.encode())
    return connection


def begin_download(served: Served) -> socket.socket:
    """Return the connection of a client that has read the first bytes of a log, and stops reading."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", served.port))
    host = f"127.0.0.1:{served.port}"
    connection.sendall(f"GET /jobs/big/log HTTP/1.1\r\nhost: {host}\r\ncookie: {served.cookie}\r\n\r\n".encode())
    assert connection.recv(1000).startswith(b"HTTP/1.1 ")
    return connection


def usage(served: Served) -> tuple[int, int]:
    """Return the server's descriptors and its resident MiB."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) // 1024
    return len(os.listdir(f"/proc/{served.process.pid}/fd")), resident


PATIENT = "from cloudtrain.launcher.ui import server; object.__setattr__(server.LIMITS, 'head_s', 600)"
HASTY = f"{PATIENT.replace('600', '0.3')}; object.__setattr__(server.LIMITS, 'idle_s', 0.3)"


def test_idle_connections_do_not_block_the_user(tmp_path: Path) -> None:
    """The page answers while 250 foreign connections send no request."""
    with serving(tmp_path, setup=PATIENT) as served:
        served.enter()
        idle = [connect(served) for _ in range(250)]
        assert [served.get("/").status for _ in range(5)] == [200] * 5
        for connection in idle:
            connection.close()


def test_request_head_has_a_time_limit(tmp_path: Path) -> None:
    """A connection ends if its head is unfinished after the limit, also after an answer, and with more bytes."""
    with serving(tmp_path, setup=HASTY) as served:
        served.enter()
        whole = f"GET / HTTP/1.1\r\nhost: 127.0.0.1:{served.port}\r\n\r\n"
        for text in ("", "GET / HTTP/1.1\r\nhost:", whole, whole + "GET /"):
            connection = connect(served, text)
            while connection.recv(1 << 16):
                pass
            connection.close()
        assert served.get("/").status == 200


def test_cancelled_downloads_are_released(tmp_path: Path) -> None:
    """After 20 cancelled downloads the descriptors of the log are closed, and memory does not grow further."""
    put(tmp_path, "big")
    log = tmp_path / "local" / "big" / "attempt-1" / "node-0" / "log" / "rank-0.log"
    log.write_text("a line of a log that is long enough to fill the buffers\n" * 300_000)
    with serving(tmp_path) as served:
        served.enter()
        assert served.get("/jobs/big/log").status == 200
        descriptors, resident = usage(served)
        for _ in range(2):
            open_ones = [begin_download(served) for _ in range(20)]
            for connection in open_ones:
                connection.close()
            # SQLite keeps the descriptors of closed connections to the registry: at most one for each thread.
            until(lambda: usage(served)[0] <= descriptors + 16, 10)
        assert usage(served)[1] < resident + 50
        until(lambda: served.get("/jobs/big/log").status == 200, 10)  # the last ones may still be closing
