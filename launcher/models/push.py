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
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.host import models
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.backend import PushedModel
from cloudtrain.launcher.backend_table import traits
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UsageError

if TYPE_CHECKING:
    from cloudtrain.entrypoints.models.folder import ModelFolder
    from cloudtrain.entrypoints.stores.store import Store
    from cloudtrain.launcher.config.schema import JobConfig

__all__ = ["back", "push", "pushed"]

_HOSTS = re.compile(r"([\w.@-]+(?:,[\w.@-]+)*):(.+)")
_DIGITS = 12  # of a version
_TRIES = 20  # of the change of versions.json, while others change it


def pushed(folder: ModelFolder, name: str | None) -> PushedModel:
    """Return the model for `push`. `name`: by default the model's own."""
    files = {each: folder.path / each for each in (*folder.files, models.SUMS)}
    return PushedModel(name or str(folder.config.get("name") or folder.path.name), folder.digest[:_DIGITS], files)


def push(model: PushedModel, place: str, config: JobConfig | None, *, replaces: bool) -> dict[str, str]:
    """Bring the model to the place, and make the model current there; return the error by target, "" if well.

    Raises ConfigError and UsageError for a wrong place. The errors of a single target are in the result.
    """
    if urlsplit(place).scheme in _schemes():
        return {place: _told(lambda: _to_store(place, model, replaces=replaces))}
    if named := _HOSTS.fullmatch(place):
        return _machines().push_model(config, named[1].split(","), named[2], model, replaces=replaces)
    return {place: _told(lambda: _to_folder(place, model, replaces=replaces))}


def back(place: str, config: JobConfig | None) -> dict[str, str]:
    """Make the version before the current one current again; return the error by target, "" if well."""
    if urlsplit(place).scheme in _schemes():
        return {place: _told(lambda: _store_back(place))}
    if named := _HOSTS.fullmatch(place):
        return _machines().restore_model(config, named[1].split(","), named[2])
    return {place: _told(lambda: models.back(place=place))}


def _schemes() -> set[str]:
    from cloudtrain.entrypoints.stores.store import MODULES

    return {"file", *MODULES}


def _machines() -> backends.ReceivesModels:
    name = next(each for each in backends.BUILT_IN if traits(each).own_machines)
    found = backends.load(name)
    assert isinstance(found, backends.ReceivesModels)
    return found


def _told(work: Callable[[], object]) -> str:
    """Do the work; return the error as text, or an empty text."""
    try:
        work()
    except (Refused, OSError, CloudtrainError) as error:
        return str(error) or type(error).__name__
    return ""


def _to_folder(place: str, model: PushedModel, *, replaces: bool) -> None:
    sizes = {name: path.stat().st_size for name, path in model.files.items()}
    begun = models.begin(place=place, version=model.version, name=model.name, files=sizes, replaces=replaces)
    root = begun["place"]
    if not begun["kept"] or models.keep(place=root, version=model.version)["damaged"]:
        for name, path in model.files.items():
            models.put(place=root, version=model.version, name=name, offset=0)
            shutil.copyfile(path, models.part_of(Path(root), model.version) / name)
    if damaged := models.keep(place=root, version=model.version)["damaged"]:
        raise ConfigError(f"{root}: {damaged[0]} is damaged after the copy", hint="look at the disk")
    models.use(place=root, version=model.version, name=model.name)


def _to_store(place: str, model: PushedModel, *, replaces: bool) -> None:
    """Store the files, SHA256SUMS last, and then change versions.json."""
    from cloudtrain.entrypoints.stores.store import in_threads, open_store

    store = open_store(place)
    known, _ = _known(store)
    if known["name"] not in (None, model.name) and not replaces:
        message = f"{place} holds the model {known['name']}, not {model.name}"
        raise UsageError(message, hint="choose another place, or add --replace")
    if store.read(f"{model.version}/{models.SUMS}")[0] is None:
        files = [name for name in model.files if name != models.SUMS]
        in_threads(lambda name: _put(store, model, name), files, 4)
        _put(store, model, models.SUMS)
    dropped = _change(store, lambda known: models.used(known, model.version, model.name))
    for version in dropped:
        for name in store.names(f"{version}/"):
            store.delete(name)


def _put(store: Store, model: PushedModel, name: str) -> None:
    store.put(model.files[name], f"{model.version}/{name}")


def _store_back(place: str) -> None:
    from cloudtrain.entrypoints.stores.store import open_store

    def chosen(known: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        if len(known["versions"]) < 2:
            raise Refused(f"{place} has no version before the current one")
        return models.restored(known), []

    _change(open_store(place), chosen)


def _known(store: Store) -> tuple[dict[str, Any], str]:
    """Return the content of versions.json and its version in the store."""
    data, version = store.read(models.VERSIONS)
    found = json.loads(data) if data else {}
    return {"name": found.get("name"), "versions": list(found.get("versions") or ())}, version


def _change(store: Store, change: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]) -> list[str]:
    """Change versions.json, again if another push changes the file meanwhile; return the versions to remove."""
    for _ in range(_TRIES):
        known, version = _known(store)
        changed, dropped = change(known)
        if changed == known or store.put_if(json.dumps(changed).encode(), models.VERSIONS, version):
            return dropped
    raise ConfigError("versions.json changes all the time", hint="let the other pushes end, and repeat this one")
