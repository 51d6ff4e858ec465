"""Homes of random jobs: all commands, the page, the report and Python show the same money, as counted again here."""

import html
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.terms import CostRate, Terms, worst_case_micro
from cloudtrain.launcher import api, cli
from cloudtrain.launcher.job import ACTIVE, Attempt, Job, State
from cloudtrain.launcher.jobs import listing, overview, reserve
from cloudtrain.launcher.jobs.view import read_view
from cloudtrain.launcher.live import tableview
from cloudtrain.launcher.live.model import Scene, WatchedJob
from cloudtrain.launcher.live.view_state import ViewState
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.report import data, facts
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.registry import Registry, this_process
from cloudtrain.launcher.text.charts import UNICODE
from cloudtrain.launcher.ui import pages, site
from doubles import swept
from doubles.plans import plan_of
from doubles.signatures import SetAnswers

NOW_S = 1_795_780_800.0  # 2026-11-27 12:00 UTC
MONTH_S = 1_793_491_200.0  # the begin of November
LIMITS = {"": "40USD", "vision": "9USD", "speech": "90USD"}  # some are below the spent money
ENDS = ("succeeded", "failed", "stopped", "unknown end", "never sent")
RUNS = ("running", "pending", "stopping", "waits again", "silent")


@dataclass
class Counted:
    """The money of an attempt, counted by this test: at list prices, and at worst before and after the month began."""

    spent: int | None
    worst: tuple[int, int] = (0, 0)
    held: int = 0


