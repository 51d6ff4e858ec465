"""Every command reports all faults of a config at once: of the file, the machine, the data, the image, the code."""

from pathlib import Path
from typing import Any

import pytest

COMMON = "name: d\nscript: train.py\n"
ROLE = "arn:aws:iam::123456789012:role/cloudtrain"
# For each backend a config, and the faulty keys in the file's order.
FAULTY = {
    "local": ('inputs: {a: "ftp://a/b"}\ncheckpoint: {uri: "nowhere://x"}\n', "inputs.a checkpoint.uri"),
    "ssh": (
        'inputs: {a: data, b: "ftp://a/b"}\noutputs: {a: out}\nssh: {hosts: [a b]}\n',
        "inputs.a inputs.b outputs.a ssh.hosts[0]",
    ),
    "slurm": (
        'inputs: {a: data}\ncheckpoint: {uri: "nowhere://x"}\nslurm: {partition: a b}\n',
        "inputs.a checkpoint.uri slurm.partition",
    ),
    "sagemaker": (
        """\
resources: {accelerators: "A10G:3"}
inputs: {a: data, code: "s3://bucket/x"}
outputs: {a: out}
limits: {max_duration: 40d}
tags: {"aws:x": y}
sagemaker: {region: eu-west-1, bucket: My_Bucket, role: r}
""",
        "resources.accelerators inputs.a inputs.code outputs limits.max_duration tags sagemaker.bucket sagemaker.role",
    ),
    "azureml": (
        """\
image: "a b"
resources: {accelerators: "A10G:3"}
inputs: {a: data}
checkpoint: {uri: "s3://bucket/x"}
limits: {max_duration: 40d}
azureml: {subscription: x, resource_group: r, workspace: w w, compute: g g}
""",
        """\
image resources.accelerators inputs.a checkpoint.uri limits.max_duration azureml.subscription azureml.workspace
azureml.compute""",
    ),
    "vertex": (
        """\
image: "a b"
resources: {accelerators: "A10G:3"}
inputs: {a: data, A: "gs://bucket/x", b-c: data}
env: {AIP_MODEL_DIR: x}
sweep: {metric: loss, algorithm: random, trials: 2, space: {args.a: {log: [1, -1]}, args.b: 3}}
vertex: {project: P, location: mars, staging_bucket: My_Bucket}
""",
        """\
image resources.accelerators inputs.a inputs.A inputs.b-c env sweep.space sweep.space vertex.project vertex.location
vertex.staging_bucket""",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script."""
    (tmp_path / "train.py").write_text("")
    return tmp_path


def keys_of(cli: Any, folder: Path, text: str, *command: str) -> list[str]:
    """Return the keys of the faults that the command reports, and check its exit code."""
    (folder / "cloudtrain.yaml").write_text(text)
    done = cli(*command, cwd=folder)
    assert done.code == 3, done.stdout + done.stderr
    places = [line.strip() for line in done.stderr.splitlines() if line.startswith("  at ")]
    return [place.rpartition(" ")[2] for place in places]


@pytest.mark.parametrize("backend", FAULTY)
def test_all_commands_report_all_faults(cli: Any, folder: Path, backend: str) -> None:
    """A faulty machine hides no data, a faulty bucket no image, a faulty file no platform; none is reported twice."""
    text, keys = FAULTY[backend]
    wanted = keys.split()
    text = f"{COMMON}backend: {backend}\n{text}"
    for command in (("validate",), ("plan",), ("submit", "--dry-run")):
        assert keys_of(cli, folder, text, *command) == wanted, command
    faulty = text.replace("name: d", "name: D d").replace("train.py", "lost.py")
    assert keys_of(cli, folder, faulty, "validate") == ["name", "script", *wanted]


def test_short_budget_hides_no_fault(cli: Any, folder: Path) -> None:
    """The budget's refusal is in the list; alone it is refused as before, with its exit code."""
    text = (
        f"{COMMON}backend: sagemaker\nbudget: {{limit: 0.01 USD}}\nlimits: {{max_duration: 10h}}\n"
        f"resources: {{instance_type: ml.g5.12xlarge}}\ninputs: {{a: data}}\n"
        f"sagemaker: {{region: eu-west-1, bucket: a-bucket, role: '{ROLE}'}}\n"
    )
    for command in (("validate",), ("plan",), ("submit", "--dry-run")):
        assert keys_of(cli, folder, text, *command) == ["budget.limit", "inputs.a"]
    (folder / "cloudtrain.yaml").write_text(text.replace("inputs: {a: data}\n", ""))
    assert cli("plan", cwd=folder).code == 6


@pytest.mark.parametrize("limit", ["20 USD", "much"])
def test_budget_without_a_price_hides_no_fault(cli: Any, folder: Path, limit: str) -> None:
    """No price is known without a region, or the limit is no amount: the checks go on without the budget."""
    text = (
        f"{COMMON}backend: azureml\nimage: 'a b'\nbudget: {{limit: {limit}}}\n"
        "resources: {accelerators: 'A100:1'}\ninputs: {a: data}\n"
        "azureml: {subscription: 11111111-2222-3333-4444-555555555555, resource_group: r, workspace: w}\n"
    )
    assert keys_of(cli, folder, text, "validate") == ["image", "budget.limit", "inputs.a"]


def test_faults_of_a_replaced_machine_do_not_count(cli: Any, folder: Path) -> None:
    """In place of a faulty machine others are tried, and what would be wrong with one of them is not reported."""
    text = (
        f"{COMMON}backend: sagemaker\nresources: {{accelerators: 'A10G:3', instances: 2}}\n"
        "distributed: {nproc_per_node: 6}\n"
        f"sagemaker: {{region: eu-west-1, bucket: a-bucket, role: '{ROLE}'}}\n"
    )
    assert keys_of(cli, folder, text, "validate") == ["resources.accelerators"]
