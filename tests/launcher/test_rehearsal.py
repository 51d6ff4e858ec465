"""Parts of a rehearsal: the scale, the sandbox, the verdict, the proof."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain import entrypoints
from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.contract import ExitReport
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.advice import proofs
from cloudtrain.launcher.advice.preparing import prepare
from cloudtrain.launcher.commands.options import Overrides
from cloudtrain.launcher.commands.rehearse import places_here
from cloudtrain.launcher.errors import ConfigError, UsageError
from cloudtrain.launcher.plan import Batch, Plan
from cloudtrain.launcher.planning.prepare import Prepared
from cloudtrain.launcher.rehearsal import judging, rehearsing, sandbox, starts
from cloudtrain.launcher.rehearsal.judging import Verdict
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, RehearsalOptions
from cloudtrain.launcher.store.database import Database

TASK = "name: tried\nbackend: local\ntask: task.py\ntraining: {global_batch_size: 64, max_steps: 100}\n"


def load(folder: Path, text: str = TASK) -> Any:
    """Return the config of the text."""
    functions = ("model(params)", "dataset(params, split)", "loss(model, batch)")
    (folder / "task.py").write_text("".join(f"def {each}: ...\n" for each in functions))
    (folder / "cloudtrain.yaml").write_text(text)
    return configs.load(folder / "cloudtrain.yaml")


def plan(instances: int, nproc: int, batch: Batch | None = None, gpus: int = 0) -> Plan:
    """Return a plan of so many ranks."""
    figures = {"instances": instances, "nproc_per_node": nproc, "ranks": instances * nproc, "gpus_per_instance": gpus}
    return Plan(**figures, hourly_usd=0.0, cap_s=3600, cap_reason="time_limit", deadline_s=3500, batch=batch)


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ("sagemaker: s3://b/x/, local: ./data", "data"),
        ("sagemaker: s3://b/x/, local: ./none", None),
        ("sagemaker: ./small, local: ./data", None),  # the place of the rehearsed backend is here
        ("sagemaker: s3://b/x/", None),
    ],
)
def test_local_place_of_an_input_is_read(tmp_path: Path, places: str, found: str | None) -> None:
    """A rehearsal for a cloud reads the data that the file names for this machine."""
    for name in ("data", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    (tmp_path / "train.py").write_text("")
    text = "name: x\nscript: train.py\nbackend: sagemaker\nresources: {instance_type: ml.g5.xlarge}\n"
    text += "sagemaker: {region: us-east-1, role: arn:aws:iam::123456789012:role/r}\n"
    (tmp_path / "cloudtrain.yaml").write_text(f"{text}inputs: {{train: {{{places}}}}}\n")
    overrides = Overrides(tmp_path / "cloudtrain.yaml", None, ())
    assert places_here(overrides, overrides.load()) == ({"train": tmp_path / found} if found else {})


@pytest.mark.parametrize(
    ("planned", "gpus", "expected"),
    [
        (plan(16, 8, Batch(2048, 4, 4), gpus=8), 0, (2, 1)),
        (plan(1, 8, Batch(64, 4, 2), gpus=8), 0, (1, 2)),
        (plan(2, 8, Batch(64, 4, 1), gpus=8), 8, (2, 4)),
        (plan(3, 1, Batch(12, 4, 1)), 0, (1, 1)),  # 3 micro-batches cannot be shared by 2 ranks
        (plan(2, 8, Batch(64, 4, 1, tensor=4), gpus=8), 0, (1, 4)),  # a layer's ranks are on one node
        (plan(4, 1, Batch(16, 4, 4, pipeline=4)), 0, (1, 4)),
        (plan(2, 8, Batch(64, 4, 4, tensor=2, pipeline=2), gpus=8), 8, (2, 4)),
        (plan(2, 1), 1, (2, 1)),
        (plan(1, 1), 8, (1, 1)),
    ],
)
def test_scale_fits_the_machine(tmp_path: Path, planned: Plan, gpus: int, expected: tuple[int, int]) -> None:
    """At most two nodes; a GPU per rank, or a rank per node without GPUs; micro-batches unchanged and evenly shared."""
    found = rehearsing.choose_scale(load(tmp_path), planned, 2, None, [str(number) for number in range(gpus)])
    assert (found.nodes, found.nproc) == expected
    assert len(found.gpus) == found.nodes


def test_scale_keeps_the_size_of_the_micro_batches(tmp_path: Path) -> None:
    """Fewer ranks take more micro-batches of the same size, as the text says; a CPU job gets no GPU of this machine."""
    found = rehearsing.choose_scale(load(tmp_path), plan(4, 8, Batch(256, 4, 2), gpus=8), 2, None, [])
    assert "training.micro_batch_size=4" in found.settings
    words = ("2 of 4 nodes x 1 of 8 ranks", "32 micro-batches of 4 a rank and step, not 2", "on the CPU, over gloo")
    assert found.words == words
    assert rehearsing.choose_scale(load(tmp_path), plan(1, 1), 2, None, ["0", "1"]).gpus == ((),)


@pytest.mark.parametrize("mode", ["root", "user", "none"])
def test_sandbox_has_its_own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A command finds a folder at the platform's path, which the machine lacks, and sees no hidden folder."""
    monkeypatch.setenv("CLOUDTRAIN_SANDBOX", mode)
    sandbox.mode.cache_clear()
    try:
        if sandbox.mode() != mode:
            pytest.skip(f"this kernel makes no namespaces for {mode}")
        for name in ("own", "code"):
            (tmp_path / name).mkdir()
        (tmp_path / "code/secret").touch()
        script = f"cat; echo done > /opt/ml-tried/file; ls {tmp_path}/code"
        places = {"/opt/ml-tried": tmp_path / "own"}
        node = NodeRun("algo-1", ("/bin/sh", "-c", script), {"PATH": sandbox.SYSTEM_PATH}, (), places)
        running = sandbox.start(node, tmp_path / "cell", [tmp_path / "code"], "spoken '$(words)'\n")
        running.process.wait(30)
    finally:
        sandbox.mode.cache_clear()
    assert running.code == 0, running.output.read_text()
    assert (tmp_path / "own/file").read_text() == "done\n"
    assert running.output.read_text() == "spoken '$(words)'\n" + ("secret\n" if mode == "none" else "")
    assert not Path("/opt/ml-tried").exists()


