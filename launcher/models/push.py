"""Bring a model folder to the machines or the bucket that serve the model: `cloudtrain push`.

A place is `host1,host2:/srv/digits` (machines by ssh), `s3://bucket/digits` (or another store), or a local folder. At
each place a version is complete before the place names the version as the current one (entrypoints/host/models.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.host import models
from cloudtrain.entrypoints.models import folder as folders
from cloudtrain.entrypoints.stores import STORES
from cloudtrain.entrypoints.stores.store import Store, in_threads, open_store

from .. import backend as backends
from ..backend.model_files import PushedModel, PushOutcome
from ..backend_table import traits
from ..config.schema import JobConfig
from ..errors import CloudtrainError, ConfigError, UsageError

_HOSTS = re.compile(r"([\w.-][\w.@-]*(?:,[\w.-][\w.@-]*)*):([/~].*)")
_DIGITS = 12  # of a version
_TRIES = 20  # of the change of versions.json, while others change it


def pushed(path: Path, name: str | None) -> PushedModel:
    """Return the model for `push`, verified, with its signature if there is one. `name`: by default the model's own.

    Raises ConfigError for a damaged folder, or without proof of the trained model.
    """
    try:
        folder = folders.verify(path, checked=True)
    except folders.ModelFolderError as error:
        raise ConfigError(f"{error}", hint="cloudtrain export writes and checks a model folder") from error
    own = [folders.SUMS, *([folders.SIGNATURE] if (path / folders.SIGNATURE).is_file() else [])]
    files = {each: path / each for each in (*folder.files, *own)}
    return PushedModel(name or str(folder.config.get("name") or path.name), folder.digest[:_DIGITS], files)


def push(model: PushedModel, place: str, config: JobConfig | None, *, replaces: bool) -> dict[str, PushOutcome]:
    """Bring the model to the place, and make the model current there; return the outcome by target.

    Raises UsageError and ConfigError for a wrong place. The errors of a single target are in its outcome.
    """
    if hosts := _hosts_of(place):
        return _machines().push_model(config, hosts[0], hosts[1], model, replaces=replaces)
    to = _to_store if _is_store(place) else _to_folder
    return {place: _told(lambda: to(place, model, replaces=replaces))}


def back(place: str, config: JobConfig | None) -> dict[str, PushOutcome]:
    """Make the version before the current one current; return the outcome by target. Raises UsageError, ConfigError."""
    if hosts := _hosts_of(place):
        return _machines().restore_model(config, *hosts)
    if _is_store(place):
        return {place: _told(lambda: _store_back(place))}
    return {place: _told(lambda: str(models.back(place=place.removeprefix("file://"))["version"]))}


def _is_store(place: str) -> bool:
    """Return whether the place is a uri of a bucket. Raises UsageError for an unknown scheme."""
    scheme = urlsplit(place).scheme
    if "://" in place and scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise UsageError(f"{place!r} is no place that this version knows", hint=f"a uri begins with {known}")
    return "://" in place and scheme != "file"


def _hosts_of(place: str) -> tuple[list[str], str] | None:
    """Return the hosts and the path of a place on machines; else None. Raises UsageError for a faulty place."""
    if "://" in place or ":" not in place:
        return None
    named = _HOSTS.fullmatch(place)
    if named is None:
        hint = "HOST,HOST:/PATH for machines; `./NAME` for a local folder without `:`"
        raise UsageError(f"{place!r} is no place", hint=hint)
    return named[1].split(","), named[2]


def _machines() -> backends.ReceivesModels:
    name = next(each for each in backends.BUILT_IN if traits(each).own_machines)
    backend = backends.load(name)
    assert isinstance(backend, backends.ReceivesModels)
    return backend


def _told(work: Callable[[], str]) -> PushOutcome:
    """Return the outcome of the work, which returns the version that is current afterwards."""
    try:
        return PushOutcome(work())
    except (Refused, OSError, CloudtrainError) as error:
        return PushOutcome(None, str(error) or type(error).__name__)


def _to_folder(place: str, model: PushedModel, *, replaces: bool) -> str:
    sizes = {name: path.stat().st_size for name, path in model.files.items()}
    path, version = place.removeprefix("file://"), model.version
    begun = models.begin(place=path, version=version, name=model.name, files=sizes, replaces=replaces)
    root = begun["place"]
    if not begun["kept"] or models.keep(place=root, version=version)["damaged"]:
        for name, source in model.files.items():
            models.put(place=root, version=version, name=name, offset=0)
            shutil.copyfile(source, models.part_of(Path(root), version) / name)
    if damaged := models.keep(place=root, version=version)["damaged"]:
        raise ConfigError(f"{root}: {damaged[0]} is damaged after the copy", hint="look at the disk")
    return str(models.use(place=root, version=version, name=model.name)["version"])


def _to_store(place: str, model: PushedModel, *, replaces: bool) -> str:
    """Store the files, SHA256SUMS last, and then change versions.json."""

    def put(name: str) -> None:
        store.put(model.files[name], f"{model.version}/{name}")

    store = open_store(place)
    known, _ = _known(store)
    if known["name"] not in (None, model.name) and not replaces:
        message = f"{place} holds the model {known['name']}, not {model.name}"
        raise UsageError(message, hint="choose another place, or add --replace")
    if store.read(f"{model.version}/{folders.SUMS}")[0] is None:
        files = [name for name in model.files if name != folders.SUMS]
        in_threads(put, files, 4)
        put(folders.SUMS)
    dropped = _change(store, lambda known: models.used(known, model.version, model.name))
    for version in dropped:
        for name in store.names(f"{version}/"):
            store.delete(name)
    return model.version


def _store_back(place: str) -> str:
    store = open_store(place)
    _change(store, lambda known: (models.restored(known, place), []))
    return str(_known(store)[0]["current"])


def _known(store: Store) -> tuple[dict[str, Any], str]:
    """Return the content of versions.json and its version in the store."""
    data, version = store.read(models.VERSIONS)
    try:
        return models.known_of(json.loads(data) if data else {}), version
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{models.VERSIONS} there is damaged", hint="restore it, or choose another place") from error


def _change(store: Store, change: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]) -> list[str]:
    """Change versions.json, again if another push changes the file meanwhile; return the versions to remove."""
    for _ in range(_TRIES):
        known, version = _known(store)
        changed, dropped = change(known)
        if changed == known or store.put_if(json.dumps(changed).encode(), models.VERSIONS, version):
            return dropped
    raise ConfigError("versions.json changes all the time", hint="let the other pushes end, and repeat this one")
