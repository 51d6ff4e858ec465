"""What a rehearsal is made of: how much of a job, a place of its own, the judgement, the proof."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain import entrypoints
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import NodeRun, Rehearsal
from cloudtrain.launcher.database import Database
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.plan import Batch, Plan
from cloudtrain.launcher.rehearsal import judging, lines, proofs, rehearsing, sandbox, scale, starts
from cloudtrain.launcher.rehearsal.verdict import Verdict

TASK = "name: tried\nbackend: local\ntask: task.py\ntraining: {global_batch_size: 64, max_steps: 100}\n"


def load(folder: Path, text: str = TASK) -> Any:
    """Return the config that the text is."""
    functions = ("model(params)", "dataset(params, split)", "loss(model, batch)")
    (folder / "task.py").write_text("".join(f"def {each}: ...\n" for each in functions))
    (folder / "cloudtrain.yaml").write_text(text)
    return configs.load(folder / "cloudtrain.yaml")


def plan(instances: int, nproc: int, batch: Batch | None = None, gpus: int = 0) -> Plan:
    """Return a plan of so many ranks."""
    return Plan(instances, nproc, instances * nproc, gpus, 0.0, "", 3600, "time_limit", 3500, 0.0, batch)


@pytest.mark.parametrize(
    ("planned", "gpus", "expected"),
    [
        (plan(16, 8, Batch(2048, 4, 4), gpus=8), 0, (2, 1)),
        (plan(1, 8, Batch(64, 4, 2), gpus=8), 0, (1, 2)),
        (plan(2, 8, Batch(64, 4, 1), gpus=8), 8, (2, 4)),
        (plan(3, 1, Batch(12, 4, 1)), 0, (1, 1)),  # 3 micro-batches cannot be shared by 2 ranks
        (plan(2, 1), 1, (2, 1)),
    ],
)
def test_scale_is_as_much_as_this_machine_bears(
    tmp_path: Path, planned: Plan, gpus: int, expected: tuple[int, int]
) -> None:
    """At most two nodes; a GPU a rank, or one rank a node without; micro-batches as large, and shared evenly."""
    found = scale.choose(load(tmp_path), planned, 2, None, [str(number) for number in range(gpus)])
    assert (found.nodes, found.nproc) == expected
    assert len(found.gpus) == found.nodes


def test_scale_keeps_the_micro_batches(tmp_path: Path) -> None:
    """Fewer ranks take more micro-batches of the same size, which is said."""
    found = scale.choose(load(tmp_path), plan(4, 8, Batch(256, 4, 2), gpus=8), 2, None, [])
    assert "training.micro_batch_size=4" in found.settings
    assert found.words == (
        "2 of 4 nodes x 1 of 8 ranks",
        "32 micro-batches of 4 a rank and step, not 2",
        "on the CPU, over gloo",
    )


@pytest.mark.parametrize("mode", ["root", "user", "none"])
def test_cell_sees_its_own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A command finds a folder at the platform's path, which this machine does not have, and hides what is hidden."""
    monkeypatch.setenv("CLOUDTRAIN_SANDBOX", mode)
    sandbox.mode.cache_clear()
    try:
        if sandbox.mode() != mode:
            pytest.skip(f"this kernel makes no namespaces for {mode}")
        for name in ("own", "code"):
            (tmp_path / name).mkdir()
        (tmp_path / "code/secret").touch()
        script = f"cat; echo done > /opt/ml-tried/file; ls {tmp_path}/code"
        cell = sandbox.Cell(
            argv=["/bin/sh", "-c", script],
            env={"PATH": sandbox.SYSTEM_PATH},
            folder=tmp_path / "cell",
            hostname="algo-1",
            places={"/opt/ml-tried": tmp_path / "own"},
            hidden=[tmp_path / "code"],
            stdin="spoken '$(words)'\n",
        )
        running = sandbox.start(cell)
        running.process.wait(30)
    finally:
        sandbox.mode.cache_clear()
    assert running.code == 0, running.output.read_text()
    assert (tmp_path / "own/file").read_text() == "done\n"
    assert running.output.read_text() == "spoken '$(words)'\n" + ("secret\n" if mode == "none" else "")
    assert not Path("/opt/ml-tried").exists()


