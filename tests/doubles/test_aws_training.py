"""AWS's stand-in executes jobs: containers, phases, ends, checkpoints, interruptions."""

import json
import random
from collections.abc import Callable

import pytest
from botocore.exceptions import ClientError

from doubles import sandbox
from doubles.aws.handle import Aws
from doubles.conftest import channel
from doubles.waiting import sleepers, until

# Without namespaces only paths in the request can be moved to private folders, not paths in these scripts.
pytestmark = pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")

Submit = Callable[..., str]
Stored = Callable[[str], dict[str, bytes]]

SPOT = {
    "EnableManagedSpotTraining": True,
    "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 120},
    "CheckpointConfig": {"S3Uri": "s3://cloudtrain-tests/ck"},
}
# Ends at SIGTERM, with code 75; as process 1 a shell without a trap ignores the signal.
ENDS_AT_TERM = "trap 'echo told to end; exit 75' TERM\necho begun\nwhile :; do sleep 0.05; done\n"


def phases(told: dict[str, list[dict[str, str]]]) -> list[str]:
    """Return the secondary statuses of a job in order."""
    return [one["Status"] for one in told["SecondaryStatusTransitions"]]


def test_container_has_the_platforms_files_and_variables(aws: Aws, submit: Submit) -> None:
    """Configuration, folders and variables are the platform's; the caller's environment is absent."""
    script = """
    for name in resourceconfig hyperparameters inputdataconfig checkpointconfig; do
        cat /opt/ml/input/config/$name.json; echo
    done
    ls -d /opt/ml/checkpoints /opt/ml/model /opt/ml/output/data /opt/ml/output/metrics
    echo $TRAINING_JOB_NAME $TRAINING_JOB_ARN $AWS_REGION $MINE ${CLOUDTRAIN_HOME:-clean}
    """
    more = {"HyperParameters": {"lr": "0.1"}, "Environment": {"MINE": "a b"}}
    checkpoints = {"CheckpointConfig": {"S3Uri": "s3://cloudtrain-tests/ck", "LocalPath": "/opt/ml/checkpoints"}}
    aws.wait(job := submit(script, **more, **checkpoints))
    lines = aws.lines(job)
    resources, hyperparameters, channels, checkpoint = map(json.loads, lines[:4])
    assert resources["hosts"] == ["algo-1"]
    assert (resources["current_host"], resources["current_instance_type"]) == ("algo-1", "ml.m5.xlarge")
    assert resources["network_interface_name"] in ("lo", "eth0")
    assert hyperparameters == {"lr": "0.1"}
    assert channels["code"]["TrainingInputMode"] == "File"
    assert checkpoint["LocalPath"] == "/opt/ml/checkpoints"
    assert lines[-1] == "job arn:aws:sagemaker:us-east-1:123456789012:training-job/job us-east-1 a b clean"


def test_channels_have_the_objects_of_their_prefix(aws: Aws, submit: Submit) -> None:
    """A channel has every object whose name begins with the prefix."""
    for key in ("data/a/1", "data/a/2", "data/ab/3"):
        aws.client("s3").put_object(Bucket="cloudtrain-tests", Key=key, Body=b"x")
    channels = [channel("code", "s3://cloudtrain-tests/job/code/"), channel("whole", "s3://cloudtrain-tests/data/a")]
    script = "cd /opt/ml/input/data && find whole -type f | sort | xargs echo"
    aws.wait(submit(script, InputDataConfig=channels))
    assert aws.lines("job") == ["whole/1 whole/2 whole/ab/3"]


def test_checkpoints_are_restored_by_the_text_of_the_address(aws: Aws, submit: Submit) -> None:
    """Without a slash, AWS restores the checkpoints of `ck-old`, too; with a slash, the folder's alone."""
    for key in ("ck/1", "ck-old/2"):
        aws.client("s3").put_object(Bucket="cloudtrain-tests", Key=key, Body=b"x")
    script = "cd /opt/ml/checkpoints && find . -type f | sort | xargs echo"
    for job, uri in (("bare", "s3://cloudtrain-tests/ck"), ("slash", "s3://cloudtrain-tests/ck/")):
        aws.wait(submit(script, name=job, CheckpointConfig={"S3Uri": uri}))
    assert (aws.lines("bare"), aws.lines("slash")) == (["./1 ./ck-old/2"], ["./1"])


