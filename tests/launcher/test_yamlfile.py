"""YAML text -> values with their places."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.launcher.config import yamlfile
from cloudtrain.launcher.errors import Fault


@pytest.fixture(params=["C", "Python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with each of PyYAML's parsers."""
    if request.param == "C" and not hasattr(yaml, "CSafeLoader"):
        pytest.skip("PyYAML was built without libyaml")
    loader = yaml.SafeLoader if request.param == "Python" else yaml.CSafeLoader
    monkeypatch.setattr(yamlfile, "_LOADER", loader)
    return str(request.param)


def read(text: str, **environ: str) -> Any:
    """Return the data of a text without faults."""
    parsed = yamlfile.parse(text, "f.yaml", environ)
    assert not parsed.faults
    return parsed.root.data()


def only_fault(text: str, **environ: str) -> Fault:
    """Return the single fault of a text."""
    (fault,) = yamlfile.parse(text, "f.yaml", environ).faults
    return fault


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("3e-4", 3e-4), ("12:30", "12:30"), ("yes", "yes"), ("no", "no"), ("off", "off"), ("True", True)),
        *(("012", 12), ("0o17", 15), ("0xff", 255), (".5", 0.5), ("1_000", "1_000"), ("~", None)),
        *(("2024-01-01", "2024-01-01"), ("'3'", "3"), ("9" * 5000, "9" * 5000)),
    ],
)
@pytest.mark.usefixtures("parser")
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    """Scalars follow YAML 1.2's core schema, although PyYAML implements 1.1."""
    assert read(f"key: {text}") == {"key": value}


def test_keys_are_text_and_aliases_repeat_values() -> None:
    """`on`, `true` and `1` are text keys, a variable names no key, and `*name` has the value of `&name`."""
    assert read("on: 1\ntrue: 2\n1: 3\n") == {"on": 1, "true": 2, "1": 3}
    assert read("'${N}': 1", N="name") == {"${N}": 1}
    assert read("a: &x {b: [1]}\nc: *x\n") == {"a": {"b": [1]}, "c": {"b": [1]}}


@pytest.mark.parametrize(
    ("text", "message", "line", "column"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "`[` that opens here", 2, 4),
        ("a: {x: 1\n", "`{` that opens here", 1, 4),
        ("a:\n\tb: 1\n", "a tab cannot indent", 2, 1),
        ("a: b: c\n", "a `:` where none can stand", 1, 5),
        ("a: 'x\nb: 2\n", "quote that opens here", 1, 4),
        ("a: {x: ${V}}\n", "a variable inside `{ }` or `[ ]` needs quotes", 1, 8),
        ("- a\nb: 1\n", "this line fits neither", 2, 1),
        ("a: @x\n", "this character cannot begin a value", 1, 4),
        ("a: *x\n", "`*x` has no anchor", 1, 4),
        ("a: &x [*x]\n", "`*x` has no anchor", 1, 8),
        ("a: !!python/name:os.system x\n", "the tag `!!python/name:os.system` has no meaning", 1, 4),
        ("a: 1\n---\nb: 2\n", "a second document", 2, 1),
        ("{a: 1}: 2\n", "a mapping cannot be a key", 1, 1),
        ("? [a]\n: b\n", "a list cannot be a key", 1, 3),
        ("<<: {a: 1}\n", "`<<` does not merge", 1, 1),
        ("a: .inf\n", "expected a finite number", 1, 4),
        ("a: 1e999\n", "expected a finite number", 1, 4),
        ("a: b\x07\n", "a character that YAML does not allow", 1, 5),
        ('a: "\\0"\n', "a NUL", 1, 4),
        ("[" * 99 + "]" * 99, "nested more than 50 levels", 1, 52),
    ],
)
@pytest.mark.usefixtures("parser")
def test_invalid_yaml_has_a_message_and_a_place(text: str, message: str, line: int, column: int) -> None:
    """Both parsers give the same messages and places, for faults of YAML and for our own rules."""
    fault = only_fault(text)
    assert message in fault.message
    assert (fault.place.line, fault.place.column) == (line, column)


