"""Backends side by side: the cheapest hour first, the reason for a missing plan, and a choice of a backend."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.commands.options import Overrides
from cloudtrain.launcher.errors import ConfigError, UsageError
from cloudtrain.launcher.jobs import compare

TEXT = """\
name: x
backend: [azureml, vertex, sagemaker]
script: train.py
resources: {instances: 2, accelerators: "A100:8"}
limits: {max_duration: 2h}
ssh: {hosts: [a, b]}
sagemaker: {region: us-east-1, role: "arn:aws:iam::111122223333:role/train", price_per_hour: 25 USD}
azureml: {subscription: 00000000-0000-0000-0000-000000000000, resource_group: ml, workspace: research,
  region: norwaywest}
vertex: {project: my-project, location: us-central1, staging_bucket: gs://b-uc, price_per_hour: 20 USD}
"""
BUDGET = "budget: {limit: 50 USD}\n"


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Overrides]:
    """Return a function that writes the file and returns the overrides of the command line."""

    def write(backend: str | None = None, more: str = "", text: str = TEXT, **given: Any) -> Overrides:
        (tmp_path / "train.py").write_text("")
        (tmp_path / "cloudtrain.yaml").write_text(text + more)
        return Overrides(tmp_path / "cloudtrain.yaml", backend, (), **given)

    return write


def offers(overrides: Overrides) -> list[compare.BackendOffer]:
    """Return the offers that `plan` compares."""
    return compare.offers(overrides.load, overrides.backends(), overrides.file)


def test_cheapest_hour_comes_first(asked: Callable[..., Overrides]) -> None:
    """An unknown price is not 0: backends without a price come last, and own machines are not the cheapest."""
    found = offers(asked())
    assert [offer.backend for offer in found] == ["vertex", "sagemaker", "azureml"]
    first = compare.cheapest(found)
    assert first.backend == "vertex"
    found = offers(asked("ssh,sagemaker"))
    assert [offer.backend for offer in found] == ["sagemaker", "ssh"]
    assert compare.cheapest(offers(asked("ssh,azureml"))) is None


def test_table_shows_the_cost_of_each_backend(asked: Callable[..., Overrides]) -> None:
    """Columns are machine, ranks, price, cap, worst case and source; a backend without a plan has a reason."""
    text = compare.lines(offers(asked("all", BUDGET)))
    rows = {line.split()[0]: line for line in text[1:6]}
    assert text[6].startswith("azureml: a budget needs a price: no price of Standard")
    without = compare.lines(offers(asked("azureml,ssh", BUDGET, TEXT.replace("region: norwaywest", "region: null"))))
    assert "; set azureml.region, set azureml.price_per_hour, or add" in "\n".join(without)
    assert set(rows) == {"local", "ssh", "sagemaker", "azureml", "vertex"}
    assert all(word in rows["vertex"] for word in ("a2-highgpu-8g", "2 x 8 = 16", "40.00", "1h 14m (budget)"))
    assert all(word in rows["sagemaker"] for word in ("ml.p4d.24xlarge", "50.00", "55m (budget)", "50.00 USD"))
    assert "a budget needs a price: no price of Standard" in rows["azureml"]
    assert all(word in rows["ssh"] for word in ("2 x 8 = 16", " 2h ", "your own machines"))


def test_offers_are_sorted_by_the_expected_price(asked: Callable[..., Overrides]) -> None:
    """A list price below the user's own comes first; the upper bound of the old list price has its own column."""
    text = TEXT.replace(", price_per_hour: 25 USD", "").replace("20 USD", "25.50 USD")
    found = offers(asked("sagemaker,vertex", text=text))
    assert [offer.backend for offer in found] == ["sagemaker", "vertex"]
    plan = found[0].plan
    assert plan.price_micro is not None
    assert plan.price_micro < 25_500_000 < plan.price_micro * plan.uncertainty
    head, first, *_ = compare.lines(found)
    assert (head.split().index("USD/h") > 0, "up to" in head) == (True, True)
    bound = next(word for word in first.split() if word.replace(".", "").isdecimal() and float(word) > 51)
    assert float(bound) == pytest.approx(2 * plan.price_micro * plan.uncertainty / 1e6, abs=0.011)


def test_spot_price_is_compared_with_the_expected_prices(asked: Callable[..., Overrides]) -> None:
    """A spot price with a high upper bound is the cheapest; an on-demand price in its place is marked as a bound."""
    text = TEXT.replace(", price_per_hour: 25 USD", "").replace(", price_per_hour: 20 USD", "")
    found = offers(asked("sagemaker,vertex", text=text.replace('"A100:8"', '"A100:8", spot: true')))
    assert [offer.backend for offer in found] == ["vertex", "sagemaker"]
    first = compare.cheapest(found)
    assert first.backend == "vertex"
    rows = compare.lines(found)
    assert (" spot " in rows[1], " spot, at most " in rows[2]) == (True, True)
    assert compare.unlike(found)[0].startswith("no spot price of sagemaker is known")
    assert compare.unlike(offers(asked("sagemaker,vertex", text=text))) == []


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ("azureml", "vertex", "sagemaker")),
        ("all", ("local", "ssh", "sagemaker", "azureml", "vertex")),
        ("cheapest", ("azureml", "vertex", "sagemaker")),
        ("ssh, vertex", ("ssh", "vertex")),
        ("vertex", ("vertex",)),
    ],
)
def test_option_overrides_the_file(given: str | None, names: tuple[str, ...], asked: Callable[..., Overrides]) -> None:
    """Without `--backend` the file's list counts; `all` means all configured backends."""
    overrides = asked(given)
    assert (overrides.backends(), overrides.compares()) == (names, len(names) > 1)


