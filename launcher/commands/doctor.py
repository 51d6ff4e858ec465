"""`cloudtrain doctor`: the problems that would stop a job: of this installation, and of several backends at once."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import click

from cloudtrain.entrypoints.format import counted

from .. import backend as backends
from ..backend import BUILT_IN, Check
from ..backend_table import ALL, DEFAULT, traits
from ..completion import SHELLS, installed_at
from ..errors import CloudtrainError, ConfigError, UsageError
from ..store.database import FAULTS, words_of
from ..store.home import where
from ..text.terminal import print_json, print_text, say
from .options import DEFAULT_FILE, backend_option, cli_command, completes, file_option, json_option

HERE = "cloudtrain"  # the heading of the checks of this installation
FREE_GB, LEAST_FREE_GB = 5.0, 0.1  # warn: checkpoints may not fit; fail: no file fits
READ_WHOLE_BYTES = 64_000_000  # a registry up to this size is checked whole, in half a second
TOOL_LIMIT_S = 5.0
LIMIT_S = 60.0  # for all checks of a backend; ssh and the clouds' clients give up on a single call earlier
_AGAIN = re.compile(r"^cannot look( at the [\w ]+)?: ")  # the name and verdict of a check already imply these words
Ask = Callable[[], list[Check]]


@cli_command("doctor", "cloudtrain doctor", "cloudtrain doctor sagemaker", "cloudtrain doctor all")
@click.argument("backend", required=False, shell_complete=completes("backends"))
@backend_option("named", metavar="NAME", help="As BACKEND.")
@file_option("Look at this job.")
@json_option
def command(backend: str | None, named: str | None, file: Path | None, as_json: bool) -> int:
    """Find the problems of a job: on this machine, and on every backend with a block in the config file.

    All are asked at once, each for a minute at most. BACKEND asks that backend alone, with or without a file; `all`
    asks every backend. Nothing is changed and nothing is sent. Exit code 1 where a check fails.
    """
    if backend and named and backend != named:
        raise UsageError(f"`{backend}` and `--backend {named}` name two backends", hint="give one of them")
    backend = backend or named
    path = file or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)
    groups: dict[str, list[Check]] = {}
    asks = {backend: _of_one(backend, path)} if backend not in (None, ALL) else _of_all(path, backend == ALL)
    here = [(HERE, of_this_installation())] if backend in (None, ALL) else []
    for name, checks in chain(here, answers(asks)):
        groups[name] = checks
        if not as_json:
            print_text([name, *(line for check in checks for line in _lines(check))])
    if as_json:
        print_json({name: [asdict(check) for check in checks] for name, checks in groups.items()})
    else:
        _sum_up(groups, path, backend)
    return int(any(check.verdict == "fail" for checks in groups.values() for check in checks))


def _of_one(name: str, path: Path | None) -> Ask:
    """Return the call for a backend's checks. Raises ConfigError for an unknown backend or a faulty config."""
    from .. import config
    from ..jobs import adopt
    from ..planning.prepare import require_whole

    require_whole(name)
    return partial(adopt.checks, name, config.load(path, backend=name) if path else None)


def _of_all(path: Path | None, with_others: bool) -> dict[str, Ask]:
    """Return the calls for the local backend, the backends in the file, and with `with_others` the remaining backends.

    A faulty config raises ConfigError if the file names a single backend; else the faults become that backend's checks.
    """
    others = {name: _of_one(name, None) for name in backends.names()} if with_others else {}
    if path is None:
        return others or {DEFAULT: _of_one(DEFAULT, None)}
    from .. import config

    names = config.backends_configured(path)
    asked = config.backends_asked(path)
    asks: dict[str, Ask] = {}
    for name in dict.fromkeys([DEFAULT, *asked, *names]):
        try:
            asks[name] = _of_one(name, path)
        except ConfigError as error:
            if name in asked and len(asked) == 1:
                raise
            asks[name] = partial(_faults, error)
    return others | asks


def _faults(error: ConfigError) -> list[Check]:
    return [
        Check("config", "fail", f"{f'{fault.place}, ' if fault.place else ''}{fault.key}: {fault.message}", fault.hint)
        for fault in error.faults
    ]


def _lines(check: Check) -> list[str]:
    cure = [f"        {check.cure}"] if check.cure else []
    return [f"  {check.verdict:4}  {check.name}: {check.found}", *cure]


def _sum_up(groups: dict[str, list[Check]], path: Path | None, backend: str | None) -> None:
    verdicts = [check.verdict for checks in groups.values() for check in checks]
    failed, warned = verdicts.count("fail"), verdicts.count("warn")
    words = [f"{failed} failed"] if failed else []
    words += [counted(warned, "warning")] if warned else []
    say(f"{counted(len(verdicts), 'check')}: {', '.join(words) or 'all is well'}")
    if backend is None and path is None:
        say(f"no {DEFAULT_FILE} here: `cloudtrain doctor ssh` checks another backend, `cloudtrain doctor all` all")


def of_this_installation() -> list[Check]:
    """Return the checks of versions, the home folder, tools, clock and completion; no file changes, no network."""
    return [
        Check("cloudtrain", "ok", f"{version('cloudtrain')}, no telemetry"),
        Check("python", "ok", f"{platform.python_version()}, {sys.executable}"),
        *_home(),
        _tool("git", "--version", "plans do not name the code's commit"),
        *(
            _tool(program, option, f"the backend {backend} needs it")
            for backend in BUILT_IN
            for program, option in traits(backend).programs.items()
        ),
        *_clock(),
        _completion(),
    ]


