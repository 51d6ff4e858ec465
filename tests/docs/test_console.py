"""The comparison of the tutorials with the printed output finds every difference."""

from pathlib import Path

import pytest
from docs.console import Session, Step, Written, missing, steps

PAGE = """\
text

```yaml
# job.yaml
name: x
```

```yaml
name: not a file
```

```json title="key.json"
{}
```

```console
$ cat job.yaml
# job.yaml
name: x
$ cat <<'END'
> two
> END
two
```
"""


def test_page_is_files_and_commands_in_order() -> None:
    """Blocks without a file name are ignored; a command may continue behind `> `."""
    assert list(steps(PAGE)) == [
        Written(4, "job.yaml", "# job.yaml\nname: x\n"),
        Written(13, "key.json", "{}\n"),
        Step(17, "cat job.yaml", ("# job.yaml", "name: x")),
        Step(20, "cat <<'END'\ntwo\nEND", ("two",)),
    ]


def test_session_keeps_folder_variables_and_code(tmp_path: Path) -> None:
    """A session keeps its state from command to command, as a terminal does."""
    (tmp_path / "reader").mkdir()
    session = Session(tmp_path / "reader", {"PATH": "/usr/bin:/bin"})
    session.run("mkdir sub; cd sub; export WORD='a b'")
    assert session.run("pwd; echo $WORD; exit 3") == [str(tmp_path / "reader/sub"), "a b"]
    assert session.run("echo $?") == ["3"]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (["loss 0.1827 eta 9s"], ["loss 12.5 eta 1m 4s"]),
        (["sent: spirals-x7k2m"], ["sent: spirals-b3d4f"]),
        (["a", "...", "c"], ["a", "b", "b", "c"]),
        (["a", "...", "c"], ["a", "c"]),
        (["...", "b"], ["a", "b"]),
        (["a", "..."], ["a", "b"]),
        (["at ... here"], ["at /a/b here"]),
        (["3.1k samples/s, 45% of 2.0GB"], ["512 samples/s, 7% of 1.25GB"]),
        (["step 200/200"], ["step 200/200  "]),
        (["A   8s  x"], ["A    12s  x"]),
    ],
)
def test_variable_parts_may_differ(shown: list[str], printed: list[str]) -> None:
    """Measured figures, ids, and text at dots may differ."""
    assert missing(tuple(shown), printed) is None


@pytest.mark.parametrize(
    ("shown", "printed", "lacking"),
    [
        (["step 200/200"], ["step 100/200"], "step 200/200"),
        (["a", "c"], ["a", "b", "c"], "c"),
        (["a", "b"], ["a"], "b"),
        (["a"], ["a", "b"], "(an end: more was printed)"),
        (["...", "x"], ["a", "b"], "x"),
        (["2 ranks"], ["4 ranks"], "2 ranks"),
        (["error: no"], [], "error: no"),
        (["sent: spirals-x7k2m"], ["sent: spirals-aeiou"], "sent: spirals-x7k2m"),
    ],
)
def test_first_difference_is_found(shown: list[str], printed: list[str], lacking: str) -> None:
    """The first line that is missing in order is returned."""
    assert missing(tuple(shown), printed) == lacking
