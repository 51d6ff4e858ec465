"""A job on the user's own machines sends its notifications itself, while the launcher's machine sleeps."""

import json
from typing import Any

import pytest

from doubles.signatures import MakeProject
from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster
from doubles.waiting import until

pytestmark = pytest.mark.slow

PORT = 18_099
# A receiver on the host itself, which refuses the first message.
RECEIVER = f"""\
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Handler.count += 1
        self.send_response(503 if Handler.count == 1 else 200)
        self.end_headers()
        if Handler.count > 1:
            with open("told.jsonl", "ab") as file:
                file.write(body + b"\\n")
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", {PORT}), Handler).serve_forever()
"""
CONFIG = """\
backend: ssh
resources: {{instances: 2}}
budget: {{limit: 0.02 USD, on_limit: alert, alert_at: [50%]}}
notify: [{{webhook: env:HOOK, from_job: true, on: [budget, stopped]}}]
ssh: {{hosts: [h0, h1], ssh_config: "${{SSH_CONFIG}}", python: {python}, price_per_hour: 36 USD}}
"""
TRAIN = "import time\nprint('runs', flush=True)\ntime.sleep(600)\n"


@pytest.mark.soak  # the notices of a node: tests/entrypoints/test_node_notifier.py
def test_job_on_hosts_sends_its_own_notices(
    cli: Any, ssh_pair: Cluster, project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address travels as a secret, and is in no file of the host; a sent notice is not repeated."""
    ssh_pair.apply(monkeypatch)
    for host in ssh_pair.hosts:
        lightpython.install(host)
    first = ssh_pair.hosts[0]
    (first.home / "receiver.py").write_text(RECEIVER)
    ssh_pair.ssh("h0", "nohup python3 receiver.py >receiver.log 2>&1 & echo begun")
    env = {"HOOK": f"http://127.0.0.1:{PORT}/secret-part"}
    where = project(CONFIG.format(python=lightpython.PATH), script="train.py", text=TRAIN)
    sent = cli.ok("submit", "-d", "-y", "--json", cwd=where, env=env)
    job = sent.json["job"]
    told = first.home / "told.jsonl"
    until(told.exists, 60.0)
    assert cli("stop", "-y", job, env=env).code == 0
    cli("watch", "--once", job, env=env)
    found = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(each["key"], each["from"]) for each in found] == [("budget:50@20000", "job"), ("stopped:1", "job")]
    spent, limit = found[0]["spend_usd"], found[0]["limit_usd"]
    assert spent >= limit / 2
    kept = [path for path in first.home.rglob("*") if path.is_file() and b"secret-part" in path.read_bytes()]
    assert kept == []
