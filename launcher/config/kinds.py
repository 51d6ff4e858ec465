"""The kinds of value beyond YAML's own that a config key can hold: durations, money, names.

Each kind defines its expected form once, for the error message, for `explain` and for the JSON schema of editors.
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict, WithJsonSchema
from pydantic_core import core_schema

from cloudtrain.entrypoints.stores import LEDGER_PATTERN, forms

from ..job import PROJECT_PATTERN
from ..text import units

T = TypeVar("T")
# A strict model refuses a list in place of a tuple, and YAML has only lists.
Many = Annotated[tuple[T, ...], Strict(False)]

# Descriptions of keys that several backends' blocks have.
RAW = "Merged last, deep, into the rendered request; the dry run shows the changes."
PRICE = "Price of an instance with disk for an hour, in US dollars; beats the price list."
_LONGEST_PATTERN = 2000
ENDPOINTS = "Addresses in place of the vendor's own, by service; for private endpoints and tests."


class Section(BaseModel):
    """A mapping of the config: unknown keys are refused, and no value is converted to the wanted type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, defer_build=True, allow_inf_nan=False, protected_namespaces=()
    )


def key(default: Any, text: str, *examples: Any, **bounds: Any) -> Any:
    """Return the field of a key with a default: the help, values as examples, and bounds such as `ge=1`."""
    return Field(default, description=text, examples=list(examples), **bounds)


def section_key(kind: type[Section], example: dict[str, Any], **defaults: Any) -> Any:
    """Return the field of a key with a section, whose docstring is the help; `defaults`: of its validators."""
    return key(kind.model_construct(**defaults), kind.__doc__ or "", example)


@dataclass(frozen=True, eq=False)
class Kind:
    """A scalar with its own reader: `read` returns the value, or raises ValueError with the expected form."""

    name: str
    read: Callable[[Any], Any]
    json_schema: dict[str, Any]
    write: Callable[[Any], Any] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        writer = core_schema.plain_serializer_function_ser_schema(self.write) if self.write else None
        return core_schema.no_info_plain_validator_function(self.read, serialization=writer)

    def __get_pydantic_json_schema__(self, _: core_schema.CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.json_schema)


@dataclass(frozen=True, eq=False)
class Shorthand:
    """A shorter form of a value: `expand` replaces the short form by the long form and keeps other values."""

    name: str
    expand: Callable[[Any], Any]
    json_schema: dict[str, Any] = field(default_factory=dict)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(schema), dict(self.json_schema)]}


