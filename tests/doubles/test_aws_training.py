"""AWS's stand-in executes jobs: containers, phases, ends, checkpoints, interruptions."""

import io
import json
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from doubles import sandbox
from doubles.aws.handle import Aws
from doubles.conftest import channel, request_of
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


def names(members: bytes) -> list[str]:
    """Return the names in an archive."""
    with tarfile.open(fileobj=io.BytesIO(members)) as tar:
        return sorted(tar.getnames())


def phases(told: dict[str, list[dict[str, str]]]) -> list[str]:
    """Return the secondary statuses of a job in order."""
    return [one["Status"] for one in told["SecondaryStatusTransitions"]]


def test_job_runs_its_entrypoint_and_completes(aws: Aws, submit: Submit, stored: Stored) -> None:
    """The container's output is in the logs, its model in S3, and every phase in the description."""
    job = submit("echo out of $(hostname)\necho error >&2\necho weights > /opt/ml/model/m.bin")
    told = aws.wait(job)
    assert told["TrainingJobStatus"] == "Completed"
    assert phases(told) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert aws.lines(job) == ["out of algo-1", "error"]
    assert names(stored(f"out/{job}/output/")[f"out/{job}/output/model.tar.gz"]) == ["m.bin"]
    assert told["ModelArtifacts"] == {"S3ModelArtifacts": f"s3://cloudtrain-tests/out/{job}/output/model.tar.gz"}
    assert told["BillableTimeInSeconds"] == told["TrainingTimeInSeconds"] >= 1


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


def test_instances_reach_each_other_by_name_on_the_same_port(aws: Aws, submit: Submit) -> None:
    """Two hosts of two jobs all listen on the same port, and each host is answered by its peer."""
    script = """
    cat > /tmp/talk.py <<'END'
import json, socket, time
config = json.load(open("/opt/ml/input/config/resourceconfig.json"))
me = config["current_host"]
server = socket.create_server((me, 29400))
peer = next(host for host in config["hosts"] if host != me)
while True:
    try:
        talk = socket.create_connection((peer, 29400))
        break
    except OSError:
        time.sleep(0.02)
heard, _ = server.accept()
talk.sendall(f"{socket.gethostname()} of {JOB}".encode())
talk.close()
print("heard", heard.recv(100).decode(), flush=True)
END
    sed -i "s/{JOB}/$TRAINING_JOB_NAME/" /tmp/talk.py
    exec python3 /tmp/talk.py
    """
    for name in ("one", "two"):
        submit(script, name=name, instances=2)
    for name in ("one", "two"):
        aws.wait(name)
        assert aws.lines(name) == [f"heard algo-2 of {name}", f"heard algo-1 of {name}"]


def test_channels_have_the_objects_of_their_prefix(aws: Aws, submit: Submit) -> None:
    """A channel has every object whose name begins with the prefix; sharded channels divide the objects among hosts."""
    for key in ("data/a/1", "data/a/2", "data/ab/3"):
        aws.client("s3").put_object(Bucket="cloudtrain-tests", Key=key, Body=b"x")
    channels = [channel("code", "s3://cloudtrain-tests/job/code/"), channel("whole", "s3://cloudtrain-tests/data/a")]
    shard = channel("shard", "s3://cloudtrain-tests/data/a/", S3DataDistributionType="ShardedByS3Key")
    script = "cd /opt/ml/input/data && find whole shard -type f | sort | xargs echo"
    aws.wait(submit(script, instances=2, InputDataConfig=[*channels, shard]))
    assert aws.lines("job", "algo-1") == ["shard/1 whole/1 whole/2 whole/ab/3"]
    assert aws.lines("job", "algo-2") == ["shard/2 whole/1 whole/2 whole/ab/3"]


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


