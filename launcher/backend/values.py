"""The values that pass between the launcher and a backend: requests, handles, log lines, checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.entrypoints.records import Record
from cloudtrain.entrypoints.terms import Terms

from ..errors import CloudtrainError, ConfigError, Fault, require_all

if TYPE_CHECKING:
    from ..config.schema import JobConfig

JobRef = dict[str, Any]  # a backend's own handle of a job: JSON, opaque to all callers


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
    """The config's keys that the request carries out, of the keys that some backends ignore."""
    archive: str | None = None
    """Where `-o DIR` puts the code, for a vendor's CLI that uploads the code."""
    decoded: Mapping[str, str] = field(default_factory=dict)
    """JSON texts that the body holds in a different encoding, by the name of their place."""

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
class Bundle:
    """An archive on disk."""

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

    def dump(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def load(cls, data: dict[str, Any]) -> Bundle:
        """Return the bundle from the output of `dump`."""
        largest = tuple((name, size) for name, size in data["largest"])
        return cls(**{**data, "path": Path(data["path"]), "largest": largest})


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


@dataclass(frozen=True)
class PushedModel:
    """A verified model folder on its way: the model's name, its version (12 digits), and its files by relative name."""

    name: str
    version: str
    files: Mapping[str, Path]


@dataclass(frozen=True)
class PushOutcome:
    """The end of a push to one target: the version that is current there, or the error."""

    version: str | None
    error: str = ""


@dataclass(frozen=True)
class ServedModel:
    """An exported model that a vendor's endpoint is to serve."""

    name: str
    version: str
    """The first 12 digits of the folder's digest."""
    machine: str | None = None
    """The machine type; None for the backend's default."""
    torch: str | None = None
    """The version of torch that traced the model."""
    requirements: str | None = None
    """The file in `code/` with the packages that the model needs; None for a traced model."""


@dataclass(frozen=True)
class ServingFiles:
    """The texts of the files that a vendor's own command line takes, by name, and notes about them for people."""

    files: Mapping[str, str]
    notes: tuple[str, ...] = ()


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

    @classmethod
    def of(
        cls, name: str, record: Any, access: Mapping[str, Any], ref_of: Callable[[Request], JobRef], *, is_own: bool
    ) -> FoundAttempt:
        """Return the attempt with the platform name, and the handle of its record's request; a damaged record is None.

        `access`, the connection of this query, wins over the record: no address in a record is followed, because
        foreign users may write records.
        """
        job_id, _, number = name.rpartition("-")
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            request = Request.load(name, record["request"])
            ref = ref_of(replace(request, sending={**request.sending, **access}))
            return cls(job_id, int(number), ref, record, is_own)
        return cls(job_id, int(number), {}, None, is_own)


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
    cursor: dict[str, Any]
    """JSON, so that a reader can continue later."""
    is_clean: bool = True
    """The page has no lines, and every stream was read to its end since the last clean page."""
    is_complete: bool = True
    """After the job's end, no more lines can come."""
    left_out: int = 0

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


def unasked(names: str, config: JobConfig | None, *asks: Callable[[JobConfig], object]) -> list[Check]:
    """Return the config's faults by `asks`, which need no credentials, and the names of the skipped checks."""
    faults: tuple[Fault, ...] = ()
    try:
        require_all(*(partial(ask, config) for ask in asks if config is not None))
    except ConfigError as error:
        faults = error.faults
    checks = [Check("config", "fail", fault.message, fault.hint) for fault in faults]
    return [*checks, Check("not checked without credentials", "warn", names)]


def nodes_of(ranks: frozenset[int] | None, nproc_per_node: int) -> frozenset[int] | None:
    """Return the nodes of the ranks, None for all nodes."""
    return None if ranks is None else frozenset(rank // nproc_per_node for rank in ranks)