def test_cell_keeps_a_clone_that_lies_in_what_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install below /tmp, or in the job's own code folder, is there all the same, and nothing beside it."""
    if sandbox.mode() == "none":
        pytest.skip("this kernel makes no namespaces")
    clone = tmp_path / "code/clone/entrypoints"
    clone.mkdir(parents=True)
    for path in (clone / "starting.py", clone.parent / "README.md", tmp_path / "code/task.py"):
        path.touch()
    monkeypatch.setattr(entrypoints, "__path__", [str(clone)])
    for hidden in ([], [tmp_path / "code"]):  # pytest's folders lie below /tmp, which no cell shares
        cell = sandbox.Cell(
            argv=["find", "/tmp", str(tmp_path), "-type", "f", "-not", "-path", f"{tmp_path}/cell/*"],
            env={"PATH": sandbox.SYSTEM_PATH},
            folder=tmp_path / f"cell/{len(hidden)}",
            hostname="algo-1",
            places={},
            hidden=hidden,
        )
        running = sandbox.start(cell)
        running.process.wait(30)
        found = {line for line in running.output.read_text().split() if line.startswith(str(tmp_path))}
        assert found == {str(clone / "starting.py")}, running.output.read_text()


def test_addresses_are_nobody_elses(tmp_path: Path) -> None:
    """Two rehearsals at once have addresses of their own, and an address can be listened on."""
    (first, one), (second, two) = sandbox.addresses(2), sandbox.addresses(2)
    with one, two, socket.create_server((first[1], 0)):
        assert not {*first} & {*second}


def test_account_takes_in_whole_lines(tmp_path: Path) -> None:
    """Rank 0's events count, as their lines become whole; other ranks are seen to be there."""
    log = tmp_path / "log"
    log.mkdir()
    (log / "rank-1.log").touch()
    found = lines.Account((tmp_path,))
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


def ended(steps: dict[int, float | None], **more: Any) -> starts.Ended:
    """Return how a start went that told of these steps."""
    found = starts.Ended(lines.Account(()), **more)
    found.account.steps = steps
    return found


WHOLE = {step: 1 / step for step in range(1, 9)}


@pytest.mark.parametrize(
    ("after", "is_right", "words"),
    [
        ({5: WHOLE[5], 6: WHOLE[6]}, True, "equal bit for bit"),
        ({5: WHOLE[5], 6: math.nextafter(WHOLE[6], 1)}, False, "at step 6"),
        ({5: math.nan}, False, "at step 5"),
        ({20: 0.5}, False, "did not come as far"),
    ],
)
def test_losses_are_held_to_the_bit(after: dict[int, float | None], is_right: bool, words: str) -> None:
    """On two ranks a resume changes nothing, not the last bit."""
    first, whole = ended({step: WHOLE[step] for step in range(1, 5)}), ended(dict(WHOLE))
    verdict = Verdict("local", is_asked_to_prove=True)
    found = judging.compared(verdict, first, ended(after), whole, 0.0, is_exact=True, is_task=True)
    assert found is is_right
    assert words in verdict.findings[-1].words


def test_script_that_never_repeats_is_judged_by_its_steps() -> None:
    """Two runs that differ before the interruption say nothing about what differs after it."""
    verdict = Verdict("local", is_asked_to_prove=True)
    runs = ended({1: 0.5, 2: 0.4}), ended({3: 0.3}), ended({1: 0.51, 2: 0.41, 3: 0.2})
    assert judging.compared(verdict, *runs, 0.0, is_exact=True, is_task=False)
    assert "cannot be compared" in verdict.findings[-1].words


