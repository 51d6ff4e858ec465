"""The image's line in `doctor`, with and without SageMaker's own SDK; tests/sdk queries the real SDK."""

import sys
from pathlib import Path

import pytest

from cloudtrain.backends.sagemaker import doctor, request_images
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.metering.rate import Machine

MACHINE = Machine("ml.g5.12xlarge", "A10G", 4)
OURS = request_images.default_image("us-west-2", 4)


@pytest.mark.parametrize(
    ("newest", "verdict", "said"),
    [
        (None, "ok", f"{OURS} (AWS's, as of {request_images.IMAGES_AS_OF})"),
        (
            "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:9.9-x",
            "ok",
            f"{OURS} (AWS's, as of {request_images.IMAGES_AS_OF}; the SDK's newest is pytorch:9.9-x)",
        ),
        ("1.dkr.ecr.us-west-2.amazonaws.com/pytorch:9.9-x", "warn", "at 1.dkr.ecr.us-west-2.amazonaws.com"),
    ],
    ids=["no SDK", "newer", "another registry"],
)
def test_doctor_shows_the_sdks_newest_image(
    newest: str | None, verdict: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK's newest image is shown next to ours; different registries give a warning."""
    (tmp_path / "cloudtrain.yaml").write_text("name: x\nscript: x.py\n")
    (tmp_path / "x.py").write_text("")
    config = configs.load(tmp_path / "cloudtrain.yaml", environ={})
    monkeypatch.setattr(request_images, "newest_of_sdk", lambda region, kind: newest)
    check = doctor._image(config, "us-west-2", MACHINE)
    assert check.verdict == verdict
    assert check.found.endswith(said)


def test_without_the_sdk_there_is_no_second_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is None, not an error, because the SDK is optional."""
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    assert request_images.newest_of_sdk("us-west-2", "ml.g5.12xlarge") is None


def test_broken_sdk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the missing part and the package to install."""
    folder = tmp_path / "sagemaker" / "core"
    folder.mkdir(parents=True)
    (folder / "image_uris.py").write_text("import no_such_part")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sagemaker"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"no_such_part(.|\n)*\[sagemaker-sdk\]"):
        request_images.newest_of_sdk("us-west-2", "ml.g5.12xlarge")
