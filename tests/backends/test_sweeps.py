"""Sweeps as whole jobs: without a launcher, after a stop, and after kill -9."""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.agent import node_folder
from cloudtrain.entrypoints.sweep.journal import NAME
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.host import Host
from doubles.waiting import until

pytestmark = pytest.mark.slow

HEAD = """\
name: j
task: task.py
env: {OMP_NUM_THREADS: "1"}
training:
  global_batch_size: 16
  max_steps: 12
  optimizer: {name: adamw}
  schedule: {name: cosine}
  log_every: 1
  seed: 3
sweep:
  space: {training.optimizer.lr: {log: [1e-4, 1e-2]}}
  algorithm: halving
  trials: 4
  first_rung: 4
  parallel: 2
budget: {limit: 2 USD}
"""
LOCAL = f"{HEAD}backend: local\nlocal: {{price_per_hour: 1}}\n"


def write(folder: Path, config: str) -> Path:
    """Write the project, whose task has an evaluation of 16 samples; return the folder."""
    wholejobs.write_task(folder, config)
    short = "else torch.utils.data.Subset(Data(), range(16))"
    (folder / "task.py").write_text(wholejobs.TASK.replace("else None", short))
    return folder


def results(cli: Any, job: str) -> dict[tuple[int, int], float]:
    """Return the results in the journal of a local sweep."""
    lines = (cli.home / "local" / job / "checkpoints" / NAME).read_text().splitlines()
    ends = [found for line in lines if (found := json.loads(line[9:]))["e"] == "end"]
    return {(each["trial"], each["rung"]): each["value"] for each in ends}


def test_sweep_ends_without_a_launcher(cli: Any, tmp_path: Path) -> None:
    """After `submit -d` no command looks: the sweep ends within its limit, exports the best, and leaves no process."""
    folder = write(tmp_path / "project", LOCAL)
    assert cli("submit", "-d", "-y", "--name", "alone", cwd=folder).code == 0
    node = cli.home / "local" / "alone" / "attempt-1" / "node-0"
    until((node / "exit.json").exists, 120, 0.2)
    until(lambda: node_folder.agent_pid(node) is None, 20, 0.1)  # the job runs until the end of its agent
    until(lambda: not processes.with_environment(CLOUDTRAIN_JOB="alone"), 20, 0.1)
    shown = cli("status", "alone", "--json").json
    trials = shown["sweep"]
    assert (shown["state"], trials["trials"], trials["is_finished"]) == ("succeeded", 4, True)
    assert 0 < shown["spend_usd"] < shown["limit_usd"] == 2
    best = trials["best"][0]
    assert best["value"] == min(value for (_, rung), value in results(cli, "alone").items() if rung == 1)
    assert wholejobs.weights(cli, "alone", folder)
    cost = cli("cost", "alone", "--json").json
    assert all(each["usd"] > 0 for each in cost["sweep"]["trials"])
    assert 0 < cost["sweep"]["idle_usd"] < shown["spend_usd"]
    own = cli("logs", f"alone.{best['trial']}").stdout.splitlines()
    assert all(line.startswith((f"[{best['trial']}] ", f"trial {best['trial']}, ")) for line in own)
    assert any("done at step 12" in line for line in own)


def kill(pids: list[int]) -> None:
    """Kill the processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.soak  # a killed trial: tests/entrypoints/test_packed.py; a sweep of two nodes: the contract's test
def test_interrupted_sweep_continues_exactly(cli: Any, tmp_path: Path) -> None:
    """After a stop, kill -9 of all ranks, or a power cut, the results and the weights are an undisturbed sweep's."""
    folder = write(tmp_path / "project", LOCAL)
    assert cli("submit", "-y", "--name", "whole", cwd=folder, timeout_s=120).code == 0
    for end in ("stop", "kill", "power"):
        assert cli("submit", "-d", "-y", "--name", end, cwd=folder).code == 0
        cli.watch("] step 6/12", "logs", "-f", end)
        if end == "stop":
            assert cli("stop", end, "-y").code == 0
        if end == "power":
            agent = cli.home / "local" / end / "attempt-1" / "node-0" / "state.json"
            kill([json.loads(agent.read_text())["pid"]])
        if end != "stop":
            kill(processes.with_environment(CLOUDTRAIN_JOB=end))
        if end == "kill":  # the agent starts the sweep again
            assert cli("wait", end, timeout_s=120).code == 0
        else:
            cli("wait", end)
            assert cli("status", end, "--json").json["state"] == ("stopped" if end == "stop" else "failed")
            cli.ok("resume", end, "-y", timeout_s=120)
        assert results(cli, end) == results(cli, "whole")
        wholejobs.assert_equal(wholejobs.weights(cli, end, folder), wholejobs.weights(cli, "whole", folder))
        assert cli("status", end, "--json").json["state"] == "succeeded"


