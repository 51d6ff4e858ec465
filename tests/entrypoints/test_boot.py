"""boot: the node's identity, torchrun's command line, and the meaning of the end."""

import math
import os
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints import atomic_json
from cloudtrain.entrypoints.agent import boot, elastic
from cloudtrain.entrypoints.agent.node import Node, identify, interface_of, resolve
from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.entrypoints.rank import heartbeat
from doubles import one_node
from doubles.waiting import until

SPEC: dict[str, Any] = {
    "job": "digits-abcde",
    "attempt": 1,
    "nproc_per_node": 8,
    "max_restarts": 3,
    "run": {"kind": "script", "target": "train.py", "args": ["--max", "3"]},
}
AGENT = {"CLOUDTRAIN_HEAD": "10.0.0.1:20123", "CLOUDTRAIN_ADDRESS": "10.0.0.2"}
SIGTERM = {"rank": 0, "kind": "signal", "signal": "SIGTERM", "exit_code": -15, "message": "killed by SIGTERM"}


def node() -> Node:
    """Return a node for a command line."""
    return Node("agent", 1, 2, "10.0.0.1", 20123, "10.0.0.2", "test")


def test_identify_uses_the_agents_variables() -> None:
    """The variables that our agent passes describe the node, and a node rank outside the job raises ValueError.

    Without any platform's variables the machine is a job of one node.
    """
    found = identify({**AGENT, "CLOUDTRAIN_NODE_RANK": "1", "CLOUDTRAIN_NUM_NODES": "2", "RANK": "7"})
    assert (found.rank, found.count, found.head, found.port, found.address) == (1, 2, "10.0.0.1", 20123, "10.0.0.2")
    with pytest.raises(ValueError, match="node 2 of 2"):
        identify({**AGENT, "CLOUDTRAIN_NODE_RANK": "2", "CLOUDTRAIN_NUM_NODES": "2"})
    assert (identify({}).rank, identify({}).count) == (0, 1)


def test_resolve_says_which_name_did_not_resolve() -> None:
    """The message contains the name of the head node."""
    with pytest.raises(TimeoutError, match=r"no-such-host\.invalid did not resolve"):
        resolve("no-such-host.invalid", 0.0)


def test_interface_of_loopback() -> None:
    """Every address in 127/8 is the loopback interface's."""
    assert interface_of("127.0.0.2") == "lo"


def test_command_under_an_agent_is_static_without_restarts() -> None:
    """The agents restart and hand out the port; ranks follow the nodes' order.

    torchrun takes `--max` for an ambiguous prefix of its own flags unless `--` comes before the flag.
    """
    command = boot.torchrun_command(JobSpec.load(SPEC), node(), "10.0.0.1", Path("/x"))
    assert {"--rdzv-backend=static", "--node-rank=1", "--master-port=20123", "--max-restarts=0"} <= set(command)
    assert "--local-addr=10.0.0.2" in command
    assert command[command.index("--") :] == ["--", "script", "train.py", "--max", "3"]


@pytest.mark.parametrize(
    ("code", "words"), [(3, "3"), (137, "137 (128 + SIGKILL)"), (139, "139 (128 + SIGSEGV)"), (245, "245")]
)
def test_code_of_a_shell_is_told_in_words(code: int, words: str) -> None:
    """A script that passes on the code of its own child ends with 128 and the number of the child's signal."""
    failure = elastic._failure(0, SimpleNamespace(exitcode=code, timestamp=1.0))
    assert (failure["kind"], failure["message"]) == ("exit", f"exited with code {words}")


def test_command_keeps_dollars() -> None:
    """torchrun would expand dollar signs as its own macros (string.Template)."""
    run = {"kind": "script", "target": "train.py", "args": ["$$", "${local_rank}", "$HOME"]}
    command = boot.torchrun_command(JobSpec.load({**SPEC, "run": run}), node(), "10.0.0.1", Path("/x"))
    told = [string.Template(word).safe_substitute(local_rank=7) for word in command[-3:]]
    assert told == run["args"]


