"""GPU use: the meter reads nvidia-smi, with any output, and writes into rank 0's log."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent import gpumeter, gpus
from doubles.waiting import until

# The output of nvidia-smi for index, UUID, utilization.gpu, memory.used, memory.total and power.draw in
# csv,noheader,nounits; a MIG device and an old board lack some values.
REAL = """0, GPU-5a1c0f6e-aaaa, 97, 39680, 81920, 402.13
1, GPU-9e2b7d44-bbbb, 3, 1024, 81920, 61.50
2, GPU-77777777-cccc, [N/A], 12, 81920, [Not Supported]
"""
FIRST, SECOND, THIRD = (97.0, 39680.0, 81920.0, 402.13), (3.0, 1024.0, 81920.0, 61.5), (None, 12.0, 81920.0, None)
GARBAGE = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n\x1b[2J\n,,,,,\n"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that puts a program named nvidia-smi first on the PATH and counts the calls."""

    def install(script: str) -> Path:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "calls"

    return install


def rows(text: str) -> list[list[str]]:
    """Return the lines' values, as `query` does."""
    return [[value.strip() for value in line.split(",")] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("visible", "ranks", "found"),
    [
        *((None, 3, (FIRST, SECOND, THIRD)), (None, 1, (FIRST,)), ("1,0", 2, (SECOND, FIRST))),
        *(("GPU-9e2b", 1, (SECOND,)), ("7,1", 2, ((None,) * 4, SECOND)), ("", 2, ()), ("-1", 2, ())),
    ],
)
def test_rank_has_the_gpu_that_it_sees(visible: str | None, ranks: int, found: Any) -> None:
    """The i-th of CUDA_VISIBLE_DEVICES, by index or by the beginning of a UUID, belongs to local rank i."""
    assert gpumeter.figures_of(rows(REAL), visible, ranks) == found


@pytest.mark.parametrize("value", ["ERR!", "", "nan", "inf", "-1", "1e9", "101", "Ä"])
def test_impossible_figure_is_not_known(value: str) -> None:
    """No text, no infinity and no impossible percentage becomes a figure."""
    assert gpumeter.figures_of([["0", "GPU-x", value, "1", "2", "3"]], None, 1) == ((None, 1.0, 2.0, 3.0),)


def test_meter_reads_the_tool(tool: Callable[[str], Path]) -> None:
    """The newest figures are known without a call by the reader."""
    tool(f"cat <<'END'\n{REAL}END")
    meter = gpumeter.GpuMeter("0,1", 2, every_s=0.01)
    assert until(lambda: meter.latest) == (FIRST, SECOND)
    meter.finish()
    meter.thread.join(10)
    assert not meter.thread.is_alive()


@pytest.mark.parametrize("script", [f"cat <<'END'\n{GARBAGE}END", "exit 9", "sleep 60", "echo No devices were found"])
def test_tool_that_does_not_work_is_left_alone(
    script: str, tool: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage, an error, silence, or no device: after three calls the thread ends, and there are no figures."""
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.3)
    calls = tool(script)
    meter = gpumeter.GpuMeter(None, 8, every_s=0.0)
    meter.thread.join(30)
    assert (meter.thread.is_alive(), meter.latest) == (False, ())
    assert calls.read_text().count("x") <= 3


def test_machine_without_the_tool_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no process runs, and no figure is known."""
    monkeypatch.setattr(gpus, "_tool", lambda: None)
    meter = gpumeter.GpuMeter(None, 1, every_s=0.0)
    meter.thread.join(10)
    assert (meter.thread.is_alive(), meter.latest) == (False, ())


def test_lines_are_short_and_parse() -> None:
    """The figures of 200 ranks take several event lines, each below 4096 bytes and in full."""
    told = [(rank, (99.99, 81559.0, 81920.0, 1234.56)) for rank in range(200)]
    made = list(gpumeter.lines(told))
    assert max(len(line.encode()) for line in made) < events.MAX_BYTES - 1
    fields = [found for line in made if (found := events.parse(line)[1])]
    assert [entry for each in fields for entry in each["gpus"]] == [[rank, *each] for rank, each in told]
    assert {each["e"] for each in fields} == {"gpu"}
    unknown = next(iter(gpumeter.lines([(0, THIRD)])))
    assert unknown.startswith("gpus: rank 0 ? %  ::ct {")
    json.loads(unknown.partition("::ct ")[2])


@pytest.mark.parametrize(("before", "after"), [("", ""), ("step 1\n", "step 1\n"), ("loss: ", "loss: \n")])
def test_line_stays_apart_from_the_ranks(before: str, after: str, tmp_path: Path) -> None:
    """A line that the rank has begun ends before; a missing log stays missing."""
    log = tmp_path / "rank-0.log"
    events.append(log, gpumeter.lines([(0, FIRST)]))
    assert not log.exists()
    log.write_text(before)
    events.append(log, gpumeter.lines([(0, FIRST)]))
    assert log.read_text().startswith(f"{after}gpus: rank 0 97 %")
    assert log.read_text().endswith("}\n")


@pytest.mark.slow
def test_job_reports_all_nodes_gpus(cli: Any, tmp_path: Path, tool: Callable[[str], Path]) -> None:
    """A script on two nodes, without code for GPU figures: each rank's figures reach `status`."""
    tool(f"cat <<'END'\n{REAL}END")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "loop.py").write_text(
        "import os, time\nwhile not os.path.exists(os.environ['STOP']):\n    time.sleep(0.1)\n"
    )
    (folder / "cloudtrain.yaml").write_text(
        "name: one\nbackend: local\nscript: loop.py\nresources: {instances: 2}\n"
        "distributed: {nproc_per_node: 1, allow_alone: true}\n"
        f'env: {{CUDA_VISIBLE_DEVICES: "1", STOP: {tmp_path}/stop}}\n'
    )
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    cli.watch("gpus: rank 0 3 %, rank 1 3 %", "logs", "-f", "last", timeout_s=180)
    found = cli("status", "last", "--json").json
    (tmp_path / "stop").touch()
    assert [(each["rank"], each["use"]) for each in found["gpus"]] == [(0, 3), (1, 3)]
    assert cli("wait", "last").code == 0
