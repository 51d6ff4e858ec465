"""The hint for a missing package has a pip command that works."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.text import extras

WITHOUT = """\
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.argv = ["cloudtrain", *sys.argv[2:]]
from cloudtrain.launcher.cli import main
main()
"""
FILE = """\
name: x
script: train.py
azureml: {subscription: 00000000-0000-0000-0000-000000000000, resource_group: g, workspace: w, region: eastus}
sagemaker: {role: "arn:aws:iam::123456789012:role/x", region: eu-west-1}
vertex: {project: a-project, location: us-central1, staging_bucket: gs://a-bucket}
notify: [{apprise: "ntfys://ntfy.invalid/x"}]
"""
LOGIN = ("client_id", "client_secret", "refresh_token")


@pytest.mark.parametrize(
    ("missing", "extra", "command"),
    [
        ("azure", "azureml", ["doctor", "azureml"]),
        ("azure", "azureml", ["doctor", "azureml", "-f", "cloudtrain.yaml"]),
        ("azure.core", "azureml", ["doctor", "azureml"]),
        ("azure.identity", "azureml", ["doctor", "azureml"]),
        ("requests", "azureml", ["doctor", "azureml"]),
        ("boto3", "sagemaker", ["doctor", "sagemaker"]),
        ("boto3,botocore", "sagemaker", ["doctor", "sagemaker", "-f", "cloudtrain.yaml"]),
        ("google", "vertex", ["doctor", "vertex", "-f", "cloudtrain.yaml"]),
        ("google.auth", "vertex", ["doctor", "vertex", "-f", "cloudtrain.yaml"]),
        ("requests", "vertex", ["doctor", "vertex", "-f", "cloudtrain.yaml"]),
        ("requests", "azureml", ["prices", "refresh", "--backend", "azureml", "--region", "eastus"]),
        ("google", "vertex", ["prices", "refresh", "--backend", "vertex", "-f", "cloudtrain.yaml"]),
        ("torch", "local", ["rehearse"]),
        ("starlette", "server", ["ui", "--no-open"]),
        ("apprise", "apprise", ["notify"]),
    ],
)
def test_missing_package_is_named_with_its_extra(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, extra: str, command: list[str]
) -> None:
    """Each command prints the pip line, without the exception's name and without a request for a report."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text(FILE)
    (tmp_path / "login.json").write_text(json.dumps({"type": "authorized_user", **dict.fromkeys(LOGIN, "x")}))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing, *command],
        cwd=tmp_path,
        env=cli.environment({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "login.json"), "HOME": str(tmp_path)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)  # the command depends on the working folder
    assert extras.install(extra) in said, said
    assert ("ModuleNotFoundError" in said, "report it" in said, "Traceback" in said) == (False, False, False), said


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'cloudtrain[server]'"),
        ("no JSON", "pip install 'cloudtrain[server]'"),
        ([], "pip install 'cloudtrain[server]'"),
        ({"url": "file://{here}", "dir_info": {}}, "pip install '.[server]'"),
        ({"url": "file://{here}", "dir_info": {"editable": True}}, "pip install -e '.[server]'"),
        ({"url": "file://{here}/a%20b", "dir_info": {}}, "pip install '{here}/a b[server]'"),
        ({"url": "file:///no/such/folder", "dir_info": {}}, "pip install 'cloudtrain[server]'"),
        (
            {"url": "https://example.com/c.whl", "archive_info": {}},
            "pip install 'cloudtrain[server] @ https://example.com/c.whl'",
        ),
        (
            {"url": "https://example.com/c", "vcs_info": {"vcs": "git", "commit_id": "f00"}},
            "pip install 'cloudtrain[server] @ git+https://example.com/c@f00'",
        ),
    ],
)
def test_command_follows_the_origin_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: Any, command: str
) -> None:
    """An index, a folder, an archive and a repository each have their own form (PEP 610)."""
    (tmp_path / "site" / "cloudtrain-0.1.0.dist-info").mkdir(parents=True)
    (tmp_path / "a b").mkdir()
    metadata = tmp_path / "site" / "cloudtrain-0.1.0.dist-info"
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cloudtrain\nVersion: 0.1.0\n")
    if origin is not None:
        text = origin if isinstance(origin, str) else json.dumps(origin)
        (metadata / "direct_url.json").write_text(text.replace("{here}", str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    assert extras.install("server") == command.replace("{here}", str(tmp_path))
