"""`cloudtrain prices` and `prices refresh`: known prices, their age, and safe updates."""

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.metering.rate import Key, Quote, Rate
from cloudtrain.launcher.prices import catalog, own
from doubles.aws.handle import ROLE, Aws

SDK = ("boto3", "botocore.session", "pydantic", "jinja2", "yaml")
CPU_JOB = f"""\
backend: sagemaker
resources: {{instance_type: ml.m5.xlarge}}
sagemaker: {{region: us-east-1, role: "{ROLE}", bucket: mine}}
"""


@pytest.fixture
def aws_cli(cli: Any, aws: Aws) -> Any:
    """Return the command of a user with an account at AWS."""
    return replace(cli, preloaded=SDK, env=aws.environ)


def test_prices_are_sorted_by_the_counted_price(cli: Any) -> None:
    """Rows have the price per GPU, kind, age and origin; types without a price come last, without a figure."""
    lines = cli("prices", "--accelerators", "h100:8", "--backend", "sagemaker", "--wide").stdout.splitlines()
    assert lines[0].split()[:4] == ["COUNTED", "PER", "GPU", "TYPE"]
    row = r"(\S+) +(\S+) +ml\.p5\.48xlarge +H100:8 +us-west-2 +on demand +63\.2960 +(\d+)d +(\d+)% +quoted"
    counted, per_gpu, age, percent = map(float, re.match(row, lines[1]).groups())
    assert percent == (age > 90) * min(45, 5 * math.ceil(age / 180))  # the table gets older, this test does not
    assert (counted, per_gpu) == (pytest.approx(63.296 * (1 + percent / 100)), pytest.approx(counted / 8, abs=1e-4))
    found = cli("prices", "--json").json["prices"]
    usd = [one["counted_usd_per_hour"] for one in found]
    known = [one for one in usd if one is not None]
    assert known == sorted(known)
    assert (len(found), None in known, usd[len(known) :]) == (646, False, [None] * 18)
    spot = [one for one in found if one["spot"]]
    assert {one["kind"] for one in spot} == {"spot"}
    assert all(one["uncertainty"] >= 1 for one in found)


def test_prices_of_a_config_cover_its_machines(cli: Any, project: Callable[..., Path]) -> None:
    """A machine without a price is named with the reason, and an option shows all machines."""
    clouds = "vertex: {project: a-project, location: us-west1, staging_bucket: gs://b-uc}\n"
    folder = project(CPU_JOB.replace("instance_type: ml.m5.xlarge", "accelerators: T4:1") + clouds)
    done = cli.ok("prices", cwd=folder)
    assert done.stdout.split()[:9] == ["BACKEND", "TYPE", "HAS", "REGION", "HOW", "USD/H", "AT", "MOST", "AGE"]
    assert [line.split()[:4] for line in done.stdout.splitlines()[1:]] == [
        ["sagemaker", "ml.g4dn.xlarge", "T4:1", "us-east-1"]
    ]
    assert "vertex: no price of n1-standard-" in done.stderr
    (folder / "cloudtrain.yaml").write_text("name: x\nscript: loop.py\n")
    assert len(cli("prices", cwd=folder).stdout.splitlines()) > 100
    for option in (("--all",), ("--backend", "azureml")):
        assert len(cli("prices", *option, cwd=folder).stdout.splitlines()) > 20


