"""The user's own prices: they win over the table, writers lose no price, and damage is reported."""

import datetime
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.metering import rate as rating
from cloudtrain.launcher.metering.rate import Key, Kind, Quote, Rate
from cloudtrain.launcher.prices import catalog, own

HEAD = "backend,instance_type,region,kind,usd_per_hour,derived,uncertainty,as_of,source"
GOOD = "sagemaker,ml.m5.large,us-east-1,on_demand,0.115,no,1,2026-11-20,AWS Price List"


@pytest.fixture
def file(home: Path) -> Path:
    """Return the path of the file."""
    home.mkdir(exist_ok=True)
    return home / own.FILE


def quote(name: str, usd: float, region: str = "us-west-2", kind: Kind = "on_demand", **more: object) -> Quote:
    """Return a price of today."""
    day = rating.today().isoformat()
    return Quote(Key("sagemaker", name, region, kind), Rate(usd, day, "list", is_own=True, **more))  # type: ignore[arg-type]


def test_own_price_wins_row_by_row(home: Path) -> None:
    """An own price wins in its region only, a type without a price gets a price, and spot prices stay."""
    table = catalog.by_type("sagemaker", "ml.g5.12xlarge", "us-west-2")
    own.add([quote("ml.g5.12xlarge", 8.0), quote("ml.m5.large", 0.115)])
    machine = catalog.by_type("sagemaker", "ml.g5.12xlarge", "us-west-2")
    assert (table.hourly_usd, machine.hourly_usd, machine.uncertainty_of()) == (7.09, 8.0, 1.0)
    assert machine.iso_day() == rating.today().isoformat()
    assert catalog.rates("sagemaker", "ml.m5.large", "us-west-2")["on_demand"].usd == 0.115
    assert catalog.rates("sagemaker", "ml.m5.large", "us-east-1") == {}
    spot = catalog.by_type("azureml", "Standard_NC6s_v3", "eastus")
    assert "spot" in spot.rates


def test_old_prices_beside_newer_prices_are_ignored(file: Path, home: Path) -> None:
    """An own price must not win over a newer table, nor the table's spot price stay above the own on-demand price."""
    row = "azureml,Standard_ND96isr_H100_v5,eastus,on_demand,60,no,1,{},Azure Retail Prices"
    file.write_text(f"{HEAD}\n{row.format('2026-08-28')}\n")
    machine = catalog.by_type("azureml", "Standard_ND96isr_H100_v5", "eastus")
    assert (machine.hourly_usd, machine.iso_day()) == (98.32, "2026-09-16")
    assert machine.price_source == "list price of 2026-09-16, newer than your own of 2026-08-28"
    file.write_text(f"{HEAD}\n{row.format('2026-09-16')}\n")
    same = catalog.by_type("azureml", "Standard_ND96isr_H100_v5", "eastus")
    assert (same.hourly_usd, same.price_source) == (60.0, "list price of 2026-09-16, read from the vendor's list")
    key = Key("azureml", "Standard_NC6s_v3", "eastus", "on_demand")
    own.add([Quote(key, Rate(0.2, rating.today().isoformat(), "list"))])
    machine = catalog.by_type("azureml", "Standard_NC6s_v3", "eastus")
    assert (machine.hourly_usd, "spot" in machine.rates) == (0.2, False)


@pytest.mark.parametrize("usd", [0.0, -1.0, float("nan"), float("inf"), 1e-12])
def test_unreadable_price_is_not_written(home: Path, usd: float) -> None:
    """A vendor's invalid answer does not damage the file."""
    bad = quote("ml.m5.large", usd)
    own.add([bad, quote("ml.m5.xlarge", 0.23), quote("ml.m5.2xlarge", 1.0, region="")])
    assert own.refusal(bad)
    assert [key.instance_type for key in own.everything()] == ["ml.m5.xlarge"]