def test_sandbox_keeps_a_clone_inside_a_hidden_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install below /tmp, or in the job's own code folder, stays visible, without neighbouring files."""
    if sandbox.mode() == "none":
        pytest.skip("this kernel makes no namespaces")
    clone = tmp_path / "code/clone/entrypoints"
    clone.mkdir(parents=True)
    for path in (clone / "starting.py", clone.parent / "README.md", tmp_path / "code/task.py"):
        path.touch()
    monkeypatch.setattr(entrypoints, "__path__", [str(clone)])
    for hidden in ([], [tmp_path / "code"]):  # pytest's folders are below /tmp, which no sandbox shares
        words = ("find", "/tmp", str(tmp_path), "-type", "f", "-not", "-path", f"{tmp_path}/cell/*")
        node = NodeRun("algo-1", words, {"PATH": sandbox.SYSTEM_PATH}, ())
        running = sandbox.start(node, tmp_path / f"cell/{len(hidden)}", hidden)
        running.process.wait(30)
        found = {line for line in running.output.read_text().split() if line.startswith(str(tmp_path))}
        assert found == {str(clone / "starting.py")}, running.output.read_text()


def test_addresses_are_exclusive_or_reported_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rehearsals have different addresses for servers; if `lo` is down or has a single address, the search ends."""
    (first, one), (second, two) = sandbox.addresses(2), sandbox.addresses(2)
    with one, two, socket.create_server((first[1], 0)):
        assert not {*first} & {*second}
    monkeypatch.setattr(sandbox.socket, "socket", lambda *_: SimpleNamespace(bind=_refuse, close=lambda: None))
    with pytest.raises(ConfigError, match="no free loopback address"):
        sandbox.addresses(2)


def _refuse(place: tuple[str, int]) -> None:
    raise OSError(99, "Cannot assign requested address")


def test_account_reads_complete_lines(tmp_path: Path) -> None:
    """Rank 0's events count with complete lines, further ranks as present; a save without a step settles nothing."""
    log = tmp_path / "log"
    log.mkdir()
    (log / "rank-1.log").touch()
    found = starts.Account((tmp_path,))
    text = (
        'step 1  ::ct {"e":"step","step":1,"loss":0.5}\nhello ::ct {"e"\nx  ::ct {"e":"step","step":2,"loss":NaN}\nste'
    )
    (log / "rank-0.log").write_text(text)
    found.look()
    with (log / "rank-0.log").open("a") as file:
        file.write('p 3  ::ct {"e":"step","step":3}\n')
    found.look()
    assert (found.ranks, found.last_step, found.odd_steps) == ({0, 1}, 3, [2])
    assert found.steps[1] == 0.5
    found = starts.Account((tmp_path,), _reported_s=math.inf)  # a step was reported just now
    found.events.append({"e": "checkpoint", "path": "out/ckpt.pt"})
    assert not found.is_settled()
    found.events.append({"e": "checkpoint", "path": "step-4", "step": 4})
    assert found.is_settled()