def test_prices_are_filtered(cli: Any) -> None:
    """The filters are backend, accelerator, region and type, also for CSV."""
    done = cli("prices", "--csv", "--accelerator", "A100", "--region", "us-central1", "--backend", "vertex")
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert {row["accelerator"] for row in rows} == {"A100"}
    assert {row["region"] for row in rows} == {"us-central1"}
    assert len({row["count"] for row in rows}) > 2
    large = cli("prices", "--json", "--accelerator", "A100-80GB:8").json["prices"]
    assert {each["instance_type"] for each in large} >= {"ml.p4de.24xlarge", "a2-ultragpu-8g"}
    assert "ml.p4d.24xlarge" not in {each["instance_type"] for each in large}
    spot = cli("prices", "--json", "--accelerator", "nvidia-tesla-a100:8", "--spot").json["prices"]
    assert {each["kind"] for each in spot} == {"spot"}
    (one,) = cli("prices", "--json", "--type", "ml.g5.12xlarge", "--region", "us-west-2").json["prices"]
    assert (one["usd_per_hour"], one["derived"], one["own"]) == (7.09, False, False)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--backend", "sagmaker"), 3, "unknown backend `sagmaker`"),
        (("--accelerator", "A100:x"), 2, "as in A100:8"),
        (("--accelerator", ":8"), 2, "names no accelerators"),
        (("--type", "ml.m5.large"), 0, "prices refresh --backend B --region R --type T"),
        (("--type", "p4d.24xlrge"), 0, "did you mean `ml.p4d.24xlarge`"),
        (("--region", "us-est-1"), 0, "did you mean `us-east-1`"),
        (("--region", "mars", "--backend", "sagemaker"), 0, "there are eu-west-1, us-east-1, us-west-2"),
        (("--accelerators", "Z9"), 0, "no accelerator `Z9` is known here; there are "),
        (("--backend", "local"), 0, "write local.price_per_hour"),
        (("--accelerator", "H100:7"), 0, "leave a filter out"),
        (("refresh",), 2, "no region with usable prices"),
        (("refresh", "--backend", "local"), 2, "write local.price_per_hour"),
        (("refresh", "--backend", "azureml"), 3, ""),
        (("refresh", "-f", "nowhere.yaml"), 3, "nowhere.yaml"),
    ],
)
def test_invalid_call_has_a_hint(cli: Any, args: tuple[str, ...], code: int, said: str) -> None:
    """The message has the fix."""
    done = cli("prices", *args, env={"AWS_CONFIG_FILE": "/dev/null", "CLOUDSDK_CONFIG": "/nowhere"})
    assert (done.code, said in done.stderr) == (code, True), done.stderr
    assert "itself failed" not in done.stderr


def test_refresh_adds_the_price_of_the_job(aws_cli: Any, project: Callable[..., Path]) -> None:
    """The table lacks a type without GPUs; after the refresh the plan has a price and a worst case."""
    folder = project(CPU_JOB)
    assert aws_cli("plan", "--json", cwd=folder).json["hourly_usd"] is None
    first = aws_cli.ok("prices", "refresh", cwd=folder)
    assert re.search(r"ml\.m5\.xlarge +us-east-1 +on demand +- +0\.2300 +new +AWS Price List, Training", first.stdout)
    assert re.search(r"ml\.g9\.xlarge .* AWS lists it at 0 USD", first.stdout)
    plan = aws_cli("plan", "--json", cwd=folder).json
    assert (plan["uncertainty"], plan["price_source"].count("ml.m5.xlarge")) == (1.0, 1)
    assert plan["hourly_usd"] == pytest.approx(0.2514, abs=1e-4)  # with its disk
    again = aws_cli("prices", "refresh", cwd=folder)
    assert "8 prices read: 0 changed, 0 new, 8 as before" in again.stderr


def test_change_is_shown_in_percent(aws_cli: Any, home: Path) -> None:
    """For any source of the old price; a type that is not listed is a row and an exit code, and the rest is stored."""
    own.add([Quote(Key("sagemaker", "ml.m5.large", "us-east-1", "on_demand"), Rate(0.1, "2026-01-01", "mine"))])
    done = aws_cli("prices", "refresh", "--backend", "sagemaker", "--type", "ml.m5.large", "--type", "ml.p4d.24xlarge")
    assert re.search(r"ml\.m5\.large +us-east-1 +on demand +0\.1000 +0\.1150 +\+15\.0%", done.stdout)
    assert "ml.p4d.24xlarge" not in done.stdout  # equal to the table
    (row,) = aws_cli("prices", "refresh", "--backend", "sagemaker", "--type", "ml.m5.large", "--json").json["prices"]
    assert (row["old_usd_per_hour"], row["usd_per_hour"], row["change"], row["reason"]) == (0.115, 0.115, 0.0, None)
    done = aws_cli("prices", "refresh", "--backend", "sagemaker", "--type", "ml.g99.large", "--type", "ml.m5.large")
    assert (done.code, "AWS lists no ml.g99.large" in done.stdout) == (3, True)
    assert catalog.rates("sagemaker", "ml.m5.large", "us-east-1")["on_demand"].usd == 0.115


def test_vendor_without_an_answer_changes_no_price(aws_cli: Any, aws: Aws, home: Path) -> None:
    """The output is a row with the reason and an exit code, and the stored prices are unchanged."""
    own.add([Quote(Key("sagemaker", "ml.m5.large", "us-east-1", "on_demand"), Rate(0.1, "2026-01-01", "mine"))])
    before = (home / "prices.csv").read_text()
    aws.settings(price_damage="truncated")
    done = aws_cli("prices", "refresh", "--backend", "sagemaker")
    assert (done.code, "not complete JSON" in done.stdout) == (7, True)
    assert (home / "prices.csv").read_text() == before


