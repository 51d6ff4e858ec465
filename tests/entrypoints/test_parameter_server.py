"""Asynchronous training: tickets, shards and messages in one process; then real runs with workers that die."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainerruns import TASK, Run, run, torchrun

from cloudtrain.entrypoints.replication.wire import Wire
from cloudtrain.entrypoints.trainer.parameter_server import wire
from cloudtrain.entrypoints.trainer.parameter_server.server import ShardServer, Tickets
from cloudtrain.entrypoints.trainer.parameter_server.shard import (
    FLUSHED,
    LEFT_OUT,
    STARTED,
    UpdateEntry,
    UpdateLog,
    WeightShard,
    pieces_of,
    read_log,
)
from cloudtrain.entrypoints.trainer.parameter_server.wire import MessageKind, WireMessage, WorkerOrder
from cloudtrain.entrypoints.trainer.settings import OptimizerSettings, ServerSettings, TrainingSettings

# --------------------------------------------------------------------------------------------------- in one process


def shard(ranks: int, log: UpdateLog | None = None, shards: int = 1, number: int = 0, **server: Any) -> WeightShard:
    """Return a shard of three weights, trained by SGD with rate 1."""
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    wanted = TrainingSettings(8, optimizer=OptimizerSettings("sgd", 1.0), server=ServerSettings(**server))
    return WeightShard(wanted, number, pieces_of(module, number, shards), ranks, 0, 1, None, log)


@dataclass
class Simulation:
    """Workers on a virtual clock: each takes a ticket, reads, computes for a random time, and pushes."""

    tickets: Tickets
    shards: list[WeightShard]
    speeds: dict[str, float]
    chance: random.Random
    staleness: list[int]
    kills: int = 0

    def run(self) -> None:
        """Run to the limit; `kills` workers die at random moments, also between two shards."""
        busy: dict[str, tuple[float, int, tuple[int, ...]]] = {}
        now_s = 0.0
        for worker in self.speeds:
            self.tickets.join(worker)
        while not self.tickets.is_complete:
            for worker in sorted(self.speeds, key=lambda _: self.chance.random()):
                if worker not in busy and (ticket := self.tickets.take(worker)) is not None:
                    versions = tuple(each.pull(ticket, torch.empty(each.weights.numel())) for each in self.shards)
                    busy[worker] = (now_s + self.speeds[worker] * self.chance.uniform(0.9, 1.1), ticket, versions)
            worker = min(busy, key=lambda name: busy[name][0])
            now_s, ticket, versions = busy.pop(worker)
            dies_at = None
            if self.kills and self.chance.random() < 0.02:
                dies_at = self.chance.randrange(len(self.shards) + 1)
                self.kills -= 1
            self._push(worker, ticket, versions, dies_at)

    def _push(self, worker: str, ticket: int, versions: tuple[int, ...], dies_at: int | None) -> None:
        for number, each in enumerate(self.shards):
            if dies_at == number:
                break
            if number == 0:
                self.staleness.append(each.version - versions[0])
                if not self.tickets.commit(worker, ticket):
                    self.staleness.pop()
                    continue
            each.push(ticket, versions, torch.ones(each.weights.numel()))
        if dies_at is None:
            self.tickets.finish(worker, ticket)
        else:
            self.tickets.leave(worker)
            del self.speeds[worker]


def simulation(workers: int, count: int, seed: int = 0, shards: int = 1, **server: Any) -> Simulation:
    """Return a simulation of workers of equal speed with `count` tickets."""
    lead = server.get("max_lead")
    tickets = Tickets(workers, max_lead=lead)
    tickets.limit = count
    built = [shard(workers, shards=shards, number=number, **server) for number in range(shards)]
    return Simulation(tickets, built, {f"{n}": 1.0 for n in range(workers)}, random.Random(seed), [])


def test_killed_workers_lose_no_ticket_and_repeat_none() -> None:
    """In 20 campaigns that kill 2 of 4 workers at random, every shard applies each ticket exactly once."""
    for seed in range(20):
        found = simulation(4, 400, seed, shards=2)
        found.kills = 2
        found.run()
        assert len(found.speeds) == 2
        for each in found.shards:
            assert each.applied == 400
            assert each._has == set(range(400))


@pytest.mark.parametrize(
    ("workers", "softsync", "mean"),
    [
        (4, 2, 1.5),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((1, 1, 0.0), (2, 1, 1.0), (4, 1, 3.0), (8, 4, 1.75))
        ),
    ],
)
def test_mean_staleness_is_the_other_workers_over_the_average(workers: int, softsync: int, mean: float) -> None:
    """Over 3,000 updates the mean staleness is (N - 1) / c, also with one slow worker."""
    for slow in (1.0, 3.0):
        found = simulation(workers, 3000, softsync=softsync)
        found.speeds["0"] = slow
        found.run()
        assert sum(found.staleness) / len(found.staleness) == pytest.approx(mean, abs=0.3 if softsync > 1 else 0.05)


@pytest.mark.parametrize("lead", [1, *(pytest.param(lead, marks=pytest.mark.soak) for lead in (0, 3))])
def test_bounded_staleness_is_never_exceeded(lead: int) -> None:
    """With max_lead s no update of N workers is staler than (2 s + 1)(N - 1), whoever is slow."""
    for seed in range(3):
        found = simulation(4, 3000, seed, max_lead=lead)
        found.speeds["0"] = 3.0
        found.run()
        assert max(found.staleness) <= (2 * lead + 1) * 3
        assert found.tickets.lead <= lead + 1


def test_joining_worker_begins_at_the_slowest_clock() -> None:
    """A new worker neither waits for the others' past, nor makes the others wait for its own."""
    tickets = Tickets(2, max_lead=1)
    tickets.limit = 100
    for worker in ("a", "b"):
        tickets.join(worker)
    for _ in range(3):
        for worker in ("a", "b"):
            ticket = tickets.take(worker)
            assert ticket is not None
            tickets.finish(worker, ticket)
    tickets.join("c")
    assert [tickets.take(worker) for worker in ("a", "b", "c")] == [6, 7, 8]