LAID_OUT = Rehearsal((NodeRun("n", ("true",), {}, (Path("x"),)),), "SIGTERM", 30.0, Path("nowhere"))


def ended(
    steps: dict[int, float | None], *ranks: int, account: dict[str, Any] | None = None, **more: Any
) -> starts.StartResult:
    """Return the result of a start whose ranks reported the steps."""
    found = starts.StartResult(LAID_OUT, starts.Account((), **account or {}), **more)
    found.account.steps, found.account.ranks = steps, {*ranks}
    return found


WHOLE = {step: 1 / step for step in range(1, 9)}


@pytest.mark.parametrize(
    ("after", "is_right", "words"),
    [
        ({5: WHOLE[5], 6: WHOLE[6]}, True, "equal bit for bit"),
        ({5: WHOLE[5], 6: math.nextafter(WHOLE[6], 1)}, False, "at step 6"),
        ({5: math.nan}, False, "at step 5"),
        ({20: 0.5}, False, "did not get as far"),
    ],
)
def test_losses_must_be_equal_bit_for_bit(after: dict[int, float | None], is_right: bool, words: str) -> None:
    """On two ranks a resume changes no bit."""
    first, whole = ended({step: WHOLE[step] for step in range(1, 5)}), ended(dict(WHOLE))
    verdict = Verdict("local", is_asked_to_prove=True)
    found = judging.compared(verdict, first, ended(after), whole, 0.0, is_exact=True)
    assert found is is_right
    assert words in verdict.findings[-1].words


def test_nondeterministic_script_is_judged_by_its_steps() -> None:
    """Two runs that differ before the interruption prove nothing about differences after, and the verdict says so."""
    verdict = Verdict("local", is_task=False, is_asked_to_prove=True, interrupted_step=2, next_step=3)
    runs = ended({1: 0.5, 2: 0.4}), ended({3: 0.3}), ended({1: 0.51, 2: 0.41, 3: 0.2})
    assert judging.compared(verdict, *runs, 0.0, is_exact=True)
    assert verdict.headline() == "proven: interrupted after step 2, continued at step 3, by its steps alone"
    assert "whether the weights and the optimizer's state come back" in verdict.not_checked[0]


