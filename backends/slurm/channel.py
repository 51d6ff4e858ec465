"""The login node of a cluster: our verbs, and Slurm's commands, over ssh or in a process of this machine.

The ssh backend's channel does both: a process there answers the calls of entrypoints/host/slurm.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cloudtrain.launcher.errors import CloudtrainError, ConfigError

from ..channel.calls import Call, Fleet, HostAnswer
from ..channel.hosts import HERE, Host

_KEYS = {
    "ssh.python, or `python` of this host": "slurm.python",
    "ssh.python": "slurm.python",
    "ssh.workdir": "slurm.workdir",
    "ssh.hosts": "slurm.login",
    " (or ssh.accept_new_host_keys: true)": "",
}
CALL_S = 90.0  # for a verb that waits for Slurm, whose commands give up after 20 s by default


class Done(NamedTuple):
    """The result of a command on the login node."""

    code: int
    stdout: str = ""
    stderr: str = ""


Run = Callable[[Sequence[str]], Done]


@dataclass(frozen=True)
class Login:
    """The login node over one of the fleet's channels."""

    fleet: Fleet
    host: Host

    @staticmethod
    def at(fleet: Fleet, host: Host) -> Login:
        """Return the login node of a stored handle or of a config."""
        return Login(fleet, replace(host, python=sys.executable) if host.is_here else host)

    @property
    def about(self) -> Mapping[str, Any]:
        """The host's report about itself: home, workdir, name. Opens the channel on first use."""
        if not self.fleet.channel(self.host).about:
            self.call("calls.clock", {})
        return self.fleet.channel(self.host).about

    def call(self, verb: str, asked: Mapping[str, Any], limit_s: float = CALL_S) -> dict[str, Any]:
        """Return a verb's answer. Raises UnreachableError, CredentialError, ConfigError."""
        answer = self.fleet.ask({self.host: Call(verb, dict(asked))}, limit_s, is_urgent=True)[self.host]
        if answer.error is not None:
            raise in_our_words(answer.error)
        return answer.reply

    def poll(self, verb: str, asked: Mapping[str, Any]) -> HostAnswer:
        """Return the answer of a verb that only reads files; no call that waits for Slurm delays it. Raises as `call`.

        A login that has just failed is not called again during the pause of its fleet.
        """
        answer = self.fleet.hedged({self.host: Call(verb, dict(asked))}, lambda answers: False)[self.host]
        if answer.error is not None:
            raise in_our_words(answer.error)
        return answer

    def run(self, argv: Sequence[str]) -> Done:
        """Return the result of a command of Slurm. Raises as `call`."""
        return Done(**self.call("slurm.run", {"argv": list(argv)}))

    def path(self, text: str) -> str:
        """Return a path on the cluster, which may begin with `~/`, as an absolute path."""
        return f"{self.about['home']}{text[1:]}" if text == "~" or text.startswith("~/") else text


def host_of(settings: Mapping[str, Any]) -> Host:
    """Return the config's login node. Our process there runs with `slurm.python` if a path there, else python3."""
    python = settings["python"] if settings["container"] == "none" and "/" in settings["python"] else "python3"
    user, _, name = (settings["login"] or HERE).rpartition("@")
    config = settings["ssh_config"] if settings["login"] else None
    return Host(name, user or None, python=python, workdir=settings["workdir"], ssh_config=config)


def in_our_words(error: CloudtrainError) -> CloudtrainError:
    """Return the channel's error, with the keys of this backend's block."""

    def ours(text: str) -> str:
        for theirs, mine in _KEYS.items():
            text = text.replace(theirs, mine)
        return text

    error.message, error.hint = ours(error.message), ours(error.hint)
    if isinstance(error, ConfigError):
        faults = (replace(fault, message=ours(fault.message), hint=ours(fault.hint)) for fault in error.faults)
        error.faults = tuple(faults)
    return error