@pytest.mark.soak
def test_more_trials_continue_the_sweep(cli: Any, tmp_path: Path) -> None:
    """An ended sweep goes on with more trials; the trials before keep their results."""
    folder = write(tmp_path / "project", LOCAL)
    fewer = ["--set", "sweep.algorithm=asha", "--set", "sweep.factor=2"]
    assert cli("submit", "-y", "--name", "more", "--set", "sweep.trials=2", *fewer, cwd=folder, timeout_s=120).code == 0
    before = results(cli, "more")
    refused = cli("resume", "more", "-y", "--set", "sweep.seed=5")
    assert (refused.code, "the search of more cannot change (seed)" in refused.stderr) == (2, True)
    for nothing in (["--set", "sweep.parallel=1"], ["--budget", "+1USD"], ["--update-code"]):
        refused = cli("resume", "more", "-y", *nothing)
        assert (refused.code, "more is done" in refused.stderr, "--trials +N" in refused.stderr) == (2, True, True)
    cli.ok("resume", "more", "-y", "--trials", "+2", timeout_s=120)
    after = results(cli, "more")
    assert {key: after[key] for key in before} == before
    shown = cli("status", "more", "--json").json
    assert (shown["sweep"]["trials"], shown["state"], shown["sweep"]["rungs"][1]["done"]) == (4, "succeeded", 2)
    assert cli("status", "last", "--json").json == shown
    assert cli("rm", "-y", "more").code == 0
    assert cli("list", "--json").json["jobs"] == []


PAIRS = HEAD.replace("parallel: 2", "instances: 2") + (
    "backend: ssh\nresources: {instances: 4, min_instances: 2}\n"
    'ssh: {hosts: [h0, h1, h2, h3], ssh_config: "${SSH_CONFIG}", python: "${SSH_PYTHON}", price_per_hour: 1}\n'
)


def ours(host: Host, words: str) -> list[int]:
    """Return the host's processes with the words in their commands."""
    return [pid for pid, command in host.processes() if words in command]


@pytest.mark.soak  # trials of two machines: tests/entrypoints/test_packed.py
def test_pairs_of_hosts_survive_kills(
    cli: Any, cluster: Callable[[int], Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed ranks, a killed agent and a host without power change neither the results nor the best trial's weights."""
    four = cluster(4)
    four.apply(monkeypatch)
    folder = write(tmp_path / "project", PAIRS)
    cli.ok("submit", "-y", "--name", "whole", cwd=folder, timeout_s=400)
    whole = cli("status", "whole", "--json").json["sweep"]
    for name in ("ranks", "agent", "host"):
        cli.ok("submit", "-d", "-y", "--name", name, cwd=folder)
        cli.watch("] step 6/12", "logs", "-f", name, timeout_s=200)
        if name == "host":
            four.hosts[3].power_off()
        else:
            host = four.hosts[1 if name == "ranks" else 3]
            for pid in ours(host, "agent.worker task" if name == "ranks" else "agent.starting"):
                host.kill(pid)
        cli.ok("wait", name, timeout_s=400)
        found = cli("status", name, "--json").json["sweep"]
        assert (found["rungs"], found["best"]) == (whole["rungs"], whole["best"]), name
        if name == "host":
            four.hosts[3].boot()
        wholejobs.assert_equal(wholejobs.weights(cli, name, folder), wholejobs.weights(cli, "whole", folder))


SCRIPT = """
import argparse, json, signal, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--resume", action="store_true")
given, saved, stops = parser.parse_args(), Path("saved/state.json"), []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
state = json.loads(saved.read_text()) if given.resume else {"step": 0, "loss": 1.0}
while state["step"] < 12 and not stops:
    state = {"step": state["step"] + 1, "loss": state["loss"] * (1 - given.lr)}
    print(f"step {state['step']}/12 loss {state['loss']:.17g}", flush=True)
    time.sleep(0.1)
saved.parent.mkdir(exist_ok=True)
saved.with_suffix(".new").write_text(json.dumps(state))
saved.with_suffix(".new").replace(saved.with_name("state.json"))
Path("saved/state.pt").write_bytes(b"x")
"""


def test_search_that_pauses_a_script_needs_a_proven_resume(cli: Any, tmp_path: Path) -> None:
    """`submit` asks for a rehearsal; after the rehearsal the trials of the script pause and continue.

    The script starts in its own folder, and its kept files lie there, in the rehearsal and in the trials.
    """
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "fit.py").write_text(f"assert __import__('os').path.exists('fit.py')\n{SCRIPT}")
    (folder / "cloudtrain.yaml").write_text(
        "name: fit\nscript: src/fit.py\ndistributed: {workdir: src}\n"
        "args: {lr: 0.1}\nkeep: [saved/]\nresume_args: [--resume]\nbackend: local\n"
        "sweep: {space: {args.lr: {uniform: [0.05, 0.4]}}, algorithm: halving, trials: 4, first_rung: 4, steps: 12}\n"
        "local: {price_per_hour: 1}\nbudget: {limit: 2 USD}\n"
    )
    refused = cli("submit", "-y", cwd=folder)
    assert refused.code == 3
    assert "no rehearsal has proven that the script resumes" in refused.stderr
    cli.ok("rehearse", "--steps", "8", "--preempt-at", "4", cwd=folder, timeout_s=120)
    cli.ok("submit", "-y", cwd=folder, timeout_s=120)
    shown = cli("status", "fit", "--json").json["sweep"]
    assert [each["done"] for each in shown["rungs"]] == [4, 1]
    best = shown["best"][0]
    assert best["value"] == pytest.approx((1 - best["values"]["args.lr"]) ** 12)
    assert f"done at step 12, value {best['value']:.6g}" in cli("logs", f"fit.{best['trial']}").stdout
