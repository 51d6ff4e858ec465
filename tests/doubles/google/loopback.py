"""A service on a loopback port, without the proxy, TLS and tokens: for tests of a single service."""

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator

from doubles.wire import Answer, HangUp, Request, read, write


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address, block_on_close = True, True, False
    respond: Callable[[Request], Answer]


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        with contextlib.suppress(HangUp, ConnectionError):
            while (request := read(self.rfile, self.wfile, False)) is not None:
                answer = self.server.respond(request)
                write(self.wfile, request, answer)
                if answer.is_last:
                    return


@contextlib.contextmanager
def served(respond: Callable[[Request], Answer]) -> Iterator[str]:
    """Yield the address of the service."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.respond = respond
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