def test_losses_beyond_the_tolerance_are_reported_once() -> None:
    """The difference and the given tolerance are stated once; a difference above all is explained by the seed."""
    verdict = Verdict("local", is_task=False, is_asked_to_prove=True, interrupted_step=2, next_step=3)
    runs = ended({1: 0.5, 2: 0.4}), ended({3: 0.35}), ended({1: 0.5, 2: 0.4, 3: 0.32})
    assert not judging.compared(verdict, *runs, 0.05, is_exact=False)
    told = "\n".join(verdict.lines())
    assert told.count("the losses differ after the resume by 8.57 %, more than --tolerance 0.05 allows") == 1
    assert "needs --tolerance" not in told
    assert told.count("is the optimizer's state") == 1
    verdict = Verdict("local", is_task=False, is_asked_to_prove=True, interrupted_step=2, next_step=3)
    runs = ended({1: 0.5, 2: 0.4}), ended({3: 0.48}), ended({1: 0.5, 2: 0.4, 3: 0.32})
    assert not judging.compared(verdict, *runs, 0.0, is_exact=False)
    assert "If a resume repeats the seed, losses of small batches differ by more than any --tolerance" in verdict.hint
    assert "needs --tolerance" not in verdict.hint


@pytest.mark.parametrize(
    ("message", "log"),
    [
        ("the 2 ranks met no group; call init", "cloudtrain: warning: this rank met no group; call init"),
        ("No module named 'x'", "ModuleNotFoundError: No module named 'x'"),
    ],
)
def test_diagnosis_is_printed_once(message: str, log: str) -> None:
    """The headline has the message; the log's other lines are shown above the headline."""
    verdict = Verdict("local", failure={"rank": None, "message": message}, tail=["step 1", log])
    verdict.found("steps", "it failed after step 1", is_right=False)
    shown = verdict.lines()
    assert [place for place, line in enumerate(shown) if line.endswith(message.rpartition("; ")[2])] == [len(shown) - 1]
    assert "  | step 1" in shown


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        *(([20], "1 reported step (20)"), ([0, 10], "2 reported steps (0 and 10)")),
        ([1, 2, 3, 4, 5], "5 reported steps (1 to 5)"),
    ],
)
def test_reported_steps_are_counted_and_named(steps: list[int], words: str) -> None:
    """A script may report each tenth step: the finding and the verdict give the same count."""
    found = ended(dict.fromkeys(steps, 0.5), 0, 1, exits=[ExitReport("succeeded")])
    verdict = Verdict("local", ranks=2)
    judging.ran(verdict, found)
    assert f"{words} with finite losses" in [each.words for each in verdict.findings]
    assert verdict.words == f"{words} on 2 ranks"


@pytest.mark.parametrize(
    ("left_s", "unkept", "is_doubtful"), [(1.0, (), True), (1.0, ("out/",), False), (None, (), False)]
)
def test_script_without_a_save_leaves_its_files_unchecked(
    tmp_path: Path, left_s: float | None, unkept: tuple[str, ...], is_doubtful: bool
) -> None:
    """A script may save after the rehearsed steps; a script that ended by itself has shown all of its files."""
    report = ExitReport("stopped" if left_s else "succeeded", unkept=unkept)
    found = ended({1: 0.5, 2: 0.4}, 0, left_s=left_s, exits=[report])
    verdict = Verdict("local", is_task=False)
    found.laid_out = Rehearsal((NodeRun("n", ("true",), {}, (tmp_path,)),), "SIGTERM", 30.0, tmp_path)
    judging.ran(verdict, found)
    assert any(each.startswith("its files: by step 2 no save was seen") for each in verdict.not_checked) is is_doubtful