def up(count: Fraction) -> int:
    """Return the number rounded up."""
    return -int(-count // 1)


def count(plan: Plan, state: State, *, sent: bool) -> Counted:
    """Count an attempt again; all times are whole seconds."""
    if not sent:
        return Counted(0)
    ended, most_s = state.state not in ACTIVE, (plan.cap_s + plan.terms.tail_s) * plan.terms.starts
    until_s = state.ended_s or (NOW_S if not ended else (state.started_s or 0) + most_s)
    seconds = 0 if state.started_s is None else int(until_s - state.started_s)
    if state.billed_s is not None:
        seconds = int(state.billed_s) + (0 if ended or state.waits_again else int(NOW_S - (state.told_s or NOW_S)))
    if plan.price_micro is None:
        return Counted(None if seconds or state.state in ("running", "stopping") else 0)
    cost = Fraction(plan.instances * plan.price_micro, 3600)
    unit_s = plan.terms.unit_s
    billed_s = up(Fraction(seconds + int(state.idle_s or 0), unit_s)) * unit_s if seconds else 0
    worst = up(cost * billed_s * Fraction(str(plan.uncertainty)))
    if not ended:
        return Counted(up(cost * seconds), (0, worst), max(0, (plan.worst_case_micro or 0) - worst))
    begin_s, end_s = state.started_s or NOW_S, min(NOW_S, until_s if state.ended_s else NOW_S)
    before = round(worst * max(0.0, MONTH_S - begin_s) / (end_s - begin_s)) if end_s > begin_s else 0
    return Counted(up(cost * seconds), (min(worst, before), worst - min(worst, before)))


def random_state(rng: random.Random, kind: str, begin_s: float) -> State:
    """Return a state of the kind that began at the time."""
    ended_s = begin_s + rng.randrange(1, 3000)
    how = {"billed_s": float(rng.randrange(1, 2000)), "billed_by": "the platform"} if rng.random() < 0.4 else {}
    if kind == "pending":
        return State("pending")
    if kind == "waits again":
        return State("pending", started_s=begin_s, ended_s=ended_s, **how)  # type: ignore[arg-type]
    if kind in RUNS:
        told = {"told_s": NOW_S} if how else {}
        return State("stopping" if kind == "stopping" else "running", started_s=begin_s, **how, **told)  # type: ignore[arg-type]
    if kind == "unknown end":
        return State("stopped", "user", started_s=begin_s)
    idle = {"idle_s": 60.0} if rng.random() < 0.3 else {}
    return State(kind, started_s=begin_s, ended_s=ended_s, **how, **idle)  # type: ignore[arg-type]


def random_plan(rng: random.Random) -> Plan:
    """Return a plan of a random price, of whose worst case a run uses a part."""
    instances, price = rng.choice([1, 2, 5]), rng.choice([None, 0, 1_234_567, 36_000_000])
    terms = {"unit_s": rng.choice([1, 60]), "tail_s": 30, "starts": rng.choice([1, 2])}
    uncertainty = rng.choice([1.0, 1.1])
    worst = None if price is None else worst_case_micro(3600, CostRate(instances, price, uncertainty), Terms(**terms))
    more = {} if worst is None else {"worst_case_micro": worst, "worst_case_usd": worst / 1e6, "price_micro": price}
    return plan_of(instances=instances, uncertainty=uncertainty, terms=terms, **more)


def put(registry: Registry, rng: random.Random, number: int) -> tuple[str, list[Counted]]:
    """Store a job of up to three attempts; return its project and the money of its attempts."""
    kinds = [*rng.choices(ENDS[:3], k=rng.choice([0, 0, 1, 2])), rng.choice(ENDS + RUNS)]
    project, counted = rng.choice(list(LIMITS)), list[Counted]()
    config = swept.config_of(9) if rng.random() < 0.3 else {}
    config |= {"project": {"name": project or None}, **({"budget": {"limit": "30 USD"}} if rng.random() < 0.5 else {})}
    job: Job | None = None
    for place, kind in enumerate(kinds, 1):
        back_s = rng.randrange(3000, 3600) if kind in RUNS else rng.randrange(4000, 60 * 86_400)
        plan, state = random_plan(rng), random_state(rng, kind, NOW_S - back_s)
        ref = {"folder": "/x", "nodes": 1, "checkpoint_dir": "/x", "state": asdict(state)}
        attempt = Attempt(f"job-{number}", place, "intent", plan, {}, NOW_S - back_s, this_process())
        made = Job(attempt.job_id, "job", "local", attempt.created_s, config, "/x.yaml", {}, attempt)
        if job is None:
            job, _ = registry.add(attempt.job_id, lambda name, first, made=made: made, exclusive=True, key=None)  # type: ignore[misc]
        else:
            registry.add_attempt(attempt, config, {})
        reserve.reserve(registry, attempt, config)
        if kind == "never sent":
            registry.mark_never_sent(attempt, State("failed", "error", ended_s=NOW_S))
        else:
            registry.mark_sent(attempt, ref)
            with registry.database.transaction():
                registry.set_state(attempt, state, {})
                listing.keep(registry, attempt.job_id)
            if kind == "silent":
                registry.set_unreachable(replace(attempt, state=state))
        counted.append(count(plan, state, sent=kind != "never sent"))
    return project, counted


def usd(micro: int | None) -> float | None:
    """Return micro-dollars in dollars, as in JSON."""
    return None if micro is None else micro / 1e6


def total(parts: list[Counted]) -> int | None:
    """Return the money spent by attempts; None if a price is unknown."""
    return None if any(each.spent is None for each in parts) else sum(each.spent or 0 for each in parts)


def plain(text: str) -> str:
    """Return the text of HTML, with single spaces."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


@pytest.fixture
def run(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command in this process and returns the output."""

    def call(*words: str) -> str:
        capsys.readouterr()
        cli.cli.main(list(words), standalone_mode=False)
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("seed", range(3))
def test_all_screens_show_the_same_money(
    registry: Registry, answers: SetAnswers, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Spent, held and left money of each job, project and month are the same everywhere; left is never negative."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    answers(lambda ref: State(**ref["state"]))
    rng, counted = random.Random(seed), dict[str, tuple[str, list[Counted]]]()
    for number in range(12):
        counted[f"job-{number}"] = put(registry, rng, number)
    for project, limit in LIMITS.items():
        run("budget", "set", *filter(None, [project]), limit, *(["--month"] if project == "speech" else []))
    listed = {each["job"]: each for each in json.loads(run("list", "--all", "--json"))["jobs"]}
    month = json.loads(run("cost", "--since", "300d", "--json"))
    by_job = {each["job"]: each["spend_usd"] for each in month["jobs"]}
    for name, (_, parts) in counted.items():
        _check_job(registry, run, name, total(parts), listed[name], by_job)
    known = sum(each.spent or 0 for _, parts in counted.values() for each in parts)
    assert (month["at_least_usd"], month["jobs_without_a_price"]) == (usd(known), list(by_job.values()).count(None))
    _check_budgets(registry, run, counted)
    run("rm", *(job.id for job in registry.jobs() if not job.active), "-y")
    _check_budgets(registry, run, counted)  # a removed job counts at its end


def _check_job(
    registry: Registry, run: Callable[..., str], name: str, spent: int | None, listed: Any, by_job: dict[str, Any]
) -> None:
    """Compare the screens of a job with the counted money."""
    view = read_view(registry, registry.find(name))
    status = json.loads(run("status", name, "--json"))
    figures = {
        "status": status["spend_usd"],
        "attempts": None if spent is None else round(sum(each["spend_usd"] for each in status["attempts"]), 6),
        "list": listed["spend_usd"],
        "cost": json.loads(run("cost", name, "--json"))["spend_usd"],
        "months": by_job.get(name, usd(spent) if not spent else "missing"),
        "python": api.status(name).cost_usd,
        "page": pages.job_values(registry, name)["job"]["spend_usd"],
        "curve": corners[-1][1] if (corners := data.spend_curve(view.attempts, NOW_S)) else usd(spent),
    }
    assert figures == dict.fromkeys(figures, usd(spent)), name
    assert status["burn_usd_per_hour"] == 0 or status["state"] in ACTIVE, name
    parts = pages.job_parts(site.Pages(site.assets(), csrf="", is_read_only=True), registry, name, "").parts
    table = tableview.view(Scene((WatchedJob(view),), NOW_S), ViewState(), (160, 9), UNICODE, "")
    cards = {card[0]: card[1] for card in facts.headline(view, series.read(registry.database, name))}
    (line,) = [each for each in listing.chosen(registry, listing.JobFilter()).lines if each.job_id == name]
    texts = {
        "status": re.findall(r"(?:spend|cost) +([\d.]+|unknown)", "\n".join(overview.as_lines(view)))[0],
        "line": overview.as_line(view).split(" USD")[0].split(" ")[-1] if spent is not None else "unknown",
        "list": line.money.split(" ")[0].replace("?", "unknown"),
        "cost": re.findall(r"  spent +(\S+)", run("cost", name))[0],
        "page": re.findall(r"Spend, USD (\S+)", plain(parts["facts"]))[0],
        "table": re.findall(r"(\S+?)(?:, \d+ %)?$", table[2].plain.rstrip())[0],
        "report": cards.get("Cost", "0.00").removesuffix(" USD"),
    }
    assert len(set(texts.values())) == 1, (name, spent, texts)
    if spent is not None:
        assert spent <= Decimal(texts["status"]) * 10**6 < spent * Decimal("1.1") + 1, (name, spent, texts)


def _check_budgets(registry: Registry, run: Callable[..., str], counted: dict[str, tuple[str, list[Counted]]]) -> None:
    """Compare the budgets on all screens with the counted money."""
    shown = json.loads(run("budget", "show", "--json"))
    page = pages.spend_values(registry.database, "2026-11", "project")
    html_rows = plain(site.Pages(site.assets(), csrf="", is_read_only=True).render("spend.html", **page, csp_nonce=""))
    text = run("budget", "show")
    for row in shown["budgets"]:
        mine = [each for project, parts in counted.values() if (row["project"] or project) == project for each in parts]
        spent = sum(each.worst[1] + (0 if row["period"] == "month" else each.worst[0]) for each in mine)
        held = sum(each.held for each in mine)
        figures = [row["spent_usd"], row["reserved_usd"], row["left_usd"]]
        left = max(0, round(row["limit_usd"] * 1e6) - spent - held)
        assert figures == [usd(spent), usd(held), usd(left)], row
    promised = [each["amount_usd"] for each in shown["reservations"] if each["amount_usd"]]
    assert sum(promised) == pytest.approx(shown["budgets"][0]["reserved_usd"])
    for line in text.splitlines()[1 : 1 + len(shown["budgets"])]:
        cells = " ".join(line.partition("[")[0].split())
        assert cells in html_rows, (cells, html_rows)
