"""Azure's stand-in executes jobs: containers, ranks, mounts, inputs, preemption."""

import json
from typing import Any

import pytest

from doubles import sandbox
from doubles.azure.handle import Azure
from doubles.azure.names import REGION, workspace_id

# Without namespaces only paths in the request can be moved to private folders, not paths in these scripts.
pytestmark = pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")

STORE = "azureml://datastores/workspaceblobstore/paths/"
# Ends at SIGTERM, with code 75.
ENDS_AT_TERM = "trap 'echo told to end; exit 75' TERM; echo begun; while :; do sleep 0.05; done"


def output(path: str, mode: str = "ReadWriteMount") -> dict[str, Any]:
    """Return an output of a job."""
    return {"out": {"jobOutputType": "uri_folder", "mode": mode, "uri": f"{STORE}{path}"}}


def source(path: str, mode: str = "ReadOnlyMount") -> dict[str, Any]:
    """Return an input of a job."""
    return {"data": {"jobInputType": "uri_folder", "mode": mode, "uri": f"{STORE}{path}"}}


def history(azure: Azure, job: str, what: str = "/details") -> dict[str, Any]:
    """Return run history's description of a job."""
    url = f"https://{REGION}.api.azureml.ms/history/v1.0{workspace_id()}/runs/{job}{what}"
    return azure.call("GET", url).json


def test_process_has_the_platforms_variables_and_code(azure: Azure) -> None:
    """The process has the documented variables, and the code as current folder; the caller's environment is absent."""
    script = "import json, os; print(json.dumps([os.getcwd(), os.listdir('.'), dict(os.environ)]))"
    azure.submit("job", "python show.py", {"show.py": script}, environmentVariables={"MINE": "a b"})
    azure.wait("job")
    cwd, files, env = json.loads(azure.log("job"))
    assert cwd == "/mnt/azureml/cr/j/job/exe/wd"
    assert files == ["show.py"]
    told = {name: env[name] for name in ("WORLD_SIZE", "NODE_RANK", "RANK", "LOCAL_RANK", "MINE", "AZUREML_RUN_ID")}
    assert told == {
        **dict(zip(("WORLD_SIZE", "NODE_RANK", "RANK", "LOCAL_RANK"), "1000", strict=True)),
        "MINE": "a b",
        "AZUREML_RUN_ID": "job",
    }
    assert {"MASTER_ADDR", "MASTER_PORT", "AZUREML_ARM_SUBSCRIPTION", "AZUREML_NODE_COUNT"} <= set(env)
    assert not {"CLOUDTRAIN_HOME", "MSI_ENDPOINT"} & set(env)


def test_each_node_has_its_rank_and_log_file(azure: Azure) -> None:
    """Log files have as many digits as the highest node number."""
    azure.submit("job", "echo $RANK $NODE_RANK $LOCAL_RANK $WORLD_SIZE", nodes=2)
    azure.wait("job")
    files = [f"user_logs/std_log_process_{number}.txt" for number in range(2)]
    assert [azure.log("job", file) for file in files] == ["0 0 0 2\n", "1 1 0 2\n"]


def test_data_is_mounted_and_copied(azure: Azure) -> None:
    """A mount is the container's folder itself, a read-only mount refuses writes, and a copy is private."""
    azure.put_blob("in/a", "content")
    command = (
        "cat ${{inputs.data}}/a; touch ${{inputs.data}}/b 2>/dev/null || echo ' refused'; "
        "echo x > ${{outputs.out}}/o; mv ${{outputs.out}}/o ${{outputs.out}}/new; "
        "echo ${{inputs.n}} $AZURE_ML_INPUT_n; ls $AZURE_ML_OUTPUT_out; ls -A /mnt"
    )
    inputs = {**source("in"), "n": {"jobInputType": "literal", "value": "3"}}
    azure.submit("job", command, inputs=inputs, outputs=output("o/x"))
    azure.wait("job")
    assert azure.log("job").startswith("content refused\n3 3\nnew\n")
    assert azure.blobs() == ["in/a", "o/x/new"]
    azure.submit("copy", "echo more >> ${{inputs.data}}/a; cat ${{inputs.data}}/a", inputs=source("in", "Download"))
    azure.wait("copy")
    assert azure.log("copy") == "contentmore\n"
    assert azure.blob("in/a") == b"content"


def test_missing_input_fails_the_job_before_it_starts(azure: Azure) -> None:
    """The run's error has the cause."""
    azure.submit("job", "true", inputs=source("nowhere"))
    told = azure.wait("job")
    assert told["status"] == "Failed"
    assert "not found" in told["error"]["message"]
    assert "Running" not in [status for status, _ in told["history"]]


def test_preempted_job_restarts_under_the_same_name(azure: Azure) -> None:
    """The node is lost without a warning; files in the mounted folder stay, files on the node are gone."""
    command = f"cat ${{{{outputs.out}}}}/n; ls; touch local; echo first > ${{{{outputs.out}}}}/n; {ENDS_AT_TERM}"
    azure.submit("job", command, outputs=output("ck"), nodes=2)
    file = "user_logs/std_log_process_0.txt"
    azure.wait_log("job", "begun", file)
    azure.preempt("job")
    log = azure.wait_log("job", "begun", file, count=2)
    assert log.count("local") == 0
    assert "first\n" in log
    assert "told to end" not in log
    told = azure.job("job")
    assert [status for status, _ in told["history"]][4:8] == ["Running", "Queued", "Preparing", "Starting"]
    assert told["attempts"] == 2


def test_run_history_has_machines_and_times(azure: Azure) -> None:
    """Run history has machines and times, from which the price follows."""
    azure.submit("job", "sleep 0.3", compute="low-cluster", nodes=2)
    azure.wait("job")
    run = history(azure, "job")
    machines = {"vmSize": "Standard_DS3_v2", "instanceCount": 2, "gpuCount": 0, "priority": "LowPriority"}
    assert {**run["compute"], **machines, "region": REGION} == run["compute"]
    assert "00:00:00.3" <= run["computeDuration"] < "00:01"
    assert run["createdTimeUtc"] <= run["startTimeUtc"] <= run["endTimeUtc"]
