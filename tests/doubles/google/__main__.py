"""The stand-in as a process: `python -m doubles.google [--state DIR] [--port N]` prints, in JSON, how to reach it."""

import json
import threading
from pathlib import Path

from doubles import process, proxy
from doubles.certificates import Authority
from doubles.google.application import Application, methods, service_of
from doubles.google.control import Plain
from doubles.google.grpcserver import GrpcServer
from doubles.google.names import REGION
from doubles.google.world import World
from doubles.sandbox import Switch

DIRECT = {
    "aiplatform": f"{REGION}-aiplatform.googleapis.com",
    "logging": "logging.googleapis.com",
    "storage": "storage.googleapis.com",
    "secretmanager": "secretmanager.googleapis.com",
    "cloudbilling": "cloudbilling.googleapis.com",
}


def begin(state: Path, port: int) -> process.Served:
    """Listen, and answer in threads."""
    authority = Authority(state / "ca", ("h2", "http/1.1"))
    switch = Switch.open()
    world = World(state, switch, authority.file)
    grpc = GrpcServer(world, methods(world))
    serving = proxy.Proxy(
        authority, lambda host: service_of(host) is not None, Application(world), Plain(world), grpc.talk
    )
    listening = process.bind(port)
    port = int(listening.getsockname()[1])
    inner = process.bind(0) if switch is None else switch.listen(port)
    world.container_url = "http://{}:{}".format(*inner.getsockname()[:2])
    for one, is_from_container in ((listening, False), (inner, True)):
        threading.Thread(target=serving.serve, args=(one, is_from_container), daemon=True).start()
    told = {"url": f"http://127.0.0.1:{port}", "ca": str(authority.file), **_files(world)}
    return process.Served(json.dumps({**told, "endpoints": _direct(serving)}), world.close)


def _files(world: World) -> dict[str, str]:
    """Write the credentials: a service account's key, and a user's own."""
    files = {"key_file": world.tokens.key_file(), "user_file": world.tokens.user_file()}
    for name, told in files.items():
        (world.state / f"{name}.json").write_text(json.dumps(told))
    return {name: str(world.state / f"{name}.json") for name in files}


def _direct(serving: proxy.Proxy) -> dict[str, str]:
    """Serve each service also on a separate port, without TLS."""
    found = {}
    for service, host in DIRECT.items():
        listening = process.bind(0)
        threading.Thread(target=serving.serve_host, args=(listening, host), daemon=True).start()
        found[service] = f"http://127.0.0.1:{listening.getsockname()[1]}"
    return found


if __name__ == "__main__":
    process.serve("google", __doc__, begin)