def test_file_with_a_single_backend_is_not_compared(asked: Callable[..., Overrides]) -> None:
    """A name and a list of a single name are equal; `cheapest` then chooses among all configured backends."""
    for line in ("backend: vertex", "backend: [vertex]"):
        text = TEXT.replace("backend: [azureml, vertex, sagemaker]", line)
        overrides = asked(text=text)
        assert (overrides.backends(), overrides.compares()) == (("vertex",), False)
        assert overrides.load().backend == "vertex"
    assert len(asked("cheapest", text=text).backends()) == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("backend: []", "no backend is named"),
        ("backend: [vertex, vertex]", "is listed twice"),
        ("backend: [vertex, 3]", "expected a backend's name"),
    ],
)
def test_invalid_list_of_backends_is_refused(line: str, words: str, asked: Callable[..., Overrides]) -> None:
    """The fault has its place."""
    with pytest.raises(ConfigError, match=words) as caught:
        asked(text=TEXT.replace("backend: [azureml, vertex, sagemaker]", line)).backends()
    assert caught.value.faults[0].place is not None


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("azurml,local", ConfigError, "did you mean `azureml`"),
        ("aws,vertex", ConfigError, "unknown backend `aws`"),
        ("all,local", UsageError, "use it alone"),
        (" ,", UsageError, "needs a name"),
    ],
)
def test_unknown_name_in_an_option_with_several_is_explained(
    given: str, error: type[Exception], words: str, asked: Callable[..., Overrides]
) -> None:
    """A misspelt backend has its similar name; `all` stands alone."""
    with pytest.raises(error, match=words):
        asked(given).backends()


def test_table_fits_its_width(asked: Callable[..., Overrides], cli: Any) -> None:
    """80 columns keep ranks, price, limit and worst case; a pipe gets 100, an old price the command of a refresh."""
    head = compare.lines(offers(asked("all", BUDGET)), 80)[0]
    assert all(name in head for name in ("backend", "ranks", "USD/h", "cap", "worst case")), head
    text = TEXT.replace(", price_per_hour: 25 USD", "").replace("norwaywest", "eastus")
    folder = asked(text=text).file.parent
    (folder / "job.yaml").write_text(text)
    shown = cli("plan", "-f", "job.yaml", "--backend", "all", "--budget", "150", cwd=folder).stdout.splitlines()
    assert max(map(len, shown)) <= 100
    assert any("Standard_ND96asr_v4" in line for line in shown)
    assert "    list price of 2025 or earlier, counted as " in "\n".join(shown)
    assert any(re.fullmatch("old prices of .*: cloudtrain prices refresh -f job.yaml", line) for line in shown), shown