def test_environment_drops_misleading_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE mean nodes on some platforms, and PET_* are torchrun's own options."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "9")
    env = boot.torchrun_environment(node())
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "TORCHELASTIC_RUN_ID"} & set(env)
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def outcome(
    folder: Path, code: int | None = 1, *, stopped: bool = False, left: tuple[int, ...] = (), **files: Any
) -> tuple[int, list[dict[str, Any]]]:
    """Return boot's outcome for these result files of two ranks; the ranks in `left` left with these codes."""
    for name, value in files.items():
        atomic_json.write_json(folder / f"{name.replace('_', '-')}.json", value)
    for rank, leaving in enumerate(left):
        (folder / f"left-{rank}").write_text(str(leaving))
    return boot._outcome(folder, boot._Ended(code, stopped), nproc=2)


ABORTED = {"rank": 0, "kind": "signal", "signal": "SIGABRT", "exit_code": -6, "message": "killed by SIGABRT"}


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"code": 0}, boot.EXIT_DONE),
        ({"rank_0": {"rank": 0, "kind": "config", "message": "no model"}}, boot.EXIT_CONFIG),
        ({"torchrun": [{"rank": 0, "kind": "exit", "exit_code": 75}]}, boot.EXIT_SAVED),
        ({"stopped": True, "torchrun": [], "outcome": {"outcome": "saved"}}, boot.EXIT_SAVED),
        ({"stopped": True, "torchrun": [SIGTERM]}, boot.EXIT_STOPPED),
        ({"stopped": True, "left": (0, 0)}, boot.EXIT_STOPPED),  # it has not finished its work
        ({"torchrun": [SIGTERM]}, boot.EXIT_FAILED),  # another process killed the rank
        ({"torchrun": [ABORTED], "left": (0, 0)}, boot.EXIT_DONE),  # an interpreter that dies in gloo's teardown
        ({"torchrun": [ABORTED], "left": (0,)}, boot.EXIT_FAILED),
    ],
)
def test_outcome_is_the_meaning_of_the_end(tmp_path: Path, told: dict[str, Any], code: int) -> None:
    """Done, saved and stopped have no failure, whatever torchrun has reported."""
    found, failures = outcome(tmp_path, **told)
    assert (found, bool(failures)) == (code, code in (boot.EXIT_CONFIG, boot.EXIT_FAILED))


def test_end_before_the_log_opens_reaches_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank prints before its log exists is in torchrun.log alone; the rank's log and the cause get it."""
    monkeypatch.setenv("CLOUDTRAIN_LOG_DIR", str(tmp_path))
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    import y\nImportError: no y\n'
    (tmp_path / "torchrun.log").write_text(f"W1 torchrun: hello\n{trace}E1 failed (exitcode: 1)\nTraceback: more\n")
    _, failures = outcome(tmp_path, torchrun=[{"rank": 1, "kind": "exit", "exit_code": 1, "message": "code 1"}])
    assert failures[0]["message"] == "code 1; last line: ImportError: no y"
    assert (tmp_path / "rank-1.log").read_text() == trace


def test_outcome_names_the_root_cause_before_its_echo(tmp_path: Path) -> None:
    """The rank with the root cause comes before the rank that lost its peer, whatever their clocks show."""
    echo = {"rank": 0, "kind": "exception", "message": "closed by peer", "peer_lost": True, "time_s": 1.0}
    cause = {"rank": 1, "kind": "exception", "message": "boom", "peer_lost": False, "time_s": 2.0}
    code, failures = outcome(tmp_path, rank_0=echo, rank_1=cause)
    assert code == boot.EXIT_FAILED
    assert [f["message"] for f in failures] == ["boom", "closed by peer"]


def test_outcome_of_a_sigterm_from_torchrun_is_an_echo(tmp_path: Path) -> None:
    """torchrun ends the siblings of a failed rank: the failed rank is the cause, even with a lost peer."""
    echo = {"rank": 1, "kind": "exception", "message": "Timed out waiting", "peer_lost": True, "time_s": 0.0}
    assert outcome(tmp_path, torchrun=[{**SIGTERM, "time_s": 1.0}], rank_1=echo)[1][0]["rank"] == 1


