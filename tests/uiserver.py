"""`cloudtrain ui` as a separate process, and a client that sends exactly the given request."""

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

COMMAND = Path(sys.executable).with_name("cloudtrain")
PATIENCE_S = 90  # CI is slow and busy


@dataclass(frozen=True)
class Answer:
    """The server's answer; `headers` have lower-case names."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Served:
    """The process, its address, and the cookie after the exchange of a token."""

    process: Any
    address: str
    home: Path
    cookie: str = ""
    csrf: str = field(default="")

    @property
    def port(self) -> int:
        """Return the port."""
        return int(self.address.split(":")[2].split("/")[0])

    @property
    def token(self) -> str:
        """Return the token in the printed address."""
        return self.address.partition("token=")[2]

    @property
    def origin(self) -> str:
        """Return the origin of requests from the server's own page."""
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: str | bytes | None = None
    ) -> Answer:
        """Send one request with exactly these headers; a given `Host` replaces the default."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        given = {name.lower() for name in headers or {}}
        connection.putrequest(method, path, skip_host="host" in given, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if body is not None and "content-length" not in given:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body.encode() if isinstance(body, str) else body)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)

    def enter(self) -> str:
        """Exchange the token; return the cookie as a browser sends it."""
        answer = self.ask("GET", f"/?token={self.token}")
        assert answer.status == 303, answer
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return self.cookie

    def get(self, path: str, **headers: str) -> Answer:
        """Send a GET with the cookie, as a page after the exchange does."""
        return self.ask("GET", path, {"cookie": self.cookie, **headers})

    def post(self, path: str, fields: Mapping[str, str], headers: Mapping[str, str] | None = None) -> Answer:
        """Send a form as the server's own page does, with changed headers and fields."""
        if not self.csrf:
            self.csrf = self.get("/").text.partition('name="csrf" content="')[2].partition('"')[0]
        said = {
            "cookie": self.cookie,
            "origin": self.origin,
            "sec-fetch-site": "same-origin",
            "content-type": "application/x-www-form-urlencoded",
            "accept": "application/json",
            **(headers or {}),
        }
        return self.ask("POST", path, said, urlencode({"csrf": self.csrf, **fields}))

    def end(self) -> tuple[int, str, str]:
        """Press Ctrl-C; return the exit code, and the rest of the output."""
        self.process.send_signal(signal.SIGINT)
        stdout, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stdout, stderr


@contextmanager
def serving(home: Path, *options: str, setup: str = "", **env: str) -> Iterator[Served]:
    """Serve the page of the home folder on a free port; end the process as a user does. `setup`: code to run first."""
    command = [sys.executable, "-c", f"import sys\n{setup}\nfrom cloudtrain.launcher.cli import main\nsys.exit(main())"]
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CLOUDTRAIN_", "PYTEST_", "SSH_")) and name not in ("DISPLAY", "WAYLAND_DISPLAY")
    }
    process = subprocess.Popen(
        [*(command if setup else [str(COMMAND)]), "ui", "--no-open", *options],
        env={**clean, "CLOUDTRAIN_HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    address = process.stdout.readline().strip() if process.stdout else ""
    try:
        assert address, process.stderr.read() if process.stderr else ""
        yield Served(process, address, home)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=PATIENCE_S)[1]
            assert process.returncode == 0, told
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
