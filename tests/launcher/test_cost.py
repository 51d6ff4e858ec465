"""`cloudtrain cost` prints the bill of a job, or the cost of all jobs in a period."""

import csv
import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import cli
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs import remove, reserve
from cloudtrain.launcher.money.period import spent_between, spent_in
from cloudtrain.launcher.store import ledger, loss_bins
from cloudtrain.launcher.store.budgets import month_span
from cloudtrain.launcher.store.registry import Registry, this_process
from cloudtrain.launcher.text.tables import csv_text
from cloudtrain.launcher.ui import pages
from doubles.plans import plan_of

NEW_YEAR_S = 1_767_225_600.0  # 2026-01-01 00:00 UTC
PLAN = {"instances": 2, "nproc_per_node": 1, "ranks": 2, "hourly_usd": 72.0, "cap_s": 3600}
PLAN |= {"worst_case_usd": 72.0, "worst_case_micro": 72_000_000}
CONFIG: dict[str, Any] = {"tags": {"team": "vision"}, "budget": {"limit": "150 USD"}, "project": {"name": "digits"}}

Put = Callable[..., Job]


def ran(start_s: float, end_s: float, **more: Any) -> State:
    """Return the state of an attempt that ran in the period."""
    return State("succeeded", started_s=start_s, ended_s=end_s, **more)


@pytest.fixture
def put(home: Path) -> Put:
    """Return a function that puts a job with the given attempts into the registry, at a cent per second and node."""

    def add(name: str, *states: State, progress: dict[str, Any] | None = None, **changes: Any) -> Job:
        registry = Registry()
        plan = plan_of(**{**PLAN, **changes.pop("plan", {})})
        config = {**CONFIG, **changes.pop("config", {})}

        def make(job_id: str, number: int) -> Job:
            first = Attempt(job_id, number, "intent", plan, {}, states[0].started_s or 0.0, this_process())
            return Job(job_id, name, "local", first.created_s, config, "/x.yaml", {}, first, **changes)

        job, _ = registry.add(name, make, exclusive=True, key=None)
        for number, state in enumerate(states, 1):
            attempt = replace(job.attempt, number=number)
            if number > 1:
                registry.add_attempt(attempt, config, {})
            reserve.reserve(registry, attempt, config)
            registry.mark_sent(attempt, {})
            registry.set_state(attempt, state, progress or {})
        return registry.find(name)

    return add