def test_closed_work_ends_at_a_step() -> None:
    """After `close` the work ends with the step of the last ticket; a save takes one step at least, a stop none."""
    tickets = Tickets(4)
    tickets.limit = 100
    tickets.join("a")
    tickets.close(least=1)
    assert tickets.limit == 4
    taken_first = [tickets.take("a") for _ in range(5)]
    assert taken_first == [0, 1, 2, 3, None]
    tickets.limit = 100
    assert tickets.take("a") == 4
    tickets.close()
    assert tickets.limit == 8
    fresh = Tickets(4, 12)
    fresh.limit = 100
    fresh.close()
    assert fresh.is_complete


def test_late_gradients_weigh_less_and_rates_are_shared() -> None:
    """A gradient that is tau late on N ranks moves the weights by rate / N x min(1, N / (1 + tau))."""
    found = shard(2)
    moved = []
    for ticket, version in enumerate((0, 0, 0, 0, 4)):
        before = found.weights.clone()
        assert found.push(ticket, (version,), torch.ones(3))
        moved.append(float((before - found.weights)[0]))
    assert moved == pytest.approx([0.5, 0.5, 0.5 * 2 / 3, 0.5 * 2 / 4, 0.5])
    assert found.staleness == Counter({0: 2, 1: 1, 2: 1, 3: 1})


def test_averaged_gradients_move_once_and_the_rest_at_the_boundary() -> None:
    """With softsync 2 of 4 ranks, two gradients make an update of half the rate; a rest is applied by `flush`."""
    found = shard(4, softsync=2)
    for ticket in range(3):
        found.push(ticket, (0,), torch.full((3,), float(ticket)))
    assert found.weights.tolist() == [-0.25] * 3  # the mean of 0 and 1, times 2 / 4
    found.flush()
    weight = 4 / (1 + 1)  # one update late: capped to 1
    assert found.weights.tolist() == pytest.approx([-0.25 - 2.0 * min(1, weight) / 4] * 3)
    assert found.version == 2


