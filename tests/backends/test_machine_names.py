"""Names of machines and clusters in the forms that the vendors' own tools accept, on each cloud."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cloudtrain.backends.azureml import machine as azureml
from cloudtrain.backends.azureml.block import AzureML
from cloudtrain.backends.sagemaker import machine as sagemaker
from cloudtrain.backends.vertex import machine as vertex
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.metering.rate import Machine
from cloudtrain.launcher.prices import catalog, listing


def _vertex(name: str) -> Machine:
    return vertex.named(name, "resources.instance_type", "us-central1").machine


NAMED: dict[str, Callable[[str], Machine]] = {
    "sagemaker": lambda name: sagemaker.named(name, "us-east-1", "auto"),
    "azureml": lambda name: azureml.named(name, "eastus", "auto"),
    "vertex": _vertex,
}


@pytest.mark.parametrize(
    ("backend", "own", "names"),
    [
        ("sagemaker", "ml.p4d.24xlarge", ("ML.P4D.24XLARGE", "p4d.24xlarge", "P4D.24xlarge", "Ml.p4d.24xlarge")),
        ("sagemaker", "ml.m5.xlarge", ("M5.XLARGE", "m5.xlarge")),
        (
            "azureml",
            "Standard_NC24ads_A100_v4",
            ("STANDARD_NC24ADS_A100_V4", "standard_nc24ads_a100_v4", "NC24ads_A100_v4", "nc24ads_a100_v4"),
        ),
        ("azureml", "Standard_ND96isr_MI300X_v5", ("STANDARD_ND96ISR_MI300X_V5", "nd96isr_mi300x_v5")),
        ("azureml", "Standard_D4s_v3", ("STANDARD_D4S_V3", "standard_d4s_v3", "D4S_V3")),  # not in our table
        ("azureml", "Standard_E4-2s_v4", ("STANDARD_E4-2S_V4",)),
        ("azureml", "Standard_DS3_v2", ("STANDARD_DS3_V2", "ds3_v2")),
        ("vertex", "a2-highgpu-8g", ("A2-HIGHGPU-8G", "A2-highgpu-8g")),
        ("vertex", "n1-standard-8", ("N1-STANDARD-8",)),
    ],
)
def test_any_case_of_a_name_means_the_machine(backend: str, own: str, names: tuple[str, ...]) -> None:
    """The request has the vendor's own spelling, and the price is found."""
    for name in (own, *names):
        machine = NAMED[backend](name)
        assert (machine.instance_type, machine.rates) == (own, NAMED[backend](own).rates), name


ANYWHERE = "; `accelerators: {}` in place of `instance_type` is for each backend that has the GPU"


@pytest.mark.parametrize(
    ("backend", "name", "hint"),
    [
        ("sagemaker", "ml.p4d-24xlarge", "did you mean `ml.p4d.24xlarge`?"),
        ("sagemaker", "ML_P4D_24XLARGE", "did you mean `ml.p4d.24xlarge`?"),
        ("sagemaker", "big", "as in ml.g5.12xlarge or ml.m5.xlarge"),
        ("sagemaker", "A100:8", "write `accelerators: A100:8`"),
        ("azureml", "Standard NC24ads A100 v4", "did you mean `Standard_NC24ads_A100_v4`?"),
        ("azureml", "Standard-NC24ads-A100-v4", "did you mean `Standard_NC24ads_A100_v4`?"),
        ("azureml", "A100", "write `accelerators: A100:1`"),
        ("vertex", "a2_highgpu_8g", "did you mean `a2-highgpu-8g`?"),
        ("vertex", "A2HIGHGPU8G", "did you mean `a2-highgpu-8g`?"),
        ("vertex", "ml.g5.xlarge", f"as in a2-highgpu-8g, g2-standard-48 or n1-standard-16{ANYWHERE.format('A10G:1')}"),
        ("sagemaker", "a2-highgpu-8g", f"as in ml.g5.12xlarge or ml.m5.xlarge{ANYWHERE.format('A100:8')}"),
        ("vertex", "nvidia-tesla-t4", "write `accelerators: nvidia-tesla-t4:1`"),
    ],
)
def test_misspelt_name_is_answered_with_the_known_one(backend: str, name: str, hint: str) -> None:
    """An accelerator in place of a machine is told as such."""
    with pytest.raises(ConfigError) as caught:
        NAMED[backend](name)
    (fault,) = caught.value.faults
    assert (fault.hint, f"`{name}` is " in fault.message) == (hint, True)


@pytest.mark.parametrize(
    ("backend", "wanted", "own"),
    [
        ("sagemaker", "nvidia-tesla-a100:8", "ml.p4d.24xlarge"),
        ("sagemaker", "NVIDIA_H100_80GB:8", "ml.p5.48xlarge"),
        ("azureml", "nvidia-a100-80gb:8", "Standard_ND96amsr_A100_v4"),
        ("vertex", "nvidia-tesla-a100:8", "a2-highgpu-8g"),
    ],
)
def test_googles_names_of_accelerators_are_known_everywhere(backend: str, wanted: str, own: str) -> None:
    """`nvidia-tesla-a100` is gcloud's spelling, `NVIDIA_TESLA_A100` the API's."""
    assert catalog.by_accelerators(backend, wanted, None)[0].instance_type == own


def test_missing_accelerators_are_answered_with_all_that_there_are() -> None:
    """Chips that torch's DDP does not run on are left out."""
    there = "there are A10, A100, H100, H100-NVL, H200, MI300X, T4, V100; or name a machine by `instance_type`"
    assert catalog.advice("azureml", "A10G:1") == there
    said = catalog.advice("sagemaker", "A1OO:8")
    assert said.startswith("no price list has an accelerator `A1OO`; did you mean `A100`? there are A100, A10G, B200")
    assert "Trainium" not in said


def test_names_of_azures_own_files_lose_their_prefix() -> None:
    """`azureml:gpu-cluster` is the form of each example of Azure; an address stays an address."""
    block = AzureML(compute="azureml:gpu-cluster", datastore="AzureML:data")
    assert (block.compute, block.datastore) == ("gpu-cluster", "data")
    assert AzureML(compute="azureml://x").compute == "azureml://x"


def test_prices_are_found_in_any_case() -> None:
    """`--type` and `--region` of `prices` have no case, and the vendor's prefix may be missing, as in the config."""
    for name, region, own in (
        ("STANDARD_NC6S_V3", "EASTUS", "Standard_NC6s_v3"),
        ("nc6s_v3", "East US", "Standard_NC6s_v3"),
        ("P4D.24xlarge", "us-east-1", "ml.p4d.24xlarge"),
    ):
        found = listing.lines(listing.PriceQuery(instance_type=name, region=region))
        assert {line.key.instance_type for line in found} == {own}