@pytest.mark.parametrize(
    "text", ["{}: v\n", "tags:\n  a: 1\n  {}: v\n", "tags: {{a: 1, {}: v}}\n", 'tags: {{"{}": v}}\n']
)
@pytest.mark.usefixtures("parser")
def test_key_that_is_too_long_is_named(text: str) -> None:
    """A key has at most 1,024 characters; a long value in the same place is a different fault."""
    fault = only_fault(text.format("k" * 1100))
    assert fault.message == "a key may have at most 1,024 characters"
    assert fault.place.line == text.count("\n", 0, text.index("{}")) + 1
    assert "`:` where none can stand" in only_fault(f"tags: a {'k' * 1100} b: v\n").message


def test_places_are_exact() -> None:
    """A duplicate key has two places, a missing variable a caret; a line separator in a text is a line."""
    fault = only_fault("a:\n  b: 1\n  b: 2\n")
    assert (fault.message, fault.key) == ("duplicate key `b`", "a.b")
    assert [place.line for place in (fault.place, *fault.also) if place] == [3, 2]
    fault = only_fault('a:\n  - "\\t ${N} ${GONE}"\n', N="1")
    assert (fault.key, fault.place.line, fault.place.column) == ("a.0", 2, 14)
    assert "`GONE` is not set" in fault.message
    fault = only_fault("a: 'x\u2028  y'\nb: ${GONE}\n")
    assert fault.place.excerpt == "b: ${GONE}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("${N}", 12), ("'${N}'", "12"), ("x${N}", "x12"), ("${GONE:-7}", 7), ("${EMPTY:-7}", 7)),
        *(("${EMPTY}", None), ("a$${N}b", "a${N}b"), ("$N", "$N")),
        *(("${ODD}", "a: [1]\n# 'x"), ('"${GONE:-a: b}"', "a: b")),
    ],
)
def test_variables_are_substituted_in_scalars(text: str, value: Any) -> None:
    """`${VAR}` inserts text; alone and unquoted the result may be a number; the structure never changes."""
    assert read(f"key: {text}", N="12", EMPTY="", ODD="a: [1]\n# 'x") == {"key": value}


@pytest.mark.parametrize("text", ["${}", "${A B}", "${A:?no}", "'${A'", "'${{ inputs.x }}'"])
def test_invalid_references_are_refused(text: str) -> None:
    """Text that is neither a variable nor escaped is a fault, and the hint explains the escape."""
    fault = only_fault(f"key: {text}")
    assert "is not a variable" in fault.message
    assert "$${" in fault.hint
    assert ("write `$CLOUDTRAIN_INPUT_X`" in fault.hint) == ("inputs.x" in text)


def test_secret_variables_are_not_shown() -> None:
    """A value from a secret variable is shown as written; aliases for billions of values are not expanded."""
    parsed = yamlfile.parse("key: x-${MY_TOKEN}", "f.yaml", {"MY_TOKEN": "hunter2"})
    node = yamlfile.find(parsed.root, ("key",)) if parsed.root else None
    assert (node.value, node.shown) == ("x-hunter2", "x-${MY_TOKEN}")
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    assert "more than 50000 values" in only_fault("\n".join(lines)).message


@pytest.mark.usefixtures("parser")
def test_empty_text_has_no_root() -> None:
    """An empty text, or only comments, gives no value and no fault."""
    assert yamlfile.parse("# only\n", "f.yaml", {}) == yamlfile.ParsedYaml(None, ())


@given(st.text(alphabet="ab:-[]{}#&*!|>'\"%@`$\\ \t\n\r,?~0.é\u2028\x00\ud800\x85"))
def test_any_text_gives_a_tree_or_faults(text: str) -> None:
    """No text raises an error, and every fault has a place in the text."""
    parsed = yamlfile.parse(text, "f.yaml", {"a": "[1"})
    for fault in parsed.faults:
        assert 1 <= fault.place.line <= text.count("\n") + text.count("\r") + 4 * len(text) + 1
        assert str(fault)
