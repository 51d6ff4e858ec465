"""Backends: the values that pass, the interface `Backend`, protocols of the abilities of some backends, and `load`.

The launcher asks for an ability with `isinstance(backend, Priced)`. The table in launcher/backend_table.py names a
backend's class, which is imported on first use; a process has one object of each backend, which holds the backend's
connections and caches.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from cloudtrain.entrypoints.records import Record
from cloudtrain.entrypoints.terms import Terms as Terms

from ..backend_table import BUILT_IN as BUILT_IN
from ..backend_table import class_of
from ..backend_table import names as names
from ..backend_table import similar as similar
from ..errors import CloudtrainError, ConfigError, Fault
from .model_files import ReceivesModels as ReceivesModels
from .model_files import Serves as Serves

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..job import State
    from ..metering.rate import Quote
    from ..plan import Plan, Runtime

JobRef = dict[str, Any]  # a backend's own handle of a job: JSON, opaque to all callers
Cursor = dict[str, Any]  # a backend's own place in a log: JSON, opaque to all callers
Chosen = frozenset[int] | None  # numbers of ranks or nodes; None: all


class DamagedRecordError(CloudtrainError, ValueError):
    """The stored data of a job lack a key, or hold a value of a wrong type."""


class StoredRecord(Record, checks=True):
    """The base of a backend's stored records: a dataclass whose fields are the keys of a JSON object."""

    @classmethod
    def fault(cls, why: str) -> DamagedRecordError:
        """Return the error of `load`."""
        hint = "look for the job with the backend's own tools; a copy of the registry mends it"
        return DamagedRecordError(f"the stored data of the job are damaged: {cls.__name__} {why}", hint=hint)


@dataclass(frozen=True)
class Capacity:
    """The GPUs of an instance, and its price."""

    gpus: int
    """0: train on the CPU."""
    hourly_usd: float | None
    """None if unknown."""
    price_source: str
    """The source of the price, with its date."""
    terms: Terms = field(default_factory=Terms)
    uncertainty: float = 1.0
    """The factor, from 1 up, by which the cost may exceed the price."""
    price_as_of: str | None = None
    """The date of the price, if known (ISO)."""
    is_own: bool = False
    """A machine of the user, without a bill unless a price was set."""
    machine: str = ""
    """The platform's name of an instance."""
    is_spot_price: bool = False
    """The price is for spot machines; otherwise a spot job counts with the price on demand, an upper bound."""
    unknown_region: Fault | None = None
    """A warning about the config's region, where no price list has a price; explains an unknown price."""


@dataclass(frozen=True)
class Request:
    """The request to send."""

    name: str
    body: dict[str, Any]
    """As the backend takes it."""
    text: str
    """The body as the dry run prints it: JSON, or YAML if the vendor's CLI takes YAML."""
    files: Mapping[str, str] = field(default_factory=dict)
    """As `-o DIR` writes them for the vendor's own CLI."""
    sending: dict[str, Any] = field(default_factory=dict)
    """The sending plan, without a field in the vendor's request."""
    notes: tuple[str, ...] = ()
    """For people: the changes by `raw`."""
    carried: frozenset[str] = frozenset()
    """The config's keys that the request carries out, of the keys that some backends ignore.

    And `spares`, if spare hosts wait in the job and begin the retries.
    """
    archive: str | None = None
    """Where `-o DIR` puts the code, for a vendor's CLI that uploads the code."""
    decoded: Mapping[str, str] = field(default_factory=dict)
    """JSON texts that the body holds in a different encoding, by the name of their place."""
    runtime: Runtime | None = None
    """What runs the job; a backend may leave it out."""

    def dump(self) -> dict[str, Any]:
        """Return the data of a send, for JSON."""
        return {"body": self.body, "beside": self.sending}

    @classmethod
    def load(cls, name: str, data: dict[str, Any]) -> Request:
        """Return the request from the output of `dump`, without the texts for people."""
        return cls(name, data.get("body", {}), "", sending=data.get("beside", {}))


