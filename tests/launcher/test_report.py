"""The report of a job: content, hidden secrets, and the view in a real browser."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from browser import contrast
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import shown_config
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.metering import meter
from cloudtrain.launcher.planning import shipped
from cloudtrain.launcher.report import facts
from cloudtrain.launcher.report.data import _checkpoint_text, chart_data, spend_curve, spent_at
from cloudtrain.launcher.report.page import report_html
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.registry import Registry
from doubles import reported
from doubles.signatures import MakeJob, MakeProject

# Prints events like the trainer; the events of a real trainer have separate tests, and torch takes seconds to load.
TELLING = """\
import json, os
for step in range(1, 13) if os.environ["RANK"] == "0" else ():
    tail = {"e": "step", "step": step, "max_steps": 12, "loss": 2.5 / step, "samples_per_s": 100.0}
    print(f"step {step}/12 loss {2.5 / step:.4f}  ::ct " + json.dumps(tail), flush=True)
    if step % 6 == 0:
        tail = {"e": "eval", "step": step, "metrics": {"accuracy": step / 20}}
        print("evaluated  ::ct " + json.dumps(tail), flush=True)
"""
NOW_S = reported.BEGAN_S + 10_000


@pytest.fixture
def job(registry: Registry) -> Job:
    """Return a job of three attempts, in the registry."""
    return reported.put(registry)


@pytest.fixture
def page(job: Job, registry: Registry, tmp_path: Path, open_page: Callable[..., Page]) -> Callable[..., Page]:
    """Return a function that opens the job's report."""
    path = tmp_path / "seeded.html"
    path.write_text(report_html(registry, job, NOW_S))
    return lambda **more: open_page(path.as_uri(), **more)


def shown(page: Page, chart: str) -> str:
    """Return the text at the upper right of a chart: the newest value, or the value at the hover."""
    return page.locator(f"[data-chart={chart}] .ct-values").inner_text()


def data_of(registry: Registry, job: Job, now_s: float = NOW_S) -> dict[str, Any]:
    """Return the data of the job's charts."""
    return chart_data(view_of(job, registry.attempts(job), now_s), series.read(registry.database, job.id))


# -- content ----------------------------------------------------------------------------------------------------------


def test_chart_data_has_columns_of_equal_length(job: Job, registry: Registry) -> None:
    """Non-finite losses are text, repeated steps appear twice, the cost grows with the meter, not in pauses."""
    data = data_of(registry, job)
    steps = data["steps"]
    assert {len(column) for column in steps.values()} == {len(steps["step"])} == {260 + 170 + 200}
    assert steps["loss"][149] == "nan"
    assert steps["step"].count(255) == 2
    assert steps["usd"] == sorted(steps["usd"])
    assert [row["metrics"]["accuracy"] for row in data["evals"]][-1] == pytest.approx(600 / 700, rel=1e-5)
    assert json.dumps(data, allow_nan=False)
    attempts = registry.attempts(job)
    spend = spend_curve(attempts, NOW_S)
    at = spent_at(attempts, NOW_S)
    legs = meter.legs_of(attempts)
    assert spend[-1][1] == pytest.approx((meter.spent_micro(legs, NOW_S) or 0) / 1e6)
    first_end_s, middle_s = reported.BEGAN_S + 540, reported.BEGAN_S + 270
    assert at(first_end_s) == at(first_end_s + reported.PAUSE_S) == pytest.approx(7.2 * 540 / 3600)
    assert at(middle_s) == pytest.approx(7.2 * 270 / 3600)


def test_unknown_price_has_no_spend_curve(seed: MakeJob, registry: Registry) -> None:
    """No line is drawn, and the axis of money is not offered."""
    found = seed("free", State("running", started_s=1000.0))
    registry.database.execute("UPDATE attempts SET plan = json_remove(plan, '$.hourly_usd')")
    registry.database.execute("UPDATE attempts SET plan = json_set(plan, '$.hourly_usd', NULL)")
    data = data_of(registry, registry.find(found.id))
    assert (data["spend"], data["limit_usd"]) == ([], None)