def test_simultaneous_refreshes_keep_both_prices(aws_cli: Any, home: Path) -> None:
    """Each refresh adds its own region."""
    cold = replace(aws_cli, preloaded=())
    args = ("prices", "refresh", "--backend", "sagemaker", "--type", "ml.m5.large", "--region")
    for process in [cold.start(*args, region) for region in ("us-east-1", "eu-west-1")]:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
    assert {key.region for key in own.everything()} == {"us-east-1", "eu-west-1"}


def test_damaged_prices_stop_a_plan_until_a_refresh(aws_cli: Any, project: Callable[..., Path], home: Path) -> None:
    """The error names file and line; a refresh fixes the file, and keeps the damaged file."""
    folder = project(CPU_JOB)
    assert aws_cli("prices", "refresh", cwd=folder).code == 0
    file = home / "prices.csv"
    file.write_text(file.read_text().replace("0.23,", "-0.23,", 1))
    number = next(place for place, line in enumerate(file.read_text().splitlines(), 1) if "-0.23" in line)
    for command in (("plan",), ("prices",), ("submit", "--dry-run")):
        done = aws_cli(*command, cwd=folder)
        assert (done.code, f"{file}:{number}:1" in done.stderr, "itself failed" in done.stderr) == (3, True, False)
    mended = aws_cli("prices", "refresh", cwd=folder)
    assert (mended.code, "its good lines are kept" in mended.stderr) == (0, True)
    assert aws_cli("plan", "--json", cwd=folder).json["hourly_usd"] == pytest.approx(0.2514, abs=1e-4)


def test_unwritable_home_folder_is_reported_before_the_vendor_is_queried(
    unprivileged: Callable[..., Any], aws: Aws, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the fix; a plan needs no home folder."""
    home.mkdir()
    home.chmod(0o555)
    for name, value in aws.environ.items():
        monkeypatch.setenv(name, value)
    done = unprivileged("prices", "refresh", "--backend", "sagemaker", cwd=tmp_path)
    home.chmod(0o755)
    assert (done.code, "set CLOUDTRAIN_HOME" in done.stderr) == (3, True), done.stderr
    assert aws.journal("GetProducts") == []


def test_old_price_has_a_note_in_the_plan(cli: Any, project: Callable[..., Path]) -> None:
    """The note has the whole command for a refresh, also of another file and of a region from the command line."""
    folder = project(CPU_JOB.replace("ml.m5.xlarge", "ml.g5.12xlarge").replace("us-east-1", "eu-west-1"))
    done = cli("plan", cwd=folder)
    command = r"price \d+ days old: cloudtrain prices refresh{} --backend sagemaker --region {}\n"
    assert re.search(command.format("", "eu-west-1"), done.stdout), done.stdout
    (folder / "cloudtrain.yaml").rename(folder / "my job.yaml")
    there = cli("plan", "-f", "my job.yaml", "--set", "sagemaker.region=us-east-1", cwd=folder)
    assert re.search(command.format(" -f 'my job.yaml'", "us-east-1"), there.stdout), there.stdout
    (folder / "my job.yaml").rename(folder / "cloudtrain.yaml")
    assert json.loads(cli("plan", "--json", cwd=folder).stdout)["uncertainty"] >= 1.1025  # more each half year


def test_each_backend_of_the_file_is_refreshed_separately(aws_cli: Any, project: Callable[..., Path]) -> None:
    """A backend without a login is a row and an exit code; further prices are stored. `--type` needs a backend."""
    blocks = CPU_JOB.replace("backend: sagemaker", "backend: [sagemaker, vertex]")
    folder = project(f"{blocks}vertex: {{project: a-project, location: us-central1}}\n")
    env = {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere.json"}
    done = aws_cli("prices", "refresh", "--json", cwd=folder, env=env)
    rows = done.json["prices"]
    assert done.code == 4
    assert [row["region"] for row in rows if row["backend"] == "vertex"] == ["us-central1"]
    assert "no valid Google credentials" in next(row["reason"] for row in rows if row["backend"] == "vertex")
    assert catalog.rates("sagemaker", "ml.m5.xlarge", "us-east-1")["on_demand"].usd == 0.23
    asked = aws_cli("prices", "refresh", "--type", "ml.m5.large", cwd=folder)
    assert (asked.code, "--backend: sagemaker, vertex" in asked.stderr) == (2, True)
