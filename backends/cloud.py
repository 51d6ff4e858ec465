"""What the clouds' backends have alike: files, lines of some ranks, prices, machines by the table, refused places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from cloudtrain.entrypoints.errors import HELD
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.backend import Check, Chosen, Cursor, FoundAttempt, JobRef, LogPage, StoredRecord
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, Fault, require_all
from cloudtrain.launcher.metering.rate import Machine
from cloudtrain.launcher.planning import request_rules
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.text import addresses

from .adapter import Adapter, handed

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.launcher.config.schema import JobConfig

    from .job_folder import JobFolder

GOES_ALONG = "a path relative to the config file goes along by itself"
_T = TypeVar("_T")
_Ref = TypeVar("_Ref", bound="CloudRef")


@dataclass(frozen=True)
class CloudRef(StoredRecord):
    """The fields of every cloud's handle of a job."""

    name: str
    """The platform's name of the job."""
    nodes: int
    """The number of instances."""
    nproc_per_node: int
    limit_reason: str
    """The reason of the platform's limit: time_limit or budget."""
    checkpoint_uri: str | None
    """None outside the platform's storage."""
    output_uri: str

    @property
    def uris(self) -> tuple[str, ...]:
        """The addresses of the job's files, some below the same folder."""
        return self.checkpoint_uri or "", self.output_uri

    @classmethod
    def of(cls: type[_Ref], plan: StoredRecord, **own: Any) -> _Ref:
        """Return the handle: the fields that the sending plan has by the same names, and `own`."""
        return cls(**{each.name: getattr(plan, each.name) for each in fields(cls) if hasattr(plan, each.name)} | own)


