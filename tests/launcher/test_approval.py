"""The confirmation before a submit costs money: required unless a limit ends the job."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs.approval import approved
from cloudtrain.launcher.planning.prepare import Prepared, prepare
from doubles.plans import make_job


@pytest.fixture
def prepared(project: Callable[..., Path], home: Path) -> Callable[..., Prepared]:
    """Return a function that prepares a job with a worst case (None: unknown) and a budget's text."""

    def make(worst_usd: float | None, budget: str = "") -> Prepared:
        folder = project(f"local: {{price_per_hour: 1 USD}}\n{budget}")
        ready = prepare(configs.load(folder / "cloudtrain.yaml"), folder / "cloudtrain.yaml", home, dry=True)
        hourly = None if worst_usd is None else ready.plan.hourly_usd
        worst = {"worst_case_usd": worst_usd, "worst_case_micro": worst_usd and round(worst_usd * 1e6)}
        return replace(ready, plan=replace(ready.plan, **worst, hourly_usd=hourly))

    return make


@pytest.mark.parametrize(
    ("worst_usd", "budget", "asked"),
    [
        (0.0, "", None),
        (50.0, "", "up to 50.00 USD. Send it?"),
        (None, "", "at a price that is not known. Send it?"),
        (50.0, "budget: {limit: 60 USD}", None),
        (50.0, "budget: {limit: 1 USD, on_limit: alert}", "up to 50.00 USD. Send it?"),
    ],
)
def test_confirmation_is_required_unless_a_budget_ends_the_job(
    worst_usd: float | None, budget: str, asked: str | None, prepared: Callable[..., Prepared]
) -> None:
    """A free job or a budget that ends the job needs no question; otherwise `--yes` or a person is required."""
    ready = prepared(worst_usd, budget)
    assert approved(ready, yes=True)
    if asked is None:
        assert approved(ready, yes=False)
        return
    with pytest.raises(UsageError) as caught:
        approved(ready, yes=False)
    assert asked in str(caught.value)


@pytest.mark.parametrize(
    ("reason", "is_repeat", "asked"), [("error", True, True), ("error", False, False), ("user", True, False)]
)
def test_failed_code_is_sent_again_only_after_a_question(
    prepared: Callable[..., Prepared], reason: str, is_repeat: bool, asked: bool
) -> None:
    """After an error, the same code and config need an answer or `-y`, also for a free job; programs get an error."""
    ready, job = replace(prepared(0.0), is_repeat=is_repeat), make_job("j", state=State("failed", reason, True))
    assert approved(ready, yes=True, before=job)
    if not asked:
        assert approved(ready, yes=False, before=job)
        return
    with pytest.raises(UsageError, match="Send the same code and config, which failed"):
        approved(ready, yes=False, before=job)


@pytest.mark.parametrize(
    ("more", "is_resumable", "is_warned"),
    [
        ("keep: [last.pt]", True, True),
        ("keep: [last.pt]", False, False),
        ("keep: [last.pt]\nresume_args: [--resume]", True, False),
        ("", True, False),
    ],
)
def test_resume_of_kept_files_without_resume_args_is_warned_of(
    prepared: Callable[..., Prepared], more: str, is_resumable: bool, is_warned: bool
) -> None:
    """The same arguments may begin at step 0 and overwrite the only checkpoint; a first submit has no checkpoint."""
    ready, job = prepared(0.0, more), make_job("j", state=State("stopped", "user", is_resumable))
    warned = [line for line in ready.lines(job) if line.startswith("warning: the script starts with the same arg")]
    assert (len(warned), "`resume_args` is not set" in "".join(ready.lines())) == (int(is_warned), False)