def test_outcome_of_a_killed_rank_has_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank leaves no message: the failure shows the last lines of its own log, not of other ranks."""
    monkeypatch.setenv("CLOUDTRAIN_LOG_DIR", str(tmp_path))
    (tmp_path / "rank-1.log").write_text("loading\nallocating 80 GB\n")
    (tmp_path / "rank-0.log").write_text("waiting\n")
    killed = {"rank": 1, "kind": "signal", "signal": "SIGKILL", "exit_code": -9, "message": "killed by SIGKILL"}
    assert outcome(tmp_path, torchrun=[killed])[1][0]["lines"] == ["loading", "allocating 80 GB"]


def test_outcome_has_the_step_of_the_failed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file with the rank's steps outlives the rank, and a new start begins without a step."""
    monkeypatch.setattr(heartbeat.faulthandler, "register", lambda *args, **kwargs: None)
    monkeypatch.setenv("CLOUDTRAIN_RESULT_DIR", str(tmp_path))
    for steps in ((), (9, 10)):
        for name in ("_due_s", "_file", "_pid", "_steps"):
            monkeypatch.setattr(heartbeat, name, getattr(heartbeat, name))
        heartbeat.enable()
        for step in steps:
            heartbeat.at(step)
        _, failures = outcome(tmp_path, torchrun=[ABORTED])
        assert failures[0].get("step") == (steps[-1] if steps else None)


def test_outcome_of_an_exit_code_names_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """argparse prints the cause and exits with code 2; a long line is cut."""
    monkeypatch.setenv("CLOUDTRAIN_LOG_DIR", str(tmp_path))
    (tmp_path / "rank-1.log").write_text("usage: train.py --lr LR\ntrain.py: error: argument --lr: invalid\n")
    left = {"rank": 1, "kind": "exit", "exit_code": 2, "message": "exited with code 2"}
    failure = outcome(tmp_path, torchrun=[left])[1][0]
    assert failure["message"] == "exited with code 2; last line: train.py: error: argument --lr: invalid"
    assert failure["lines"] == ["usage: train.py --lr LR", "train.py: error: argument --lr: invalid"]
    (tmp_path / "rank-1.log").write_text("x" * 5000)
    assert len(outcome(tmp_path, torchrun=[left])[1][0]["message"]) < 300


@pytest.mark.parametrize(
    ("signal_name", "killed", "words"),
    [
        ("SIGKILL", 1, "killed by it; meanwhile the kernel killed a process of this machine for want of memory"),
        ("SIGKILL", 3, "killed by it; meanwhile the kernel killed 3 processes of this machine for want of memory"),
        ("SIGKILL", 0, "killed by it"),
        ("SIGSEGV", 1, "killed by it"),
    ],
)
def test_failure_mentions_memory_if_the_kernel_killed(signal_name: str, killed: int, words: str) -> None:
    """The kernel's counter of kills proves the cause; SIGKILL alone does not."""
    failure = {"rank": 0, "kind": "signal", "signal": signal_name, "message": "killed by it"}
    assert boot._with_memory([failure], killed) == [{**failure, "message": words}]


def test_outcome_of_a_killed_torchrun(tmp_path: Path) -> None:
    """Without any failure report, the signal of torchrun is the reported failure."""
    code, failures = outcome(tmp_path, -9)
    assert (code, failures[0]["kind"]) == (boot.EXIT_FAILED, "signal")


def test_outcome_of_a_trainer_that_finished_after_a_stop_is_done(tmp_path: Path) -> None:
    """The trainer exits 0 only after its last step and all saves."""
    for rank in range(2):
        (tmp_path / f"left-{rank}").write_text("0")
    assert boot._outcome(tmp_path, boot._Ended(1, True), 2, is_task=True) == (boot.EXIT_DONE, [])


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have boot get SIGTERM as soon as torchrun runs."""
    handlers: dict[int, Any] = {}

    def watch(child: subprocess.Popen[bytes], _told_s: list[float], asked_s: list[float], *_: Any) -> boot._Ended:
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        return boot._Ended(child.wait(10), bool(asked_s))

    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(boot, "_watch", watch)


@pytest.mark.usefixtures("signalled")
@pytest.mark.parametrize(("left", "code"), [((0, 0), boot.EXIT_DONE), ((0,), boot.EXIT_STOPPED)])
def test_stop_after_the_success_of_all_ranks_is_no_stop(tmp_path: Path, left: tuple[int, ...], code: int) -> None:
    """A SIGTERM during the teardown ends torchrun, and does not turn the success into a stop."""
    for rank, leaving in enumerate(left):
        (tmp_path / f"left-{rank}").write_text(str(leaving))
    ended = boot._run_torchrun(["sleep", "60"], dict(os.environ), tmp_path, JobSpec(nproc_per_node=2))
    assert boot._outcome(tmp_path, ended, 2) == (code, [])


@pytest.mark.usefixtures("signalled")
def test_ranks_that_obey_a_stop_at_once_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that exits 0 by the signal is not done, however fast it leaves."""

    def obey(pid: int, signum: int) -> None:
        (tmp_path / "left-0").write_text("0")
        os.kill(pid, signum)

    monkeypatch.setattr(boot.processes, "kill", obey)
    ended = boot._run_torchrun(["sleep", "60"], dict(os.environ), tmp_path, JobSpec(nproc_per_node=1))
    assert boot._outcome(tmp_path, ended, 1) == (boot.EXIT_STOPPED, [])