def test_leaving_with_another_exit_code_is_wrong() -> None:
    """A platform that goes by exit codes would take it for a failure."""
    account = {"state": "stopped"}
    node = NodeRun("n", ("true",), {}, (Path("x"),))
    laid_out = Rehearsal((node,), "SIGTERM", 30.0, Path("nowhere"), codes={"interrupted": 143})
    start = ended({1: 0.5}, codes=[75], verdicts=[account], left_s=1.0)
    start.account.ranks = {0}
    verdict = Verdict("vertex", is_asked_to_prove=True)
    assert not judging.interrupted(verdict, laid_out, start, 1, rehearsing.Wish(preempt_at=1), is_task=True)
    assert "where the platform needs 143" in verdict.headline()


def test_leaving_too_late_is_wrong() -> None:
    """What is saved after the platform's grace is not saved."""
    node = NodeRun("n", ("true",), {}, (Path("x"),))
    start = ended({1: 0.5}, left_s=31.0, is_late=True)
    start.account.ranks = {0}
    verdict = Verdict("vertex", is_asked_to_prove=True)
    laid_out = Rehearsal((node,), "SIGTERM", 30.0, Path("nowhere"))
    assert not judging.interrupted(verdict, laid_out, start, 1, rehearsing.Wish(preempt_at=1), is_task=False)
    assert "had not left after 30 s" in verdict.headline()


def test_proof_is_of_the_code_and_what_training_depends_on(tmp_path: Path) -> None:
    """Another name or budget keeps it; another archive, backend, setting or argument does not."""
    database, config = Database(tmp_path), load(tmp_path)
    proofs.store(database, "local", "a" * 64, config, {"words": "saved"})
    found = proofs.find(database, "local", "a" * 64, config.model_copy(update={"name": "other"}))
    assert found is not None
    assert found.words == "saved"
    slower = load(tmp_path, TASK.replace("max_steps: 100", "max_steps: 100, optimizer: {lr: 0.1}"))
    assert proofs.find(database, "local", "a" * 64, slower) is None
    assert proofs.find(database, "local", "b" * 64, config) is None
    assert proofs.find(database, "ssh", "a" * 64, config) is None


def test_folders_of_dead_rehearsals_are_removed(tmp_path: Path) -> None:
    """Those of the living stay, and those that are kept."""
    for name in ("dead", "kept"):
        (tmp_path / "rehearsals" / name).mkdir(parents=True)
        (tmp_path / "rehearsals" / name / "lock").touch()
    with rehearsing.place(tmp_path, keeps=True) as kept:
        pass
    with rehearsing.place(tmp_path, keeps=False) as first, rehearsing.place(tmp_path, keeps=False) as second:
        there = {path.name for path in (tmp_path / "rehearsals").iterdir()}
    assert there == {kept.name, first.name, second.name}
    assert {path.name for path in (tmp_path / "rehearsals").iterdir()} == {kept.name}


def test_verdict_for_scripts_has_everything() -> None:
    """One JSON object, with what was found wrong in its headline."""
    verdict = Verdict("vertex", "f" * 64, is_asked_to_prove=True, not_checked=["GPUs"])
    verdict.found("started", "2 nodes")
    verdict.found("steps", "it came to no step", is_right=False)
    told = json.loads(json.dumps(verdict.dump()))
    assert (told["ok"], told["proven"]) == (False, False)
    assert told["verdict"] == "not proven: it came to no step"
    assert told["checked"][1] == {"name": "steps", "ok": False, "found": "it came to no step"}


def test_kill_needs_a_step(cli: Any) -> None:
    """`--kill` says how to interrupt, and without a step there is nothing to say that of."""
    assert cli("rehearse", "--kill").code == 2


def test_backend_without_rehearsals_says_so() -> None:
    """A plug-in need not know them."""
    prepared: Any = SimpleNamespace(config=SimpleNamespace(backend="vendor"), backend=SimpleNamespace())
    one = scale.Scale(1, 1, ((),), (), ())
    with pytest.raises(UsageError, match="`vendor` cannot be rehearsed"):
        rehearsing.rehearse(prepared, one, rehearsing.Wish(), {}, print, Path())
