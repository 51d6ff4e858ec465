"""What the backends' tests share: accounts on the clouds' stand-ins."""

from __future__ import annotations

import pytest

from doubles.aws.handle import Aws
from doubles.azure.handle import Azure
from doubles.google.handle import Google


@pytest.fixture
def account(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """Return an account at AWS with role and bucket, where the command finds it."""
    for key, value in aws.environ.items():
        monkeypatch.setenv(key, value)
    aws.role()
    aws.bucket()
    aws.settings(stop_grace_s=30, interrupt_grace_s=20)
    return aws


@pytest.fixture
def azure_account(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> Azure:
    """Return a workspace at Azure, where the command finds it."""
    azure.apply(monkeypatch)
    return azure


@pytest.fixture
def google_project(google: Google, monkeypatch: pytest.MonkeyPatch) -> Google:
    """Return a project at Google Cloud with a bucket, where the command finds it."""
    google.apply(monkeypatch)
    return google