def _home() -> Iterator[Check]:
    cure = "set CLOUDTRAIN_HOME to a folder that you can write"
    try:
        path = where()
    except RuntimeError as error:  # the user `~nobody` has no home folder
        yield Check("home", "fail", str(error), cure)
        return
    except ConfigError as error:
        yield Check("home", "fail", error.message, error.hint)
        return
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Check("home", "fail", f"{there} cannot be written", cure)
        return
    yield Check("home", "ok", f"{path}{', which the first job makes' if there != path else ''}")
    yield _disk(there)
    if there == path:
        yield _registry(path / "registry.sqlite")


def _disk(folder: Path) -> Check:
    free_gb = shutil.disk_usage(folder).free / 1e9
    cure = "" if free_gb >= FREE_GB else f"free some; `du -sh {folder}/*` says what takes it"
    verdict = "ok" if free_gb >= FREE_GB else "warn" if free_gb >= LEAST_FREE_GB else "fail"
    return Check("disk", verdict, f"{free_gb:.1f} GB free", cure)


def _registry(path: Path) -> Check:
    """Check the registry read-only: no table is created."""
    if not path.exists():
        return Check("registry", "ok", "no job yet")
    unlike = f"move it away: mv {path} {path}.damaged; or take an older one from a backup"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=TOOL_LIMIT_S)) as database:
            jobs = database.execute("SELECT COUNT(*) FROM jobs").fetchone()[0]
            size = path.stat().st_size
            is_small = size <= READ_WHOLE_BYTES
            answer = str(database.execute("PRAGMA quick_check(1)").fetchone()[0]) if is_small else "ok"
    except sqlite3.OperationalError as error:
        return Check("registry", "fail", f"{path}: {error}", f"look who may read it, and who holds it: ls -l {path}")
    except (*FAULTS, OSError) as error:
        return Check("registry", "fail", f"{path}: {words_of(error)}", unlike)
    if answer != "ok":
        return Check("registry", "fail", f"{path}: {answer.splitlines()[0]}", unlike)
    if not os.access(path, os.W_OK):
        return Check("registry", "fail", f"{path} cannot be written", f"sudo chown {os.getuid()} {path}*")
    return Check("registry", "ok", f"{counted(jobs, 'job')}, {size / 1e6:.1f} MB")


def _tool(program: str, flag: str, without: str) -> Check:
    command = shutil.which(program)
    if command is None:
        return Check(program, "warn", f"there is no `{program}` here: {without}", f"install {program}")
    try:
        done = subprocess.run([command, flag], capture_output=True, text=True, check=False, timeout=TOOL_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(program, "warn", f"{command} does not work: {error}", f"install {program} again")
    return Check(program, "ok", (done.stdout or done.stderr).strip().partition(",")[0])


def _clock() -> Iterator[Check]:
    """Check by systemd whether the clock is synchronized; clouds refuse calls if the clock is wrong by minutes."""
    command = shutil.which("timedatectl")
    if command is None:
        return
    argv = [command, "show", "--property=NTPSynchronized", "--value"]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TOOL_LIMIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return
    if answer == "yes":
        yield Check("clock", "ok", "kept by network time")
    elif answer == "no":
        yield Check("clock", "warn", "nothing keeps it: tokens and signatures need it", "sudo timedatectl set-ntp true")


def _completion() -> Check:
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        return Check("completion", "ok", f"for {', '.join(SHELLS)}", "cloudtrain completion bash --install")
    started = {"bash": (".bashrc", ".bash_profile"), "zsh": (".zshrc",), "fish": (".config/fish/config.fish",)}[shell]
    texts = [path.read_text(errors="replace") for name in started if (path := Path.home() / name).is_file()]
    if installed_at(shell).exists() or any("cloudtrain completion" in text for text in texts):
        return Check("completion", "ok", f"set up for {shell}")
    return Check("completion", "ok", f"not set up for {shell}", f"cloudtrain completion {shell} --install")


def answers(asks: Mapping[str, Ask], limit_s: float = LIMIT_S) -> Iterator[tuple[str, list[Check]]]:
    """Yield each backend with its checks, in the given order, as soon as the backend and all earlier backends answered.

    An exception becomes a failed check of the backend. A backend without an answer after `limit_s` seconds in all gets
    a failed check `answer`; the backend's daemon thread ends with the process.
    """
    found: dict[str, list[Check]] = {}
    threads = {
        name: threading.Thread(target=_asked, args=(name, ask, found), name=f"doctor-{name}", daemon=True)
        for name, ask in asks.items()
    }
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + limit_s
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        late = Check("answer", "fail", f"none within {limit_s:.0f} s", "look at the network, then ask again")
        yield name, found.get(name, [late])


def _asked(name: str, ask: Ask, found: dict[str, list[Check]]) -> None:
    try:
        found[name] = [replace(check, found=_AGAIN.sub("", check.found)) for check in ask()]
    except CloudtrainError as error:
        found[name] = [Check("answer", "fail", error.message, error.hint)]
    except Exception as error:  # a bug of cloudtrain or a plug-in in a backend must not stop the remaining backends
        cure = f"report it, with what `cloudtrain doctor {name} --debug` prints"
        found[name] = [Check("answer", "fail", f"{type(error).__name__}: {error}", cure)]