def watched(folder: Path, *asked_s: float) -> tuple[int, list[dict[str, Any]]]:
    """Return boot's outcome of two ranks after the watch of a torchrun that does not end by itself."""
    with subprocess.Popen(["sleep", "60"]) as child:
        ended = boot._watch(child, [*asked_s], [*asked_s], folder, JobSpec(nproc_per_node=2))
        child.kill()
    return boot._outcome(folder, ended, 2)


@pytest.mark.parametrize(("word", "code"), [("done", boot.EXIT_DONE), ("saved", boot.EXIT_SAVED)])
def test_idle_torchrun_is_ended_with_the_trainers_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, code: int
) -> None:
    """If all work is done but a process does not end, boot ends torchrun, so the machine does not cost on."""
    monkeypatch.setattr(boot, "LOOK_S", 0.05)
    monkeypatch.setattr(boot, "EXIT_DEADLINE_S", 0.1)
    atomic_json.write_json(tmp_path / "outcome.json", {"outcome": word})
    assert watched(tmp_path) == (code, [])


def test_torchrun_may_stay_while_a_rank_works(tmp_path: Path) -> None:
    """While a rank of the node works, torchrun may stay; when all have left, it waits for the other nodes."""
    (tmp_path / "left-0").write_text("0")
    assert boot._patience_s(tmp_path, 2) is None
    (tmp_path / "left-1").write_text("0")
    assert boot._patience_s(tmp_path, 2) == boot.EXIT_DEADLINE_S + boot.EXIT_BARRIER_S


def test_torchrun_that_does_not_stop_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop request, torchrun gets its own timeout for the save, and no more."""
    monkeypatch.setattr(boot, "LOOK_S", 0.05)
    asked_s = time.monotonic() - boot.SHUTDOWN_TIMEOUT_S - boot.EXIT_DEADLINE_S
    assert watched(tmp_path, asked_s) == (boot.EXIT_STOPPED, [])


TWO_NODES = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
with open("met-" + os.environ["RANK"], "w") as met:
    met.write(str(os.getpid()))
time.sleep(600 * int(os.environ["RANK"]))
"""


@pytest.mark.slow
def test_stop_after_the_end_of_rank_0_is_obeyed(tmp_path: Path) -> None:
    """torchrun waits in native code for the ranks of node 1, which a stop has ended; boot ends that wait."""
    (tmp_path / "train.py").write_text(TWO_NODES)
    run = {"kind": "script", "target": "train.py", "args": []}
    atomic_json.write_json(tmp_path / "spec.json", {**SPEC, "nproc_per_node": 1, "run": run})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        names = {"HEAD": f"127.0.0.1:{listening.getsockname()[1]}", "ADDRESS": "127.0.0.1", "NUM_NODES": "2"}
    code = "from cloudtrain.entrypoints.agent import boot; boot.OBEY_S = 1.0; raise SystemExit(boot.main())"
    started = []
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        own = {"SPEC": f"{tmp_path}/spec.json", "RESULT_DIR": f"{tmp_path}/node-{node}", "NODE_RANK": str(node)}
        env = os.environ | {f"CLOUDTRAIN_{name}": value for name, value in (names | own).items()}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=env, cwd=tmp_path))
    until(lambda: (tmp_path / "node-0/left-0").exists() and (tmp_path / "met-1").exists(), 120)
    until(lambda: not Path("/proc", (tmp_path / "met-0").read_text()).exists())
    time.sleep(1.0)  # torchrun looks at its ranks each 0.1 s
    for process in started:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in started] == [boot.EXIT_DONE, boot.EXIT_STOPPED]


