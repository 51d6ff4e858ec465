"""A training job: its request, its state, and its description in DescribeTrainingJob."""

import time
from dataclasses import dataclass, field
from typing import Any

from doubles.kit import life

ACCOUNT = "123456789012"
_NOT_TOLD = ("Tags",)  # fields of the request that the description omits
_SUMMARY = (
    *("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingEndTime", "LastModifiedTime"),
    *("TrainingJobStatus", "SecondaryStatus", "WarmPoolStatus"),
)


@dataclass(kw_only=True)
class Job(life.Job):
    """One training job, with its primary and its secondary status."""

    ENDS = ("Completed", "Failed", "Stopped")
    name: str
    region: str
    request: dict[str, Any]
    tags: dict[str, str]
    status: str = "InProgress"
    secondary: str = "Starting"
    transitions: list[dict[str, Any]] = field(default_factory=list)
    modified: float = 0.0
    training_start: float | None = None
    training_end: float | None = None
    failure_reason: str | None = None
    model_uri: str = ""
    training_s: int | None = None
    billable_s: int | None = None
    ran_s: float = 0.0  # in containers, over all attempts
    last_epoch: int = 0  # of the job's log streams
    selected: str = ""  # of InstancePreferences

    @property
    def arn(self) -> str:
        """Return the job's ARN."""
        return f"arn:aws:sagemaker:{self.region}:{ACCOUNT}:training-job/{self.name.lower()}"

    @property
    def is_spot(self) -> bool:
        """Return whether the job runs on spot machines."""
        return bool(self.request.get("EnableManagedSpotTraining", False))

    @property
    def instance_types(self) -> list[str]:
        """Return the machine's type for each instance; of a list of types, the selected type."""
        resources = self.request["ResourceConfig"]
        kind = self.selected or resources.get("InstanceType")
        own = [each.get("InstanceCount") for each in self.preferences if each["InstanceType"] == kind]
        return [kind] * (resources.get("InstanceCount") or own[0]) if kind else []

    @property
    def preferences(self) -> list[dict[str, Any]]:
        """Return InstancePreferences; an empty list of a job with one type."""
        return list(self.request["ResourceConfig"].get("InstancePreferences", []))

    def enter_secondary(self, secondary: str, message: str, status: str | None = None) -> None:
        """Enter the next secondary status; for an unchanged status only the message changes."""
        with self.changed:
            if self.has_ended or (self.status == "Stopping" and status is None):
                return  # stopping has overtaken the next status
            now = time.time()
            self.modified, self.secondary, self.status = now, secondary, status or self.status
            last = self.transitions[-1] if self.transitions else None
            if last is not None and last["Status"] == secondary:
                last["StatusMessage"] = message
            else:
                if last is not None:
                    last["EndTime"] = now
                self.transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": message})
            if self.has_ended:
                self.transitions[-1]["EndTime"] = now
            self.changed.notify_all()


def described(job: Job) -> dict[str, Any]:
    """Return the answer of DescribeTrainingJob."""
    with job.changed:
        told = {key: value for key, value in job.request.items() if key not in _NOT_TOLD}
        told |= {
            "TrainingJobArn": job.arn,
            "TrainingJobStatus": job.status,
            "SecondaryStatus": job.secondary,
            "SecondaryStatusTransitions": [dict(one) for one in job.transitions],
            "CreationTime": job.created,
            "LastModifiedTime": job.modified,
            "ModelArtifacts": {"S3ModelArtifacts": job.model_uri},
            "StoppingCondition": {"MaxRuntimeInSeconds": 86_400, **job.request.get("StoppingCondition", {})},
            "EnableManagedSpotTraining": job.is_spot,
            "EnableNetworkIsolation": job.request.get("EnableNetworkIsolation", False),
            "EnableInterContainerTrafficEncryption": job.request.get("EnableInterContainerTrafficEncryption", False),
            "ProfilingStatus": "Disabled",
        }
        if job.selected and job.training_start is not None:
            chosen = {"SelectedInstanceType": job.selected, "SelectedInstanceCount": len(job.instance_types)}
            told["ResourceConfig"] = told["ResourceConfig"] | chosen
        optional = {
            "TrainingStartTime": job.training_start,
            "TrainingEndTime": job.training_end,
            "FailureReason": job.failure_reason,
            "TrainingTimeInSeconds": job.training_s,
            "BillableTimeInSeconds": job.billable_s,
        }
        if job.request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
            told["WarmPoolStatus"] = {"Status": "Available" if job.has_ended else "InUse"}
        return told | {key: value for key, value in optional.items() if value is not None}


def summary(job: Job) -> dict[str, Any]:
    """Return the job's entry in the answer of ListTrainingJobs."""
    whole = described(job)
    return {name: whole[name] for name in _SUMMARY if name in whole}
