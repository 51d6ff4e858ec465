"""Tokens a second, MFU and memory of a 355 M GPT in bf16 on this machine's GPUs: a bare loop, cloudtrain, Lightning.

    cd benchmarks && ../.venv-bench/bin/python -m trainer.gpu

By ddp and fsdp, with and without compile. Without a GPU it says so and ends; `--tiny` runs the same on CPUs with a
model of no use, to test the script itself. MFU counts 6 x parameters + 12 x layers x width x tokens operations a token
(PaLM's convention: attention counted whole, although half of it is masked), of the GPU's dense bf16 peak.
Lightning's fsdp is its FSDPStrategy (FSDP1); the other two use FSDP2.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import BELOW, PASS, Report
from sandbox import fresh_folder

from cloudtrain.entrypoints.trainer.metrics import peak_tflops
from trainer import contest
from trainer.contest import OURS, Model, Run

GPT = {"layers": 24, "width": 1024, "heads": 16, "vocab": 50304, "tokens": 1024}
TINY = {"layers": 2, "width": 64, "heads": 4, "vocab": 256, "tokens": 32}
WARM, TIMED = 12, 30  # steps; compiling and the choice of kernels are over by then
TINY_TIMED = 8
CONTESTANTS = ("bare", OURS, "lightning")
TARGET = 0.98  # of the bare loop's tokens a second


@dataclass(frozen=True)
class Way:
    """One cell of the table."""

    contestant: str
    strategy: str
    is_compiled: bool


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="on CPUs too, with a tiny model: to test this script")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="samples a rank and step, of 1,024 tokens each")
    parser.add_argument("--ranks", type=int, help="usually one a GPU")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--strategies", default="ddp,fsdp")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled runs out")
    parser.add_argument(
        "--repo", type=Path, help="a checkout whose cloudtrain is measured in place of the installed one"
    )
    parser.add_argument("--peak-tflops", type=float, help="of one GPU in dense bf16, where the table has it wrong")
    asked = parser.parse_args()
    name, count = _gpus()
    if not count and not asked.tiny:
        print("skipped: there is no CUDA device here; --tiny tests the script on CPUs")
        return 0
    ranks = asked.ranks or count or 2
    ways = [
        Way(contestant, strategy, is_compiled)
        for strategy in asked.strategies.split(",")
        for is_compiled in ((False,) if asked.no_compile else (False, True))
        for contestant in asked.contestants.split(",")
    ]
    runs: dict[Way, list[Run]] = {way: [] for way in ways}
    failures: dict[Way, str] = {}
    if not count:
        failures = {
            way: "Lightning's fsdp wants a GPU"
            for way in ways
            if (way.contestant, way.strategy) == ("lightning", "fsdp")
        }
    for round_ in range(asked.rounds):
        for way in (way for way in ways if way not in failures):
            try:
                runs[way].append(_run(way, ranks, asked.batch, asked.tiny, asked.repo))
                print(f"round {round_ + 1} of {asked.rounds}: {way}", file=sys.stderr, flush=True)
            except RuntimeError as error:
                failures[way] = _cause(str(error))
                print(f"{way} failed: {error}", file=sys.stderr, flush=True)
    peak = asked.peak_tflops or (peak_tflops(name, "bf16") if name else None)
    _table(runs, failures, name or "CPUs", ranks, asked.batch, TINY if asked.tiny else GPT, peak).show()
    return 0


def _run(way: Way, ranks: int, batch: int, is_tiny: bool, repo: Path | None) -> Run:
    steps = WARM + (TINY_TIMED if is_tiny else TIMED)
    model = Model("gpt", batch, steps, {"gpt": TINY if is_tiny else GPT})
    compiled = {"compile": True} if way.is_compiled else {}
    spec = contest.spec_of(
        model,
        strategy=way.strategy,
        precision="bf16",
        global_batch_size=ranks * batch,
        micro_batch_size=batch,
        log_every=10,
        **compiled,
    )
    script = contest.HERE / "gpu_bare.py" if way.contestant == "bare" else None
    with fresh_folder() as folder:
        return contest.run(way.contestant, spec, folder, ranks=ranks, repo=repo, script=script, BENCH_SYNC_AT=str(WARM))


def _table(
    runs: dict[Way, list[Run]],
    failures: dict[Way, str],
    device: str,
    ranks: int,
    batch: int,
    sizes: dict[str, int],
    peak: float | None,
) -> Report:
    head = ("strategy", "compiled", "contestant", "tokens/s", "x bare", "MFU", "GPU GiB", "")
    table = Report(
        f"{_parameters(sizes) / 1e6:.0f} M GPT, bf16, {ranks} x {device}, {batch} x {sizes['tokens']} a rank", head
    )
    tokens = ranks * batch * sizes["tokens"]
    for way, found in runs.items():
        cells = [way.strategy, "yes" if way.is_compiled else "no", way.contestant]
        if way in failures or not found:
            table.rows.append((*cells, "-", "-", "-", "-", f"did not run: {failures.get(way, '')}"))
            continue
        rate = statistics.median(_tokens_per_s(run, tokens) for run in found)
        bare = runs.get(Way("bare", way.strategy, way.is_compiled), [])
        by_round = [_tokens_per_s(a, tokens) / _tokens_per_s(b, tokens) for a, b in zip(found, bare, strict=False)]
        ratio = statistics.median(by_round) if by_round else None
        mfu = f"{100 * rate * _flops_per_token(sizes) / (ranks * peak * 1e12):.1f} %" if peak else "-"
        memory = max((note.get("gpu_bytes", 0) for run in found for note in run.notes), default=0)
        verdict = ""
        if memory and ratio is not None and way.contestant == OURS:  # on CPUs it tests this script, and says nothing
            verdict = PASS if ratio >= TARGET else BELOW
        shown = f"{ratio:.3f}" if ratio is not None else "-"
        table.rows.append((*cells, f"{rate:,.0f}", shown, mfu, f"{memory / 2**30:.1f}", verdict))
    table.notes.append(f"target: cloudtrain at {TARGET} of the bare loop's tokens a second, or more")
    return table


def _tokens_per_s(run: Run, tokens_per_step: int) -> float:
    """Return the rate between the two calls that waited for the GPU, over the slowest rank."""
    return min(_rates(run, tokens_per_step))


def _rates(run: Run, tokens_per_step: int) -> Iterator[float]:
    for note in run.notes:
        times = note["wall_s"]
        yield tokens_per_step * (len(times) - WARM) / (times[-1] - times[WARM - 1])


def _parameters(sizes: dict[str, int]) -> int:
    """Return the parameters that matrices are made of, the embedding once: it is the last layer too."""
    return 12 * sizes["layers"] * sizes["width"] ** 2 + sizes["vocab"] * sizes["width"]


def _flops_per_token(sizes: dict[str, int]) -> int:
    return 6 * _parameters(sizes) + 12 * sizes["layers"] * sizes["width"] * sizes["tokens"]


def _gpus() -> tuple[str, int]:
    import torch  # here, so that --help needs none

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (torch.cuda.get_device_name(0) if count else "", count)


def _cause(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)), lines[-1])[:160]


if __name__ == "__main__":
    sys.exit(main())