@dataclass
class Sending:
    """Whether the platform may have the job already: a send that fails earlier frees the job's money at once.

    A backend that never calls `prepares` leaves `may_exist` true: the job then counts until `find` has searched for it.
    """

    may_exist: bool = True

    def prepares(self) -> None:
        """Record that the request that creates the job has not begun: uploads and checks come first."""
        self.may_exist = False

    def creates(self) -> None:
        """Record that the request that creates the job begins now."""
        self.may_exist = True

    def is_nothing_sent(self, error: BaseException) -> bool:
        """Return whether a send that ends with the error created no job: refused, or not begun."""
        return not self.may_exist or (isinstance(error, CloudtrainError) and error.exit_code != 7)


@dataclass(frozen=True)
class Bundle(Record, checks=True):
    """An archive on disk."""

    what: ClassVar[str] = "code"
    """The content, in messages."""
    sha256: str
    path: Path
    bytes: int
    """The packed size."""
    files: int
    code_bytes: int
    """The sum of the code folder's files."""
    largest: tuple[tuple[str, int], ...] = ()
    git: dict[str, Any] = field(default_factory=dict)
    code_sha256: str = ""
    """The hash of all files but the config file, which has more settings than the code that runs."""
    notes: tuple[str, ...] = ()
    """On files that are no use on a node as they are."""


@dataclass(frozen=True)
class Shipment:
    """The data besides the request: the archive, the folder of local state, and the secrets' values."""

    bundle: Bundle
    home: Path
    base: Path
    """The folder of the config file, from which the config's relative paths count."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    sending: Sending = field(default_factory=Sending, compare=False)
    """The progress of `send`."""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What `send` leaves with the job, for `Lists.jobs`."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Inputs that go along, by name, each with its hash: `data/@sha256:...`."""


@dataclass(frozen=True)
class FoundAttempt:
    """An attempt on a platform that has not ended."""

    job_id: str
    number: int
    ref: JobRef
    record: Mapping[str, Any] | None
    """The shipment's record, None if no record of the job can be read."""
    is_own: bool = True
    """Sent from this home folder."""


class LogLine(NamedTuple):
    """A line as written, without its newline. `rank` is None for the node's own messages.

    A line with a carriage return at its end is the state of a progress bar, which the stream's next line replaces. A
    plain tuple, since a job has millions of lines.
    """

    text: str
    node: int
    rank: int | None
    time_s: float


@dataclass(frozen=True)
class LogPage:
    """Lines, and the start of the next page."""

    lines: list[LogLine]
    cursor: Cursor
    """JSON, so that a reader can continue later."""
    is_clean: bool = True
    """The page has no lines, and every stream was read to its end since the last clean page."""
    is_complete: bool = True
    """After the job's end, no more lines can come."""
    is_whole: bool = False
    """Each node was read to its end: an absent line was written after the request for this page."""
    left_out: int = 0
    counts: tuple[int, ...] = ()
    """Of a search of one rank for events.MARK, which may leave out steps: how many events each line stands for."""

    def only(self, ranks: frozenset[int]) -> LogPage:
        """Return the page with only the ranks' lines; `left_out` counts the remaining lines."""
        lines = [line for line in self.lines if line.rank in ranks]
        return replace(self, lines=lines, left_out=len(self.lines) - len(lines))


@dataclass(frozen=True)
class Pace:
    """How often a backend may be asked, and what the platform does by itself."""

    lines_s: float = 0.1
    """Seconds between polls for lines."""
    state_s: float = 0.2
    """Seconds between polls for the state."""
    late_s: float = 0.0
    """The time after a job's end in which last lines may still come, if no page is complete."""
    can_kill: bool = True
    """Whether `stop --now` ends a job without a save."""
    retries: bool = False
    """Whether the platform itself makes the retries of the config's `retry`."""
    hold_back_s: float = 0.0
    """How long a line waits by default for earlier lines of nodes that the platform ingests later."""


