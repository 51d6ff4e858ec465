"""Local data that goes along: a relative path of `inputs` is copied once to the job's backend, named by its content.

A relative path is beside the config file and goes along; an absolute path is on the machine that runs the job. The
local backend reads both in place. A config with `data/@sha256:...` names the files as they were at the submit.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.format import counted, span

from ..backend_table import BackendTraits, traits
from ..errors import ConfigError, Fault, refuse
from ..text import addresses
from .bundle import size_words
from .secret_files import Secrets
from .shipped import refuse_files

if TYPE_CHECKING:
    from ..config.schema import JobConfig

LEFT_OUT = {".git", ".DS_Store", "__pycache__"}  # no data; nor is macOS's `._name`, beside a file on foreign disks
NAME_BYTES = 900  # of a file below the folder: an object's name has at most 1024, with prefix and hash
UPLINK_BYTES_S = 12_500_000  # 100 Mbit/s, for an estimate
WRITE_USD = 5e-6  # of a file into a bucket: S3 and Cloud Storage, list prices of 2025; Azure is close
GB = 1_000_000_000
_APART = "; the code is sent without it, except for Python files"
_NOT_BESIDE = re.compile(r"[/~]|.*://")  # `azureml:NAME:1` is no address of this machine
_SPECIAL, _ESCAPED = re.compile(r"[\\*?\[\]!# ]"), r"\\\g<0>"  # in a pattern of an ignore file


@dataclass(frozen=True)
class LocalData:
    """A file, or the files of a folder, by their names below it. A single file has its own name."""

    folder: Path
    is_file: bool
    sizes: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """The sum of the files."""
        return sum(self.sizes.values())

    def hashes(self) -> dict[str, str]:
        """Return the sha256 of each file. Raises OSError; a file is read again after a change only."""
        paths = {name: self.folder / name for name in self.sizes}
        stats = {name: path.stat() for name, path in paths.items()}
        return {name: _hash(paths[name], each.st_size, each.st_mtime_ns, each.st_ino) for name, each in stats.items()}

    def digest(self) -> str:
        """Return the hash of all names and contents. Raises OSError."""
        return foreign.sha256_of_names(self.hashes())


@functools.lru_cache(maxsize=1 << 17)
def _hash(path: Path, *state: int) -> str:
    return foreign.sha256_of(path)


def pinned(config: JobConfig, base: Path, *, hashes: bool = True) -> tuple[JobConfig, list[str]]:
    """Return the config with the hash of the data that goes along, and notes for the plan. `base`: the file's folder.

    Data with a hash stays as it is, as in a stored config: the files may be gone by then. Without `hashes`, the files
    are looked at, and not read. The local backend reads in place, by the plain path. Raises ConfigError with the faults
    of all inputs.
    """
    facts, inputs, notes = traits(config.backend), dict(config.inputs), list[str]()
    if not facts.data_place:  # the files of today must be the files with the hash
        for name, uri in inputs.items():
            inputs[name] = addresses.path_of(uri)
            if inputs[name] != uri:
                as_submitted(base, name, uri)
        here = {name: base / uri for name, uri in inputs.items() if facts.runs_here and not _NOT_BESIDE.match(uri)}
        refuse(_absent(path, f"inputs.{name}") for name, path in here.items() if not path.exists())
        within = [name for name, uri in inputs.items() if _in_code(config, base, uri)]
        notes += [f"inputs.{name}: {inputs[name]} is read in place{_APART}" for name in within]
        return config.model_copy(update={"inputs": inputs}), notes
    faults, sizes = list[Fault](), dict[Path, int]()
    for name, uri in inputs.items():
        if not addresses.is_beside(uri) or addresses.PINNED.fullmatch(uri):
            continue
        try:
            data = data_at(base / uri)
            sizes[(base / uri).resolve()] = data.bytes  # two inputs of one folder go once
            faults += [replace(fault, key=f"inputs.{name}") for fault in _faults(data, uri, config.code.exclude)]
            if (total := sum(sizes.values())) > config.code.max_data_gb * GB:
                faults.append(_too_large(config, facts, name, uri, total))
            elif not faults:
                shown = f"{uri.rstrip('/')}{'/' * (not data.is_file)}"
                inputs[name] = f"{shown}@sha256:{data.digest() if hashes else '0' * 64}"
                once = _APART if _in_code(config, base, uri) else ""
                notes.append(f"inputs.{name}: {shown} goes along: {_cost(data, facts)}{once}")
        except ConfigError as error:
            faults += [replace(fault, key=f"inputs.{name}") for fault in error.faults]
        except OSError as error:
            message = f"`{error.filename or uri}` cannot be read: {error.strerror}"
            faults.append(Fault(message, f"inputs.{name}", hint="change its mode"))
    refuse(faults)
    return config.model_copy(update={"inputs": inputs}), notes


def data_at(path: Path) -> LocalData:
    """Return the files at the path. Raises ConfigError with all faults of files, OSError."""
    if not path.exists():
        raise ConfigError([_absent(path)])
    if not path.is_dir():  # a link, too, by its own name
        refuse(_why_not(path, path.resolve().parent, path.name))
        return LocalData(path.parent, True, {path.name: path.stat().st_size})
    path = path.resolve()
    names = list(_names(path))
    faults = [fault for name in names for fault in _why_not(path / name, path, name)]
    if not names:
        faults.append(Fault(f"there is no file in {path}", hint="an empty folder cannot go along"))
    refuse_files(faults, only="the data")
    return LocalData(path, False, {name: (path / name).stat().st_size for name in names})


def _absent(path: Path, key: str = "") -> Fault:
    names = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, 1)
    near = f"did you mean `{close[0]}`? " if close else ""
    hint = f"{near}a relative path is beside the config file, an absolute path on the machine that runs the job"
    return Fault(f"there is no file or folder {path}", key, hint=hint)


def as_submitted(base: Path, name: str, uri: str) -> tuple[LocalData, dict[str, str]]:
    """Return the files of an input with a hash, and the files' own hashes. Raises ConfigError if the files differ."""
    where, hint = addresses.path_of(uri), f"--set inputs.{name}={addresses.path_of(uri)} takes the data of today"
    try:
        data = data_at(base / where)
        hashes = data.hashes()
        if uri.endswith(f":{foreign.sha256_of_names(hashes)}") and data.is_file is not where.endswith("/"):
            return data, hashes
        message = f"`{where}` has changed since the submit was prepared, and the job's place has no copy of the data"
    except (ConfigError, OSError) as error:
        message = f"the job's place has no copy of the data of `{where}`, and here it cannot be read: "
        message += getattr(error, "message", str(error))
    raise ConfigError([Fault(message, key=f"inputs.{name}", hint=hint)])


