"""What a command costs before it does anything: processor seconds and peak memory, medians, beside bare Python."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping

from report import Report
from sandbox import COMMAND, Sandbox, sandbox

RUNS = 7
CLOUDS = {
    "sagemaker": "resources.instance_type=ml.m5.xlarge sagemaker.region=eu-west-1 "
    "sagemaker.role=arn:aws:iam::123456789012:role/x",
    "azureml": "resources.instance_type=Standard_D4s_v5 azureml.subscription=00000000-0000-0000-0000-000000000000 "
    "azureml.resource_group=g azureml.workspace=w",
    "vertex": "resources.instance_type=n1-standard-8 vertex.project=a-project vertex.location=us-central1 "
    "vertex.staging_bucket=gs://bucket",
}
# (command line, most CPU seconds, most MB): the targets, with a margin in MB for other versions of pydantic
COMMANDS = [
    ("--help", 0.06, 17),
    ("list", 0.09, 25),
    ("validate", 0.22, 42),
    ("submit --dry-run", 0.25, 44),
    *((f"validate --backend {name}", 0.22, 42) for name in CLOUDS),
    *((f"submit --dry-run --backend {name}", 0.25, 44) for name in CLOUDS),
    ("plan", 0.30, None),
    ("plan --backend all", 0.30, None),
    ("status last", 0.15, None),
]
# (what is typed before TAB, most CPU seconds)
TABS = [("", 0.10), ("logs ", 0.10), ("logs last --attempt ", 0.10), ("submit --set resources.", 0.10)]
PROGRAMS = ("pass", "import click", "import pydantic", "import click, yaml, jinja2")
BASELINES = {f"python -c {program!r}": program for program in PROGRAMS}

# A child's peak memory counts its parent's before the exec, so what measures must be smaller than what is measured.
METER = """\
import os, sys
null = os.open("/dev/null", os.O_RDWR)
actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions)
_, status, used = os.wait4(pid, 0)
print("[%d, %f, %f]" % (os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
"""


def measure(box: Sandbox, command: list[str]) -> tuple[float, float]:
    """Return one run's CPU seconds and peak memory in MB, with modules that are compiled, as an installed one's are."""
    meter = [sys.executable, "-S", "-E", "-c", METER, *command]
    env = {**box.environment, "PYTHONPYCACHEPREFIX": str(box.home / "compiled")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # which developers set
    done = subprocess.run(meter, cwd=box.folder, env=env, capture_output=True, text=True, check=True)
    code, cpu_s, peak_mb = json.loads(done.stdout)
    if code != 0:
        raise RuntimeError(f"{command}: exit code {code}")
    return cpu_s, peak_mb


def medians(box: Sandbox, commands: Mapping[str, list[str]], runs: int = RUNS) -> dict[str, tuple[float, float]]:
    """Return each command's median CPU seconds and peak memory in MB.

    The commands run in turn, so that a slow moment of the machine meets them all. Their first runs do not count: they
    compile modules and fill the page cache.
    """
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for round_ in range(runs + 1):
        for name, command in commands.items():
            measured = measure(box, command)
            figures[name] += [measured] if round_ else []
    return {
        name: (statistics.median(cpu_s for cpu_s, _ in found), statistics.median(peak_mb for _, peak_mb in found))
        for name, found in figures.items()
    }


def settings(line: str) -> list[str]:
    """Return the options that a cloud of the command line needs."""
    pairs = CLOUDS.get(line.rpartition("--backend ")[2], "").split()
    return [word for pair in pairs for word in ("--set", pair)]


def run() -> Report:
    """Measure every command."""
    report = Report("Start-up: processor time and peak memory", ("command", "CPU s", "MB", "target", ""))
    with sandbox() as box:
        box.write("name: bench\nscript: train.py\n", train="print('x')\n")
        box.write(f"name: bench\nscript: train.py\nlocal: {{python: {box.idle_python()}}}\n")
        box.call("submit", "-d")
        box.call("stop", "last", "--now", "-y")
        lines = {f"cloudtrain {line}": [COMMAND, *line.split(), *settings(line)] for line, _, _ in COMMANDS}
        for typed, _ in TABS:
            lines[f"cloudtrain {typed}<TAB>"] = ["/usr/bin/env", "_CLOUDTRAIN_COMPLETE=zsh", COMMAND, *typed.split(" ")]
        lines |= {name: [sys.executable, "-c", program] for name, program in BASELINES.items()}
        median = medians(box, lines)
    targets = {f"cloudtrain {line}": (cpu_s, mb) for line, cpu_s, mb in COMMANDS}
    targets |= {f"cloudtrain {typed}<TAB>": (cpu_s, None) for typed, cpu_s in TABS}
    for name, (cpu_s, mb) in median.items():
        most_s, most_mb = targets.get(name, (None, None))
        ok = None if most_s is None else cpu_s <= most_s and (most_mb is None or mb <= most_mb)
        target = "" if most_s is None else f"<= {most_s:.2f} s" + (f", {most_mb} MB" if most_mb else "")
        verdict = {None: "", True: "PASS", False: "below target"}[ok]
        report.rows.append((name, f"{cpu_s:.3f}", f"{mb:.0f}", target, verdict))
    light = median["python -c 'import click, yaml, jinja2'"][0]
    ratios = ", ".join(f"{line} {median[f'cloudtrain {line}'][0] / light:.1f}x" for line, _, _ in COMMANDS[:4])
    report.notes.append(f"against `import click, yaml, jinja2`: {ratios}; medians of {RUNS}")
    return report


if __name__ == "__main__":
    run().show()
