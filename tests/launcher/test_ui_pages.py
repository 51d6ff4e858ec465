"""The page in a real browser, over real jobs: content, live updates, and buttons."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from uiserver import Served, serving

from browser import PATIENT_MS, Seen, contrast
from cloudtrain.launcher.job import State
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.sweeps import overview
from doubles import swept
from doubles.signatures import MakeJob, MakeProject
from doubles.waiting import until

# Reports a step each twentieth of a second, like the trainer; obeys SIGTERM.
TELLING = """\
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("<b id=hostile>bold</b><script>document.title = 'taken'</script> \\x1b[31mred\\x1b[0m", flush=True)
for step in range(1, 6001):
    fields = {"e": "step", "step": step, "max_steps": 6000, "loss": 2 / step, "samples_per_s": 100.0}
    print(f"step {step}/6000 loss {2 / step:.4f}  ::ct " + json.dumps(fields), flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def patient() -> None:
    """Wait for the page as long as a slow machine needs."""
    expect.set_options(timeout=PATIENT_MS)


@pytest.fixture
def served(home: Path) -> Iterator[Served]:
    """Return the page of the private home folder, served until the browser has closed the page."""
    with serving(home) as found:
        yield found


@pytest.fixture
def visit(served: Served, open_page: Any) -> Callable[..., Any]:
    """Return a function that opens the printed address in a browser."""
    return lambda **context: open_page(served.address, **context)


@pytest.mark.slow
def test_job_is_shown_running_stopped_and_resumed(cli: Any, project: MakeProject, served: Served, visit: Any) -> None:
    """From the list to the job's page: lines and curve are live, and a stop and a resume within the budget work."""
    where = project("local: {price_per_hour: 1 USD}\nbudget: {limit: 5 USD}\n", text=TELLING)
    cli.ok("submit", "-d", "-y", "--name", "live", cwd=where)
    page = visit()
    assert page.url == f"http://127.0.0.1:{served.port}/"
    row = page.locator("#row-live")
    expect(row.locator(".badge")).to_have_text("running")
    expect(row.locator("progress")).to_be_visible()
    row.get_by_role("link", name="live").click()

    log = page.locator("#log")
    expect(log).to_contain_text("<b id=hostile>bold</b><script>document.title = 'taken'</script> red")
    assert page.locator("#hostile").count() == 0
    assert page.title() == "live · cloudtrain"
    before = log.locator("div").count()
    page.wait_for_function("n => document.querySelectorAll('#log div').length > n + 5", arg=before)
    assert "::ct" not in log.inner_text()
    assert _is_unbroken(_steps(log))

    curve = page.locator("#curves path.ct-line").first
    expect(curve).to_be_visible()
    drawn = curve.get_attribute("d")
    page.wait_for_function("d => document.querySelector('#curves path.ct-line').getAttribute('d') !== d", arg=drawn)

    # As after a suspend: the connection is gone while lines come, then the page continues after its last line.
    page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide'))")

    def rests() -> bool:  # lines that had come are still drawn, on a busy machine many
        shown = max(_steps(log))
        until(lambda: cli("status", "live", "--json").json["step"] > shown + 10)
        return max(_steps(log)) == shown

    until(rests)
    shown = max(_steps(log))
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    page.wait_for_function("n => document.querySelectorAll('#log div').length > n", arg=shown + 20)
    assert _is_unbroken(_steps(log))

    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Let it run").click()
    expect(page.locator("#stop")).to_be_hidden()
    assert cli("status", "live", "--json").json["state"] == "running"
    page.get_by_role("button", name="Stop").click()
    page.locator("#stop").get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#said")).to_have_text(
        "stopping live with SIGTERM (only files in CLOUDTRAIN_CHECKPOINT_DIR are saved)"
    )
    expect(page.locator("#part-head .badge").first).to_have_text("stopped")
    expect(page.locator("#log-state")).to_contain_text("the end")
    assert cli("status", "live", "--json").json["state"] == "stopped"

    assert cli("budget", "set", "0.5USD").code == 0  # a budget for all jobs, while the job would use 5 USD
    page.get_by_role("link", name="Resume").click()
    expect(page.get_by_role("alert").last).to_contain_text("does not hold this job's worst case")
    assert page.get_by_role("button", name="Resume it").count() == 0
    page.get_by_label("Budget").fill("0.40 USD")
    page.get_by_role("button", name="Reckon with that").click()
    expect(page.locator(".cost")).to_contain_text("It may cost up to 0.40 USD")
    page.get_by_role("button", name="Resume it").click()
    expect(page.locator("#part-head .badge").first).to_have_text("running")
    expect(page.locator("#part-head")).to_contain_text("attempt 2")
    assert cli("stop", "--now", "-y", "live").code == 0
    expect(page.locator("#part-head .badge").first).to_have_text("stopped")