def test_ticket_that_arrives_twice_counts_once() -> None:
    """A shard ignores a ticket that it has, and counts a ticket without an update."""
    found = shard(1)
    assert found.push(0, (0,), torch.ones(3))
    assert not found.push(0, (0,), torch.ones(3))
    assert found.push(1, (0,), None)
    assert found.weights.tolist() == [-1.0] * 3
    assert (found.applied, found.version) == (2, 1)


def test_ordered_shard_applies_in_order_and_keeps_old_weights() -> None:
    """With `order: tickets`, ticket i reads the weights after ticket i - N, whatever arrives first."""
    found, room = shard(2, order="tickets"), torch.empty(3)
    found.begin()
    found.push(1, (0,), torch.ones(3))
    assert found.version == 0  # ticket 0 is missing
    found.push(0, (0,), torch.ones(3))
    assert found.version == 2
    assert [found.pull(ticket, room) for ticket in (2, 3)] == [1, 2]
    assert room.tolist() == found.weights.tolist()


def test_ticket_from_before_a_boundary_is_refused() -> None:
    """A worker that was frozen over a boundary pushes too late; its ticket is applied already."""
    found = shard(2)
    found.begin()
    assert found.push(0, (0,), torch.ones(3))
    assert found.push(1, (0,), torch.ones(3))
    found.begin()
    assert not found.push(0, (0,), torch.ones(3))
    assert found.applied == 2


def test_ordered_ticket_can_be_pulled_again_after_its_push() -> None:
    """A worker that dies between two shards is replaced: the next one must read the same weights."""
    found, before, again = shard(2, order="tickets"), torch.empty(3), torch.empty(3)
    found.begin()
    assert found.pull(0, before) == 0
    found.push(0, (0,), torch.ones(3))
    assert found.pull(0, again) == 0
    assert before.tolist() == again.tolist()
    found.pull(2, again)  # ticket 2 is handed out after ticket 0 is finished
    assert set(found._kept) == {1, 2}


def test_versions_continue_in_a_continued_log(tmp_path: Path) -> None:
    """After a resume the versions go on from the log's, so that a replay finds the weights."""
    log = UpdateLog(tmp_path / "a.log", 1, 0)
    found = shard(2, log, softsync=2)
    for ticket in range(3):
        found.push(ticket, (found.version,), torch.ones(3))
    found.flush()
    assert found.version == 2
    log.close()
    again = UpdateLog(tmp_path / "a.log", 1, 3)
    assert shard(2, again, softsync=2).version == 2
    again.close()


def test_full_disk_ends_the_log_and_not_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An update counts although its entry cannot be written; a line says that the run cannot be replayed."""
    log = UpdateLog(tmp_path / "a.log", 1, 0)
    log.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        log._file = full
        found = shard(1, log)
        assert found.push(0, (0,), torch.ones(3))
        assert found.push(1, (1,), torch.ones(3))
    assert found.version == 2
    assert capsys.readouterr().out.count("cannot be replayed") == 1


def test_shards_cover_all_weights_once() -> None:
    """The parts of 3 shards are all elements of all parameters, in order; frozen parameters have no part.

    A channels_last parameter's elements are in the order of its dimensions.
    """
    module = nn.Sequential(nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last), nn.Linear(5, 3), nn.Linear(3, 2))
    module[2].bias.requires_grad_(False)
    shards = [pieces_of(module, number, 3) for number in range(3)]
    assert [sum(p.numel() for p in pieces) for pieces in shards] == [16, 17, 17]
    values = torch.cat([piece.detach() for pieces in shards for piece in pieces])
    assert values.tolist() == [x for p in module.parameters() if p.requires_grad for x in p.flatten().tolist()]
    whole = pieces_of(module, 0, 1)
    assert [p.numel() for p in whole] == [p.numel() for p in module.parameters() if p.requires_grad]


def test_update_log_is_cut_to_the_checkpoint(tmp_path: Path) -> None:
    """A continued log keeps the entries up to the first ticket, and its average's end; a short log begins anew."""
    log = UpdateLog(tmp_path / "a.log", 2, 0)
    for ticket in range(4):
        log.write(UpdateEntry(ticket, (ticket, 7)))
    log.write(UpdateEntry(1, (FLUSHED,)))
    log.write(UpdateEntry(4, (LEFT_OUT,)))
    log.sync()
    log.close()
    UpdateLog(tmp_path / "a.log", 2, 4).close()
    kept = read_log(tmp_path / "a.log", 2)
    assert [entry.ticket for entry in kept] == [0, 0, 1, 2, 3, 1]
    assert (kept[0].versions, kept[-1].versions) == ((STARTED, STARTED), (FLUSHED, FLUSHED))
    UpdateLog(tmp_path / "a.log", 2, 9).close()
    assert read_log(tmp_path / "a.log", 2) == [UpdateEntry(9, (STARTED, STARTED))]
    UpdateLog(tmp_path / "a.log", 2, 9).close()  # a start that ended before its first save
    assert read_log(tmp_path / "a.log", 2) == [UpdateEntry(9, (STARTED, STARTED))]


