"""Messages and errors in the words of Python: the keywords and functions of launcher/api.py for options and commands.

A command without a function in Python stays, and is named as a command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..errors import CloudtrainError, ConfigError, Fault
from .terminal import reporting

FLAGS, TEXTS = "force|from-older|now|start-over|update-code|update-config", "backend|budget|by|month|name|since|trials"
OF_JOBS, OF_ALL = "artifacts|logs|resume|status|stop|wait", "cost|list|submit"
OTHERS = """adopt|advance|approve|backends|best|budget|compare|completion|deploy|diagnose|doctor|evaluate|exec|explain
|export|extend|hosts|init|notify|plan|prices|prune|push|register|rehearse|report|rm|schema|selftest|serve|ui|undeploy
|validate|watch""".replace("\n", "")
FORMS = {"set": 'overrides=["{}"]', "instances": 'resources={{"instances": {}}}'}
FORMS["price-per-hour"] = 'overrides=["BACKEND.price_per_hour={}"]'
_VALUE = r"[+\w./-]*(?:[A-Z0-9=]|(?<=--backend )[a-z]|\w(?=: expected))(?:[^\s,;:)`]|:\w)*|'[^']+'"
_OPTION = rf"--(?:(?P<flag>{FLAGS})|(?P<name>{TEXTS}|{'|'.join(FORMS)})(?: (?P<value>{_VALUE}))?)(?![\w=-])"
_CALL = rf"cloudtrain (?:(?P<of>{OF_JOBS})\b(?P<follow> -f)?(?: (?P<job>(?!-)[\w.-]*\w)(?![\w=]))?|(?P<all>{OF_ALL})\b"
_CALL += r"(?: --all| -d)?)(?P<more>(?: \w+=(?:True|\S+[\"\]}]))*)(?! -)"
_COMMAND = rf"(`?cloudtrain (?:{OTHERS}|stop --forget|logs --)\b[^,;:`()]*)"


@contextmanager
def speaking(to: Callable[[str], None]) -> Iterator[None]:
    """In the block, pass messages for people to the function `to`; messages and raised errors speak Python."""
    with reporting(lambda message: to(in_python(message))):
        try:
            yield
        except CloudtrainError as error:
            error.message, error.where, error.hint = map(in_python, (error.message, error.where, error.hint))
            if isinstance(error, ConfigError):
                error.faults = tuple(map(_fault, error.faults))
            raise


def in_python(text: str) -> str:
    """Return the message with keywords and calls in the place of options and commands."""
    parts = re.split(_COMMAND, text)
    parts[::2] = [re.sub(_CALL, _call, re.sub(_OPTION, _keyword, part)) for part in parts[::2]]
    return "the command ".join(["".join(parts[:1]), *map("".join, zip(parts[1::2], parts[2::2], strict=True))])


def _keyword(found: re.Match[str]) -> str:
    if found["flag"]:
        return f"{found['flag'].replace('-', '_')}=True"
    form = FORMS.get(found["name"], found["name"] + '="{}"')
    return form.format(found["value"].strip("'")) if found["value"] else f"`{form.partition('=')[0]}`"


def _call(found: re.Match[str]) -> str:
    name = found["of"] or {"list": "jobs"}.get(found["all"], found["all"])
    first = [f'"{found["job"]}"'] if found["job"] else ["config"] if name == "submit" else []
    follow = ["follow=True"] if found["follow"] else []
    return f"{name}({', '.join([*first, *follow, *found['more'].split()])})"


def _fault(fault: Fault) -> Fault:
    place = fault.place and replace(fault.place, file=in_python(fault.place.file.removeprefix("--set ")))
    return replace(fault, message=in_python(fault.message), hint=in_python(fault.hint), place=place)
