"""Runs the soak tests of the files that changed: `.ci/run` does so after `make test`.

    soak_of_changes.py [--since REV] [--seconds N] [--list]

Without REV, the changes are the commits ahead of origin/main. A fresh clone has none: there, the changes are those of
the day before the newest commit, at least the newest commit itself. The tests of a changed file come first, and the
list ends at N recorded seconds (tests/slowest.txt, added up over the tests; two cores do about three a second).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DAY_S = 86_400
SECONDS = 800  # some minutes on two cores: a change of the whole tree would choose all soak tests, half an hour
USUAL_S, STAND_IN_S = 8, 1  # for a soak test without a recorded time: of a whole job, of a stand-in

# A changed path -> the soak tests of the same subject, by their node ids; `{0}` is the first group of the path's match.
SUBJECTS = (
    (r"tests/.*?(test_\w+)\.py", r"/{0}\.py::"),
    (r"docs/tutorials/(\w+)\.md", r"test_tutorials\.py::.*\[{0}\]"),
    (r"tests/doubles/(aws|azure|google|slurm|sshhosts|kit|warm\w+|sandbox)", r"doubles/test_{0}"),
    (r"(?:backends|templates)/(\w+)/", r"backends/test_{0}_|\W{0}\W"),
    (r"docs/python\.md|launcher/api\.py", r"docs/test_python\.py"),
    (r"tests/doubles/macos\.py|backends/channel/", r"backends/test_macos\.py"),
    (r"examples/digits/|tests/docs/console\.py", r"test_tutorials"),
    (r"launcher/(?:commands|jobs|logs|planning|cli)\b", r"test_tutorials|test_contract"),
    (r"launcher/(?:metering|store|money)/", r"launcher/test_(meter|reserve|budget|ledger)"),
    (r"(?:launcher/sweeps|entrypoints/sweep)/", r"sweep|packed|test_search"),
    (r"(?:launcher/rehearsal/|launcher/models/|entrypoints/(?:export|serve|models)/)", r"rehears|export|serv"),
    (r"entrypoints/(?:trainer|rank|checkpoints)/", r"entrypoints/test_(strategies|tensor|train|optim|checkpoints|ema)"),
    (r"entrypoints/(?:trainer|checkpoints)/", r"test_parallel_jobs"),
    (r"entrypoints/(?:stores|checkpoints)/", r"test_stores_contract"),
    (r"launcher/(?:commands|store|cli)\b", r"launcher/test_(imports|extras|submit_crash|unsent|money)"),
    (r"entrypoints/scripts/|tests/scripts/", r"test_(script_runs|scripts)\.py"),
    (r"entrypoints/(?:agent|container|host)/", r"backends/test_(contract|local|ssh|slurm)|entrypoints/test_queue"),
    (r"entrypoints/environments/", r"test_dependencies|test_environments|test_containers"),
    (r"(?:\w+/)+(\w{5,})\.py", r"/test_{0}"),
)


def chosen(changed: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Return the tests of the same subject as a changed path, in the order of SUBJECTS."""
    paths, tests = list(changed), list(tests)
    found: dict[str, None] = {}
    for path_pattern, test_pattern in SUBJECTS:
        matches = filter(None, (re.match(path_pattern, path) for path in paths))
        wanted = {test_pattern.format(*map(re.escape, match.groups())) for match in matches}
        found |= dict.fromkeys(test for test in tests if any(re.search(pattern, test) for pattern in wanted))
    return list(found)


def within(tests: Iterable[str], seconds: float) -> list[str]:
    """Return the first tests whose recorded times add up to at most `seconds`, without those that are longer alone."""
    lines = (ROOT / "tests" / "slowest.txt").read_text().splitlines()
    known = {name: float(cost_s) for cost_s, name in map(str.split, lines)}
    kept: list[str] = []
    for test in tests:
        cost_s = known.get(test.partition("[")[0], STAND_IN_S if "tests/doubles/" in test else USUAL_S)
        if cost_s <= seconds:
            seconds -= cost_s
            kept.append(test)
    return kept


def base() -> str:
    """Return the commit before the changes."""
    ahead = _git("rev-list", "--count", "origin/main..HEAD", check=False)
    if ahead not in ("", "0"):
        return _git("merge-base", "HEAD", "origin/main")
    newest_s = int(_git("show", "-s", "--format=%ct", "HEAD"))
    before = _git("rev-list", "-1", f"--before={newest_s - DAY_S}", "HEAD")
    return before or _git("rev-list", "--max-parents=0", "HEAD").splitlines()[-1]


def _git(*args: str, check: bool = True) -> str:
    return subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True, check=check).stdout.strip()


def main() -> int:
    """Run the chosen tests, or list the tests; return pytest's exit code."""
    options = argparse.ArgumentParser()
    options.add_argument("--since", metavar="REV")
    options.add_argument("--seconds", type=float, default=SECONDS)
    options.add_argument("--list", action="store_true")
    given = options.parse_args()
    since = given.since or base()
    changed = _git("diff", "--name-only", since, "HEAD").splitlines()
    pytest = [sys.executable, "-m", "pytest", "-m", "soak"]
    collected = subprocess.run([*pytest, "--collect-only", "-q"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = chosen(changed, [line for line in collected.stdout.splitlines() if "::" in line])
    tests = within(wanted, given.seconds)
    print(f"{len(changed)} files changed since {since[:12]}: {len(tests)} of {len(wanted)} soak tests", flush=True)
    if given.list or not tests:
        print(*tests, sep="\n")
        return 0
    return subprocess.run([*pytest, "-n", "6", "--dist", "worksteal", *tests], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
