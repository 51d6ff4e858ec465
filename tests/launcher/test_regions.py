"""An unknown region has a warning before the submit."""

from __future__ import annotations

from cloudtrain.backends.sagemaker.request_images import REGIONS as AWS
from cloudtrain.backends.vertex.machine_regions import REGIONS as GOOGLE
from cloudtrain.launcher.planning.request_rules import doubts
from cloudtrain.launcher.prices import catalog


def test_unknown_region_has_a_warning_with_similar_names() -> None:
    """A known or missing region has no warning; a new region may be valid, so the submit is not refused."""
    for region in ("us-east-1", "eu-north-1", "cn-north-1", "me-west-1", None):
        assert not list(doubts("sagemaker.region", region, AWS, "2026"))
    said = next(doubts("sagemaker.region", "eu-wset-1", AWS, "2026"))
    assert said.startswith("sagemaker.region: no region `eu-wset-1` was known in 2026, so the platform may refuse it;")
    assert "did you mean eu-west-1" in said
    assert next(doubts("vertex.location", "x", GOOGLE, "2026")).endswith("may refuse it")


def test_every_region_with_a_price_is_known() -> None:
    """A region with a price must not cause a warning."""
    for backend, known in (("sagemaker", AWS), ("vertex", GOOGLE)):
        assert {row["region"] for row in catalog.rows(backend)} - {""} <= known


def test_type_without_a_price_names_regions_with_a_price() -> None:
    """The text shows a misspelt region, and also a region without prices."""
    said = catalog.unpriced("sagemaker", "ml.g4dn.xlarge", "mars-1")
    assert said.startswith("no price of ml.g4dn.xlarge in mars-1 (known in ")
    assert "us-east-1" in said
    assert "known in" not in catalog.unpriced("sagemaker", "ml.none", "us-east-1")