def test_single_faults_of_the_backend_option_are_told(cli: Any, tmp_path: Path) -> None:
    """The only configured backend explains how to compare; a misspelt one has a similar name, and no second fault."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text("name: x\nscript: train.py\n")
    done = cli("plan", "--backend", "all", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "only `local` is configured: add another backend's block to compare\n")
    for command in ("plan", "validate"):
        done = cli(command, "--backend", "vertx", cwd=tmp_path)
        assert (done.code, done.stderr.count("error: "), "did you mean `vertex`?" in done.stderr) == (3, 1, True)


def test_config_is_loaded_for_a_single_backend(asked: Callable[..., Overrides]) -> None:
    """The journal has only the chosen backend; without a choice the error has a hint; a price is for one backend."""
    with pytest.raises(ConfigError, match="chosen by `--backend NAME`"):
        asked().load()
    with pytest.raises(ConfigError, match="unknown backend `gcp`"):
        asked(text=TEXT.replace("azureml, vertex", "gcp, vertex")).backends()
    config = asked("vertex", price_micro=2_000_000).load()
    assert config.vertex.price_per_hour == 2_000_000
    own = asked(text="name: x\nscript: train.py\n", price_micro=100_000).load()
    assert own.local.price_per_hour == 100_000
    with pytest.raises(UsageError, match="one backend's machines"):
        asked(price_micro=2_000_000).compares()
    config = asked("vertex").load()
    assert configs.stored(config.model_dump(mode="json")).backend == "vertex"


def test_faults_of_the_file_and_of_the_backend_come_together(cli: Any, tmp_path: Path) -> None:
    """Region, role, machine type, an unknown key, a bad value and the missing script are reported at once."""
    (tmp_path / "cloudtrain.yaml").write_text(
        "name: x\nbackend: sagemaker\nscript: no.py\nresources: {instance_type: p4d, instances: two}\n"
        "limits: {max_duraton: 1h}\ncheckpoint: {resume: s3://b/x}\nsagemaker: {prefix: x}\n"
    )
    done = cli("validate", "--json", cwd=tmp_path, env={"AWS_CONFIG_FILE": str(tmp_path / "none")})
    keys = {fault["key"] for fault in done.json["faults"]}
    told = {"script", "resources.instance_type", "resources.instances", "limits.max_duraton", "checkpoint.resume"}
    assert (done.code, keys) == (3, {*told, "sagemaker.region", "sagemaker.role"})
    for command in ("plan", "submit"):
        done = cli(command, cwd=tmp_path, env={"AWS_CONFIG_FILE": str(tmp_path / "none")})
        assert (done.code, done.stderr.count("error: ")) == (3, 7), done.stderr


@pytest.mark.parametrize(
    ("backend", "block", "keys"),
    [
        ("azureml", "azureml: {datastore: x}", {"azureml.subscription", "azureml.resource_group", "azureml.workspace"}),
        ("vertex", "vertex: {prefix: x}", {"vertex.project", "vertex.location", "vertex.staging_bucket"}),
    ],
)
def test_place_and_machine_are_checked_together(
    cli: Any, tmp_path: Path, backend: str, block: str, keys: set[str]
) -> None:
    """The job's place, its machine and unreachable folders are reported at once, with the file's faults."""
    (tmp_path / "cloudtrain.yaml").write_text(
        f"name: x\nbackend: {backend}\nscript: no.py\nresources: {{instance_type: '?'}}\n{block}\n"
    )
    environ = {"CLOUDSDK_CONFIG": str(tmp_path), "AZURE_SUBSCRIPTION_ID": ""}
    done = cli("validate", "--json", cwd=tmp_path, env=environ)
    assert {fault["key"] for fault in done.json["faults"]} == {*keys, "script", "resources.instance_type"}


def test_backend_fault_caused_by_a_fault_of_the_file_is_omitted(cli: Any, tmp_path: Path) -> None:
    """A misspelt section or a bad value is reported once, not also as a missing key."""
    text = "name: x\nbackend: sagemaker\nscript: t.py\nresources: {accelerators: 8}\n"
    text += "sagemaker: {roll: a, region: us-east-1}\n"
    (tmp_path / "cloudtrain.yaml").write_text(text)
    (tmp_path / "t.py").write_text("")
    done = cli("validate", "--json", cwd=tmp_path)
    assert {fault["key"] for fault in done.json["faults"]} == {"resources.accelerators", "sagemaker.roll"}


def test_long_errors_are_below_the_table(cli: Any, asked: Callable[..., Overrides]) -> None:
    """Without accelerators no cloud has a plan: each row has a short cause, and the text below has the fix."""
    file = asked(text=TEXT.replace(', accelerators: "A100:8"', "")).file
    shown = cli("plan", "-f", file, "--backend", "all").stdout.splitlines()
    assert max(map(len, shown)) <= 100
    assert "    Vertex AI needs to know which machines" in shown
    assert "vertex: Vertex AI needs to know which machines; write `accelerators: A100:8`, or" in "\n".join(shown)
    done = cli("validate", "-f", file, "--backend", "all")
    assert (done.code, done.stderr.count(" needs to know which machines")) == (3, 3), done.stderr


def test_faults_of_the_file_are_told_in_full(asked: Callable[..., Overrides]) -> None:
    """A fault is refused for all backends with its place; a missing plan's line counts all after the first."""
    with pytest.raises(ConfigError, match="unknown key `role_arn`") as caught:
        offers(asked(text=TEXT.replace("region: us-east-1, role: ", "role_arn: ")))
    assert caught.value.faults[0].place is not None
    text = TEXT.replace(
        "subscription: 00000000-0000-0000-0000-000000000000, resource_group: ml, workspace: research,\n ", ""
    )
    found = {offer.backend: offer for offer in offers(asked("azureml,vertex", text=text))}
    assert found["azureml"].why.startswith("no Azure subscription; `az account show")
    assert found["azureml"].why.endswith("(and 2 more)")
    assert found["vertex"].why == ""