@pytest.mark.parametrize(
    ("first", "second", "is_right", "words"),
    [
        ({1: 0.5, 2: 0.4}, {3: 0.3}, True, "started again, the script continues: its first reported step is 3"),
        ({10: 0.5, 30: 0.4}, {40: 0.3}, True, "its first reported step is 40"),  # the script reports every tenth step
        ({1: 0.5, 9: 0.4}, {5: 0.3}, True, "step is 5; the steps after its last save, up to step 9, are repeated"),
        ({3: 0.5, 4: 0.4}, {3: 0.5}, False, "began again at step 3"),
        ({1: 0.5}, {}, False, "the script reported no steps"),
        ({}, {7: 0.1}, False, "its first start reported no steps"),
    ],
)
def test_script_continues_at_its_next_step(
    first: dict[int, float | None], second: dict[int, float | None], is_right: bool, words: str
) -> None:
    """The checkpoint that a script loaded is unknown, so the verdict has only the next step."""
    verdict = Verdict("local", is_task=False, is_asked_to_prove=True)
    runs = ended(first, left_s=1.0), ended(second, left_s=1.0, exits=[ExitReport("stopped")])
    assert judging.resumed(verdict, *runs) is is_right
    assert words in verdict.findings[-1].words
    assert (verdict.saved_step, verdict.resumed_step) == (None, None)


@pytest.mark.parametrize(
    ("went_on", "is_killed", "is_right"), [(30, False, True), (20, False, False), (20, True, True), (None, True, False)]
)
def test_task_continues_from_the_save_at_the_notice(went_on: int | None, is_killed: bool, is_right: bool) -> None:
    """An older checkpoint is acceptable only after a kill without time to save."""
    verdict = Verdict("local", is_asked_to_prove=True, saved_step=30)
    second = ended({31: 0.3}, exits=[ExitReport("succeeded")])
    second.account.events = [{"e": "start", "resumed_from": went_on}]
    first = ended({30: 0.3}, left_s=1.0, is_killed=is_killed)
    assert judging.resumed(verdict, first, second) is is_right


def test_failed_save_does_not_count() -> None:
    """A checkpoint event counts only with the path of the checkpoint."""
    start = ended({1: 0.5}, 0, left_s=1.0, exits=[ExitReport("stopped")])
    start.account.events = [{"e": "checkpoint", "step": 1, "path": "x"}, {"e": "checkpoint", "step": 2, "failed": "y"}]
    verdict = Verdict("local", is_asked_to_prove=True)
    judging.interrupted(verdict, start, 1)
    assert verdict.saved_step in (1, None)


def test_slow_script_is_waited_for() -> None:
    """A silent script is waited for to the end of the time; a rank that says that it is alone ends the wait."""
    said: list[str] = []
    ranks = SimpleNamespace(ranks=2)
    work: Any = SimpleNamespace(wish=RehearsalOptions(preempt_at=3), say=said.append, scale=ranks)
    work.verdict = Verdict("local", is_task=False)
    silent, until = starts.Account(()), rehearsing._until(work, 3, None)
    assert not any(until(silent, seconds) for seconds in (1.0, 100.0, 299.0))
    assert len(said) == 1
    lonely, work.wish = starts.Account((), alone="it waits at localhost"), RehearsalOptions()
    assert [rehearsing._until(work, None, 5)(one, 61.0) for one in (silent, lonely)] == [False, True]
    work.wish = RehearsalOptions(timeout_s=600.0)
    assert [rehearsing._until(work, None, 5)(one, 61.0) for one in (silent, lonely)] == [False, False]


