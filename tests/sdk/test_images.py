"""The launcher's table of AWS's images equals the table in SageMaker's own SDK."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sagemaker.core import image_uris

from cloudtrain.backends.sagemaker import request_images
from cloudtrain.launcher.planning import request_rules

MODERN = "pytorch-amzn2023"
REGIONS = image_uris.config_for_framework(MODERN)["training"]["versions"][request_images.TORCH]["registries"]

# A separate process without a network, also during the import of the SDK.
OFFLINE = """\
import sys

def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise SystemExit(f"{event}: {args}")

sys.addaudithook(refuse)
from cloudtrain.backends.sagemaker import request_images
assert "sagemaker" not in sys.modules
print(request_images.newest_of_sdk("us-west-2", "ml.p5.48xlarge"))
"""


@pytest.mark.parametrize(("kind", "gpus"), [("ml.g5.12xlarge", 4), ("ml.m5.xlarge", 0)])
@pytest.mark.parametrize("region", REGIONS)
def test_default_image_is_where_the_sdk_looks(region: str, kind: str, gpus: int) -> None:
    """The account, the domain, the repository and the tag are equal in every region of the SDK."""
    theirs = image_uris.retrieve(
        MODERN, region, version=request_images.TORCH, instance_type=kind, image_scope="training"
    )
    assert request_images.default_image(region, gpus) == theirs


def test_every_region_of_the_table_is_in_the_sdk() -> None:
    """A region without an entry in the SDK could not be compared."""
    with_account = {region for region, account in request_rules.regions("sagemaker").items() if account}
    assert with_account <= REGIONS.keys()


def test_newest_image_has_the_regions_newest_version() -> None:
    """The image has the newest version that AWS publishes in the region; an unknown region gives None."""
    versions = image_uris.config_for_framework(MODERN)["training"]["versions"]
    for region in REGIONS:
        newest = [version for version in versions if region in versions[version]["registries"]][-1]
        found = request_images.newest_of_sdk(region, "ml.p5.48xlarge")
        assert found is not None
        assert f".{region}." in found
        assert f"/pytorch:{newest}-cu" in found
    assert request_images.newest_of_sdk("xx-west-1", "ml.p5.48xlarge") is None


def test_lookup_needs_no_network(tmp_path: Path) -> None:
    """The look-up connects to no host, resolves no name and prints no warning; only whole operations send telemetry."""
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], cwd=tmp_path, env={"HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:")