def test_command_of_the_cheapest_backend_repeats_the_options(cli: Any, asked: Callable[..., Overrides]) -> None:
    """The suggested submit sends the compared job: the same file, keys, machines and budget, quoted for a shell."""
    file = asked().file.rename(asked().file.with_name("cloud 8.yaml"))
    given = ("--set", "resources.accelerators=A100:8", "--instances", "3", "--spot", "--budget", "90")
    done = cli("plan", "-f", "cloud 8.yaml", "--backend", "sagemaker,vertex", *given, cwd=file.parent)
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("cheapest by the hour, of the known prices: cloudtrain submit -f 'cloud 8.yaml' --backend ")
    words = shlex.split(line.partition("cloudtrain submit ")[2])
    again = cli("plan", *words, "--json", cwd=file.parent).json
    told = cli("plan", "-f", "cloud 8.yaml", "--backend", words[3], *given, "--json", cwd=file.parent).json
    assert again == told


def test_table_explains_worst_cases_and_missing_accelerators(asked: Callable[..., Overrides]) -> None:
    """Vertex AI may start a job four times without a budget; an hour of a CPU is not of eight A100, and comes last."""
    note = "worst case of vertex: 4 starts by the platform, a budget allows one"
    assert [line for line in compare.lines(offers(asked())) if "starts by" in line] == [note]
    assert not any("starts by" in line for line in compare.lines(offers(asked(more=BUDGET))))
    found = offers(asked("all", "local: {price_per_hour: 0.10 USD}\n"))
    local = next(offer for offer in found if offer.backend == "local")
    assert (local.lacks, local.dump()["lacks"]) == ("0 of 8 GPUs", "0 of 8 GPUs")
    first = compare.cheapest(found)
    assert first.backend == "vertex"
    assert compare.cheapest([local]) is None
    assert "has 0 of 8 GPUs: " in compare.lines([local])[1]


