"""What a backend is, and where to find one by name.

A backend is a module with the functions of `Backend`; it is imported on first use. Other packages join through the
entry-point group `cloudtrain.backends` (name -> module), next to the built-in ones, never in place of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from cloudtrain.launcher.errors import CloudtrainError, ConfigError, Fault, require_all
from cloudtrain.launcher.metering.limit import Terms

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.job import State
    from cloudtrain.launcher.metering.rate import Quote
    from cloudtrain.launcher.plan import Plan

__all__ = [
    "ALL",
    "BUILT_IN",
    "CHEAPEST",
    "GROUP",
    "Backend",
    "Bundle",
    "Capacity",
    "Check",
    "FoundAttempt",
    "HostUse",
    "Invoice",
    "Invoiced",
    "JobRef",
    "Lists",
    "LogLine",
    "LogPage",
    "Machines",
    "Pace",
    "Priced",
    "Ready",
    "Request",
    "Sending",
    "Shipment",
    "Sought",
    "Terms",
    "load",
    "names",
    "nodes_of",
    "unasked",
]

GROUP = "cloudtrain.backends"
ALL, CHEAPEST = "all", "cheapest"  # instead of the name of a backend
BUILT_IN = {
    "local": "cloudtrain.backends.local.backend",
    "ssh": "cloudtrain.backends.ssh.backend",
    "sagemaker": "cloudtrain.backends.sagemaker.backend",
    "azureml": "cloudtrain.backends.azureml.backend",
    "vertex": "cloudtrain.backends.vertex.backend",
}

JobRef = dict[str, Any]  # a backend's own handle, JSON, opaque to everyone else


@dataclass(frozen=True)
class Capacity:
    """What one instance brings: GPUs (0: train on the CPU), and its price, None where nobody can say.

    `price_source` says where the price is from, with its date, which is `price_as_of` too where it is known (ISO).
    `uncertainty`, from 1 up, is how much more than the price it may cost. `is_own`: a machine of the user's, which
    costs nothing that a bill shows, unless a price was set. `machine` is what an instance is called there.
    `is_spot_price`: the price is of spot machines; else a spot job counts with the price on demand, an upper bound.
    """

    gpus: int
    hourly_usd: float | None
    price_source: str
    terms: Terms = field(default_factory=Terms)
    uncertainty: float = 1.0
    price_as_of: str | None = None
    is_own: bool = False
    machine: str = ""
    is_spot_price: bool = False


@dataclass(frozen=True)
class Request:
    """What is sent: `body` as the backend takes it; `files` what `-o DIR` writes for the vendor's own CLI.

    `text` is the body as the dry run prints it (JSON, or YAML where the vendor's CLI takes YAML). `beside` is what the
    sending needs and the vendor's request has no field for; `notes` are for people: what `raw` has changed. `carried`
    names the config's keys, of those that not every backend carries out, that this request does. `archive` is where
    `-o DIR` puts the code, for a vendor's CLI that uploads it by itself. `decoded`: JSON texts that the body holds in
    another encoding, by the name of their place.
    """

    name: str
    body: dict[str, Any]
    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    carried: frozenset[str] = frozenset()
    archive: str | None = None
    decoded: Mapping[str, str] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """Return what a send needs, for JSON."""
        return {"body": self.body, "beside": self.beside}

    @classmethod
    def load(cls, name: str, data: dict[str, Any]) -> Request:
        """Return what `dump` described, without what is for people."""
        return cls(name, data.get("body", {}), "", beside=data.get("beside", {}))


@dataclass
class Sending:
    """Whether the platform may have the job already: a send that fails before frees the job's money at once.

    A backend that never calls `prepares` leaves `may_exist` true: the job then counts until `find` has looked for it.
    """

    may_exist: bool = True

    def prepares(self) -> None:
        """Say that the request that creates the job has not begun: uploads and looks come first."""
        self.may_exist = False

    def creates(self) -> None:
        """Say that the request that creates the job begins now."""
        self.may_exist = True

    def is_nothing_sent(self, error: BaseException) -> bool:
        """Return whether a send that ends with the error has created no job: it was refused, or had not begun."""
        return not self.may_exist or (isinstance(error, CloudtrainError) and error.exit_code != 7)


@dataclass(frozen=True)
class Bundle:
    """An archive on disk. `bytes` is its packed size, `code_bytes` what the code folder's files add up to.

    `code_sha256` is of what is in it but for the config file, which has more to say than what runs.
    """

    sha256: str
    path: Path
    bytes: int
    files: int
    code_bytes: int
    largest: tuple[tuple[str, int], ...] = ()
    git: dict[str, Any] = field(default_factory=dict)
    code_sha256: str = ""

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def load(cls, data: dict[str, Any]) -> Bundle:
        """Return the bundle that `dump` described."""
        largest = tuple((name, size) for name, size in data["largest"])
        return cls(**{**data, "path": Path(data["path"]), "largest": largest})


@dataclass(frozen=True)
class Shipment:
    """What travels beside the request: the archive, where local state is kept, and the secrets' values.

    Relative paths of the config count from `base`, its file's folder. `send` says in `sending` how far it is. A send
    leaves `record` with the job, for `Lists.jobs`.
    """

    bundle: Bundle
    home: Path
    base: Path
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    sending: Sending = field(default_factory=Sending, compare=False)
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class FoundAttempt:
    """An attempt that a platform has, and that has not ended.

    `record` is the shipment's, None where the job has no record that can be read here. `is_own`: this home has sent it.
    """

    job_id: str
    number: int
    ref: JobRef
    record: Mapping[str, Any] | None
    is_own: bool = True

    @classmethod
    def of(
        cls, name: str, record: Any, access: Mapping[str, Any], ref_of: Callable[[Request], JobRef], *, is_own: bool
    ) -> FoundAttempt:
        """Return the attempt of that platform name, with the handle of the record's request; a damaged record is none.

        `access` is how the platform was asked: others may write records, and no address in a record is followed.
        """
        job_id, _, number = name.rpartition("-")
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            request = Request.load(name, record["request"])
            ref = ref_of(replace(request, beside={**request.beside, **access}))
            return cls(job_id, int(number), ref, record, is_own)
        return cls(job_id, int(number), {}, None, is_own)


@dataclass(frozen=True)
class Invoice:
    """What a vendor's billing has for a job, of whole days in UTC, in micro-dollars; an estimate may still change.

    `note` says why there may be nothing yet.
    """

    micro: int
    is_estimate: bool
    first_day: str
    last_day: str
    source: str
    note: str = ""


class LogLine(NamedTuple):
    """One line as it was written, without its newline. `rank` is None for the node's own messages.

    One that ends with a carriage return is a progress bar's state, which the stream's next line takes the place of. A
    plain tuple, since a job has millions of them.
    """

    text: str
    node: int
    rank: int | None
    time_s: float


@dataclass(frozen=True)
class LogPage:
    """Lines, and where the next page begins: a cursor is JSON, so that a stream can be taken up again later.

    `is_clean`: there are no lines, and since the last such page every stream was read to its end. `is_complete`: where
    the job is over, no more can come.
    """

    lines: list[LogLine]
    cursor: dict[str, Any]
    is_clean: bool = True
    is_complete: bool = True
    left_out: int = 0

    def only(self, ranks: frozenset[int]) -> LogPage:
        """Return the page without other ranks' lines, which are counted in `left_out`."""
        lines = [line for line in self.lines if line.rank in ranks]
        return replace(self, lines=lines, left_out=len(self.lines) - len(lines))


@dataclass(frozen=True)
class Pace:
    """How often a backend may be asked: seconds between looks for lines, and for the state.

    `late_s`: how long after a job's end its last lines may still come, where no page is complete. `can_kill`: whether
    `stop --now` ends a job without letting it save. `retries`: whether the platform itself makes the new attempts that
    the config's `retry` asks for. `hold_back_s`: how long a line waits by default for earlier ones of other nodes,
    which the platform takes in later.
    """

    lines_s: float = 0.1
    state_s: float = 0.2
    late_s: float = 0.0
    can_kill: bool = True
    retries: bool = False
    hold_back_s: float = 0.0


@dataclass(frozen=True)
class HostUse:
    """One GPU of a machine, or a machine without any: `free`, `held` by a job, `busy` with others' processes.

    `unreachable`, `unknown` (by name) or `broken` machines are reported too: `detail` says why. `since_s` in unix
    seconds.
    """

    host: str
    unit: str
    model: str
    use: str
    user: str | None = None
    job: str | None = None
    since_s: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Check:
    """One line of `doctor`: verdict ok, warn or fail, and the cure."""

    name: str
    verdict: str
    found: str
    cure: str = ""


def unasked(names: str, config: JobConfig | None, *asks: Callable[[JobConfig], object]) -> list[Check]:
    """Return the faults of the config by `asks`, which need no credentials, and the names of the skipped checks."""
    faults: tuple[Fault, ...] = ()
    try:
        require_all(*(partial(ask, config) for ask in asks if config is not None))
    except ConfigError as error:
        faults = error.faults
    found = [Check("config", "fail", fault.message, fault.hint) for fault in faults]
    return [*found, Check("not checked without credentials", "warn", names)]


class Backend(Protocol):
    """What every backend can do. `request` and `check` are pure: no network, no SDK, no clock."""

    def capacity(self, config: JobConfig) -> Capacity:
        """Return what one instance of the configured kind brings."""

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        """Return the request, the same bytes for the same input."""

    def check(self, request: Request) -> list[Fault]:
        """Return what the vendor would refuse."""

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        """Start the job. Raises CredentialError, CapacityError, UnreachableError, ConfigError."""

    def find(self, request: Request, home: Path) -> JobRef | None:
        """Return the job that the platform knows by the request's name, None where there is none.

        None is final where the platform allows it: a send still under way finds the door closed.
        """

    def state(self, ref: JobRef) -> State:
        """Return what the platform says of the job. Raises UnreachableError."""

    def logs(
        self, ref: JobRef, cursor: dict[str, Any] | None, ranks: frozenset[int] | None = None, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor, at most a page of them, in each stream's own order.

        With `ranks` only theirs: without what the nodes themselves say. `now`: none is held back for the sake of
        earlier ones of other nodes, which may come later.
        """

    def pace(self, ref: JobRef) -> Pace:
        """Return how often to ask for the job."""

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Ask the job to save and stop; `now` does not wait for the save. Returns at once."""

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return what stands in the way of a job here; with a config, of that one."""

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy what the job has left in its output folder below `folder`; return the files there."""


class Ready(Protocol):
    """What a backend can do that knows, before a job is written down, whether it could be sent from here."""

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Look for the libraries and the credentials. Raises ConfigError, CredentialError, UnreachableError."""


class Sought(Protocol):
    """What a backend can do whose jobs the vendor's own tools show."""

    def where_to_look(self, request: Request) -> str:
        """Return the vendor's command that shows whether the request's job exists."""


class Lists(Protocol):
    """What a backend can do that finds running jobs without the registry."""

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        """Return the running attempts: with a config those where its jobs run. Changes nothing.

        Raises CredentialError, ConfigError, UnreachableError where the platform cannot be asked.
        """


class HasCheckpoints(Protocol):
    """A backend that can bring the files home which a script has kept or saved."""

    def checkpoints(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the job's checkpoint folder below `folder`; return the files there."""


class Machines(Protocol):
    """What a backend can do whose machines are there before the job, and can be entered."""

    def shell(self, ref: JobRef, node: int, argv: list[str]) -> list[str]:
        """Return the command that runs `argv`, or a shell where it is empty, where the node's ranks run."""

    def hosts(self, config: JobConfig) -> list[HostUse]:
        """Return who uses which GPU of the config's machines."""


class Priced(Protocol):
    """What a backend can do whose vendor publishes what machines cost."""

    def price_region(self, config: JobConfig | None) -> str | None:
        """Return the region whose prices are of use: the config's, else the environment's; None where none is known."""

    def quotes(self, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
        """Read the vendor's prices of the types, without any named of all that are of use, the job's among them.

        What the vendor does not list is a quote without a price, which says why. Raises CredentialError, ConfigError,
        UnreachableError where the list as a whole cannot be read.
        """


class Invoiced(Protocol):
    """What a backend can do whose vendor's billing can be asked for a job's tag."""

    def invoice(self, ref: JobRef, job_id: str, from_s: float, to_s: float) -> Invoice:
        """Return what was billed under the job's tag. Raises CredentialError, ConfigError, UnreachableError."""


class Seekable(Protocol):
    """What a backend can do that finds the end of a long log without reading what is before."""

    def logs_from(
        self, ref: JobRef, ranks: frozenset[int] | None, *, lines: int | None, since_s: float | None
    ) -> dict[str, Any] | None:
        """Return a cursor for `logs` before each stream's last `lines`, or before what it has said since then.

        Never behind them, and None where it is the beginning. Raises UnreachableError.
        """


def nodes_of(ranks: frozenset[int] | None, nproc_per_node: int) -> frozenset[int] | None:
    """Return the nodes that the ranks are on, None where all are meant."""
    return None if ranks is None else frozenset(rank // nproc_per_node for rank in ranks)


def names() -> list[str]:
    """Return the names of the backends that can be used: the built-in ones, then plug-ins."""
    return [*BUILT_IN, *sorted(set(_plugins()) - set(BUILT_IN))]


def load(name: str) -> Backend:
    """Import and return a backend. Raises ConfigError where there is none of that name."""
    path = BUILT_IN.get(name) or _plugins().get(name)
    if path is None:
        raise ConfigError([Fault(f"unknown backend `{name}`", "backend", hint=f"there are: {', '.join(names())}")])
    return cast("Backend", importlib.import_module(path))


def _plugins() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}
