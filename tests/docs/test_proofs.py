"""The reports of docs/proofs: each is a whole report of a selftest, with its row in the table of the page."""

import json
import re
from collections import Counter
from pathlib import Path

PROOFS = Path(__file__).resolve().parents[2] / "docs" / "proofs"
ROW = re.compile(r"^\| \[(.+?)\]\(\1\) \| (\w+) \| (\d+) \| (\d+) \| (\d+) \| .+ \|$", re.MULTILINE)
VERDICTS = ("ok", "differs", "not checked")


def test_each_report_has_its_row() -> None:
    """The table has the backend and the verdicts of each report, and no other row."""
    rows = {}
    for path in sorted(PROOFS.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        counts = Counter(step["verdict"] for step in report["steps"])
        assert (report["selftest"], set(counts) <= set(VERDICTS)) == (1, True), path.name
        assert {"cloudtrain", "python", "backend", "machine"} <= set(report["head"]), path.name
        assert all(step["seconds"] >= 0 and step["step"] for step in report["steps"]), path.name
        rows[path.name] = (report["head"]["backend"], *(str(counts[verdict]) for verdict in VERDICTS))
    page = (PROOFS / "README.md").read_text(encoding="utf-8")
    assert {name: tuple(found) for name, *found in ROW.findall(page)} == rows
    assert page.count("| [") == len(rows)
