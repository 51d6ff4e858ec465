"""Who gets to the page, by which way, and what a browser may do with what it is given: asked of the real server."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from uiserver import PATIENCE_S, Served, serving

from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.store.registry import Registry, this_process
from cloudtrain.launcher.text.extras import install
from cloudtrain.launcher.ui import server
from doubles.plans import plan_of

PLAN = {"instances": 2, "nproc_per_node": 1, "ranks": 2, "hourly_usd": 1.5, "cap_s": 3600}
HOSTILE = "<script>alert(1)</script>"


def put(folder: Path, name: str, **more: Any) -> None:
    """Put a job of a cloud that has ended into the registry, its texts as hostile as can be."""
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
    registry.set_state(job.attempt, more.get("state", state), {"step": 7, "max_steps": 10, "loss": 0.5})
    registry.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a server whose token was exchanged, with one job."""
    home = tmp_path_factory.mktemp("ui")
    put(home, "hostile")
    with serving(home) as found:
        found.enter()
        yield found


def test_address_is_of_the_loopback_alone(served: Served) -> None:
    """No other address of this machine answers."""
    assert served.address.startswith("http://127.0.0.1:")
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    listening += [line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:] if " 0A " in line]
    assert [each for each in listening if each.endswith(f":{served.port:04X}")] == [f"0100007F:{served.port:04X}"]


def test_token_is_long_and_in_no_process_s_arguments(served: Served) -> None:
    """256 bits; what `ps` shows is for everybody."""
    assert len(served.token) >= 43
    arguments = b"".join(path.read_bytes() for path in Path(f"/proc/{served.process.pid}").glob("task/*/../../cmdline"))
    assert arguments
    assert served.token.encode() not in arguments


@pytest.mark.parametrize(
    "path", ["/", "/?token=wrong", "/jobs/hostile", "/stream", "/static/ui.js", "/spend", "/nosuch"]
)
def test_nobody_gets_in_without_the_token(served: Served, path: str) -> None:
    """Whatever is asked for, and whether it is there."""
    answer = served.ask("GET", path)
    assert answer.status == 403
    assert "set-cookie" not in answer.headers
    assert served.ask("GET", path, {"cookie": served.cookie[:-1]}).status == 403


def test_cookies_of_other_programs_shut_nobody_out(served: Served) -> None:
    """Browsers keep one jar for all ports of a host, and what is in it may be in any form."""
    for other in ('prefs={"a":1}', "a[b]=1", "flag", "x=two words", "y=\xe9"):
        assert served.ask("GET", "/spend", {"cookie": f"{other}; {served.cookie}; z=1"}).status == 200, other


def test_token_becomes_a_cookie_that_no_script_and_no_other_site_can_use(tmp_path: Path) -> None:
    """It leaves the address, and is good once; the next one is printed."""
    put(tmp_path, "job")
    with serving(tmp_path) as found:
        first = found.ask("GET", f"/jobs/job?x=1&token={found.token}")
        assert (first.status, first.headers["location"]) == (303, "/jobs/job?x=1")
        flags = {part.strip().lower() for part in first.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/"} <= flags
        assert found.token not in first.headers["set-cookie"]
        assert found.ask("GET", f"/?token={found.token}").status == 403
        found.cookie = first.headers["set-cookie"].partition(";")[0]
        assert found.get(f"/?token={found.token}").status == 303  # by the way back in the browser
        code, stdout, stderr = found.end()
    assert (code, stdout) == (0, "")
    assert "for another browser: http://127.0.0.1" in stderr
    assert found.token not in stderr
    assert "the page is closed; the jobs continue" in stderr


@pytest.mark.parametrize("host", ["evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}"])
def test_foreign_host_is_not_served(served: Served, host: str) -> None:
    """A name that a site has rebound to this machine gets nothing, with the cookie and the token even."""
    name = host.format(port=served.port)
    assert served.get("/", host=name).status == 421
    assert served.ask("GET", f"/?token={served.token}", {"host": name}).status == 421


def test_localhost_is_a_name_of_ours(served: Served) -> None:
    """As typed at the near end of an ssh tunnel."""
    assert served.get("/", host=f"localhost:{served.port}").status == 200


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"origin": "http://evil.example"}, {}),
        ({"origin": "null"}, {}),
        ({"origin": ""}, {}),
        ({"origin": "http://127.0.0.1:1"}, {}),
        ({"sec-fetch-site": "cross-site"}, {}),
        ({"sec-fetch-site": "same-site"}, {}),
        ({}, {"csrf": "wrong"}),
        ({}, {"csrf": ""}),
        ({"cookie": ""}, {}),
    ],
)
def test_form_of_another_page_is_refused(served: Served, headers: dict[str, str], fields: dict[str, str]) -> None:
    """Nothing is stopped or sent but from our own page."""
    assert served.post("/jobs/hostile/stop", fields, headers).status == 403
    assert served.post("/jobs/hostile/resume", {"attempt": "2", **fields}, headers).status == 403