def test_report_of_a_long_job_is_small(registry: Registry) -> None:
    """Three attempts with the maximum of stored steps stay under a megabyte."""
    job = reported.put(registry)
    for number in (1, 2, 3):
        lines = [(reported.step_line(n, 1 / (n + 1)), reported.BEGAN_S + n / 7) for n in range(1000, 3000)]
        registry.database.execute("DELETE FROM points WHERE attempt = ?", (number,))
        with registry.database.transaction():
            series.append(registry.database, job.id, series.gather(number, lines))
    text = report_html(registry, job, NOW_S)
    assert len(data_of(registry, job)["steps"]["step"]) == 3 * series.MOST
    assert len(text.encode()) < 1_000_000


def test_report_contains_no_secret(job: Job, registry: Registry) -> None:
    """People send reports around: secrets appear by name, without values, addresses or foreign backends' settings."""
    text = report_html(registry, job, NOW_S)
    assert "HF_TOKEN" in text
    assert "NCCL_DEBUG: WARN" in text
    assert [word for word in ("hunter2", "hooks.example.org", "arn:of:another") if word in text] == []


def test_config_in_a_report_hides_secrets(job: Job) -> None:
    """Secrets are found by their names, after a flag, or in an address; similar harmless names are shown."""
    asked = {
        "params": {"hf_token": "s3cret", "max_tokens": 4096, "tokenizer": "bpe"},
        "args": ["--api-key=s3cret", "--password", "s3cret", "--lr", "1"],
        "env": {"DATABASE_URL": "postgres://me:s3cret@host/db", "TOKENIZERS_PARALLELISM": "no", "AUTHOR": "me"},
        "inputs": {"train": "https://host/data?sig=s3cret"},
        "local": {"environment": {"accessKey": "s3cret"}},
    }
    found = shown_config.shown(replace(job, config=asked))
    assert "s3cret" not in str(found)
    assert found["params"] == {"hf_token": shown_config.HIDDEN, "max_tokens": 4096, "tokenizer": "bpe"}
    assert found["args"][3:] == ["--lr", "1"]
    url = f"postgres://{shown_config.HIDDEN}@host/db"
    assert found["env"] == {"DATABASE_URL": url, "TOKENIZERS_PARALLELISM": "no", "AUTHOR": "me"}


def test_config_of_a_script_has_no_defaults_of_the_trainer(job: Job) -> None:
    """Values that the user has set are shown; the step of a script's save is unknown."""
    asked = JobConfig.model_validate({"name": "x", "script": "t.py", "checkpoint": {"uri": "/data"}})
    found = shown_config.shown(replace(job, config=asked.model_dump(mode="json")))
    assert "training" not in found
    assert found["checkpoint"] == {"uri": "/data"}
    task = JobConfig.model_validate({"name": "x", "task": "t.py"}).model_dump(mode="json")
    assert shown_config.shown(replace(job, config=task))["training"]["precision"] == "fp32"
    assert _checkpoint_text(series.Point(1, "checkpoint", 1.0, None, {"path": "out/ckpt.pt"})) == "saved out/ckpt.pt"


def test_report_shows_the_plan_and_the_results(job: Job, registry: Registry) -> None:
    """Commit, machines, attempts with reasons, price and failing rank; the pauses between the attempts do not count."""
    text = report_html(registry, job, NOW_S)
    for words in (
        *("with uncommitted changes", "2 x a big one", "A card, 80 GiB", "the list of 2026-11", "8 ranks"),
        *("stopped (preempted)", "failed (node failure)", "250 to 420", "Attempt 3: rank 3 on node 1"),
        *("best 0.8571 at step 600", "10.00 USD"),
    ):
        assert words in text, words
    found = facts.results(view_of(job, registry.attempts(job), NOW_S), series.read(registry.database, job.id))
    assert found["running_s"] == 540 + 360 + 420


# -- appearance -------------------------------------------------------------------------------------------------------