# ------------------------------------------------------------------------------------------------------ connections


SECRET = "5ec7e7" * 10 + "abcd"


@pytest.fixture
def server() -> Iterator[ShardServer]:
    """Return a server of one shard and ten tickets, on two ranks."""
    tickets = Tickets(2)
    found = ShardServer(shard(2), SECRET, 2, 2.0, tickets)
    found.open(10)
    yield found
    found.close()


def connected(
    server: ShardServer, name: str, kind: MessageKind, secret: str = SECRET
) -> contextlib.AbstractContextManager[Wire]:
    """Return a worker's connection."""
    return wire.connected(WorkerOrder(name, [("127.0.0.1", server.port)], secret, 2, 0, 0, 0), kind, 0)


@contextlib.contextmanager
def beating(server: ShardServer, name: str) -> Iterator[Wire]:
    """Yield the connection for work of a worker that the server knows."""
    with connected(server, name, MessageKind.BEAT) as beats:
        wire.receive(beats)
        with connected(server, name, MessageKind.COMPUTE) as work:
            yield work


def taken(work: Wire, finished: int = -1) -> int:
    """Return the worker's next ticket."""
    wire.send(work, WireMessage(MessageKind.TAKE, finished))
    return wire.receive(work).ticket


def test_stranger_without_the_secret_is_refused(server: ShardServer) -> None:
    """A process on the network that does not know the run's secret gets no weights and no ticket."""
    with pytest.raises(OSError), connected(server, "a", MessageKind.BEAT, "x" * 64) as stranger:  # noqa: PT011
        wire.receive(stranger)
    assert server.figures()["workers"] == 0