@settings(max_examples=50)
@given(usd=st.floats(1e-6, 1e4), factor=st.floats(1, 9), source=st.text(min_size=1).map(lambda text: f"x{text}"))
def test_written_price_is_read_back(home: Path, usd: float, factor: float, source: str) -> None:
    """The source may contain commas, quotes and newlines of any kind."""
    day = rating.today().isoformat()
    rate = Rate(usd, day, source, is_derived=True, is_own=True, factor=round(factor, 4))
    wanted = Key("vertex", "n1-standard-8 + 2 x NVIDIA_TESLA_T4", "r", "flex_start")
    own.add([Quote(wanted, rate), quote("ml.m5.large", 1.0)])
    found = own.everything()[wanted]
    assert (found.usd, found.factor) == (pytest.approx(usd, abs=1e-9), pytest.approx(factor, rel=1e-4))
    assert found.source == " ".join(source.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (GOOD.replace("0.115", "-0.115"), "costs more than nothing"),
        (GOOD.replace("0.115", "0"), "costs more than nothing"),
        (GOOD.replace("0.115", "nan"), "usd_per_hour is nan"),
        (GOOD.replace("0.115", "1,5"), "10 fields, not 9"),
        (GOOD.replace("0.115", ""), "is ``, no number"),
        (GOOD.replace("2026-11-20", "2999-01-01"), "in the future"),
        (GOOD.replace("2026-11-20", "lately"), "`lately` is not a date"),
        (GOOD.replace("on_demand", "weekly"), "`weekly` is not one of on_demand"),
        (GOOD.replace(",no,1,", ",no,0.5,"), "1 or more"),
        (GOOD.replace(",no,1,", ",perhaps,1,"), "neither yes nor no"),
        (GOOD[:30], "3 fields, not 9"),
        (f"{GOOD}\n{GOOD}", "a second price"),
        (GOOD.replace("AWS", '"AWS'), "damaged"),
        ("\0\0\0\0", "1 fields"),
        ("", "0 fields"),
    ],
)
def test_damaged_line_is_named(file: Path, line: str, said: str) -> None:
    """Before a budget uses the file, the error has the file, the line and the fix."""
    file.write_text(f"{HEAD}\n{GOOD.replace('m5.large', 'm5.xlarge')}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        catalog.rates("sagemaker", "ml.m5.large", "us-east-1")
    number = 4 if "\n" in line else 3
    assert said in str(caught.value)
    assert f"{file}:{number}:1" in str(caught.value)
    assert "cloudtrain prices refresh" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"PK\x03\x04", b"backend,type\n", HEAD.encode()[:20]])
def test_foreign_file_in_place_of_the_prices_is_named(file: Path, content: bytes) -> None:
    """The file is empty or has a different format."""
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not a list of prices"):
        own.everything()


def test_refresh_keeps_the_valid_lines(file: Path) -> None:
    """The damaged file is kept beside the new file; a clock may be a day ahead, and such a price has age 0."""
    file.write_text(f"{HEAD}\n{GOOD}\nhalf a li")
    damaged = own.add([quote("ml.m5.xlarge", 0.23)])
    assert damaged.read_text().endswith("half a li")
    assert {key.instance_type for key in own.everything()} == {"ml.m5.large", "ml.m5.xlarge"}
    assert own.add([]) is None
    day = rating.today() + datetime.timedelta(days=1)
    file.write_text(f"{HEAD}\n{GOOD.replace('2026-11-20', day.isoformat())}\n")
    found = catalog.rates("sagemaker", "ml.m5.large", "us-east-1")
    assert rating.age_days(found["on_demand"]) == 0


def test_simultaneous_writers_lose_no_price(home: Path) -> None:
    """Each writer adds its own row and a common row; a reader at any time finds a complete file."""

    def write(number: int) -> int:
        own.add([quote(f"ml.x{number}.large", 1.0 + number), quote("ml.all.large", 5.0)])
        return len(own.everything())

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(write, range(40)))
    assert len(own.everything()) == 41
    assert min(seen) >= 2
    names = sorted(path.name for path in home.iterdir() if path.name.startswith("prices"))
    assert names == ["prices.csv", "prices.lock"]


def test_unwritable_file_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are a home folder that is a file, and a folder in place of the file."""
    home.mkdir(exist_ok=True)
    (home / own.FILE).mkdir()
    for attempt in (lambda: own.add([quote("ml.m5.large", 1.0)]), lambda: catalog.rates("sagemaker", "a", "b")):
        with pytest.raises(ConfigError, match="own prices cannot be kept or read"):
            attempt()
    (home / "flat").write_text("")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(home / "flat"))
    assert catalog.rates("sagemaker", "a", "b") == {}
    with pytest.raises(ConfigError, match="cannot keep its state"):
        own.add([])