class CloudAdapter(Adapter):
    """A cloud's backend: the platform has the lines, and the cloud's store has the files of jobs."""

    CONNECTIONS: tuple[str, str]
    """The module and the class of what all calls to the cloud share."""
    REF: type[CloudRef]
    """The handle of a job."""
    NO_CHECKPOINTS = ("", "")
    """The message and the hint for a job whose checkpoints are outside the cloud's store."""
    MAY_BE_EMPTY = False
    """Whether a download of no checkpoint at all is fine."""

    @cached_property
    def connections(self) -> Any:
        """What all calls to the cloud share, made on first use."""
        return self.duty(*self.CONNECTIONS)()

    quotes = handed(backends.Priced.quotes, "prices")
    supersede = handed(backends.Supersedes.supersede, "jobs")
    serving = handed(backends.Serves.serving, "serving", "files", is_pure=True)

    def logs(self, ref: JobRef, cursor: Cursor | None, ranks: Chosen = None, *, now: bool = False) -> LogPage:
        """Return the lines after the cursor."""
        nproc = self.REF.load(ref).nproc_per_node
        nodes = None if ranks is None else frozenset(rank // nproc for rank in ranks)
        page: LogPage = self.duty("jobs", "lines")(self.connections, ref, cursor, nodes, now=now)
        return page if ranks is None else page.only(ranks)

    def accepted(self, request: backends.Request, ref: JobRef) -> Any:
        """Return the platform's record of the attempt, beside the request."""
        return self.duty("jobs", "accepted")(self.connections, request, self.REF.load(ref))

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Download the job's output folder, also while the job runs; return the files."""
        handle = self.REF.load(ref)
        uri = handle.output_uri
        return self._with_files(handle, uri, "download the outputs", lambda files: files.download(uri, folder))

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Download the job's checkpoint folder, also while the job runs; return the files."""
        handle = self.REF.load(ref)
        if handle.checkpoint_uri is None:
            message, hint = self.NO_CHECKPOINTS
            raise ConfigError(message, hint=hint)
        uri = f"{handle.checkpoint_uri}/{inner}".rstrip("/")
        doing, empty = "download the checkpoints", self.MAY_BE_EMPTY
        return self._with_files(handle, uri, doing, lambda files: files.download(uri, folder, may_be_empty=empty))

    def saved(self, refs: Sequence[JobRef], config: JobConfig) -> backends.SavedFiles:
        """Return the files in the bucket, where all attempts have one folder."""
        from cloudtrain.entrypoints.replication import entries

        handle = self.REF.load(refs[-1])
        uri = handle.checkpoint_uri or ""
        try:
            names = self._with_files(handle, uri, f"list {uri}", lambda files: list(files.open_at(uri).names("")))
        except CloudtrainError as error:
            return backends.SavedFiles(away=f"in {uri} ({error.message})")
        whole = {entry for name in names if entries.is_name(entry := name.partition("/")[0])}
        return backends.SavedFiles(bool(whole), max(filter(None, map(entries.step_of, whole)), default=None))

    def left(self, refs: Mapping[str, Sequence[JobRef]], *, remove: bool) -> list[backends.LeftFiles]:
        """Return the jobs' folders in the bucket; with `remove`, delete their objects. Code that jobs share stays."""
        from .channel.copies import own_folders
        from .job_folder import JobFolder

        handles = [(job, self.REF.load(ref)) for job, those in refs.items() for ref in those]
        uris = {uri: (job, h) for job, h in handles for uri in own_folders(job, *h.uris)}
        found: list[backends.LeftFiles] = []
        kept = ""
        for uri, (job, handle) in uris.items():
            sizes = None
            try:
                if remove or not kept:  # the sizes alone are not worth a wait for each job of a silent store
                    kept = ""
                    use = partial(JobFolder.sizes, uri=uri, remove=remove)
                    sizes = self._with_files(handle, uri, f"list {uri}", use)
            except CloudtrainError as error:
                kept = error.message
            if sizes != {}:
                found.append(backends.LeftFiles(job, uri, None if sizes is None else sum(sizes.values()), kept))
        return found

    def saved_shapes(self, ref: JobRef, *, averaged: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the job's saved weights, by the headers alone."""
        from cloudtrain.entrypoints.models import tensors

        handle = self.REF.load(ref)
        uri, doing = str(handle.checkpoint_uri), "read the checkpoints"
        return self._with_files(handle, uri, doing, lambda files: tensors.shapes(files.open_at(uri), averaged=averaged))

    def _with_files(self, handle: CloudRef, uri: str, doing: str, use: Callable[[JobFolder], _T]) -> _T:
        """Return the result of `use` for the files at the URI; errors of the store become cloudtrain's."""
        return self.duty("files", "used")(self.connections, handle, uri, doing, use)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        """Return the place of the checkpoint folder, for a later job."""
        return self.REF.load(ref).checkpoint_uri

    def price_region(self, config: JobConfig | None) -> str | None:
        """Return the region for prices: the config's, else the environment's; None if unknown."""
        block: Any = self.duty("machine", "block_of")(config)
        return self.duty("machine", "region_of")(block)


def with_places(config: JobConfig, root: str) -> JobConfig:
    """Return the config with the address below `root` of each input that goes along."""
    inputs = {name: addresses.placed(root, uri) for name, uri in config.inputs.items()}
    return config.model_copy(update={"inputs": inputs})


def machine_with(backend: str, whose: str, accelerators: str, region: str | None) -> Machine:
    """Return the cheapest machine of the backend's table with the accelerators. Raises ConfigError."""
    machines = catalog.by_accelerators(backend, accelerators, region)
    if not machines:
        message = f"no {whose} machine of our table has `{accelerators}`"
        raise ConfigError(message, key="resources.accelerators", hint=catalog.advice(backend, accelerators))
    return machines[0]


def machine_of_type(backend: str, name: str, region: str | None, nproc: int | str, *, is_cpu: bool) -> Machine:
    """Return the machine type; of a type that is not in the table, `nproc` says the number of GPUs.

    `is_cpu`: the type's family has no accelerators. Raises ConfigError if the number of GPUs is not known.
    """
    known = catalog.by_type(backend, name, region)
    if known is not None:
        return known
    if is_cpu:
        return Machine(name, "CPU", 0, catalog.rates(backend, name, region))
    if nproc == "auto":
        similar = request_rules.meant(name, catalog.types(backend)).removeprefix("; ")
        hint = f"{similar} else set distributed.nproc_per_node" if similar else "set distributed.nproc_per_node"
        message = f"how many GPUs `{name}` has is not in our table"
        raise ConfigError(message, key="resources.instance_type", hint=hint)
    return Machine(name, "GPU", int(nproc), catalog.rates(backend, name, region))


def misnamed(name: str, what: str, known: Iterable[str], examples: str, key: str) -> ConfigError:
    """Return the error of a name that has not the form of the vendor's machine types, with a similar known name."""
    if not catalog.unknown(name):
        hint = f"write `accelerators: {name if ':' in name else f'{name}:1'}`"
        return ConfigError(f"`{name}` is an accelerator, not {what}", key=key, hint=hint)
    hint = request_rules.meant(name, known).removeprefix("; ") or f"as in {examples}"
    elsewhere = next(filter(None, (catalog.by_type(each, name, None) for each in catalog.backends())), None)
    if elsewhere is not None and elsewhere.count and elsewhere.accelerator not in catalog.NO_GPUS:
        wanted = f"`accelerators: {elsewhere.accelerator}:{elsewhere.count}`"
        hint += f"; {wanted} in place of `instance_type` is for each backend that has the GPU"
    return ConfigError(f"`{name}` is not {what}", key=key, hint=hint)


def unsupported(config: JobConfig, vendor: str, *, outputs_of: str = "a job") -> Iterator[Fault]:
    """Yield a fault for a resume from a foreign checkpoint, and for several places of outputs: no cloud has either."""
    if config.checkpoint.resume not in ("auto", "never"):
        hint = "leave `resume: auto`; `init_from` starts from another job's weights, as `init_from: {job: NAME}`"
        message = f"on {vendor} a job resumes only from its own checkpoints"
        yield Fault(message, key="checkpoint.resume", hint=hint)
    if len(config.outputs) > 1:
        names = ", ".join(config.outputs)
        hint = "keep one: what the job writes below CLOUDTRAIN_OUTPUT_DIR goes there"
        yield Fault(f"{outputs_of} has one place for outputs, not {names}", key="outputs", hint=hint)


def require_empty(used: Callable[..., Iterable[str]], name: str, *places: str | None) -> None:
    """Raise ConfigError if a place of a first attempt `name` holds files, by `files.used`; unreadable places pass."""
    for uri in filter(None, places) if name.endswith("-1") else ():
        names: Iterable[str] = ()
        with suppress(CloudtrainError):
            names = used(uri, f"list {uri}", lambda files, uri=uri: files.open_at(uri).names(""))
        if names:
            raise ConfigError(HELD.format(uri))


def tried(
    answers: Callable[[str], AbstractContextManager[None]], name: str, ask: Callable[..., Check], *args: Any
) -> Check:
    """Return the check's result, or a failed check with the error's message and hint."""
    try:
        with answers(f"look at the {name}"):
            return ask(*args)
    except CloudtrainError as error:
        return Check.failed(name, error)


def as_faults(checks: Iterable[Check]) -> list[Fault]:
    """Return the failed checks of inputs (`input NAME`) as faults of the config."""
    failed = [each for each in checks if each.verdict == "fail"]
    return [Fault(each.found, each.name.replace("input ", "inputs.", 1), hint=each.cure) for each in failed]


def unasked(names: str, config: JobConfig | None, *asks: Callable[[JobConfig], object]) -> list[Check]:
    """Return the config's faults by `asks`, which need no credentials, and the names of the skipped checks."""
    faults: tuple[Fault, ...] = ()
    try:
        require_all(*(partial(ask, config) for ask in asks if config is not None))
    except ConfigError as error:
        faults = error.faults
    checks = [Check("config", "fail", fault.message, fault.hint) for fault in faults]
    return [*checks, Check("not checked without credentials", "warn", names)]


def found_attempt(
    name: str, record: Any, access: Mapping[str, Any], ref_of: Callable[[backends.Request], JobRef], *, is_own: bool
) -> FoundAttempt:
    """Return the attempt with the platform name, and the handle of its record's request; a damaged record is None.

    `access`, the connection of this query, wins over the record: no address in a record is followed, because foreign
    users may write records.
    """
    job_id, _, number = name.rpartition("-")
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        request = backends.Request.load(name, record["request"])
        ref = ref_of(replace(request, sending={**request.sending, **access}))
        return FoundAttempt(job_id, int(number), ref, record, is_own)
    return FoundAttempt(job_id, int(number), {}, None, is_own)