def test_report_opens_without_a_request_or_an_error(page: Callable[..., Page], page_seen: Any) -> None:
    """A single file, safe from markup in output: attempts, saves and bad losses are marked; a table has the values."""
    opened = page()
    assert opened.title() == "seeded: failed"
    assert opened.evaluate("window.broken") is None
    assert opened.locator("script").count() == 3
    assert len(page_seen.requests) == 1
    assert opened.locator(".failure .message").inner_text().startswith("ValueError: </script><script>")
    loss = opened.locator("[data-chart=loss]")
    assert loss.locator("text.ct-attempt").all_text_contents() == [
        "attempt 2, after a preemption", "attempt 3, after a node failure",
    ]  # fmt: skip
    assert loss.locator("text.ct-restart").count() == 0  # no room beside its neighbour: the line's title has the text
    assert loss.locator("line.ct-restart title").all_text_contents() == ["restart, went on from step 300"]
    assert loss.locator(".ct-notfinite title").all_text_contents() == ["nan at step 150"]  # step 151 is beside step 150
    assert loss.locator("> svg").get_attribute("aria-label").endswith("2 not finite")
    assert loss.locator(".ct-saved").count() > 10
    assert loss.locator("path.ct-stale").count() > 0
    assert opened.locator("[data-chart=spend] .ct-label.ct-limit").text_content() == "limit 10.00 USD"
    opened.get_by_text("Table of values").click()
    opened.locator(".ct-rows tbody tr").nth(200).wait_for(state="attached")
    assert opened.locator(".ct-rows th").first.inner_text() == "attempt"
    assert "Training loss: from 4.064 to 0.2036, least 0.1096" in opened.locator(
        "[data-chart=loss] > svg"
    ).get_attribute("aria-label")


@pytest.mark.parametrize(("value", "text"), [(18_840.4, "18,840"), (0.12345, "0.1235"), (3, "3"), ("nan", "nan")])
def test_figure_has_no_exponent(value: Any, text: str) -> None:
    """The figure looks as a person writes numbers."""
    assert facts.figure(value) == text


def test_curves_show_the_reported_values(page: Callable[..., Page], job: Job, registry: Registry) -> None:
    """The keyboard moves to the first and the last step, and every chart shows the figures of the step."""
    opened, steps = page(), data_of(registry, job)["steps"]
    charts = opened.locator("[data-chart]").evaluate_all("all => all.map(each => each.dataset.chart)")
    assert charts == ["loss", "eval-accuracy", "eval-loss", "samples_per_s", "split", "lr", "grad_norm",
                      "memory_bytes", "spend"]  # fmt: skip
    assert float(shown(opened, "loss")) == pytest.approx(steps["loss"][-1], rel=1e-3)
    opened.locator("[data-chart=loss] > svg").focus()
    opened.keyboard.press("Home")
    assert float(shown(opened, "loss")) == pytest.approx(steps["loss"][0], rel=1e-3)
    assert "step 1 · 12 s in" in opened.locator(".ct-readout").inner_text()
    assert (shown(opened, "eval-accuracy"), shown(opened, "memory_bytes")) == ("0.1429", "1 GiB")
    assert re.sub(r"\s+", " ", shown(opened, "split")) == "data 250 ms compute 1.5 s communication 250 ms"
    opened.keyboard.press("Escape")
    assert float(shown(opened, "loss")) == pytest.approx(steps["loss"][-1], rel=1e-3)
    assert opened.locator("[data-chart=loss] path.ct-line").first.get_attribute("d").count("L") > 100


def test_hover_and_choices_hold_in_every_chart(page: Callable[..., Page], job: Job, registry: Registry) -> None:
    """The crosshair is at the same step in all charts; a redraw by `ui` keeps axis, focus and hover."""
    opened = page()
    box = opened.locator("[data-chart=loss] > svg").bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    step = int(re.match(r"step (\d+)", opened.locator(".ct-readout").inner_text())[1])
    assert 280 < step < 320
    assert opened.locator(".ct-cross line").count() == opened.locator("[data-chart]").count()
    assert float(shown(opened, "lr")) == pytest.approx(0.1 / (step + 1), rel=1e-3)
    box = opened.locator("[data-chart=lr] > svg").bounding_box()
    ends = opened.locator("[data-chart=lr] .ct-cross line").get_attribute("x1")
    assert 0.45 < (float(ends) - 62) / (box["width"] - 62 - 16) < 0.55
    opened.get_by_role("button", name="Time").click()
    opened.locator("[data-chart=lr] > svg").focus()
    opened.keyboard.press("Home")
    before = opened.locator(".ct-readout").inner_text()
    opened.evaluate(
        "data => CloudtrainCharts.draw(document.getElementById('charts'), [data], {x: 'step'})", data_of(registry, job)
    )
    assert opened.locator("[data-x=time]").get_attribute("aria-pressed") == "true"
    assert opened.locator(".ct-readout").inner_text() == before
    assert opened.evaluate("document.activeElement.closest('[data-chart]').dataset.chart") == "lr"