@pytest.mark.parametrize("saved", [False, True])
def test_job_without_a_supervisor_ends_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """The supervisor may be suspended. A save before the deadline counts as saved."""
    monkeypatch.setattr(boot, "LOOK_S", 0.05)
    monkeypatch.setattr(boot, "SLACK_S", 0.1)
    monkeypatch.setenv("CLOUDTRAIN_DEADLINE", f"{time.time():.0f}")
    monkeypatch.setenv("CLOUDTRAIN_GRACE", "0")
    if saved:
        atomic_json.write_json(tmp_path / "outcome.json", {"outcome": "saved"})
    code, failures = watched(tmp_path)
    kinds = [failure["kind"] for failure in failures]
    assert (code, kinds) == ((boot.EXIT_SAVED, []) if saved else (boot.EXIT_FAILED, ["deadline"]))


def test_deadline_is_left_to_the_supervisor() -> None:
    """boot waits for grace and slack after the deadline, tolerates a wrong clock, and has no limit without one."""
    told = {"CLOUDTRAIN_DEADLINE": f"{time.time() + 1000}", "CLOUDTRAIN_GRACE": "30"}
    now_s = time.monotonic()
    assert boot._limit_s(told, now_s) == pytest.approx(now_s + 1000 + 30 + boot.SLACK_S, abs=1)
    assert boot._limit_s({"CLOUDTRAIN_DEADLINE": "1"}, now_s) == now_s + boot.GRACE_S + boot.SLACK_S
    assert boot._limit_s({}, now_s) == math.inf


# Writes the outcome "done" as the trainer does, and then does not exit, like a teardown that hangs.
DONE_BUT_STAYS = """
import json, os, time
with open(os.environ["CLOUDTRAIN_RESULT_DIR"] + "/outcome.json", "w") as out:
    json.dump({"outcome": "done"}, out)
time.sleep(600)
"""


@pytest.mark.slow
def test_rank_that_never_leaves_does_not_hold_the_machine(tmp_path: Path, home: Path) -> None:
    """boot ends torchrun and the rank below it, and exits 0."""
    (tmp_path / "train.py").write_text(DONE_BUT_STAYS)
    run = {"kind": "script", "target": "train.py", "args": []}
    atomic_json.write_json(tmp_path / "spec.json", {**SPEC, "nproc_per_node": 1, "run": run})
    code = "from cloudtrain.entrypoints.agent import boot; boot.EXIT_DEADLINE_S = 1.0; raise SystemExit(boot.main())"
    own = {"CLOUDTRAIN_SPEC": str(tmp_path / "spec.json"), "CLOUDTRAIN_RESULT_DIR": str(tmp_path)}
    env = {**os.environ, **one_node.variables(), **own}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, timeout=90)
    assert (done.returncode, atomic_json.read_json(tmp_path / "result.json")["code"]) == (0, 0), done.stderr


PARTS = """\
import sys
from cloudtrain.entrypoints.agent import elastic
elastic.LATE |= {more}
code = elastic.main(["--standalone", "--nproc-per-node=1", "-m", "platform"])
import torch
late = [name for name in elastic.LATE & sys.modules.keys() if "__getattr__" in vars(sys.modules[name])]
print(code, len(late), torch.export.Dim.__name__, torch.utils.data.Dataset.__name__)
"""


@pytest.mark.parametrize(("more", "late"), [("set()", 5), ("{'torch.func'}", 0)])
def test_torchrun_leaves_parts_of_torch_to_their_first_use(more: str, late: int) -> None:
    """torchrun uses none of the parts; with a torch that needs a part earlier, the process begins again, with all."""
    argv = [sys.executable, "-c", PARTS.format(more=more)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90)
    assert done.stdout.splitlines()[-1:] == [f"0 {late} Dim Dataset"], done.stderr


def test_follower_waits_for_the_store_of_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends when the port listens, and in time where it never does: then torchrun's own errors count."""
    monkeypatch.setattr(elastic, "STORE_S", 30.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        waiting = threading.Thread(target=elastic._await_store, args=("127.0.0.1", port))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        server.listen()
        waiting.join(20)
        assert not waiting.is_alive()
    monkeypatch.setattr(elastic, "STORE_S", 0.05)
    elastic._await_store("127.0.0.1", port)
