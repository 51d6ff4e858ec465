"""The names of the account: one project, one region, one bucket, one service account."""

from datetime import datetime, timezone

PROJECT = "cloudtrain-tests"
NUMBER = "123456789012"
REGION = "us-central1"
BUCKET = "cloudtrain-tests-bucket"
SERVICE_ACCOUNT = f"trainer@{PROJECT}.iam.gserviceaccount.com"


def rfc3339(moment: float) -> str:
    """Return a time in the format of Google's JSON."""
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