@pytest.fixture
def cost(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command in this process and returns the output."""

    def run(*args: str) -> str:
        cli.cli.main(["cost", *args], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_bill_of_a_job_shows_planned_metered_and_billed(put: Put, cost: Callable[..., str]) -> None:
    """Each leg has its times and its seconds, billed and metered; the platform's seconds count."""
    put("one", ran(0, 100, billed_s=90.0, billed_by="BillableTimeInSeconds"), ran(500, 600))
    found = json.loads(cost("one", "--json"))
    assert (found["spend_usd"], found["metered_usd"], found["billed_usd"]) == (3.8, 4.0, None)
    assert (found["limit_usd"], found["worst_case_usd"]) == (150.0, 73.8)
    first, second = found["legs"]
    assert (first["billed_usd"], first["metered_usd"], first["source"]) == (1.8, 2.0, "BillableTimeInSeconds")
    assert (second["cost_usd"], second["billed_usd"], second["source"]) == (2.0, None, "start and end")
    text = cost("one")
    assert "3.80 USD of 150.00 USD, 2 %" in text
    assert "1970-01-01 00:08:20  00:10:00  1m 40s  2.00" in text


def test_idling_is_shown_apart_and_counted_by_the_ledger(
    put: Put, cost: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The bill sums up seconds; the budget also counts the possible idle time, and a note explains the difference."""
    put("one", ran(0, 100, idle_s=60.0))
    assert [json.loads(cost("one", "--json"))[key] for key in ("spend_usd", "idle_usd")] == [2.0, 1.2]
    assert "up to 1.20 USD more while its machines idle after it; not in spent" in cost("one")
    cli.cli.main(["budget", "show", "--json"], standalone_mode=False)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["counted"], shown["spent_usd"][0]["months"]) == ("at_worst", {"1970-01": 3.2})
    cli.cli.main(["budget", "set", "100USD"], standalone_mode=False)
    cli.cli.main(["budget", "show"], standalone_mode=False)
    assert "`cloudtrain cost` counts seconds at list prices" in capsys.readouterr().err


def test_bill_shows_the_price_of_progress(put: Put, cost: Callable[..., str]) -> None:
    """Prices are per epoch, per million samples and tokens, per unit of loss, and for the last fifth of the money."""
    falling = loss_bins.added(loss_bins.EMPTY, ((float(t), t, 4.0 - 3.0 * t / 100) for t in range(101)))
    told = {"epoch": 4.0, "samples": 2_000_000, "tokens": 8_000_000, "forecast": [5, 80.0]}
    told["curve"] = loss_bins.dump(falling)
    put("one", ran(0, 100), progress=told)
    found = json.loads(cost("one", "--json"))
    assert (found["epoch_usd"], found["million_samples_usd"], found["million_tokens_usd"]) == (0.5, 1.0, 0.25)
    assert (found["estimate_usd"], found["estimate_step"]) == (1.6, 5)
    assert found["loss_usd"] == pytest.approx(2.0 / 2.7, rel=0.05)
    assert (found["last_usd"], found["last_loss_drop"]) == (pytest.approx(0.4), pytest.approx(0.6, rel=0.1))
    assert "0.50 USD an epoch, 0.25 USD per 1M tokens" in cost("one")
    assert "for the last 0.40 USD it fell by 0.6" in cost("one")


def test_price_of_an_epoch_leaves_out_the_steps_of_another_job(put: Put, cost: Callable[..., str]) -> None:
    """`checkpoint.resume: PATH` at step 60 of 100: 1.6 of 4 epochs are this job's; after an own restart, all are."""
    for name, first, price in (("other", 61, 2.0 / 1.6), ("own", 1, 0.5)):
        curve = loss_bins.added(loss_bins.EMPTY, ((float(step), step, 1.0) for step in range(first, 101)))
        told = {"epoch": 4.0, "step": 100, "resumed_step": 60, "curve": loss_bins.dump(curve)}
        put(name, ran(0, 100), progress=told)
        assert json.loads(cost(name, "--json"))["epoch_usd"] == pytest.approx(price)


def test_month_counts_its_part_of_a_leg_across_the_border(
    registry: Registry, put: Put, cost: Callable[..., str]
) -> None:
    """A job over New Year is in both months, and the parts add up, even if a clock 40 days ahead gave its submit."""
    put("party", ran(NEW_YEAR_S - 30, NEW_YEAR_S + 60))
    put("later", ran(NEW_YEAR_S + 100, NEW_YEAR_S + 200))
    registry.database.execute("UPDATE attempts SET created_s = ? WHERE job_id = 'party'", (NEW_YEAR_S + 40 * 86_400,))
    december, january = (json.loads(cost("--month", month, "--json")) for month in ("2025-12", "2026-01"))
    assert [(job["job"], job["spend_usd"]) for job in december["jobs"]] == [("party", 0.6)]
    assert [(job["job"], job["spend_usd"]) for job in january["jobs"]] == [("later", 2.0), ("party", 1.2)]
    assert (december["to_s"], december["spend_usd"], january["spend_usd"]) == (NEW_YEAR_S, 0.6, 3.2)
    assert json.loads(cost("--month", "2026-02", "--json"))["jobs"] == []


def test_months_are_summed_by_one_read_of_the_attempts(
    registry: Registry, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each month of several has what the month alone has."""
    put("party", ran(NEW_YEAR_S - 30, NEW_YEAR_S + 60))
    put("later", ran(NEW_YEAR_S + 100, NEW_YEAR_S + 200))
    put("point", ran(NEW_YEAR_S, NEW_YEAR_S))
    spans = {month: month_span(month) for month in ("2025-11", "2025-12", "2026-01", "2026-02")}
    alone = {month: spent_between(registry.database, *span, time.time()) for month, span in spans.items()}
    asked: list[str] = []
    execute = registry.database.execute
    monkeypatch.setattr(registry.database, "execute", lambda sql, *rest: asked.append(sql) or execute(sql, *rest))
    assert spent_in(registry.database, spans, time.time()) == alone
    assert sum("FROM attempts" in sql for sql in asked) == 1


def test_page_of_costs_reads_the_labels_of_the_shown_month_alone(
    registry: Registry, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the groups of a month need tags and projects: of a job that ran in another month no config is read."""
    now_s = NEW_YEAR_S + 300
    put("before", ran(NEW_YEAR_S - 90, NEW_YEAR_S - 30))
    put("later", ran(NEW_YEAR_S + 100, NEW_YEAR_S + 200))
    monkeypatch.setattr(time, "time", lambda: now_s)
    registry.database.execute("UPDATE jobs SET config = '{broken' WHERE id = 'before'")
    values = pages.spend_values(registry.database, "", "project")
    assert [job.job_id for job in values["jobs"]] == ["later"]
    assert values["months"]["2025-12"].jobs == 1


def test_removed_jobs_are_in_the_sum(registry: Registry, put: Put, cost: Callable[..., str]) -> None:
    """In each month the row has the ledger's part; the kept job and the removed jobs add up to the spent budget."""
    put("party", ran(NEW_YEAR_S - 30, NEW_YEAR_S + 60))
    put("later", ran(NEW_YEAR_S + 100, NEW_YEAR_S + 200))
    put("kept", ran(NEW_YEAR_S + 100, NEW_YEAR_S + 200))
    for name in ("party", "later"):
        remove.remove(registry, registry.find(name))
    december, january = (json.loads(cost("--month", month, "--json")) for month in ("2025-12", "2026-01"))
    assert (december["spend_usd"], january["spend_usd"], january["job_count"]) == (0.6, 5.2, 3)
    assert ledger.months(registry.database)["digits"] == {"2025-12": 600_000, "2026-01": 5_200_000}
    lines = [line.split() for line in cost("--month", "2026-01").splitlines()]
    assert [lines[1][0], lines[1][-1], *lines[-1][:4]] == ["(removed", "3.20", "total", "of", "3", "jobs"]
    groups = json.loads(cost("--month", "2026-01", "--by", "project", "--json"))["groups"]
    assert [(each["key"], each["spend_usd"], each["job_count"]) for each in groups] == [("digits", 5.2, 3)]
    assert json.loads(cost("--since", "2026-01-02", "--json"))["job_count"] == 0


def test_damaged_row_makes_the_sum_a_minimum(registry: Registry, put: Put, cost: Callable[..., str]) -> None:
    """A job whose row cannot be read is counted without a price, and not left out."""
    put("party", ran(NEW_YEAR_S - 30, NEW_YEAR_S + 60))
    put("later", ran(NEW_YEAR_S + 100, NEW_YEAR_S + 200))
    registry.database.execute("UPDATE attempts SET outcome = '{' WHERE job_id = 'later'")
    january = json.loads(cost("--month", "2026-01", "--json"))
    assert (january["spend_usd"], january["at_least_usd"], january["jobs_without_a_price"]) == (None, 1.2, 1)


def test_unknown_price_makes_the_sum_a_minimum(put: Put, cost: Callable[..., str]) -> None:
    """The price is shown as unknown, and never counts as 0."""
    put("known", ran(NEW_YEAR_S, NEW_YEAR_S + 100))
    put("strange", ran(NEW_YEAR_S, NEW_YEAR_S + 100), plan={"hourly_usd": None, "worst_case_usd": None})
    found = json.loads(cost("--month", "2026-01", "--json"))
    assert (found["spend_usd"], found["at_least_usd"], found["jobs_without_a_price"]) == (None, 2.0, 1)
    text = cost("--month", "2026-01")
    assert "unknown" in text
    assert "at least 2.00: 1 job without a price" in text
    assert json.loads(cost("strange", "--json"))["spend_usd"] is None
    assert "unknown of 150.00 USD" in cost("strange")


@pytest.mark.parametrize(
    ("by", "key"),
    [("tag:team", "vision"), ("tag:owner", ""), ("project", "digits"), ("backend", "local"), ("name", "a")],
)
def test_groups_are_summed(by: str, key: str, put: Put, cost: Callable[..., str]) -> None:
    """The keys are a tag, the project, the backend and the name; jobs without the key are a group too."""
    put("a", ran(NEW_YEAR_S, NEW_YEAR_S + 100))
    put("b", ran(NEW_YEAR_S, NEW_YEAR_S + 50))
    groups = json.loads(cost("--month", "2026-01", "--by", by, "--json"))["groups"]
    assert (groups[0]["key"], groups[0]["spend_usd"]) == (key, 2.0 if by == "name" else 3.0)
    assert cost("--month", "2026-01", "--by", by).splitlines()[-1].split()[0] == "total"


def test_spreadsheet_executes_no_formula(put: Put, cost: Callable[..., str]) -> None:
    """A tag that looks like a formula becomes text; numbers stay numbers."""
    put("a", ran(NEW_YEAR_S, NEW_YEAR_S + 100), config={"tags": {"team": '=HYPERLINK("http://x","y")', "n": "-1+2"}})
    rows = list(csv.DictReader(io.StringIO(cost("--month", "2026-01", "--csv"))))
    assert rows[0]["tag:team"] == '\'=HYPERLINK("http://x","y")'
    assert (rows[0]["tag:n"], rows[0]["usd"], rows[0]["node_hours"]) == ("'-1+2", "2.000000", "0.0556")
    assert csv_text(["@a"], [["+1"], ["\tx"], [-1.5]]).splitlines() == ["@a", "'+1", "'\tx", "-1.5"]
    legs = list(csv.DictReader(io.StringIO(cost("a", "--csv"))))
    assert (legs[0]["from_utc"], legs[0]["cost_usd"]) == ("2026-01-01 00:00:00", "2.000000")
    groups = list(csv.DictReader(io.StringIO(cost("--month", "2026-01", "--by", "tag:team", "--csv"))))
    assert groups[0]["tag:team"].startswith("'=")


def test_since_limits_the_period(put: Put, cost: Callable[..., str]) -> None:
    """The value is a date or a duration; months end at the start of the next month, in UTC."""
    now_s = time.time()
    put("old", ran(NEW_YEAR_S, NEW_YEAR_S + 100))
    put("new", ran(now_s - 5400, now_s - 1800))
    assert [job["job"] for job in json.loads(cost("--since", "2d", "--json"))["jobs"]] == ["new"]
    assert json.loads(cost("--since", "1h", "--json"))["spend_usd"] == pytest.approx(36.0, abs=0.1)
    assert len(json.loads(cost("--since", "2026-01-01", "--json"))["jobs"]) == 2
    assert month_span("2025-12")[1] == month_span("2026-01")[0] == NEW_YEAR_S
    assert month_span("2028-02")[1] - month_span("2028-02")[0] == 29 * 86_400


@pytest.mark.parametrize(
    "args",
    [
        *(["--month", "2026-13"], ["--month", "26-1"], ["--since", "2026-02-31"], ["--since", "yesterday"]),
        *(["--by", "owner"], ["--by", "tag:"], ["--json", "--csv"]),
        *(["--month", "2026-01", "--since", "1d"], ["last", "--month", "2026-01"]),
    ],
)
def test_invalid_arguments_are_refused(args: list[str], cost: Callable[..., str]) -> None:
    """Each case is a usage error."""
    with pytest.raises(UsageError):
        cost(*args)


def test_job_that_was_never_sent_costs_nothing(put: Put, cost: Callable[..., str], registry: Registry) -> None:
    """The job appears neither in a month nor on its own bill."""
    job = put("ghost", State("pending"))
    registry.database.execute("UPDATE attempts SET phase = 'never_sent', state = 'failed'")
    assert json.loads(cost(job.id, "--json"))["legs"] == []
    assert "nothing was ever sent" in cost(job.id)
    assert json.loads(cost("--json"))["jobs"] == []


def test_job_that_cannot_be_polled_counts_in_its_last_state(
    registry: Registry, put: Put, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing backend, such as a removed plug-in, hides no cost of jobs on working backends."""
    put("fine", ran(NEW_YEAR_S, NEW_YEAR_S + 100))
    put("orphan", State("running", started_s=NEW_YEAR_S))
    registry.database.execute("UPDATE jobs SET backend = 'gone' WHERE id = 'orphan'")
    cli.cli.main(["cost", "--month", "2026-01", "--json"], standalone_mode=False)
    said = capsys.readouterr()
    assert "orphan is counted as it was last seen: unknown backend `gone`" in said.err
    found = json.loads(said.out)
    assert (found["spend_usd"], found["node_hours"]) == (74.0, 2.0556)  # up to its cap of an hour