def test_list_is_filtered_compared_and_updated(served: Served, tmp_path: Path, seed: MakeJob, open_page: Any) -> None:
    """The form filters, the chosen jobs open a comparison, and a job of a second command appears live.

    A file leads the browser to the page, as `ui` does: the request of the first visit has no strict cookie.
    """
    for number in range(3):
        seed(f"good-{number}", State("succeeded", started_s=1.0, ended_s=2.0))
    seed("bad-1", State("failed", "error", error={"message": "a rare fault"}, started_s=1.0, ended_s=2.0))
    page = open_page("about:blank")
    file = tmp_path / "open.html"
    file.write_text(f'<meta http-equiv="refresh" content="0;url={served.address}">')
    page.goto(file.as_uri())
    expect(page.locator("tbody tr")).to_have_count(4)
    assert "token" not in page.url
    assert page.locator("tbody tr .name").first.inner_text() == "bad-1"
    page.get_by_label("Text").fill("rare")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="all jobs").click()
    page.get_by_label("State").select_option("succeeded")
    expect(page.locator("tbody tr")).to_have_count(3)
    compare = page.locator("button.compare")
    expect(compare).to_be_disabled()
    page.get_by_label("compare good-0").check()
    page.get_by_label("compare good-2").check()
    page.evaluate("window.same = true")
    seed("another", State("succeeded", started_s=1.0, ended_s=2.0))
    expect(page.locator("#row-another .badge")).to_have_text("succeeded")
    assert page.evaluate("window.same")
    compare.click()  # the ticks have stayed
    expect(page.locator("thead th")).to_have_text(["", "good-2", "good-0"])


def test_log_is_filtered_paused_and_bounded(served: Served, seed: MakeJob, visit: Any) -> None:
    """Ranks have colours, a progress bar has a single line, the page has the last lines; a search finds older lines."""
    many = "".join(f"line {number} of rank 0\n" for number in range(5100))
    seed(
        "long",
        State("succeeded", started_s=1.0, ended_s=2.0),
        {"0": many, "1": "from the other\n" + "  5%\r 50%\r100%\n"},
    )
    page = visit()
    page.goto(f"{served.origin}/jobs/long")
    lines = page.locator("#log div")
    expect(lines).to_have_count(5000)
    expect(page.locator("#log-state")).to_have_text("the last 5000 lines; the end")
    page.get_by_label("Ranks").fill("1")
    expect(lines).to_have_count(2)
    assert lines.all_inner_texts()[1].endswith("100%")
    assert lines.first.locator("b").get_attribute("class") == "r1"
    page.get_by_label("Ranks").fill("")
    page.get_by_label("Search").fill("line 7 of")
    expect(lines).to_have_count(1)
    expect(page.locator("#log-download")).to_have_attribute("href", re.compile(r"grep=line"))
    page.get_by_label("Search").fill("(")
    expect(page.locator("#log-state")).to_contain_text("not a valid regular expression")


def test_sweep_is_a_job_whose_page_has_its_trials(
    served: Served, registry: Registry, seed: MakeJob, visit: Any
) -> None:
    """The list has one line for a sweep; the page has rungs and the best trials as `status`, and the report."""
    seed("plain", State("succeeded", started_s=1.0, ended_s=2.0))
    sweep = swept.put(registry, 9)
    page = visit(width=400)
    expect(page.locator("tbody .name")).to_have_text([sweep.id, "plain"])
    expect(page.locator(f"#row-{sweep.id}")).to_contain_text("9 / 9 trials")
    page.get_by_role("link", name=sweep.id).click()
    expect(page.locator("#part-head .badge").first).to_have_text("succeeded")
    best = overview.as_json(registry.database, sweep)["best"][0]
    expect(page.locator("section", has_text="Best trials").locator("tbody tr").first).to_contain_text(
        overview.figure(best["value"])
    )
    rungs = page.locator("section", has_text="Rungs").locator("tbody tr")
    expect(rungs).to_have_count(3)
    expect(rungs.first.locator("[data-name=Done]")).to_have_text("8")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert [each for each in contrast(page) if each[0] < 4.5] == [], scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Report").click()
    expect(opened.value.locator("h1")).to_contain_text(sweep.id)


def test_pages_are_readable_in_light_and_dark_and_on_a_narrow_screen(
    served: Served, seed: MakeJob, visit: Any, page_seen: Seen
) -> None:
    """Every text has a contrast of 4.5 or more, 400 pixels are wide enough, and the keyboard reaches all parts."""
    error = {"rank": 3, "type": "ValueError", "message": "x" * 300, "traceback": "Traceback\n  File y, line 1, in z\n"}
    seed("bad-with-a-name-that-is-as-long-as-can-be", State("failed", "error", True, error, started_s=1.0, ended_s=2.0))
    page = visit(width=400)
    for path in ("/", "/jobs/last", "/spend", "/jobs/nosuch"):
        if path == "/jobs/nosuch":
            page_seen.errors.clear()
        page.goto(served.origin + path)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert [each for each in contrast(page) if each[0] < 4.5] == [], (path, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
    page_seen.errors.clear()  # the browser reports the missing page


def test_spend_equals_the_cost_command_and_a_report_is_isolated(
    cli: Any, served: Served, seed: MakeJob, visit: Any
) -> None:
    """The sum of the month is the command's; the report is drawn, and cannot read data of the page."""
    now_s = time.time()
    seed("priced", State("succeeded", started_s=now_s - 30, ended_s=now_s - 10, hourly_usd=3.0))
    told = json.loads(cli("cost", "--json").stdout)
    page = visit()
    page.get_by_role("link", name="Spend").click()
    heading = page.locator("#groups-title").inner_text()
    assert f"{told['at_least_usd']:.2f} USD" in heading
    expect(page.locator(".month")).to_have_count(12)
    page.goto(f"{served.origin}/jobs/priced/report")
    expect(page.locator("h1")).to_contain_text("priced")
    assert page.evaluate("self.origin") == "null"


def _steps(log: Any) -> list[int]:
    """Return the steps of the visible lines, in order."""
    return [int(each) for each in re.findall(r"step (\d+)/6000", log.inner_text())]


def _is_unbroken(steps: list[int]) -> bool:
    """Return whether each step appears exactly once and in order."""
    return steps == list(range(1, len(steps) + 1))
