"""The ssh request, rendered and checked without a connection."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.launcher.backend import Request

HERE = Path(__file__).parent
PLAIN = """\
name: digits
backend: ssh
script: train.py
resources: {instances: 2}
ssh: {hosts: [gpu1, gpu2]}
"""
EVERYTHING = """\
name: digits
backend: ssh
script: train.py
args: [--lr, "0.1", "a b $HOME"]
env: {NCCL_DEBUG: WARN}
secrets: [API_TOKEN]
image: registry.example/train@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
resources: {instances: 2, min_instances: 1, accelerators: "A100:8"}
distributed: {max_restarts: 2, timeout_s: 120}
checkpoint: {uri: /shared/checkpoints}
inputs: {train: /shared/train}
outputs: {model: "file:///shared/model"}
limits: {max_duration: 10h}
budget: {limit: 100 USD}
ssh:
  hosts: [gpu1, "me@gpu2:2222", {host: gpu3, python: /opt/py/bin/python, address: 10.0.0.4, workdir: /data/ct}]
  user: train
  python: /usr/bin/python3.12
  interface: eth1
  ssh_config: /etc/ssh/cluster
  price_per_hour: 2.50 USD
  environment: docker
  ports: 29400-29499
  gpu_locks: /var/lock/cloudtrain
  allow_busy: true
  accept_new_host_keys: true
"""


@pytest.mark.parametrize(("name", "text"), [("plain", PLAIN), ("everything", EVERYTHING)])
def test_request_equals_the_golden_file(name: str, text: str, render: Callable[..., Request]) -> None:
    """The whole request is compared, so every new or missing field shows; our own check accepts the request."""
    made = render(text)
    golden = json.loads((HERE / "golden" / f"ssh_{name}.json").read_text())
    assert made.body == golden
    assert SshBackend().check(made) == []
    assert json.loads(made.text) == made.body
    assert render(text).text == made.text


@pytest.mark.parametrize(
    ("more", "swaps"),
    [
        ("retry: {max_attempts: 3}", 2),
        ("", None),
        ("retry: {max_attempts: 3, on: [error]}", None),
        ("retry: {max_attempts: 3}\nqueue: {wait: true}", None),
        ("retry: {max_attempts: 3}\nresources: {instances: 1}", None),
        ("retry: {max_attempts: 3}\nresources: {instances: 3}", None),
    ],
)
def test_job_begins_its_retries_with_spare_hosts(render: Callable[..., Request], more: str, swaps: int | None) -> None:
    """Only a job of several hosts, with spare hosts and retries for lost machines, and outside a line."""
    text = PLAIN.replace("gpu2]", "gpu2, gpu3]")
    text = text.replace("resources: {instances: 2}\n", "") if "resources" in more else text
    made = render(f"{text}{more}\n")
    assert (made.body.get("swaps"), "spares" in made.carried) == (swaps, swaps is not None)


def test_dry_run_writes_the_request_of_a_submit(cli: Any, tmp_path: Path) -> None:
    """The dry run needs neither a connection nor an `ssh`; the request does not contain the secret's value."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text(EVERYTHING)
    environ = {"PATH": "/nowhere", "API_TOKEN": "s3cret-value"}
    told = cli.ok("submit", "--dry-run", "-o", tmp_path / "request", env=environ)
    written = (tmp_path / "request/request.json").read_text()
    assert json.loads(written)["runs_in"]["kind"] == "docker"
    assert "s3cret-value" not in written + told.stdout + told.stderr