def test_stop_gives_the_container_a_grace_period(aws: Aws, submit: Submit, stored: Stored) -> None:
    """The container receives SIGTERM and has the grace period; files saved until its end are uploaded."""
    job = submit(f"touch /opt/ml/model/kept\n{ENDS_AT_TERM}")
    aws.wait(job, "Training")
    wait_for_line(aws, job, "begun")
    aws.client("sagemaker").stop_training_job(TrainingJobName=job)
    assert aws.describe(job)["TrainingJobStatus"] in ("Stopping", "Stopped")
    told = aws.wait(job)
    assert (told["TrainingJobStatus"], told["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert aws.lines(job)[-1] == "told to end"
    assert names(stored(f"out/{job}/output/model.tar.gz")[f"out/{job}/output/model.tar.gz"]) == ["kept"]


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


def test_maximum_runtime_stops_the_job(aws: Aws, submit: Submit) -> None:
    """The time limit appears as a stop with its own secondary status."""
    told = aws.wait(submit(ENDS_AT_TERM, StoppingCondition={"MaxRuntimeInSeconds": 1}))
    assert (told["TrainingJobStatus"], told["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert aws.lines("job") == ["begun", "told to end"]


def test_maximum_wait_stops_a_job_without_machines(aws: Aws, submit: Submit) -> None:
    """A spot job waits in Starting no longer than its limit."""
    aws.settings(pending=True)
    limits = {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}
    job = submit("true", **{**SPOT, "StoppingCondition": limits})
    time.sleep(0.2)
    assert "Insufficient capacity" in aws.describe(job)["SecondaryStatusTransitions"][-1]["StatusMessage"]
    told = aws.wait(job)
    assert (told["TrainingJobStatus"], told["SecondaryStatus"]) == ("Stopped", "MaxWaitTimeExceeded")
    assert "TrainingStartTime" not in told


def test_job_waits_for_capacity(aws: Aws, submit: Submit) -> None:
    """With capacity for one job, the second starts after the first has ended."""
    aws.settings(capacity=1, execute=False)
    submit("true", name="one")
    aws.wait("one", "Training")
    submit("true", name="two")
    time.sleep(0.2)
    assert aws.describe("two")["SecondaryStatus"] == "Starting"
    aws.end("one", training_s=7200)
    told = aws.wait("one")
    assert (told["TrainingTimeInSeconds"], told["BillableTimeInSeconds"]) == (7200, 7200)
    aws.wait("two", "Training")
    aws.capacity_error("two")
    assert aws.wait("two")["FailureReason"].startswith("CapacityError: Unable to provision")


def test_checkpoints_are_copied_while_training_and_at_the_end(aws: Aws, submit: Submit, stored: Stored) -> None:
    """Incomplete files are copied too, and deleted files stay in S3."""
    aws.settings(sync_every_s=0.05)
    script = """
    cd /opt/ml/checkpoints && echo half > part && sleep 0.6 && rm part && echo last > final
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
    assert told["BillableTimeInSeconds"] <= told["TrainingTimeInSeconds"]
    first = ["/opt/ml/checkpoints: /opt/ml/output/data:", "begun", "told to end"]
    again = ["/opt/ml/checkpoints: 1 /opt/ml/output/data:"]
    assert aws.lines(job, "algo-1") == first + again
    streams = aws.client("logs").describe_log_streams(logGroupName="/aws/sagemaker/TrainingJobs")["logStreams"]
    epochs = [int(stream["logStreamName"].rsplit("-", 1)[1]) for stream in streams]
    assert len(streams) == 4
    assert epochs[1] > epochs[0]


def test_internal_error_is_retried_up_to_the_limit(aws: Aws, submit: Submit) -> None:
    """An error of the platform returns the job to Starting, and fails the job after the retries."""
    job = submit(ENDS_AT_TERM, RetryStrategy={"MaximumRetryAttempts": 1})
    wait_for_line(aws, job, "begun")
    aws.internal_error(job)
    wait_for_line(aws, job, "begun", times=2)
    aws.internal_error(job)
    told = aws.wait(job)
    assert phases(told).count("Training") == 2
    assert told["FailureReason"].startswith("InternalServerError")


def test_tensorboard_and_output_are_uploaded(aws: Aws, submit: Submit, stored: Stored) -> None:
    """TensorBoard files and output arrive below the request's paths."""
    script = "mkdir -p /opt/ml/model/tb; echo e > /opt/ml/model/tb/events; echo o > /opt/ml/output/data/o"
    board = {"S3OutputPath": "s3://cloudtrain-tests/tb", "LocalPath": "/opt/ml/model/tb"}
    aws.wait(submit(script, TensorBoardOutputConfig=board))
    assert stored("tb/") == {"tb/job/tensorboard-output/events": b"e\n"}
    assert names(stored("out/job/output/output.tar.gz")["out/job/output/output.tar.gz"]) == ["o"]


def test_container_calls_aws_with_its_role(aws: Aws, submit: Submit) -> None:
    """boto3 in the container reaches S3 and SSM without configuration."""
    aws.client("ssm").put_parameter(Name="/cloudtrain/job/KEY", Value="secret", Type="SecureString")
    script = """
    python3 -c "
import boto3
print(boto3.client('ssm').get_parameter(Name='/cloudtrain/job/KEY', WithDecryption=True)['Parameter']['Value'])
boto3.client('s3').put_object(Bucket='cloudtrain-tests', Key='from/inside', Body=b'x')
print(boto3.client('sts').get_caller_identity()['Account'])"
    """
    aws.wait(submit(script))
    assert aws.lines("job") == ["secret", "123456789012"]
    assert [call["params"]["Key"] for call in aws.journal("PutObject")] == ["job/code/run.sh", "from/inside"]


def test_cloudtrain_is_not_installed_in_the_container(aws: Aws, submit: Submit) -> None:
    """The image has boto3 and torch but not cloudtrain: only the bundle's modules can be imported."""
    aws.wait(submit('python3 -c "import boto3; import cloudtrain.entrypoints"'))
    assert aws.lines("job")[-1] == "ModuleNotFoundError: No module named 'cloudtrain'"


def test_phase_lasts_as_long_as_set(aws: Aws, submit: Submit) -> None:
    """A job can be observed and stopped in a phase with a set duration."""
    aws.settings(starting_s=30)
    job = submit("true")
    assert aws.describe(job)["SecondaryStatus"] == "Starting"
    aws.client("sagemaker").stop_training_job(TrainingJobName=job)
    assert aws.wait(job)["SecondaryStatus"] == "Stopped"


def test_aws_command_creates_and_describes(aws: Aws, submit: Submit, tmp_path: Path) -> None:
    """The vendor's own command accepts the same request from a file."""
    aws.client("s3").put_object(Bucket="cloudtrain-tests", Key="cli/code/run.sh", Body=b"echo by hand")
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request_of("cli")))
    command = [str(Path(sys.executable).with_name("aws")), "sagemaker"]
    env = {"PATH": "/usr/bin:/bin", **aws.environ}
    create = [*command, "create-training-job", "--cli-input-json", f"file://{path}"]
    done = subprocess.run(create, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["TrainingJobArn"].endswith(":training-job/cli")
    aws.wait("cli")
    describe = [*command, "describe-training-job", "--training-job-name", "cli"]
    done = subprocess.run(describe, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["TrainingJobStatus"] == "Completed"


@pytest.mark.slow
def test_torchrun_trains_over_two_instances(aws: Aws, submit: Submit, home: Path) -> None:
    """torchrun and gloo find the peer by the hosts' names, with the same port on both hosts."""
    script = """
    cat > /tmp/train.py <<'END'
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
END
    rank=$(($(hostname | cut -d- -f2) - 1))
    exec torchrun --nnodes 2 --node-rank $rank --master-addr algo-1 --master-port 29500 --nproc-per-node 1 /tmp/train.py
    """
    told = aws.wait(submit(script, instances=2, Environment={"OMP_NUM_THREADS": "1"}), timeout_s=180)
    assert told["TrainingJobStatus"] == "Completed", aws.lines("job")
    assert [line for line in aws.lines("job") if line.startswith("sum")] == ["sum 3.0 of 2"] * 2


def wait_for_line(aws: Aws, job: str, line: str, times: int = 1) -> None:
    """Wait until the job has written the line `times` times."""

    def is_there() -> bool:
        try:
            return aws.lines(job).count(line) >= times
        except ClientError:  # there is no log group before the first line
            return False

    until(is_there)