@pytest.mark.parametrize("asks", [True, False], ids=["proof", "run"])
@pytest.mark.parametrize(
    ("found", "needs_group", "words"),
    [
        (
            ended({1: 0.5, 2: 0.4}, 0, 1, left_s=1.0),
            True,
            "2 of 2 ranks have joined no process group of all ranks after",
        ),
        (ended({1: 0.5}, 0, 1, left_s=1.0, account={"met": {0}}), True, "rank 1 has joined no process group"),
        (
            ended({}, 0, 1, is_late=True, seconds=300.0),
            True,
            "2 of 2 ranks have joined no process group of all ranks in",
        ),
        (ended({}, 0, 1, left_s=1.0, account={"alone": "it waits"}), True, "2 of 2 ranks have joined no process group"),
        (ended({}, 0, 1, is_late=True, account={"met": {0, 1}}), True, "it reported no step in"),
        (ended({}, 0, 1, is_late=True), False, "it reported no step in"),
        (ended({1: 0.5}, 0, 1, left_s=1.0, account={"met": {0, 1}}), True, ""),
        (ended({1: 0.5}, 0, 1, left_s=1.0), False, ""),  # allow_alone
    ],
)
def test_only_ranks_that_met_are_said_to_have_met(
    tmp_path: Path, found: starts.StartResult, needs_group: bool, words: str, asks: bool
) -> None:
    """A script whose ranks did not meet, or that made no step, fails, with or without an interruption."""
    found.exits = [ExitReport("stopped")]
    verdict = Verdict("local", is_task=False, ranks=2, is_asked_to_prove=asks, needs_group=needs_group)
    found.laid_out = replace(LAID_OUT, checkpoints=tmp_path, nodes=(NodeRun("n", ("true",), {}, (tmp_path, tmp_path)),))
    if asks:
        judging.interrupted(verdict, found, 1)
    else:
        judging.ran(verdict, found)
    first, second = verdict.findings[:2]
    assert first.words.endswith("and met") is (found.account.met == {0, 1})
    assert (second.is_right, words in second.words) == (not words, True)


def test_output_of_the_job_has_no_escape_sequences(tmp_path: Path) -> None:
    """The last lines and the exception are shown without terminal controls."""
    verdict = Verdict("local", failure={"rank": 0, "message": "gone \x1b]0;title\x07\x1b[2J"})
    (tmp_path / "log").mkdir()
    (tmp_path / "log/rank-0.log").write_text("line \x1b[2J\x9b1m\n")
    verdict.tail = starts._tail(ended({}), (tmp_path,), [])
    verdict.found("started", "no", is_right=False)
    shown = "\n".join(verdict.lines())
    assert "gone" in shown
    assert "line" in shown
    assert not {"\x1b", "\x07", "\x9b"} & {*shown}


@pytest.mark.parametrize(
    ("codes", "started", "is_task", "words"),
    [
        (
            {"interrupted": 143},
            {"codes": [75], "exits": [ExitReport("stopped")], "left_s": 1.0},
            True,
            "where the platform needs 143",
        ),
        ({}, {"left_s": 31.0, "is_late": True}, False, "had not left after 30 s"),
    ],
)
def test_wrong_exit_after_an_interruption_fails(
    codes: dict[str, int], started: dict[str, Any], is_task: bool, words: str
) -> None:
    """A platform that reads exit codes would report a failure, and a save after the platform's grace is lost."""
    start, verdict = ended({1: 0.5}, 0, **started), Verdict("vertex", is_task=is_task, is_asked_to_prove=True)
    start.laid_out = replace(LAID_OUT, codes=codes)
    assert not judging.interrupted(verdict, start, 1)
    assert words in verdict.headline()


def test_interruption_waits_for_the_last_rank(tmp_path: Path) -> None:
    """Rank 0 comes to the step before rank 1 has started: the interruption finds both ranks."""
    (tmp_path / "code").mkdir()
    agents = [tmp_path / "agent-0", tmp_path / "agent-1"]
    for agent in agents:
        (agent / "log").mkdir(parents=True)
    late = "while ! test -e /job/agent-0/log/rank-0.log; do sleep 0.05; done; sleep 1; "
    commands = (
        "echo > /job/agent-0/log/rank-0.log; exec sleep 60",
        f"{late}echo > /job/agent-1/log/rank-1.log; exec sleep 60",
    )
    nodes = tuple(
        NodeRun(f"node{number}", ("sh", "-c", command), {"PATH": os.environ["PATH"]}, (agent,), {"/job": tmp_path})
        for number, (command, agent) in enumerate(zip(commands, agents, strict=True))
    )
    looks = []

    def until(account: starts.Account, seconds: float) -> bool:
        looks.append(set(account.ranks))
        return True

    found = starts.run(
        Rehearsal(nodes, "SIGTERM", 30.0, tmp_path),
        tmp_path,
        until=until,
        ranks=2,
        at_once=True,
        timeout_s=60.0,
        hidden=tmp_path / "code",
    )
    assert (found.account.ranks, looks) == ({0, 1}, [{0, 1}])