def test_secret_is_never_sent(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer of the connection sees nonces, proofs and messages, and not the secret in any form."""
    seen = bytearray()
    sent, received = Wire.write, Wire.read

    def write(self: Wire, block: memoryview) -> None:
        seen.extend(block)
        sent(self, block)

    def read(self: Wire, block: memoryview) -> None:
        received(self, block)
        seen.extend(block)

    monkeypatch.setattr(Wire, "write", write)
    monkeypatch.setattr(Wire, "read", read)
    with beating(server, "a") as work:
        assert taken(work) == 0
    assert b"nonce" in seen
    assert SECRET.encode() not in seen
    assert bytes.fromhex(SECRET) not in seen


def test_worker_pulls_and_pushes(server: ShardServer) -> None:
    """A push moves the weights that the next pull returns; its loss is the step's."""
    room, one = torch.empty(3), torch.tensor([0])
    with beating(server, "a") as work:
        for number in range(2):
            assert taken(work, number - 1) == number
            wire.send(work, WireMessage(MessageKind.PULL, number))
            assert wire.receive(work).version == number
            work.read(wire.memory(room))
            push = WireMessage(MessageKind.PUSH, number, 1, 3.0 + number)
            wire.send(work, push, bytes(wire.memory(one)), bytes(wire.memory(torch.ones(3))))
            wire.receive(work)
        assert room.tolist() == [-0.5] * 3
        assert taken(work, 1) == 2
        news = server.news(2, 30.0)
        assert (news.done, news.losses) == (2, [3.5])


def test_tickets_of_a_silent_worker_are_handed_out_again(server: ShardServer) -> None:
    """A worker without beats for the lease loses its ticket and its connections: it must not go on unnoticed."""
    with beating(server, "silent") as work:
        assert taken(work) == 0
        with pytest.raises(OSError):  # noqa: PT011  # at the end of the lease
            wire.receive(work)
        with beating(server, "other") as other:
            assert taken(other) == 0
            assert server.news(0, 0.0).lost == ["silent"]


def test_gradient_that_cannot_be_applied_is_a_failure(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ticket counts as applied from its commit, so an error after it must end the run, not be lost."""

    def broken(*_: Any) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.shard, "push", broken)
    with beating(server, "a") as work:
        assert taken(work) == 0
        push = WireMessage(MessageKind.PUSH, 0, 1, 1.0)
        wire.send(work, push, bytes(wire.memory(torch.tensor([0]))), bytes(wire.memory(torch.ones(3))))
        with pytest.raises(OSError):  # noqa: PT011
            wire.receive(work)
        assert server.news(10, 30.0).failure == "a gradient cannot be applied: RuntimeError: out of memory"


def test_histogram_of_an_event_has_a_last_bar(server: ShardServer) -> None:
    """The updates of any larger staleness are in the last of 64 bars: an event is a short line."""
    server.shard.staleness.update({0: 5, 63: 2, 3000: 4})
    figures = server.figures()
    assert (figures["tau_max"], len(figures["tau_counts"]), figures["tau_counts"][-1]) == (3000, 64, 6)


def test_gradient_that_is_not_finite_is_a_failure(server: ShardServer) -> None:
    """Without on_nan: skip, the run fails with the step's number, and the weights stay finite."""
    with beating(server, "a") as work:
        assert taken(work) == 0
        wire.send(work, WireMessage(MessageKind.LEFT_OUT, 0, 1, float("nan")), bytes(wire.memory(torch.tensor([0]))))
        with pytest.raises(OSError):  # noqa: PT011
            wire.receive(work)
        failure = server.news(10, 30.0).failure
        assert failure is not None
        assert "step 1" in failure
        assert server.shard.weights.tolist() == [0.0] * 3


# -------------------------------------------------------------------------------------------------------- real runs

ASYNC: dict[str, Any] = {
    "strategy": "async",
    "max_steps": 30,
    "eval_every": None,
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "checkpoint": {"every_steps": 10},
}
# The elements of the convolution's weight are not in the order of a vector.
CHANNELS_LAST = TASK.replace(
    'Net(params.get("width", 16))',
    "nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (2, 1)), nn.Flatten(), nn.Linear(8, 3)).to("
    "memory_format=torch.channels_last)",
)


def train(folder: Path, ranks: int = 2, do: str = "", **settings: Any) -> Run:
    """Train in the folder, from its newest checkpoint on."""
    return run(folder, ranks, do, **{**ASYNC, **settings})


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that the weights have equal names and bits."""
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def assert_applied_once(folder: Path, tickets: int, shards: int = 1) -> None:
    """Assert that each shard's log has every ticket exactly once."""
    paths = sorted((folder / "output" / "updates").glob("*.log"))
    assert len(paths) == shards
    for path in paths:
        entries = [entry for entry in read_log(path, shards) if entry.versions[0] not in (FLUSHED, STARTED)]
        assert sorted(entry.ticket for entry in entries) == list(range(tickets))


def replayed(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a replay of the folder's logs ends with."""
    words = ["-m", "cloudtrain.entrypoints.trainer.parameter_server.replay", "spec.json", "output"]
    done = torchrun(1, words, folder, {})
    assert done.returncode == 0, done.stderr
    found: dict[str, torch.Tensor] = torch.load(folder / "output" / "replayed.pt", weights_only=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (ASYNC["optimizer"], TASK),
        ({"name": "adamw", "lr": 0.01, "weight_decay": 0.01}, TASK),
        (ASYNC["optimizer"], CHANNELS_LAST),
    ],
    ids=["sgd", "adamw", "channels_last"],
)
def test_one_worker_equals_ddp_to_the_bit(tmp_path: Path, optimizer: dict[str, Any], text: str) -> None:
    """On one rank the losses, the weights, the buffers and the average are those of ddp."""
    settings = {"optimizer": optimizer, "ema_decay": 0.9, "text": text}
    plain = train(tmp_path / "ddp", 1, strategy="ddp", **settings)
    found = train(tmp_path / "async", 1, **settings)
    assert found.code == 0, found.errors
    assert found.values("step", "loss") == plain.values("step", "loss")
    assert_equal(found.exported(), plain.exported())


@pytest.mark.slow
@pytest.mark.soak
def test_ordered_run_repeats_to_the_bit_through_kills(tmp_path: Path) -> None:
    """With `order: tickets`, a killed worker and a killed rank with a resume change no bit of losses and weights."""
    server = {"order": "tickets", "shards": 2, "lease_s": 5}
    plain = train(tmp_path / "plain", server=server)
    assert plain.code == 0, plain.errors
    kill = train(tmp_path / "killed", do="kill:any:21", server=server)
    assert kill.code == 0, kill.errors
    assert "it starts again" in kill.output
    assert kill.values("step", "loss") == plain.values("step", "loss")
    assert_equal(kill.exported(), plain.exported())
    assert_applied_once(tmp_path / "killed", 60, 2)
    stopped = train(tmp_path / "rank", do="rank:any:44", server=server)
    assert stopped.code != 0
    resumed = train(tmp_path / "rank", server=server)
    assert "resuming from step" in resumed.output
    losses, again = plain.values("step", "loss"), resumed.values("step", "loss")
    assert again == {step: losses[step] for step in range(31 - len(again), 31)}
    assert_equal(resumed.exported(), plain.exported())
    assert_applied_once(tmp_path / "rank", 60, 2)
    assert_equal(replayed(tmp_path / "rank"), plain.exported())


@pytest.mark.slow
@pytest.mark.soak
def test_stopped_worker_costs_a_lease_and_the_run_replays(tmp_path: Path) -> None:
    """A worker that SIGSTOP stops is lost after its lease; training goes on, and the logs replay to the bit."""
    folder = tmp_path / "run"
    found = train(folder, do="stop:any:9", server={"lease_s": 2, "softsync": 2, "shards": 2})
    assert found.code == 0, found.errors
    assert "is lost; its tickets are handed out again" in found.output
    assert_applied_once(folder, 60, 2)
    assert "the worker of rank" in found.output
    assert_equal(replayed(folder), found.exported())


@pytest.mark.slow
@pytest.mark.parametrize("is_cold", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_gradient_that_is_not_finite_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cold: bool
) -> None:
    """With on_nan: skip one ticket has no update, and counts; the losses of all steps are finite.

    With `is_cold` the workers are real interpreters, not forks of a warm process.
    """
    if is_cold:
        monkeypatch.setenv("COLD_PYTHON", "1")
    found = train(tmp_path, do="nan:any:9", on_nan="skip")
    assert found.code == 0, found.errors
    assert "is left out: its loss or gradient is not finite" in found.output
    assert_applied_once(tmp_path, 60)
    assert all(abs(loss) < 10 for loss in found.values("step", "loss").values())


@pytest.mark.slow
def test_checkpoint_continues_under_ddp_on_other_ranks(tmp_path: Path) -> None:
    """A checkpoint of async on 2 ranks, with a task that raises later, continues under ddp on one rank."""
    folder = tmp_path / "run"
    failed = train(folder, do="raise:any:44")
    assert failed.code != 0
    assert "no such label" in failed.errors
    found = train(folder, 1, strategy="ddp")
    assert found.code == 0, found.errors
    assert "the strategy was async, now ddp: the losses differ" in found.output
    assert max(found.values("step", "loss")) == 30