def test_submit_with_several_backends_requires_a_choice(cli: Any, asked: Callable[..., Overrides]) -> None:
    """The error names the cheapest, as `plan` does; a dry run prints each, and a backend without a plan is no error."""
    folder = asked().file.parent
    done = cli("submit", cwd=folder)
    assert (done.code, "--backend vertex is the cheapest by the hour" in done.stderr) == (2, True), done.stderr
    planned = cli("plan", "--json", cwd=folder).json
    assert (planned["cheapest"], planned["backends"][0]["backend"]) == ("vertex", "vertex")
    assert planned["backends"][0]["plan"]["worst_case_micro"] == -(-40_000_000 * 4 * 7260 // 3600)
    shown = cli("submit", "--dry-run", "--backend", "cheapest", cwd=folder)
    assert (shown.code, "displayName: x-00000-1" in shown.stdout) == (0, True), shown.stderr
    done = cli.ok("render", "--backend", "azureml,vertex", "--json", cwd=asked(None, BUDGET).file.parent)
    assert [row["backend"] for row in done.json] == ["vertex", "azureml"]
    assert ("needs a price" in done.json[1]["error"], "USD/h" in done.stderr) == (True, True)


def test_plan_of_accelerators_that_no_backend_has_fails(cli: Any, asked: Callable[..., Overrides]) -> None:
    """The last line names the accelerators, not a price; with a backend that has a plan the exit code is 0."""
    folder = asked(text=TEXT.replace("A100:8", "A100:3").replace("ssh: {hosts: [a, b]}\n", "")).file.parent
    done = cli("plan", "--backend", "all", cwd=folder)
    last = "no backend can be planned with `accelerators: A100:3`: `cloudtrain plan --backend NAME` shows all problems"
    assert (done.code, done.stderr.splitlines()) == (3, [last])
    assert cli("plan", "--backend", "all", "--json", cwd=folder).code == 3
    done = cli("plan", "--backend", "all", "--set", "ssh.hosts=[a, b]", cwd=folder)
    assert (done.code, done.stderr.splitlines()[-1].split(":")[0]) == (0, "no price is known of ssh")


UNKNOWN = {"us-east-1": "us-esat-1", "norwaywest": "eastsu", "us-central1": "us-centarl1"}
UNPRICED = TEXT.replace(", price_per_hour: 25 USD", "").replace(", price_per_hour: 20 USD", "")


def test_backend_with_an_unknown_region_is_not_suggested(cli: Any, asked: Callable[..., Overrides]) -> None:
    """Below the table a warning has similar names, and no advice to submit or set a price, which mends no region."""
    text = UNPRICED.replace("ssh: {hosts: [a, b]}\n", "")
    for right, wrong in UNKNOWN.items():
        text = text.replace(right, wrong)
    done = cli("plan", "--backend", "all", cwd=asked(text=text).file.parent)
    shown = " ".join(done.stdout.split())
    for key, wrong in zip(("sagemaker.region", "azureml.region", "vertex.location"), UNKNOWN.values(), strict=True):
        assert f"{key}: no region `{wrong}` was known" in shown
    assert "did you mean `us-east-1` or `us-east-2`?" in shown
    assert ("price_per_hour" in shown, "submit" in done.stderr) == (False, False)
    assert done.stderr.startswith("the region of ")
    assert (done.code, len(done.stderr.splitlines())) == (0, 1)
    folder = asked(text=TEXT.replace("us-central1", "us-centarl1")).file.parent
    done = cli("plan", "--backend", "all", cwd=folder)
    last = "the region of vertex is unknown: correct the region, and plan again"
    assert (done.code, done.stderr.splitlines()) == (0, [last])


@pytest.mark.parametrize("more", ["", ", price_per_hour: 25 USD"])
@pytest.mark.parametrize("backend", ["sagemaker", "all"])
def test_validate_warns_of_an_unknown_region(
    cli: Any, asked: Callable[..., Overrides], backend: str, more: str
) -> None:
    """The warning is the line of a plan, on stderr and in the JSON; the exit code stays 0."""
    text = UNPRICED.replace("region: us-east-1", f"region: us-esat-1{more}")
    folder = asked(text=text).file.parent
    done = cli("validate", "--backend", backend, cwd=folder)
    warning = "sagemaker.region: no region `us-esat-1` was known"
    assert (done.code, f"warning: {warning}" in done.stderr, "did you mean" in done.stderr) == (0, True, True)
    found = cli("validate", "--json", "--backend", backend, cwd=folder).json["warnings"]
    assert [line.startswith(warning) for line in found] == [True]


def test_hint_of_two_kinds_of_machines_names_the_setting(cli: Any, asked: Callable[..., Overrides]) -> None:
    """The file has accelerators and `--set` an instance type: a second `--set` removes the accelerators."""
    folder = asked().file.parent
    options = ("--backend", "vertex", "--set", "resources.instance_type=a2-highgpu-8g")
    done = cli("validate", *options, cwd=folder)
    assert (done.code, "--set resources.accelerators=null takes the file's away" in done.stderr) == (3, True)
    assert cli("validate", *options, "--set", "resources.accelerators=null", cwd=folder).code == 0