SPOT = """\
name: tried
backend: sagemaker
script: task.py
env: {LEVEL: "1"}
inputs: {train: s3://abc/b}
resources: {instance_type: ml.m5.xlarge, spot: true}
sagemaker: {region: eu-west-1, role: "arn:aws:iam::123456789012:role/cloudtrain", bucket: a-bucket,
            price_per_hour: 1 USD}
"""


def refusal(database: Database, prepared: Prepared) -> str | None:
    """Return the message of a submit without a proof; None if the submit is allowed."""
    try:
        proofs.require(database, prepared)
    except ConfigError as error:
        return error.faults[0].message
    return None


def missing(folder: Path, text: str, code: str = "x = 1\n") -> str | None:
    """Return the reason why a proof of SPOT with the code `x = 1` does not cover the config and the code."""
    for own in (home := folder / "home", code_folder := folder / "code"):
        own.mkdir()
    database = Database(home)
    for told, source in ((SPOT, "x = 1\n"), (text, code)):
        config = load(code_folder, told)
        (code_folder / "task.py").write_text(source)
        prepared = prepare(config, code_folder / "cloudtrain.yaml", home / "bundles", dry=True)
        if source == "x = 1\n" and not database.execute("SELECT * FROM rehearsals"):
            proofs.store(database, prepared.bundle.code_sha256, config, "saved", proofs.files_of(prepared))
    return refusal(database, prepared)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: tried\n", "name: other\n# a word\nbudget: {limit: 5 USD}\ntags: {team: a}\nproject: vision\n"),
        ("backend: s", "notify: [{slack: 'env:HOOK'}]\nlimits: {max_duration: 2h}\nbackend: s"),
        ("spot: true", "spot: true, instances: 3"),
        ("s3://abc/b", "s3://abc/c"),
        ("1 USD", "2 USD"),
    ],
)
def test_proof_survives_changes_that_do_not_affect_a_resume(tmp_path: Path, old: str, new: str) -> None:
    """A comment, names, money, notices, machines and places in the config keep the proof."""
    assert old in SPOT
    assert missing(tmp_path, SPOT.replace(old, new)) is None


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('LEVEL: "1"', 'LEVEL: "2"', "env"),
        ("bucket: a-bucket", "bucket: a-bucket, raw: {InfraCheckConfig: {EnableInfraCheck: true}}", "sagemaker"),
        ("script: task.py", "script: task.py\ncheckpoint: {every: 5m}", "checkpoint"),
        ("script: task.py", "script: task.py\nimage: 123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:3", "image"),
        ("{train:", "{other:", "inputs"),
    ],
)
def test_changed_setting_needs_a_new_proof(tmp_path: Path, old: str, new: str, name: str) -> None:
    """The message names the setting, which may affect save and resume."""
    assert old in SPOT
    said = missing(tmp_path, SPOT.replace(old, new))
    assert said is not None
    assert f": {name} has changed since" in said


def test_changed_code_needs_a_new_proof(tmp_path: Path) -> None:
    """A single changed byte ends the proof, and the message names the file."""
    said = missing(tmp_path, SPOT, "x = 2\n") or ""
    assert said.startswith("spot machines, and the code has changed since its resume was proven (")
    assert said.endswith("): task.py")


@pytest.mark.parametrize(
    ("files", "said"),
    [(None, "cloudtrain's own code on the nodes has changed"), ({"other.yaml": "0"}, "other.yaml, task.py")],
)
def test_message_separates_own_code_from_the_users(tmp_path: Path, files: dict[str, str] | None, said: str) -> None:
    """The files of the proof decide, and removed files count."""
    for own in (folder := tmp_path / "code", tmp_path / "home"):
        own.mkdir()
    (folder / "task.py").write_text("x = 1\n")
    config = load(folder, SPOT)
    prepared = prepare(config, folder / "cloudtrain.yaml", tmp_path / "bundles", dry=True)
    database = Database(tmp_path / "home")
    proofs.store(database, "0" * 64, config, "saved", proofs.files_of(prepared) if files is None else files)
    assert said in (refusal(database, prepared) or "")


