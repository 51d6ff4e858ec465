"""A job on the stand-in of AWS whose image has an old Python: `status` shows one sentence with the cure."""

from pathlib import Path
from typing import Any

import pytest

from doubles.aws.handle import ROLE, Aws

OLD = sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin"))


@pytest.mark.skipif(not OLD, reason="this machine has no Python older than 3.10")
def test_status_names_the_old_python_of_an_image(account: Aws, cli: Any, tmp_path: Path) -> None:
    """The container writes the sentence to SageMaker's file for failures."""
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "cloudtrain.yaml").write_text(
        f"name: j\nbackend: sagemaker\nscript: train.py\nresources: {{instances: 1, instance_type: ml.g5.xlarge}}\n"
        f'sagemaker:\n  role: "{ROLE}"\n  bucket: cloudtrain-tests\n'
        f'  raw: {{Environment: {{PATH: "{OLD[-1]}:/usr/bin:/bin"}}}}\n'
    )
    done = cli("submit", "-y", cwd=tmp_path)
    said = done.stdout + done.stderr + cli("status", cwd=tmp_path).stdout
    assert f"the image's Python is {OLD[-1].parent.name}, and cloudtrain needs 3.10 or newer" in said
    assert "Traceback" not in said
