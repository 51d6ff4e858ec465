"""What the backends' tests share: accounts on the clouds' stand-ins."""

from __future__ import annotations

import pytest

from doubles.aws.handle import Aws


@pytest.fixture
def account(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """Return an account at AWS with role and bucket, where the command finds it."""
    for key, value in aws.environ.items():
        monkeypatch.setenv(key, value)
    aws.role()
    aws.bucket()
    aws.settings(stop_grace_s=30, interrupt_grace_s=20)
    return aws