def argv(value: Any) -> Any:
    """Return a mapping of options, or a command line as text, as an argument list; a list is returned unchanged.

    `{epochs: 10, flag: true, off: false, x: [1, 2], -v: true}` becomes `--epochs 10 --flag --x 1 2 -v`: true gives the
    option alone, false and null omit the option, a list follows its option. Text is split by shlex. Raises ValueError.
    """
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ValueError(f"arguments as a shell would split them ({str(error).lower()})") from None
    if not isinstance(value, dict):
        return value
    wanted = "text, a number, true, false or a list of them for each option"
    arguments: list[str] = []
    for name, given in value.items():
        if given is None or given is False:
            continue
        arguments.append(name if name.startswith("-") else f"--{name}")
        items = given if isinstance(given, list | tuple) else [] if given is True else [given]
        if any(item is None or isinstance(item, dict | list) for item in items):
            raise ValueError(wanted)
        arguments += [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
    return arguments


def _matching(name: str, wanted: str, pattern: str) -> Kind:
    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(wanted)
        return value

    return Kind(name, read, {"type": "string", "pattern": f"^({pattern})$"})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    if not value.strip():
        raise ValueError("text that is not empty")
    return value


def _relative_path(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a path below `code.dir`")
    return value


def _kept_path(value: object) -> str:
    text = value.removeprefix("!") if isinstance(value, str) else ""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or text.startswith(("/", "~")) or ".." in parts or "\0" in text:
        raise ValueError("a path or pattern below the working directory, such as `out/` or `*.ckpt`")
    return f"{'!' * str(value).startswith('!')}{'/'.join(parts)}{'/' * text.endswith('/')}"


def _pattern(value: object) -> str:
    compiled = _compiled(value) if isinstance(value, str) else None
    if compiled is None or not compiled.groups:
        raise ValueError("a regular expression whose first group is the number, such as `loss ([0-9.]+)`")
    return compiled.pattern


def _regex(value: object) -> str:
    if isinstance(value, str) and value:
        return _compiled(value).pattern
    raise ValueError("a regular expression that finds names")


def _compiled(value: str) -> re.Pattern[str]:
    if len(value) > _LONGEST_PATTERN:
        raise ValueError(f"a regular expression of at most {_LONGEST_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a set in a set, which a later Python may read otherwise
            return re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"a regular expression ({error})") from error


def _price(value: object) -> int:
    if micro := units.parse_money(value):
        return micro
    raise ValueError("a price above 0: what is not known is not 0; leave it out, and the price list counts")


def _process_count(value: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024:
        return value
    raise ValueError("`auto` or a whole number from 1 to 1024")


# The lookahead refuses `A100x8`, which would be one accelerator of an unknown type.
_ACCELERATORS = r"(?!.*[0-9][A-Za-z-]*[xX][0-9]+(:|$))[A-Za-z][A-Za-z0-9_-]*(:[1-9][0-9]{0,3})?"


def _accelerators(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(_ACCELERATORS, value):
        return value if ":" in value else f"{value}:1"
    raise ValueError("a type and a count per instance, such as `A100:8`")


_DURATION = {"anyOf": [{"type": "string", "pattern": units.DURATION_PATTERN}, {"const": 0}]}
_MONEY = {"anyOf": [{"type": "string", "pattern": units.MONEY_PATTERN}, {"type": "number", "minimum": 0}]}
_ABOVE_0 = units.MONEY_PATTERN.replace("^", "^(?=.*[1-9])", 1)
_PRICE = {"anyOf": [{"type": "string", "pattern": _ABOVE_0}, {"type": "number", "exclusiveMinimum": 0}]}
_SIZE = {"anyOf": [{"type": "string", "pattern": units.SIZE_PATTERN}, {"type": "integer", "minimum": 1}]}
_COUNT = {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": 1024}]}
_PERCENT = {"type": "string", "pattern": units.PERCENT_PATTERN}
_ARGUMENTS = {"anyOf": [{"type": "object", "additionalProperties": {"not": {"type": "object"}}}, {"type": "string"}]}
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"

Duration = Annotated[int, Kind("duration", units.parse_duration, _DURATION, units.format_duration)]
Money = Annotated[int, Kind("amount of money", units.parse_money, _MONEY, units.format_money)]
Price = Annotated[int, Kind("price", _price, _PRICE, units.format_money)]
Percent = Annotated[int, Kind("percentage", units.parse_percent, _PERCENT, units.format_percent)]
SizeGb = Annotated[int, Kind("size in GB", units.parse_size_gb, _SIZE)]
ProcessCount = Annotated[int | Literal["auto"], Kind("whole number or auto", _process_count, _COUNT)]
Accelerators = Annotated[str, Kind("accelerators", _accelerators, {"type": "string", "pattern": f"^{_ACCELERATORS}$"})]
RelativePath = Annotated[str, Kind("path", _relative_path, {"type": "string", "minLength": 1})]
KeptPath = Annotated[str, Kind("path", _kept_path, {"type": "string", "minLength": 1})]
Pattern = Annotated[str, Kind("regular expression", _pattern, {"type": "string", "format": "regex"})]
NamePattern = Annotated[str, Kind("regular expression", _regex, {"type": "string", "format": "regex"})]
CheckpointChoice = Annotated[
    str, _matching("checkpoint", "best, last, or a step such as step-200", r"best|last|step-[0-9]{1,12}")
]
# Text that may be written as an unquoted number or boolean: the value is the text as written.
Written = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
Text = Annotated[str, Kind("text", _text, {"type": "string", "minLength": 1})]
_PLACES = {"type": "object", "additionalProperties": {"minLength": 1}}
Place = Annotated[Text, Shorthand("mapping by backend", lambda place: place, _PLACES)]
Arguments = Annotated[Many[Written], Shorthand("mapping or text", argv, _ARGUMENTS)]

_NAME = "[a-z0-9][a-z0-9-]{0,40}"
# As the argument JOB of a command, `last` means the newest job.
_NAME_WANTED = f"a name of small letters, digits and hyphens, at most 41 (`{_NAME}`), not `last`"
JobName = Annotated[str, _matching("name", _NAME_WANTED, f"(?!last$){_NAME}")]
PROJECT_WANTED = "a project's name: small letters, digits, `-`, `_`, at most 63, a letter or digit first, not `agent`"
ProjectName = Annotated[str, _matching("project's name", PROJECT_WANTED, PROJECT_PATTERN)]
LedgerUri = Annotated[
    str, _matching("ledger's place", f"a ledger's place: {', '.join(forms('NAME'))} or a path", LEDGER_PATTERN)
]
BackendName = Annotated[
    str, _matching("backend", "a backend's name, such as `local` or `sagemaker`", r"[a-z][a-z0-9_-]{0,40}")
]


def _the_one(value: object) -> object:
    """Return the backend in a list of length 1. `--backend` replaces a longer list before; else raise ValueError."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) == 1:
        return value[0]
    raise ValueError("one backend, chosen by `--backend NAME` where the file lists several")


# `plan` compares several backends, and `submit` chooses from several (config/__init__.py); a job has one backend.
BackendChoice = Annotated[
    BackendName, Shorthand("list of them", _the_one, {"type": "array", "items": {"type": "string"}, "minItems": 1})
]
EnvName = Annotated[str, _matching("variable's name", "a variable's name: letters, digits and `_`", _WORD)]
# 128 is the limit of AWS, the largest of the three clouds; the backends check the smaller limits themselves.
_TAG = r"[^\x00-\x1f\x7f\u2028\u2029]{1,128}"
TagName = Annotated[str, _matching("tag's name", "a tag's name: 1 to 128 characters on one line", _TAG)]
InputName = Annotated[
    str, _matching("name", "a name of letters, digits and `_`: it becomes part of a variable's name", _WORD)
]
MetricName = Annotated[
    str,
    _matching("metric's name", "a metric's name: letters, digits and `_`, at most 40", r"[A-Za-z_][A-Za-z0-9_]{0,39}"),
]
_SPLIT_WANTED = "a split's name: letters, digits, `_`, `-` and `.`, at most 40, a letter, a digit or `_` first"
SplitName = Annotated[str, _matching("split's name", _SPLIT_WANTED, r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}")]


def _address(name: str, wanted: str, pattern: str) -> Kind:
    return _matching(name, f"`env:NAME` (the address is in that variable) or {wanted}", rf"env:{_WORD}|{pattern}")


Channel = Annotated[str, _address("address", "an http(s) address", r"https?://[!-~]+")]
AppriseUrl = Annotated[
    str, _address("address", "an address that Apprise knows, `ntfys://...`", r"(?!env:)[a-z][a-z0-9+.-]*://?[!-~]+")
]
MailServer = Annotated[str, _address("mail server", "smtp://USER:PASSWORD@HOST:587, smtps://...", r"smtps?://[!-~]+")]
MailAddress = Annotated[
    str, _matching("mail address", "a mail address such as team@example.org", r"[^\s@,;<>\"]+@[^\s@,;<>\"]+")
]