def test_figures_are_drawn_by_their_weight(page: Callable[..., Page], job: Job, registry: Registry) -> None:
    """The axis of huge figures ends; a row of weight 0 is an extreme and does not change the mean."""
    opened, data = page(), data_of(registry, job)
    huge = [2**53 - 7, 2**53 - 5, 2**53 - 6]
    row = {"attempt": [1] * 3, "time_s": [reported.BEGAN_S + n for n in range(3)], "usd": [0.0] * 3}
    for some in ({"step": [1, 2, 3], "own": huge}, {"step": sorted(huge), "own": [1, 2, 3]}):
        opened.evaluate("data => CloudtrainCharts.draw(document.getElementById('charts'), [data], {x: 'step'})",
                        data | {"steps": row | some, "evals": [], "marks": []})  # fmt: skip
        assert opened.locator("[data-chart=own] text.ct-tick").count() > 0
    count = 40
    row = {"attempt": [1] * count, "time_s": [reported.BEGAN_S + n for n in range(count)], "usd": [None] * count}
    rates = [20.0 if n % 2 else 100.0 for n in range(count)]
    weights = [0 if n % 2 else 100 for n in range(count)]
    steps = row | {"step": list(range(count)), "samples_per_s": rates, "weight": weights}
    opened.evaluate("data => CloudtrainCharts.draw(document.getElementById('charts'), [data], {x: 'step'})",
                    data | {"steps": steps, "evals": [], "marks": [], "spend": []})  # fmt: skip
    smooth = opened.locator("[data-chart=samples_per_s] path.ct-line:not(.ct-raw)").get_attribute("d")
    assert len({place.split()[1] for place in smooth[1:].split("L")}) == 1


def test_axes_switch(page: Callable[..., Page]) -> None:
    """The log scale has decades; all charts switch at once, with shaded pauses over time, and steps over money."""
    opened = page()
    opened.get_by_role("button", name="Log scale").click()
    ticks = opened.locator("[data-chart=loss] text.ct-tick[text-anchor=end]").all_text_contents()
    assert {"0.2", "0.5", "1", "2"} <= set(ticks)
    ticks = "[data-chart=loss] text.ct-tick[text-anchor=middle]"
    assert opened.locator(ticks).nth(1).text_content() == "50"
    opened.get_by_role("button", name="Time").click()
    assert opened.locator(ticks).nth(1).text_content() == "5m"
    assert opened.locator("[data-chart=lr] .ct-gap").count() == 2
    opened.get_by_role("button", name="Money").click()
    assert opened.locator("[data-chart=bought]").count() == 1
    assert opened.locator("[data-chart=spend]").count() == 0
    assert opened.locator("[data-x=money]").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(page: Callable[..., Page], scheme: str) -> None:
    """The contrast of each text with its background is at least 4.5 (WCAG 2.1, AA)."""
    lowest = contrast(page(color_scheme=scheme))
    assert lowest
    assert lowest[0][0] >= 4.5, lowest


def test_page_fits_windows_and_paper(page: Callable[..., Page]) -> None:
    """At 400 pixels charts form a column, and tables scroll; the print is white, without buttons, and cuts no chart."""
    opened = page(width=400)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 400
    left = opened.locator("[data-chart]").evaluate_all("all => all.map(each => each.getBoundingClientRect().left)")
    assert len(set(left)) == 1
    opened = page(color_scheme="dark")
    assert len(re.findall(rb"/Type\s*/Page\b", opened.pdf(format="A4"))) >= 3
    opened.emulate_media(media="print", color_scheme="dark")
    assert opened.locator(".ct-bar").is_hidden()
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.locator("[data-chart=loss]").evaluate("each => getComputedStyle(each).breakInside") == "avoid"