@dataclass(frozen=True)
class HostUse:
    """A GPU of a machine, or a machine without GPUs."""

    host: str
    unit: str
    """The GPU; of a job in line for the machine, the job's place."""
    model: str
    use: str
    """`free`, `held` by a job, `busy` with foreign processes; `waits`: a job in line for the machine.

    `unreachable`, `unknown` (by name) or `broken` machines are reported too.
    """
    user: str | None = None
    job: str | None = None
    since_s: float | None = None
    """In unix seconds."""
    detail: str = ""
    """The reason, for a machine that is unreachable, unknown or broken."""
    start_s: float | None = None
    """The expected start of a job in line."""


@dataclass(frozen=True)
class Check:
    """A line of `doctor`: verdict ok, warn or fail, and the cure."""

    name: str
    verdict: str
    found: str
    cure: str = ""

    @classmethod
    def failed(cls, name: str, error: CloudtrainError) -> Check:
        """Return the line for an error, with all faults of a config."""
        faults = error.faults if isinstance(error, ConfigError) else ()
        message = "; ".join(fault.message for fault in faults) or error.message
        return cls(name, "fail", message, "; ".join(fault.hint for fault in faults if fault.hint) or error.hint)


class Backend(Protocol):
    """The methods of every backend. `request` and `check` are pure: no network, no SDK, no clock."""

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs and the price of an instance of the configured kind."""

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        """Return the request, the same bytes for the same input."""

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which the vendor would refuse the request."""

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        """Start the job. Raises CredentialError, CapacityError, ConfigError or UsageError.

        Raises UnreachableError if the start is uncertain, and `find` can later tell whether the job exists.
        """

    def find(self, request: Request, home: Path) -> JobRef | None:
        """Return the job with the request's name on the platform, or None.

        After None, a send still in progress can no longer start the job, if the platform can refuse a late send.
        """

    def state(self, ref: JobRef) -> State:
        """Return the platform's state of the job. Raises UnreachableError."""

    def logs(self, ref: JobRef, cursor: Cursor | None, ranks: Chosen = None, *, now: bool = False) -> LogPage:
        """Return the lines after the cursor, at most a page, in each stream's own order.

        With `ranks` only the ranks' lines, without the nodes' own messages. `now`: no line is held back for earlier
        lines of further nodes, which may come later.
        """

    def pace(self, ref: JobRef) -> Pace:
        """Return the poll intervals for the job."""

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Ask the job to save and stop; `now` does not wait for the save. Returns at once."""

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return checks for jobs on this backend; with a config, for the config's job."""

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the job's output files below `folder`; return the copied files."""


@runtime_checkable
class Ready(Protocol):
    """A backend that knows, before the job is journalled, whether a send from here is possible."""

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Check the libraries and the credentials. Raises ConfigError, CredentialError, UnreachableError."""


@runtime_checkable
class Supersedes(Protocol):
    """A backend whose platform may start an attempt after the platform has told its end, and that refuses the start."""

    def supersede(self, request: Request, number: int) -> int:
        """Refuse each start of an attempt below `number`; return the highest that the job's store saw start, else 0.

        After a stop and before the end is read, each start is either known or refused. Raises as `Ready.ready`.
        """


@runtime_checkable
class Sought(Protocol):
    """A backend whose jobs the vendor's own tools show."""

    def where_to_look(self, request: Request) -> str:
        """Return the vendor's command that shows whether the request's job exists."""


@runtime_checkable
class Lists(Protocol):
    """A backend that finds running jobs without the registry."""

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        """Return the running attempts; with a config, the attempts where the config's jobs run. Changes no state.

        Raises CredentialError, ConfigError, UnreachableError if the platform cannot be asked.
        """


@runtime_checkable
class HasCheckpoints(Protocol):
    """A backend that can fetch the files that a job has kept or saved."""

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Copy the job's checkpoint folder, or the folder `inner` in it, below `folder`; return the files there."""

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the checkpoint folder's uri or path, for `inputs` of a later job; None outside the storage."""

    def saved(self, refs: Sequence[JobRef], config: JobConfig) -> SavedFiles:
        """Return the files of the attempts `refs` that an attempt with `config` finds; the start judges damage."""


@dataclass(frozen=True)
class SavedFiles:
    """A job's saved files that the next attempt finds."""

    is_any: bool = False
    step: int | None = None
    """The newest step of the trainer's checkpoints."""
    away: str = ""
    """The places that cannot be read, in words: `on h1 (no answer)`."""