def test_failed_container_ends_the_other_containers(aws: Aws, submit: Submit) -> None:
    """The job fails with the cut failure file and the exit code of the first failed container."""
    script = f"""
    if [ $(hostname) = algo-2 ]; then
        python3 -c 'print("x" * 2000, end="")' > /opt/ml/output/failure
        exit 3
    fi
    {ENDS_AT_TERM}
    """
    told = aws.wait(submit(script, instances=2))
    assert told["TrainingJobStatus"] == told["SecondaryStatus"] == "Failed"
    assert told["FailureReason"] == f"AlgorithmError: {'x' * 1024}, exit code: 3"
    assert aws.lines("job", "algo-1")[-1] == "told to end"


def test_missing_input_fails_the_job(aws: Aws, submit: Submit) -> None:
    """A channel without objects fails the job during the download, not earlier."""
    told = aws.wait(submit("true", InputDataConfig=[channel("x", "s3://cloudtrain-tests/nothing/")]))
    assert told["TrainingJobStatus"] == "Failed"
    assert 'No S3 objects found under S3 URL "s3://cloudtrain-tests/nothing/"' in told["FailureReason"]
    told = aws.wait(submit("true", name="two", OutputDataConfig={"S3OutputPath": "s3://no-such-bucket/out"}))
    assert told["FailureReason"].endswith("The specified bucket does not exist")


def test_stop_kills_all_processes_after_the_grace_period(aws: Aws, submit: Submit) -> None:
    """A container that ignores SIGTERM is killed with all its processes."""
    aws.settings(stop_grace_s=0.3)
    mark = str(random.randint(10**6, 10**8))
    job = submit(f"setsid sleep {mark} & sleep {mark} & echo begun; wait")
    wait_for_line(aws, job, "begun")
    assert len(sleepers(mark)) == 2
    aws.client("sagemaker").stop_training_job(TrainingJobName=job)
    assert aws.wait(job)["SecondaryStatus"] == "Stopped"
    assert sleepers(mark) == []


def test_checkpoints_are_copied_while_training_and_at_the_end(aws: Aws, submit: Submit, stored: Stored) -> None:
    """Incomplete files are copied too, and deleted files stay in S3."""
    script = """
    cd /opt/ml/checkpoints && echo half > part && sleep 2.5 && rm part && echo last > final
    """
    job = submit(script, CheckpointConfig={"S3Uri": "s3://cloudtrain-tests/ck/"})
    aws.wait(job, "Training")
    until(lambda: stored("ck/") == {"ck/part": b"half\n"})
    aws.wait(job)
    assert stored("ck/") == {"ck/part": b"half\n", "ck/final": b"last\n"}


def test_interrupted_job_restarts_on_empty_disks_with_its_checkpoints(aws: Aws, submit: Submit) -> None:
    """New instances have only S3's checkpoints; their log streams are new and have later epochs."""
    script = f"""
    ls /opt/ml/checkpoints /opt/ml/output/data | xargs echo
    [ -e /opt/ml/checkpoints/1 ] && exit 0
    touch /opt/ml/checkpoints/1 /opt/ml/output/data/gone
    {ENDS_AT_TERM}
    """
    job = submit(script, instances=2, **SPOT)
    wait_for_line(aws, job, "begun", times=2)
    aws.interrupt(job)
    told = aws.wait(job)
    run = ["Starting", "Downloading", "Training"]
    assert phases(told) == [*run, "Interrupted", *run, "Uploading", "Completed"]
    assert 1 <= told["BillableTimeInSeconds"] <= told["TrainingTimeInSeconds"]
    first = ["/opt/ml/checkpoints: /opt/ml/output/data:", "begun", "told to end"]
    again = ["/opt/ml/checkpoints: 1 /opt/ml/output/data:"]
    assert aws.lines(job, "algo-1") == first + again
    streams = aws.client("logs").describe_log_streams(logGroupName="/aws/sagemaker/TrainingJobs")["logStreams"]
    epochs = [int(stream["logStreamName"].rsplit("-", 1)[1]) for stream in streams]
    assert len(streams) == 4
    assert epochs[1] > epochs[0]


def test_cloudtrain_is_not_installed_in_the_container(aws: Aws, submit: Submit) -> None:
    """The image has boto3 and torch but not cloudtrain: only the bundle's modules can be imported."""
    aws.wait(submit('python3 -c "import boto3; import cloudtrain.entrypoints"'))
    assert aws.lines("job")[-1] == "ModuleNotFoundError: No module named 'cloudtrain'"


def wait_for_line(aws: Aws, job: str, line: str, times: int = 1) -> None:
    """Wait until the job has written the line `times` times."""

    def is_there() -> bool:
        try:
            return aws.lines(job).count(line) >= times
        except ClientError:  # there is no log group before the first line
            return False

    until(is_there)
