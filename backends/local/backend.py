"""The local backend: agents on this machine, each of them one node; as the `ssh` backend, without ssh."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.entrypoints import atomic_json, processes
from cloudtrain.entrypoints.agent import node_folder
from cloudtrain.entrypoints.contract import NEVER_SENT, RECORD, START_LOCK, STATE, JobSpec
from cloudtrain.launcher.backend import Capacity, Check, FoundAttempt, LeftFiles, Pace, SavedFiles, Terms
from cloudtrain.launcher.errors import ConfigError, UnreachableError
from cloudtrain.launcher.planning.request_rules import own_mirror
from cloudtrain.launcher.text.extras import install

from ..adapter import Adapter
from .jobs import INSTEAD, NEEDS_LINUX, agent_spec, here, interpreter, locks_of, make_own, places, start_agents, starter
from .records import LocalRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cloudtrain.launcher.backend import Chosen, Cursor, JobRef, LogPage, Request, Shipment
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.job import State

PYTHON_S = 30.0  # for the start of the job's interpreter, from a cold disk
PAGE_BYTES = 1 << 20  # of log: the next page is close, so the first page is on the screen at once
# The agent of node 0 ends the job at the cap by its own clock. The remaining agents end at its message, or after 15 s
# of silence (entrypoints/agent/transport.py); killing the processes takes some seconds more.
TERMS = Terms(tail_s=20)


class LocalBackend(Adapter):
    """The backend: it keeps no state, because everything is in the nodes' folders."""

    FOLDER = __package__

    def capacity(self, config: JobConfig) -> Capacity:
        """Return this machine's GPUs, divided evenly among the instances."""
        from .block import Local  # a poll of a job's state needs no config

        price = config.block(Local).price_per_hour
        each = len(processes.gpus()) // config.resources.instances
        source = "your own machine" if price is None else "local.price_per_hour"
        return Capacity(each, (price or 0) / 1e6, source, TERMS, is_own=not price, machine="this machine")

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError if no interpreter with torch exists."""
        interpreter(request.body["python"], shipment.base)

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        """Start one detached agent for each node, or no agent at all. Raises ConfigError if the machine is not fit."""
        from cloudtrain.entrypoints.host import files

        body = request.body
        shipment.sending.prepares()
        python = interpreter(body["python"], shipment.base)
        job_folder = shipment.home / "local" / body["job"]
        folder = job_folder / f"attempt-{body['attempt']}"
        checkpoints = here(shipment.base, body["checkpoint_dir"] or str(job_folder / "checkpoints"))
        job = JobSpec.load(body["spec"])
        outputs = [str(here(shipment.base, uri)) for uri in body["outputs"].values()]
        written = [*outputs, *filter(None, [own_mirror(job)])]
        ref = LocalRef(str(folder), len(body["nodes"]), str(checkpoints), tuple(written)).dump()
        if job.attempt == 1 and (why := files.held(str(checkpoints), *written)):
            raise ConfigError(why)
        with starter(shipment.home) as begun:  # it imports its modules beside the writes
            try:
                processes.make_private(job_folder)
                make_own(folder, body["job"])
                checkpoints.mkdir(parents=True, exist_ok=True)
                environment = body["environment"] | places(body, shipment.base, job_folder / "output", checkpoints)
                atomic_json.write_json(folder / "request.json", body)
                atomic_json.write_json(folder / RECORD, dict(shipment.record))
                atomic_json.write_json(folder / "ref.json", ref)
            except OSError as error:
                from cloudtrain.entrypoints.host import slurm

                slurm.discard(folder=str(folder))
                raise ConfigError(f"the job's folder cannot be made: {error.strerror}", where=error.filename) from error
            shipment.sending.creates()
            try:
                specs = [agent_spec(node, body, shipment, environment, python, folder) for node in body["nodes"]]
                start_agents(begun, folder, specs, locks_of(shipment.home, body))
            except ConfigError:
                # The agents may live, though their starter died before its answer.
                if self.find(request, shipment.home) is None:
                    raise
        return ref

    def find(self, request: Request, home: Path) -> JobRef | None:
        """Return the job if its agents have started, else forbid that start. Raises UnreachableError on a full disk."""
        job, _, attempt = request.name.rpartition("-")
        folder = home / "local" / job / f"attempt-{attempt}"
        if not folder.is_dir():
            return None
        with processes.locked(folder / START_LOCK):
            if not (folder / NEVER_SENT).exists() and any(folder.glob(f"node-*/{STATE}")):
                ref: JobRef = atomic_json.read_json(folder / "ref.json")
                return ref
            try:
                (folder / NEVER_SENT).touch()
            except OSError as error:
                message = f"whether {job} was started stays open: {error.strerror}"
                raise UnreachableError(message, where=str(folder), hint="free some room") from error
        return None

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        """Return the attempts of this home folder with a running agent."""
        found = []
        for path in sorted((home / "local").glob("*/attempt-*/ref.json")):
            ref, number = atomic_json.read_json(path), path.parent.name.removeprefix("attempt-")
            if ref and number.isdigit() and any(map(node_folder.agent_pid, LocalRef.load(ref).roots)):
                found.append(
                    FoundAttempt(path.parent.parent.name, int(number), ref, atomic_json.read_json(path.parent / RECORD))
                )
        return found

    def state(self, ref: JobRef) -> State:
        """Return the combined state of the nodes."""
        from cloudtrain.launcher.backend import agent_state

        handle = LocalRef.load(ref)
        checkpoints = Path(handle.checkpoint_dir)
        looks = {node: node_folder.look(root, checkpoints) for node, root in enumerate(handle.roots)}
        found = agent_state.fold(looks, handle.nodes)
        assert found is not None  # all were seen
        return found

    def logs(self, ref: JobRef, cursor: Cursor | None, ranks: Chosen = None, *, now: bool = False) -> LogPage:
        """Return the lines after the cursor; all existing lines are available at once, so no line is held back."""
        return self.logs_with("", ref, cursor, ranks)

    def logs_with(
        self, pattern: str, ref: JobRef, cursor: Cursor | None, ranks: Chosen, *, now: bool = False
    ) -> LogPage:
        """Return the lines after the cursor that may match the pattern; all lines if it is empty."""
        from cloudtrain.entrypoints.agent import node_logs
        from cloudtrain.launcher.backend import agent_pages

        handle = LocalRef.load(ref)
        roots, page_bytes = handle.roots, (node_logs.PAGE_BYTES if pattern else PAGE_BYTES) // handle.nodes
        found = {
            node: node_logs.read(root, agent_pages.offsets(cursor, node), ranks, page_bytes, pattern=pattern)
            for node, root in enumerate(roots)
        }
        return agent_pages.page(cursor, found)

    def logs_from(self, ref: JobRef, ranks: Chosen, *, lines: int | None, since_s: float | None) -> Cursor | None:
        """Return a cursor before each file's last lines, or before the lines written since the time."""
        from cloudtrain.entrypoints.agent import node_logs

        return {
            f"{node}/{name}": offset
            for node, root in enumerate(LocalRef.load(ref).roots)
            for name, offset in node_logs.near_end(root, ranks, lines=lines, since_s=since_s).items()
        }

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: a poll reads a few files."""
        return Pace()

    def stop(self, ref: JobRef, *, now: bool) -> None:
        """Send each agent the stop request; kill processes of dead agents and, with `now`, agents that do not obey."""
        roots = LocalRef.load(ref).roots
        try:
            for root in roots:
                node_folder.ask_to_stop(root, "now" if now else "user")
        except OSError as error:  # a full disk: agents that have ended need no request, and neither does a kill
            if not now and any(map(node_folder.agent_pid, roots)):
                what = f"the agents cannot be asked to stop: {error.strerror}"
                where, hint = error.filename or roots[0], "free some room, or stop --now"
                raise ConfigError(what, where=where, hint=hint) from error
        if now or not any(map(node_folder.agent_pid, roots)):
            node_folder.end(roots)

    def artifacts(self, ref: JobRef, folder: Path) -> list[Path]:
        """Copy the output folder below `folder`; return the files there."""
        return _copied(Path(LocalRef.load(ref).folder).parent / "output", folder)

    def checkpoints(self, ref: JobRef, folder: Path, inner: str = "") -> list[Path]:
        """Copy the checkpoint folder below `folder`; return the files there."""
        return _copied(Path(LocalRef.load(ref).checkpoint_dir) / inner, folder)

    def saved(self, refs: Sequence[JobRef], config: JobConfig) -> SavedFiles:
        """Return the files in the job's checkpoint folder."""
        from cloudtrain.entrypoints.replication import entries

        folder = LocalRef.load(refs[-1]).checkpoint_dir
        try:
            found = entries.list_entries(Path(folder))
        except OSError as error:
            return SavedFiles(away=f"in {folder} ({error.strerror})")
        return SavedFiles(bool(found), found[0].step if found else None)

    def left(self, refs: Mapping[str, Sequence[JobRef]], *, remove: bool) -> list[LeftFiles]:
        """Return the jobs' folders outside the home folder; with `remove`, remove the folders."""
        from cloudtrain.entrypoints.host import files
        from cloudtrain.entrypoints.host.calls import Here

        from ..channel.copies import own_folders

        found: dict[str, str] = {}
        for job, handle in ((job, LocalRef.load(ref)) for job, those in refs.items() for ref in those):
            home = Path(handle.folder).parent  # goes with the job's row
            outside = [path for path in (handle.checkpoint_dir, *handle.written) if home not in Path(path).parents]
            found |= own_folders(job, *outside)
        nowhere = Here(Path(os.devnull), "", 0, "")  # without folders, nothing is left
        sizes, kept = files.left(nowhere, folders=[*found], remove=remove).values()
        return [LeftFiles(found[path], path, sizes[path], kept.get(path, "")) for path in sizes]

    def checkpoint_place(self, ref: JobRef) -> str | None:
        return LocalRef.load(ref).checkpoint_dir

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return the checks for a job on this machine."""
        from .block import Local

        linux = sys.platform == "linux"
        free_gb = shutil.disk_usage(Path.home()).free / 1e9
        is_roomy = free_gb > 5
        return [
            Check("system", "ok" if linux else "fail", sys.platform, "" if linux else f"{NEEDS_LINUX}; {INSTEAD}"),
            _torch(None if config is None else config.block(Local).python),
            Check("disk", "ok" if is_roomy else "warn", f"{free_gb:.0f} GB free", "" if is_roomy else "free some"),
        ]


def _torch(wanted: str | None) -> Check:
    """Return whether the job's interpreter has torch."""
    from cloudtrain.entrypoints.host import probes

    cure = install("local") if wanted is None else f"{wanted} -m pip install torch, or name another in local.python"
    try:
        python = sys.executable if wanted is None else interpreter(wanted, Path.cwd())
    except ConfigError as error:
        return Check("torch", "fail", error.message, error.hint)
    told = probes.interpreter(python, 0o022, PYTHON_S)
    if told.get("torch"):
        return Check("torch", "ok", f"{told['torch']}, {python}")
    return Check("torch", "fail", str(told.get("error") or f"not in {python}"), cure)


def _copied(source: Path, folder: Path) -> list[Path]:
    """Copy the files, and return the copies; files that a running job removes meanwhile are left out."""
    copies = []

    def copy(file: str, to: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(file, to)
            copies.append(Path(to))

    try:
        shutil.copytree(source, folder, dirs_exist_ok=True, copy_function=copy)
    except shutil.Error as error:  # a list of (file, copy, reason)
        if faults := [reason for file, _, reason in error.args[0] if os.path.lexists(file)]:
            raise ConfigError(f"the output cannot be copied: {faults[0]}", where=str(folder)) from error
    except OSError as error:
        raise ConfigError(f"the output cannot be copied: {error}", where=str(folder)) from error
    return sorted(copies)