def changed(name: str, file: str) -> ConfigError:
    """Return the error of a file that changes while it is sent."""
    hint = "submit again when no program writes to the data"
    return ConfigError([Fault(f"`{file}` changed while it was sent", key=f"inputs.{name}", hint=hint)])


def outside_code(config: JobConfig, base: Path, job_id: str = "") -> list[str]:
    """Return patterns of `code.exclude` for data beside the config, and for all jobs' checkpoints and outputs here.

    The code has the Python files there, as of a package. `job_id`: of a job that the config's places belong to.
    """
    facts, lines = traits(config.backend), list[str]()
    here = [config.checkpoint.uri or "/", *config.outputs.values()] if facts.runs_here else []
    inputs = config.inputs.values() if facts.data_place or facts.runs_here else ()
    uris = (*inputs, *(uri.removesuffix(f"/{job_id}") for uri in here))
    for path in filter(None, (_in_code(config, base, uri) for uri in uris)):
        lines.append(f"/{re.sub(_SPECIAL, _ESCAPED, path)}")
        if any(name.endswith(".py") for _, _, names in os.walk(base / config.code.dir / path) for name in names):
            lines.append(f"!{lines[-1]}/**/*.py")
    return lines


def _in_code(config: JobConfig, base: Path, uri: str) -> str:
    """Return the path below the code folder of an input or place; empty for another path, and a Python file."""
    code = Path(os.path.realpath(base / config.code.dir))  # without an error for a link to itself
    path = Path(os.path.normpath(base.resolve() / addresses.path_of(uri)))
    is_inside = addresses.is_beside(uri) and path.suffix != ".py" and path != code and path.is_relative_to(code)
    return path.relative_to(code).as_posix() if is_inside else ""


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of files, and of links to folders, below the folder, in order. Raises OSError."""

    def stop(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=stop):
        links = [each for each in folders if Path(root, each).is_symlink()]
        folders[:] = sorted({*folders} - LEFT_OUT - {*links})
        below = os.path.relpath(root, folder)
        for name in sorted(each for each in {*files, *links} - LEFT_OUT if not each.startswith("._")):
            yield name if below == "." else f"{below}/{name}"


def _why_not(path: Path, top: Path, name: str) -> Iterator[Fault]:
    """Yield the fault of a file that cannot go along; a link counts as the file that it points to."""
    copy, why = "copy what it points to: cp -rL", ("", "")
    try:
        mode = path.stat().st_mode
        if path.is_symlink() and not path.resolve().is_relative_to(top):
            why = "is a link that points outside the folder", copy
        elif stat.S_ISDIR(mode):
            why = "is a link to a folder", copy
        elif not stat.S_ISREG(mode):
            why = "is neither a file nor a folder", "take it out of the folder, or name another folder"
        elif not os.access(path, os.R_OK):
            why = "cannot be read", "change its mode"
        elif not foreign.is_inside(name) or not name.isprintable():
            why = "has a name with characters that no bucket keeps", "rename it"
        elif len(os.fsencode(name)) > NAME_BYTES:
            why = f"has a path of more than {NAME_BYTES} bytes", "rename it, or pack the folder"
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}", "take it out of the folder"
    if why[0]:
        yield Fault(f"`{name}` {why[0]}", hint=why[1])


def _faults(data: LocalData, uri: str, exclude: Iterable[str]) -> Iterator[Fault]:
    """Yield the faults of secrets among the files, by the rules of the code."""
    secrets = Secrets(data.folder, data.sizes, exclude)
    secrets.read()
    for fault in secrets.faults():
        hint = f"take the file out of {uri}; a line `!{{name}}` in a .cloudtrainignore beside it lets it go along"
        name = fault.place.file if fault.place else fault.message.split("`")[1]
        yield replace(fault, message=fault.message.replace("the code", "the data"), hint=hint.format(name=name))


def _too_large(config: JobConfig, facts: BackendTraits, name: str, uri: str, total: int) -> Fault:
    message = f"`{uri}` makes {total / GB:.1f} GB of data that goes along, over the {config.code.max_data_gb} GB"
    command = facts.data_copy.format(path=shlex.quote(uri.rstrip("/")), name=name)
    hint = f"copy it once by `{command}` and write that place, or raise code.max_data_gb"
    return Fault(f"{message} of code.max_data_gb", f"inputs.{name}", hint=hint)


def _cost(data: LocalData, facts: BackendTraits) -> str:
    size, seconds = data.bytes, round(data.bytes / UPLINK_BYTES_S)
    words = f"{size / GB:.1f} GB" if size >= GB else size_words(size)
    takes = f", about {span(seconds)} at 100 Mbit/s" if seconds else ""
    monthly, writes = size / GB * facts.data_usd, len(data.sizes) * WRITE_USD
    costs = f"; there it costs about {monthly:.2g} USD a month" if monthly >= 0.005 else ""
    costs = "; there it costs less than 0.01 USD a month" if facts.data_usd and not costs else costs
    costs += f", and the files cost about {writes:.2g} USD to write" if costs and writes >= 0.005 else ""
    return f"{counted(len(data.sizes), 'file')}, {words}, copied once to {facts.data_place}{takes}{costs}"
