"""Put one fault after the other into the product, and see that the tests named for it find it.

    python tools/faults.py [WORD...]    all faults, or those whose capability has one of the words

Each row is a capability, a file, a text that occurs there exactly once, its replacement, and tests that must fail. The
file is changed in place and always restored; `git diff` shows the fault after a `kill -9`. The exit code is 1 if a
fault was not found, or if a text has changed, so that a row must follow its code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    """A fault, and tests below tests/ that must find it."""

    capability: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    Fault(
        "place of a config error",
        "launcher/config/yamlfile.py",
        "return self.source.place(event.start_mark.line, event",
        "return self.source.place(event.start_mark.line + 1, event",
        "launcher/test_yamlfile.py::test_invalid_yaml_has_a_message_and_a_place",
    ),
    Fault(
        "split of the batch",
        "launcher/planning/planner.py",
        "Batch(size, micro, size // (micro * ranks), tensor",
        "Batch(size, micro, size // micro, tensor",
        "launcher/test_plan.py::test_plan_splits_the_batch",
    ),
    Fault(
        "limit from money",
        "launcher/metering/limit.py",
        "return (whole_s - terms.tail_s) // terms.unit_s * terms.unit_s",
        "return whole_s",
        "launcher/test_limit.py::test_cap_counts_the_platform_bill",
    ),
    Fault(
        "worst case of restarts",
        "entrypoints/terms.py",
        "billed_s * terms.starts // MICRO_HOUR)",
        "billed_s // MICRO_HOUR)",
        "launcher/test_limit.py::test_cap_respects_the_budget_in_ten_thousand_cases",
    ),
    Fault(
        "room in the ledger",
        "launcher/store/ledger.py",
        "            require_room(standings(database, held.created_s, held.project), held.amount_micro)\n",
        "",
        "launcher/test_ledger.py::test_refused_job_is_not_journalled",
    ),
    Fault(
        "unknown cost",
        "launcher/store/ledger.py",
        'total = row["amount_micro"] if spent_micro is None else',
        "total = 0 if spent_micro is None else",
        "launcher/test_ledger.py::test_end_at_an_unknown_cost_counts_as_the_worst_case",
    ),
    Fault(
        "cached log lines",
        "launcher/logs/blocks.py",
        "if len(data) != entry.size or zlib.crc32(data) != entry.checksum:",
        "if len(data) != entry.size:",
        "launcher/test_log_cache.py::test_flipped_bit_in_a_block_is_detected",
    ),
    Fault(
        "rule of retries",
        "launcher/jobs/retry.py",
        "attempt.number < last_number(job, attempts) and",
        "attempt.number <= last_number(job, attempts) and",
        "launcher/test_retry.py::test_retry_is_due_by_a_configured_fault",
    ),
    Fault(
        "stop",
        "launcher/jobs/stopping.py",
        "    backend.stop(ref, now=now)  #",
        "    backend.stop(ref, now=False)  #",
        "launcher/test_stopping.py::test_stop_reports_the_kind_of_its_request",
    ),
    Fault(
        "own and listed prices",
        "launcher/prices/catalog.py",
        "own.day >= listed.day",
        "own.day < listed.day",
        "launcher/test_own_prices.py::test_own_price_wins_row_by_row",
    ),
    Fault(
        "threshold of an alert",
        "entrypoints/notices/rules.py",
        "if spent * 100 >= limit * each]",
        "if spent * 90 >= limit * each]",
        "launcher/test_alerts.py::test_highest_threshold_is_due_once",
    ),
    Fault(
        "checksums of a model folder",
        "entrypoints/models/folder.py",
        "        if sha256 != files[name]:\n",
        "        if False:\n",
        "entrypoints/test_model_folder.py::test_flipped_bit_is_refused_anywhere",
    ),
    Fault(
        "pickle in a model",
        "entrypoints/export/loading.py",
        "    _require_no_pickle(folder / PT2)\n",
        "",
        "entrypoints/test_serve.py::test_archive_with_a_pickle_is_refused_before_a_load",
    ),
    Fault(
        "access to the page",
        "launcher/ui/guard.py",
        "        if not self.is_known(headers):\n            is_visit",
        "        if False:\n            is_visit",
        "launcher/test_ui_guard.py::test_request_without_the_token_is_refused",
    ),
    Fault(
        "rungs of asha",
        "entrypoints/sweep/search.py",
        "return ranked[: count // self.search.factor]\n",
        "return ranked[:count]\n",
        "entrypoints/test_search.py::test_asha_promotes_the_best_third_from_the_top_down",
    ),
    Fault(
        "a sweep's money",
        "entrypoints/sweep/search.py",
        "+ max(waits, default=0.0) <= allowance.left else furthest",
        "<= allowance.left else furthest",
        "entrypoints/test_search.py::test_deadline_leaves_a_slot_for_the_furthest_trial",
    ),
    Fault(
        "restart of a killed rank",
        "entrypoints/agent/coordinate.py",
        'first["kind"] in ("signal", "rendezvous"',
        'first["kind"] in ("rendezvous"',
        "entrypoints/test_coordinate.py::test_failure_kills_all_and_a_killed_worker_restarts",
    ),
    Fault(
        "limit of restarts",
        "entrypoints/agent/coordinate.py",
        "or self._restarts_left() > 0",
        "or self._restarts_left() >= 0",
        "entrypoints/test_coordinate.py::test_restart_stops_at_its_limit",
    ),
    Fault(
        "cause of a hang",
        "entrypoints/agent/coordinate.py",
        'f["kind"] != "hang" for r in broken',
        'f["kind"] != "" for r in broken',
        "entrypoints/test_coordinate.py::test_hang_waits_for_the_rank_that_was_silent_first",
    ),
    Fault(
        "silence of a rank",
        "entrypoints/rank/heartbeat.py",
        "seen.silent_s += passed_s",
        "seen.silent_s += 0 * passed_s",
        "entrypoints/test_heartbeat.py::test_rank_without_heartbeats_hangs",
    ),
    Fault(
        "checksums of a checkpoint",
        "entrypoints/checkpoints/folder.py",
        'if _crc32(path / name) != files[name]["crc32"]:',
        'if _crc32(path / name) == "":',
        "entrypoints/test_checkpoints.py::test_flipped_byte_is_found_anywhere",
    ),
    Fault(
        "order of the samples",
        "entrypoints/trainer/data.py",
        "mix(seed, ORDER, epoch)",
        "mix(seed, ORDER, 0 * epoch)",
        "entrypoints/test_data.py::test_stream_orders_epochs_differently_and_by_seed",
    ),
    Fault(
        "residual of sparse gradients",
        "entrypoints/trainer/strategies/sparse.py",
        "residual.index_fill_(0, positions, 0.0)",
        "residual.index_fill_(0, positions[1:], 0.0)",
        "entrypoints/test_sparse.py::test_sent_entries_and_residual_are_the_gradients",
    ),
    Fault(
        "place in the line",
        "entrypoints/agent/queue_turns.py",
        'each.cap_s if is_current else float("inf")',
        "each.cap_s if is_current else start_s",
        "entrypoints/test_queue.py::test_ticket_without_a_known_start_blocks_later_tickets",
    ),
    Fault(
        "pre-emption",
        "entrypoints/agent/queue_turns.py",
        "each.priority < ticket.priority",
        "each.priority <= ticket.priority",
        "entrypoints/test_queue.py::test_preemption_takes_the_lowest_own_jobs",
    ),
    Fault(
        "token in the code",
        "launcher/planning/secret_files.py",
        "data[:FILE_BYTES]",
        "data[:0]",
        "launcher/test_secret_files.py::test_token_in_a_file_is_found_with_its_line_and_never_printed",
    ),
    Fault(
        "SageMaker's time limit",
        "templates/sagemaker/request.json",
        '"MaxRuntimeInSeconds": {{ plan.cap_s',
        '"MaxRuntimeInSeconds": {{ 2 * plan.cap_s',
        "backends/test_sagemaker.py::test_request_equals_the_golden_file",
    ),
    Fault(
        "Azure ML's time limit",
        "templates/azureml/job.yml",
        "timeout: {{ plan.cap_s",
        "timeout: {{ 2 * plan.cap_s",
        "backends/test_azureml.py::test_request_equals_the_golden_file",
    ),
    Fault(
        "Vertex AI's time limit",
        "backends/vertex/request.py",
        '"timeout": f"{plan.cap_s}s"',
        '"timeout": f"{2 * plan.cap_s}s"',
        "backends/test_vertex.py::test_request_equals_the_golden_file",
    ),
    Fault(
        "Slurm's states",
        "backends/slurm/status.py",
        'dict.fromkeys(("PREEMPTED",), "preempted")',
        'dict.fromkeys(("PREEMPTED",), "user")',
        "backends/test_slurm_status.py::test_each_state_has_its_meaning",
    ),
]


def main(words: list[str]) -> int:
    """Try the chosen faults; return 1 if a fault is missed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = [fault for fault in FAULTS if not words or any(word in fault.capability for word in words)]
    missed = 0
    for fault in chosen:
        began_s = time.monotonic()
        verdict = tried(fault)
        missed += verdict != "found"
        print(f"{fault.capability:34} {fault.file:48} {time.monotonic() - began_s:5.1f} s  {verdict}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return int(missed > 0)


def tried(fault: Fault) -> str:
    """Return `found`, or why the fault counts as missed."""
    path = ROOT / fault.file
    whole = path.read_bytes()
    if whole.count(fault.old.encode()) != 1:
        return f"the text occurs {whole.count(fault.old.encode())} times, not once"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # the compiled fault would outlive the fault
    try:
        path.write_bytes(whole.replace(fault.old.encode(), fault.new.encode()))
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in fault.tests.split())],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_bytes(whole)
    if done.returncode == 1:
        return "found"
    return f"missed: exit code {done.returncode}, {(done.stdout.strip() or done.stderr).splitlines()[-1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
