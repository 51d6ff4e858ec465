"""The server: on the loopback interface only; prints its address and opens the browser if available.

Every local user can connect. A connection is a stranger's until its request carries the cookie, and strangers give way.
"""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from html import escape
from pathlib import Path

import uvicorn
from starlette.datastructures import Headers

from cloudtrain.entrypoints import atomic_json
from cloudtrain.entrypoints.serve.connections import Connection, ConnectionLimits, configured

from ..errors import UsageError
from ..store.home import home
from ..text.terminal import print_lines, say
from .app import make
from .guard import Keys
from .site import Site

HOST = "127.0.0.1"
LIMITS = ConnectionLimits(connections=200, head_s=5.0, idle_s=5, head_bytes=32_768)
END_S = 1  # for answers in progress when the server ends


def serve(*, port: int, opens: bool, is_read_only: bool) -> None:
    """Serve until Ctrl-C. Raises UsageError if the port is taken."""

    class Server(uvicorn.Server):
        """Ends the connections of open pages before waiting for them."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _tell(place, keys.token, opens=opens)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            site.close()
            _forget_page()  # after a SIGTERM no later code runs
            await super().shutdown(sockets)

    class PageConnection(Connection):
        """A connection that gives way until its request carries the cookie."""

        def is_trusted(self) -> bool:
            return app.is_known(Headers(raw=self.headers))

    listening = _listening(port)
    place = f"{HOST}:{listening.getsockname()[1]}"
    keys = Keys()
    site = Site(keys, is_read_only=is_read_only)

    def used() -> None:
        _forget_page()
        say(f"opened; for another browser: {_address(place, keys.token)}")

    app = make(site, listening.getsockname()[1], used)
    config = configured(app, LIMITS, PageConnection, timeout_graceful_shutdown=END_S)
    try:
        Server(config).run(sockets=[listening])
    finally:
        _forget_page()
        listening.close()


def has_desktop(environ: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Return whether a browser can be opened on the user's screen."""
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"):
        return False
    return platform in ("darwin", "win32") or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def tunnel(environ: Mapping[str, str], port: int) -> str:
    """Return the command that forwards the port to the user's own machine."""
    client = environ.get("SSH_CONNECTION", "").split()
    host = client[2] if len(client) == 4 else socket.gethostname()
    try:
        user = f"{getpass.getuser()}@"
    except (KeyError, OSError, ImportError):  # a container's user without a name
        user = ""
    return f"ssh -N -L {port}:{HOST}:{port} {user}{host}"


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        message = f"port {port} cannot be opened: {os.strerror(error.errno or 0)}"
        raise UsageError(message, hint="without --port a free port is chosen") from error


def _address(place: str, token: str) -> str:
    return f"http://{place}/?token={token}"


def _tell(place: str, token: str, *, opens: bool) -> None:
    """Print the address, open the browser, and explain the access from a remote machine."""
    print_lines([_address(place, token)])
    say("reachable only from this machine; the address works once; Ctrl-C stops the server, not the jobs")
    if not has_desktop(os.environ):
        say(f"from another machine, there:\n  {tunnel(os.environ, int(place.rpartition(':')[2]))}")
        say("then open the address in the browser there")
    elif opens:
        _open(_address(place, token))


def _page() -> Path:
    return home() / f"ui-{os.getpid()}.html"


def _open(address: str) -> None:
    """Open the browser on a private file that redirects to the address: arguments of processes are public."""
    page = _page()
    text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={escape(address)}">'
    atomic_json.write_text(page, text, 0o600)
    program = "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))"
    options = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL), "start_new_session": True}
    command = [sys.executable, "-c", program, page.as_uri()]
    threading.Thread(target=subprocess.run, args=(command,), kwargs=options, name="browser", daemon=True).start()


def _forget_page() -> None:
    _page().unlink(missing_ok=True)