@runtime_checkable
class KnowsShapes(Protocol):
    """A backend that reads the headers of a job's saved weights, and no weights."""

    def saved_shapes(self, ref: JobRef, *, averaged: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes by name, of the average if wanted and kept. Raises CloudtrainError, OSError, ValueError."""


@runtime_checkable
class Machines(Protocol):
    """A backend whose machines exist before the job, and can be entered."""

    def shell(self, ref: JobRef, node: int, argv: list[str]) -> list[str]:
        """Return the command that runs `argv`, or a shell if `argv` is empty, where the node's ranks run."""

    def hosts(self, config: JobConfig) -> list[HostUse]:
        """Return the use of each GPU of the config's machines."""

    def held(self, config: JobConfig) -> list[LeftFiles]:
        """Return the folders of cloudtrain on the config's machines, with their sizes."""


@dataclass(frozen=True)
class LeftFiles:
    """A folder that cloudtrain has beside this machine: on a host, or in a bucket."""

    job: str
    """The job's id, or empty for a folder of no single job."""
    place: str
    """`h0:/home/alice/.cloudtrain/jobs/digits-x4k2p`, or a uri."""
    bytes: int | None = None
    """None: unknown."""
    kept: str = ""
    """Why the folder was not read or removed, else empty."""


@runtime_checkable
class Cleans(Protocol):
    """A backend that leaves files of jobs beside this machine, and can remove them."""

    def left(self, refs: Mapping[str, Sequence[JobRef]], *, remove: bool) -> list[LeftFiles]:
        """Return the folders that belong to one of these jobs alone, by their attempts; with `remove`, empty them."""


@runtime_checkable
class ListsTypes(Protocol):
    """A backend whose platform takes a list of machine types, moves from one to the next, and tells their quotas."""

    def types_at_once(self, config: JobConfig) -> int:
        """Return how many types a request of the config may list, as `resources.instance_type: A,B`; 1 for no list."""

    def short_quota(self, config: JobConfig) -> str:
        """Return the quota that is too small for each of the config's types, in words; "" if none is known to be."""


@runtime_checkable
class Priced(Protocol):
    """A backend whose vendor publishes the prices of machines."""

    def price_region(self, config: JobConfig | None) -> str | None:
        """Return the region for prices: the config's, else the environment's; None if unknown."""

    def quotes(self, config: JobConfig | None, region: str, types: tuple[str, ...]) -> list[Quote]:
        """Return the vendor's prices of the types; without types, of all useful types, with the job's type.

        A type that the vendor does not list gets a quote without a price, with the reason. Raises CredentialError,
        ConfigError, UnreachableError if the list as a whole cannot be read.
        """


@runtime_checkable
class Seekable(Protocol):
    """A backend that finds the end of a long log without reading the lines before."""

    def logs_from(self, ref: JobRef, ranks: Chosen, *, lines: int | None, since_s: float | None) -> Cursor | None:
        """Return a cursor for `logs` before each stream's last `lines`, or before its lines since `since_s`.

        The cursor may be too early, never too late; None is the beginning. Raises UnreachableError.
        """


@runtime_checkable
class Searchable(Protocol):
    """A backend that searches a job's log where the log is."""

    def logs_with(
        self, pattern: str, ref: JobRef, cursor: Cursor | None, ranks: Chosen, *, now: bool = False
    ) -> LogPage:
        """Return a page as `logs`, perhaps without lines that do not match the regular expression, which is ASCII."""


_making = threading.Lock()


def load(name: str) -> Backend:
    """Return the process's object of a backend, made on first use. Raises ConfigError for an unknown name."""
    path = class_of(name)
    if path is None:
        raise ConfigError([Fault(f"unknown backend `{name}`", "backend", hint=similar(name))])
    with _making:
        return _made(path)


@functools.cache
def _made(path: str) -> Backend:
    module, _, kind = path.partition(":")
    backend: Backend = getattr(importlib.import_module(module), kind)()
    return backend