def test_our_own_form_is_taken(served: Served) -> None:
    """What the refusals above are measured against."""
    answer = served.post("/jobs/hostile/stop", {})
    assert (answer.status, "there is nothing to stop" in answer.text) == (200, True), answer


def test_what_another_page_would_load_is_refused(served: Served) -> None:
    """A script tag or a fetch of another site gets nothing; a link that somebody follows is harmless."""
    assert served.get("/static/ui.js", **{"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status == 403
    assert served.get("/jobs/hostile/curves", **{"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}).status == 403
    assert served.get("/", **{"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status == 200


def test_visit_that_another_page_began_is_begun_anew_by_ours(served: Served) -> None:
    """Such a visit does not carry the cookie; the page that it gets tells nothing, and no loop comes of it."""
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    answer = served.ask("GET", "/jobs/hostile", visit)
    assert (answer.status, "hostile" in answer.text, 'content="0"' in answer.text) == (200, False, True)
    assert served.ask("GET", "/jobs/hostile", {**visit, "sec-fetch-site": "same-origin"}).status == 403


@pytest.mark.parametrize("path", ["/", "/jobs/hostile", "/spend", "/static/ui.js", "/nosuch", "/jobs/nosuch"])
def test_every_answer_says_what_a_browser_may_do_with_it(served: Served, path: str) -> None:
    """No script in the page, no frame, no address passed on, nothing for other origins."""
    headers = served.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["x-frame-options"], headers["referrer-policy"]) == ("DENY", "no-referrer")
    assert headers["x-content-type-options"] == "nosniff"
    assert not [name for name in headers if name.startswith("access-control")]
    assert "server" not in headers


def test_answer_to_what_fails_is_guarded_too(tmp_path: Path) -> None:
    """A fault of our own comes with what a browser may do with it, as every answer does."""
    import asyncio
    from typing import cast

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


def test_sizes_are_bounded(served: Served) -> None:
    """Of the address, of what is sent with it, and of a form, whatever it says of its length."""
    assert served.get(f"/?text={'x' * 5000}").status == 414
    assert served.post("/jobs/hostile/stop", {"x": "y" * 20_000}).status == 413
    assert served.post("/jobs/hostile/stop", {}, {"content-length": "nine"}).status in (400, 411)
    assert served.post("/jobs/hostile/stop", {f"x{n}": "" for n in range(30)}).status == 400
    assert served.get("/", **{"x-long": "y" * 70_000}).status in (400, 431)
    assert served.ask("DELETE", "/jobs/hostile", {"cookie": served.cookie}).status == 405


@pytest.mark.parametrize("path", ["/static/", "/static", "/static/../ui.py", "/static/%2e%2e%2fregistry.sqlite", "//x"])
def test_only_the_page_s_own_files_are_there(served: Served, path: str) -> None:
    """No list of a folder, and no way out of it."""
    assert served.get(path).status == 404


@pytest.mark.parametrize("path", ["/", "/jobs/hostile", "/spend?by=tag:team", "/compare?job=hostile&job=hostile"])
def test_what_jobs_say_is_text(served: Served, path: str) -> None:
    """Errors, tags, folders and addresses of a job are not read as HTML, and no link leads to a script."""
    text = served.get(path).text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "javascript:" not in text


def test_address_with_markup_is_said_as_text(served: Served) -> None:
    """What was asked for comes back in errors."""
    answer = served.get("/jobs/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert (answer.status, "<script>alert" in answer.text) == (404, False)


def test_log_is_downloaded_as_plain_text(served: Served) -> None:
    """As it was written, but for colours, under the job's name."""
    answer = served.get("/jobs/hostile/log")
    assert answer.text == f"[r0] hello\n[r0] {HOSTILE}\n[r0] red\n"
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["content-disposition"] == 'attachment; filename="hostile-attempt-1.log"'
    assert served.get("/jobs/hostile/log?grep=h.llo").text == "[r0] hello\n"
    assert served.get("/jobs/hostile/log?ranks=5").text == ""


@pytest.mark.parametrize(
    ("query", "status"), [("grep=(", 400), ("ranks=x", 400), ("node=-1", 400), ("attempt=2", 404), ("attempt=x", 400)]
)
def test_what_makes_no_sense_is_refused_in_words(served: Served, query: str, status: int) -> None:
    """And not with a traceback."""
    answer = served.get(f"/jobs/hostile/log?{query}", accept="application/json")
    assert (answer.status, '"error":' in answer.text, "itself failed" in answer.text) == (status, True, False)


def test_read_only_page_has_no_buttons_and_takes_no_form(tmp_path: Path) -> None:
    """They are not there, rather than hidden."""
    put(tmp_path, "job")
    with serving(tmp_path, "--read-only") as found:
        found.enter()
        text = found.get("/jobs/job").text
        assert ("read-only" in text, "stop-button" in text, "resume-button" in text) == (True, False, False)
        assert found.post("/jobs/job/stop", {}).status in (404, 405)
        assert found.get("/jobs/job/resume").status == 404


def test_port_that_is_taken_is_said(cli: Callable[..., Any]) -> None:
    """With what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = cli("ui", "--no-open", "--port", str(taken.getsockname()[1]))
    assert (done.code, "cannot be opened" in done.stderr, "itself failed" in done.stderr) == (2, True, False)


def test_missing_extra_is_named(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line with the command that installs it; a fault of our own is not hidden by that."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "starlette.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'starlette'\", name='starlette')\n"
    )
    done = cli("ui", "--no-open", env={"PYTHONPATH": str(folder)})
    monkeypatch.chdir(tmp_path)  # the command in the hint depends on the working folder
    assert (done.code, install("ui") in done.stderr) == (2, True), done.stderr


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
def test_browser_is_opened_where_the_user_sees_it(environ: dict[str, str], platform: str, expected: bool) -> None:
    """Not at the far end of ssh."""
    assert server.has_desktop(environ, platform) is expected


def test_tunnel_leads_to_where_the_user_came_in() -> None:
    """The host is the one that ssh has reached."""
    command = server.tunnel({"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}, 8123)
    assert command.startswith("ssh -N -L 8123:127.0.0.1:8123 ")
    assert command.endswith("@10.0.0.2")


def test_tunnel_of_a_user_without_a_name_leads_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, whose user is a number."""
    monkeypatch.setattr("getpass.getuser", lambda: {}["uid not found"])
    assert server.tunnel({}, 8123) == f"ssh -N -L 8123:127.0.0.1:8123 {socket.gethostname()}"


def test_browser_is_led_by_a_file_of_the_user_s_own(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    """The address is in no process's arguments; the file is for its owner alone, and goes with the first visit."""
    seen = tmp_path / "seen"
    browser = tmp_path / "a-browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}.part && mv {seen}.part {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    server._open("http://127.0.0.1:1/?token=secret&x=1")
    argument = wait_until(lambda: seen.exists() and seen.read_text().strip())
    page = home / f"ui-{os.getpid()}.html"
    assert (argument, "secret" in argument) == (page.as_uri(), False)
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "url=http://127.0.0.1:1/?token=secret&amp;x=1" in page.read_text()
    server._forget_page()
    assert not page.exists()


def connect(served: Served, text: str = "") -> socket.socket:
    """Return a connection that has sent this text."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    connection.sendall(text.encode())
    return connection


def begin_download(served: Served) -> socket.socket:
    """Return the connection of a client that has the first bytes of a log, and reads no more."""
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


def wait(holds: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Return once the condition holds."""
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_idle_strangers_leave_room_for_the_holder_of_the_cookie(tmp_path: Path) -> None:
    """The page answers while 250 connections of another user send no request."""
    with serving(tmp_path, setup="from cloudtrain.launcher.ui import connections; connections.HEAD_S = 600") as served:
        served.enter()
        idle = [connect(served) for _ in range(250)]
        assert [served.get("/").status for _ in range(5)] == [200] * 5
        for connection in idle:
            connection.close()


def test_request_head_has_a_time_limit(tmp_path: Path) -> None:
    """A connection ends if its head is unfinished after the limit, also after an answer, and with more bytes."""
    with serving(tmp_path, setup="from cloudtrain.launcher.ui import connections; connections.HEAD_S = 0.3") as served:
        served.enter()
        whole = f"GET / HTTP/1.1\r\nhost: 127.0.0.1:{served.port}\r\n\r\n"
        for text in ("", "GET / HTTP/1.1\r\nhost:", whole, whole + "GET /"):
            connection = connect(served, text)
            while connection.recv(1 << 16):
                pass
            connection.close()
        assert served.get("/").status == 200


def test_downloads_that_clients_leave_are_released(tmp_path: Path) -> None:
    """After 20 cancelled downloads the descriptors of the log are closed, and memory does not grow with each."""
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
            wait(lambda: usage(served)[0] <= descriptors + 16, 10)
        assert usage(served)[1] < resident + 50
        assert served.get("/jobs/big/log").status == 200