def test_report_of_a_job_without_steps_explains_itself(
    job: Job, registry: Registry, tmp_path: Path, open_page: Callable[..., Page], seed: MakeJob
) -> None:
    """Text replaces empty axes: a silent script is told how to report steps, and a new job promises nothing."""
    registry.database.execute("DELETE FROM points")
    registry.database.execute(
        "UPDATE attempts SET state = 'running', outcome = json_set(outcome, '$.state', 'running')"
    )
    path = tmp_path / "begun.html"
    path.write_text(report_html(registry, registry.find(job.id), NOW_S))
    assert "It runs: as of " in path.read_text()
    assert "No step is reported yet" in open_page(path.as_uri()).locator("#charts").inner_text()
    job = seed("silent", State("succeeded", started_s=1000.0, ended_s=1060.0))
    path = tmp_path / "silent.html"
    path.write_text(report_html(registry, job, NOW_S))
    text = open_page(path.as_uri()).locator("#charts").inner_text()
    assert "The job reported no steps" in text
    assert "::ct" in text


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_of_a_real_job(cli: Any, project: MakeProject, tmp_path: Path, open_page: Callable[..., Page]) -> None:
    """The last loss of the file is the last printed loss."""
    where = project("", text=TELLING)
    done = cli.ok("submit", "--name", "real", "-y", cwd=where, timeout_s=240)
    cli.ok("report", "real", "-o", tmp_path / "real.html")
    opened = open_page((tmp_path / "real.html").as_uri())
    assert opened.locator("h1").inner_text() == "real"
    printed = re.findall(r"step 12/12 loss (\S+)", done.stdout)[0]
    assert float(shown(opened, "loss")) == pytest.approx(float(printed), rel=1e-3)
    assert opened.locator("[data-chart=eval-accuracy] circle.ct-dot").count() == 2


def test_report_replaces_only_an_older_report(cli: Any, seed: MakeJob, tmp_path: Path) -> None:
    """A newer report replaces an older report; a foreign file needs --force."""
    seed("one", State("succeeded", started_s=1000.0, ended_s=1060.0))
    assert cli("report", "one").code == cli("report", "one").code == 0
    path = tmp_path / "mine.html"
    path.write_text("<p>mine</p>")
    refused = cli("report", "one", "-o", path)
    assert (refused.code, path.read_text()) == (2, "<p>mine</p>")
    assert "is not a cloudtrain report" in refused.stderr
    assert cli("report", "one", "-o", path, "--force").code == 0
    assert "mine</p>" not in path.read_text()


def test_report_beside_the_code_is_not_shipped(job: Job, registry: Registry, tmp_path: Path) -> None:
    """The report may be in the code folder: the code's hash stays, and the user's own page is code."""
    (tmp_path / "train.py").write_text("x = 1")
    (tmp_path / "page.html").write_text("<p>mine</p>")
    (tmp_path / "seeded.html").write_text(report_html(registry, job, NOW_S))
    assert shipped.collect(tmp_path, exclude=["home"]) == ["page.html", "train.py"]


@pytest.mark.parametrize("where", ["none/there.html", ".", "/dev/stdout"])
def test_unwritable_report_path_is_a_usage_error(cli: Any, seed: MakeJob, where: str) -> None:
    """The cases are a missing folder, a folder and a pipe; no file is left."""
    seed("one", State("succeeded"))
    told = cli("report", "one", "-o", where)
    assert told.code == 2
    assert "hint:" in told.stderr
    assert "Traceback" not in told.stderr


def test_report_as_json_has_the_data_of_the_charts(cli: Any, job: Job, tmp_path: Path) -> None:
    """No file is written."""
    told = cli("report", "seeded", "--json").json
    assert told["job"]["job"] == "seeded"
    assert len(told["steps"]["loss"]) == 630
    assert not list(tmp_path.glob("*.html"))
