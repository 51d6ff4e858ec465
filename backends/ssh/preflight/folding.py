"""Short texts for many hosts: equal values once, neighbours as ranges, one command for all hosts with a problem."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from cloudtrain.launcher.backend import Check

SHORTEST = 3  # neighbours that become a range


def fold(values: Mapping[str, str], of: int) -> str:
    """Return `VALUE: HOSTS | VALUE: HOSTS`, the commonest value first; HOSTS is `all N hosts` if all of `of` agree."""
    texts = []
    for value, hosts in groups(values).items():
        who = f"all {of} hosts" if len(hosts) == of > 1 else ranges(hosts)
        texts.append(f"{value}: {who}")
    return " | ".join(texts)


def groups(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hosts by value, the commonest value first."""
    found: dict[str, list[str]] = {}
    for host, value in values.items():
        found.setdefault(value, []).append(host)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def most(values: Mapping[str, str]) -> str:
    """Return the commonest value; among equally common values, the first."""
    return next(iter(groups(values)))


def ranges(hosts: Iterable[str]) -> str:
    """Return the names or numbers, with neighbours as a range: `gpu1-gpu4, gpu7, head`."""
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(hosts))


def graded(
    name: str, grades: Mapping[str, tuple[str, str]], of: int, cure: Callable[[Sequence[str]], str]
) -> Iterator[Check]:
    """Yield one line for all failed hosts and one for all warnings; if all hosts are good, one line with their values.

    `grades` maps a host to verdict and finding; `cure` returns the command for hosts of one verdict.
    """
    for verdict in ("fail", "warn"):
        if bad := {host: words for host, (grade, words) in grades.items() if grade == verdict}:
            yield Check(name, verdict, fold(bad, of), cure(list(bad)))
    if grades and all(grade == "ok" for grade, _ in grades.values()):
        yield Check(name, "ok", fold({host: words for host, (_, words) in grades.items()}, of))


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in the text, for example of a version."""
    return tuple(int(part) for part in re.findall(r"\d{1,18}", text))


def remote(hosts: Iterable[str], command: str) -> str:
    """Return the line to type that runs the command on each of the hosts."""
    asks = "-t " if "sudo " in command else ""  # sudo may ask for a password, which needs a terminal
    return local(hosts, f"ssh {asks}{{}} {shlex.quote(command)}")


def local(hosts: Iterable[str], command: str) -> str:
    """Return the line to type that runs the command here for each host: `{}` stands for the host's name."""
    names = list(hosts)
    if len(names) == 1:
        return command.replace("{}", shlex.quote(names[0]))
    words = " ".join(_typed(run) for run in _runs(names))
    return f"for h in {words}; do {command.replace('{}', '$h')}; done"


def _runs(hosts: Iterable[str]) -> list[list[str]]:
    """Return the names in runs of neighbours; a name without a neighbour is a run of its own."""
    found: list[list[str]] = []
    for host in sorted(hosts, key=_natural):
        if found and _next(found[-1][-1]) == host:
            found[-1].append(host)
        else:
            found.append([host])
    return [part for run in found for part in ([run] if len(run) >= SHORTEST else [[host] for host in run])]


def _natural(host: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host)]


def _next(host: str) -> str | None:
    """Return the next name: the last number of the first label plus 1; for an address, the last number plus 1."""
    parts = _parts(host)
    if parts is None:
        return None
    before, number, after = parts
    return f"{before}{int(number) + 1:0{len(number)}d}{after}"


def _parts(host: str) -> tuple[str, str, str] | None:
    label, dot, rest = (host, "", "") if re.fullmatch(r"[\d.]+", host) else host.partition(".")
    match = re.fullmatch(r"(.*?)(\d+)(\D*)", label)
    return (match[1], match[2], f"{match[3]}{dot}{rest}") if match else None


def _typed(run: list[str]) -> str:
    """Return shell words for the names; a long run as a call of seq."""
    parts = _parts(run[0])
    if len(run) <= SHORTEST or parts is None or "%" in run[0]:
        return " ".join(map(shlex.quote, run))
    before, number, after = parts
    last = _parts(run[-1])
    assert last is not None
    width = f"0{len(number)}" if number.startswith("0") and len(number) > 1 else ""
    form = shlex.quote(f"{before}%{width}g{after}")
    return f"$(seq -f {form} {int(number)} {int(last[1])})"