def test_suggested_rehearsal_repeats_the_settings(tmp_path: Path) -> None:
    """A script chooses its saves, so the step is a placeholder; the request for spot machines is not needed."""
    (tmp_path / "task.py").write_text("x = 1\n")
    config = load(tmp_path, SPOT)
    prepared = prepare(config, tmp_path / "cloud 8.yaml", tmp_path / "bundles", dry=True)
    prepared = replace(prepared, settings=("resources.spot=true", "env.LEVEL=a b"))
    told = proofs._advice(prepared)
    assert told.startswith(
        f"`cloudtrain rehearse -f '{tmp_path}/cloud 8.yaml' --backend sagemaker --set 'env.LEVEL=a b'"
    )
    assert told.endswith(" --preempt-at STEP`, with a step after the script's first save,")


@pytest.mark.parametrize("words", ["--kill", *(f"--preempt-at 3 --tolerance {x}" for x in ("nan", "inf", "-0.1", "5"))])
def test_option_without_sense_is_refused(cli: Any, words: str) -> None:
    """A kill is an interruption at a step; with any of the tolerances, every comparison or none would pass."""
    assert cli("rehearse", *words.split()).code == 2


def test_folders_of_ended_rehearsals_are_removed(tmp_path: Path) -> None:
    """Folders of running rehearsals stay, and kept folders stay."""
    for name in ("dead", "kept"):
        (tmp_path / "rehearsals" / name).mkdir(parents=True)
        (tmp_path / "rehearsals" / name / "lock").touch()
    with rehearsing.place(tmp_path, keeps=True) as kept:
        pass
    with rehearsing.place(tmp_path, keeps=False) as first, rehearsing.place(tmp_path, keeps=False) as second:
        there = {path.name for path in (tmp_path / "rehearsals").iterdir()}
    assert there == {kept.name, first.name, second.name}
    assert {path.name for path in (tmp_path / "rehearsals").iterdir()} == {kept.name}


def test_verdict_as_json_is_complete() -> None:
    """The output is a JSON object whose headline has the fault; a plug-in need not support rehearsals."""
    verdict = Verdict("vertex", "f" * 64, is_asked_to_prove=True, not_checked=["GPUs"])
    verdict.found("started", "2 nodes")
    verdict.found("steps", "no step completed", is_right=False)
    told = json.loads(json.dumps(verdict.dump()))
    assert (told["ok"], told["proven"]) == (False, False)
    assert told["verdict"] == "not proven: no step completed"
    assert told["checked"][1] == {"name": "steps", "ok": False, "found": "no step completed"}
    prepared: Any = SimpleNamespace(config=SimpleNamespace(backend="vendor"), backend=SimpleNamespace())
    one = rehearsing.Scale(1, 1, ((),), (), ())
    with pytest.raises(UsageError, match="`vendor` cannot be rehearsed"):
        rehearsing.rehearse(prepared, one, RehearsalOptions(), {}, print, Path())


STUCK = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR2)
def load():
    print("ready", flush=True)
    while True:
        signal.pause()
load()
"""


def test_rank_that_hangs_shows_its_stack(tmp_path: Path) -> None:
    """A process below the sandbox prints where it is; a process without a handler lives on."""
    (tmp_path / "train.py").write_text(STUCK)
    command = f"sleep 60 & {sys.executable} train.py; wait"
    with subprocess.Popen(
        ["bash", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        starts._show_stacks([sandbox.Running(process, tmp_path)])
        below = processes.descendants(process.pid)
        for pid in (*below, process.pid):
            processes.kill(pid, signal.SIGKILL)
        assert (len(below), b" in load\n" in process.communicate()[1]) == (2, True)
