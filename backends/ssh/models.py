"""Model folders on hosts: one upload, then copies from host to host, then the change of the link on all hosts.

The upload goes to the first host that answers. Each host with the version then serves a host without the version, so
the number of copies doubles each round. A host that fails is left out and reported; its link stays as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.launcher.backend.model_files import PushedModel, PushOutcome
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CloudtrainError, ConfigError

from ..channel.calls import Call, Fleet
from ..channel.hosts import Host
from .hosts_placement import address_of
from .request import of_config

BLOCK = 4 << 20
LIMIT_S = 600.0  # for a block on a slow uplink, and for the check of a version
COPY_S = 3600.0
TRIES = 3  # of damaged files


def push(
    fleet: Fleet, config: JobConfig | None, names: Sequence[str], place: str, model: PushedModel, *, replaces: bool
) -> dict[str, PushOutcome]:
    """Make the model current at `place` on each host; return the outcomes. Raises ConfigError if one is named twice."""
    return _Push(fleet, _hosts(config, names), place, model).run(replaces=replaces)


def restore(fleet: Fleet, config: JobConfig | None, names: Sequence[str], place: str) -> dict[str, PushOutcome]:
    """Make the version before the current one current on each host; return the outcome by host."""
    hosts = _hosts(config, names)
    answers = fleet.ask(dict.fromkeys(hosts, Call("models.back", {"place": place})), LIMIT_S, is_urgent=True)
    return {
        host.name: PushOutcome(None, str(answer.error)) if answer.error else PushOutcome(answer.reply["version"])
        for host, answer in answers.items()
    }


def _hosts(config: JobConfig | None, names: Sequence[str]) -> list[Host]:
    """Return the hosts; a host of the config has the settings there. `user@name` names the user."""
    known = {} if config is None else {each.name: each for each in of_config(config)}
    default = next(iter(known.values()), Host("default"))
    found = []
    for word in names:
        user, _, name = word.rpartition("@")
        host = known.get(name) or dataclasses.replace(default, name=name, address=None)
        found.append(dataclasses.replace(host, user=user or host.user))
    if len({host.name for host in found}) < len(found):
        raise ConfigError("a host is named twice", hint="name each host once")
    return found


class _Push:
    """The transfer of one model. `errors`: by host, of the hosts that are left out."""

    def __init__(self, fleet: Fleet, hosts: Sequence[Host], place: str, model: PushedModel) -> None:
        self._fleet, self._hosts, self._place, self._model = fleet, hosts, place, model
        self.errors: dict[Host, CloudtrainError] = {}
        self._at: dict[Host, str] = {}  # the absolute path of the place

    def run(self, *, replaces: bool) -> dict[str, PushOutcome]:
        """Run all steps; return the outcome by host's name."""
        model = self._model
        sizes = {name: path.stat().st_size for name, path in model.files.items()}
        asked = {"place": self._place, "version": model.version, "name": model.name, "files": sizes}
        begin = Call("models.begin", {**asked, "replaces": replaces})
        replies = self._all(dict.fromkeys(self._hosts, begin))
        self._at = {host: reply["place"] for host, reply in replies.items()}
        kept = self._kept([host for host, reply in replies.items() if reply["kept"]])
        have = [host for host, damaged in kept.items() if not damaged]
        replies |= self._all({host: begin for host, damaged in kept.items() if damaged})
        lack = [host for host in replies if host not in have and host not in self.errors]
        for host in list(lack) if not have else ():
            lack.remove(host)
            if self._upload(host, replies[host]["arrived"]):
                have = [host]
                break
        while lack:
            pairs = dict(zip(lack, have, strict=False))
            arrived = self._copied(pairs)
            failed = [host for host in pairs if host not in arrived]
            for host in failed:  # a host that its peers cannot reach
                if self._upload(host, {}):
                    arrived.append(host)
            have, lack = [*have, *arrived], [host for host in lack if host not in pairs]
        about = {"version": model.version, "name": model.name}
        self._all({host: Call("models.use", {"place": self._at[host], **about}) for host in have})
        errors = {host.name: PushOutcome(None, str(error)) for host, error in self.errors.items()}
        return {host.name: errors.get(host.name, PushOutcome(model.version)) for host in self._hosts}

    def _all(self, calls: Mapping[Host, Call]) -> dict[Host, dict[str, Any]]:
        """Return the replies; a host with an error is left out from now on."""
        answers = self._fleet.ask(calls, LIMIT_S, is_urgent=True)
        self.errors |= {host: answer.error for host, answer in answers.items() if answer.error is not None}
        return {host: answer.reply for host, answer in answers.items() if answer.error is None}

    def _upload(self, host: Host, arrived: Mapping[str, int]) -> bool:
        """Send all files from here, from the end of an earlier try; return whether the version is complete."""
        where = {"place": self._at[host], "version": self._model.version}
        names, begun = sorted(self._model.files), dict(arrived)
        try:
            for _ in range(TRIES):
                for name in names:
                    self._send(host, name, self._model.files[name], begun.get(name, 0), where)
                names = self._fleet.call(host, "models.keep", where, limit_s=LIMIT_S)["damaged"]
                if not names:
                    self.errors.pop(host, None)
                    return True
                begun = {}
            raise ConfigError(f"{host.name}: the model has arrived damaged {TRIES} times", hint="look at its disk")
        except CloudtrainError as error:
            self.errors[host] = error
            return False

    def _send(self, host: Host, name: str, path: Path, begin: int, where: Mapping[str, Any]) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(begin if begin <= size else 0)
            while True:
                offset, block = file.tell(), file.read(BLOCK)
                if block or not size:
                    self._fleet.call(host, "models.put", {**where, "name": name, "offset": offset}, block, LIMIT_S)
                if len(block) < BLOCK:
                    return

    def _copied(self, pairs: Mapping[Host, Host]) -> list[Host]:
        """Copy the version to each host from its source; return the hosts that have the version now."""
        version, calls = self._model.version, {}
        for host, source in pairs.items():
            try:
                about = {"folder": self._at[source], "address": address_of(self._fleet, source)}
                offer = self._fleet.call(source, "copying.offer", about)
            except CloudtrainError as error:
                self.errors[host] = error
                continue
            calls[host] = Call("copying.fetch", {**offer, "name": version, "into": self._at[host]})
        fetched = self._fleet.ask(calls, COPY_S, is_urgent=True)
        self.errors |= {host: answer.error for host, answer in fetched.items() if answer.error is not None}
        arrived = [host for host, answer in fetched.items() if answer.error is None]
        kept = self._kept(arrived)
        for host in [host for host, damaged in kept.items() if damaged]:
            self.errors[host] = ConfigError(f"{host.name}: the copy of the model is damaged", hint="look at its disk")
        return [host for host, damaged in kept.items() if not damaged]

    def _kept(self, hosts: Sequence[Host]) -> dict[Host, list[str]]:
        """Have the hosts verify the version; return the damaged files by host."""
        about = {"version": self._model.version}
        replies = self._all({host: Call("models.keep", {**about, "place": self._at[host]}) for host in hosts})
        return {host: reply["damaged"] for host, reply in replies.items()}
