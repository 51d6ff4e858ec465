"""The Slurm request, rendered and checked without a cluster."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.launcher.backend import Request

HERE = Path(__file__).parent
PLAIN = """\
name: digits
backend: slurm
script: train.py
resources: {instances: 2}
slurm: {cpus_per_node: 4}
"""
EVERYTHING = """\
name: digits
backend: slurm
script: train.py
args: [--lr, "0.1", "a b $HOME"]
env: {NCCL_DEBUG: WARN}
secrets: [API_TOKEN]
image: docker://registry.example/train:1
resources: {instances: 4, min_instances: 2, accelerators: "A100:8"}
checkpoint: {uri: /shared/checkpoints}
inputs: {train: ~/train}
limits: {max_duration: 10h}
budget: {limit: 9000 USD}
slurm:
  login: me@cluster
  partition: gpu,spot
  account: lab
  qos: high
  constraint: ib&fast
  reservation: course
  licenses: matlab:2
  cpus_per_node: 64
  mem: 240G
  nodelist: node[1-4]
  exclude: node7
  workdir: /scratch/me/ct
  modules: [cuda/12.8, python/3.12]
  python: ~/my venv/bin/python
  container: apptainer
  interface: ib0
  ssh_config: /etc/ssh/cluster
  price_per_gpu_hour: 1.80 USD
  raw: [--switches=1]
"""


@pytest.mark.parametrize(("name", "text"), [("plain", PLAIN), ("everything", EVERYTHING)])
def test_request_equals_the_golden_file(name: str, text: str, render: Callable[..., Request]) -> None:
    """The whole request is compared, so every new or missing field shows; our own check accepts the request."""
    made = render(text)
    assert made.text == (HERE / f"golden/slurm_{name}.yml").read_text()
    assert SlurmBackend().check(made) == []
    assert yaml.safe_load(made.text) == made.body
    assert made.files["job.sh"] == made.body["script"]
    assert subprocess.run(["bash", "-n"], input=made.body["script"], text=True).returncode == 0


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("slurm.partition=gpu;rm", "slurm.partition"),
        ("slurm.account=-x", "slurm.account"),
        ("slurm.login=-oProxyCommand=x", "slurm.login"),
        ("slurm.workdir=work", "slurm.workdir"),
        ("slurm.mem=lots", "slurm.mem"),
        ("slurm.mem='0'", "slurm.mem"),
        ("slurm.python=-c", "slurm.python"),
        ("slurm.container=pyxis", "image"),
        ("slurm.modules=['a b']", "slurm.modules[0]"),
        ("slurm.raw=[--nodes=9]", "slurm.raw[0]"),
        ("slurm.raw=[--wrap=x]", "slurm.raw[0]"),
        ("slurm.raw=[--signal=USR1@60]", "slurm.raw[0]"),
        ("slurm.raw=[-N9]", "slurm.raw[0]"),
        ("checkpoint.uri=s3://bucket/x", "checkpoint.uri"),
    ],
)
def test_bad_value_is_refused_with_its_key(change: str, key: str, render: Callable[..., Request]) -> None:
    """A value that sbatch or a shell would read in a different way is refused, with the key of the config."""
    faults = [fault for fault in SlurmBackend().check(render(PLAIN, change)) if not fault.is_warning]
    assert [fault.key for fault in faults] == [key]


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        (("limits.max_wait=2h", "budget.limit=90 USD", "slurm.price_per_hour=1 USD"), "--deadline=now+43200"),
        (("limits.max_wait=2h",), None),  # Slurm may requeue the job, whose later runs come after any deadline
        (("budget.limit=90 USD", "slurm.price_per_hour=1 USD"), None),
    ],
)
def test_wait_of_a_job_without_requeues_has_a_deadline(
    settings: tuple[str, ...], option: str | None, render: Callable[..., Request]
) -> None:
    """Slurm removes the job that can no longer end by the end of the wait and the run."""
    request = render(PLAIN, "limits.max_duration=10h", *settings)
    assert next((each for each in request.body["sbatch"] if each.startswith("--deadline")), None) == option
    assert ("limits.max_wait" in request.carried) is (option is not None)


def test_job_without_cores_or_on_a_local_disk_is_warned_of(render: Callable[..., Request]) -> None:
    """The two causes of slow or failed first jobs are told before the send."""
    made = render(PLAIN.replace("{cpus_per_node: 4}", "{workdir: /tmp}"))
    faults = [(fault.key, fault.is_warning) for fault in SlurmBackend().check(made)]
    assert faults == [("slurm.workdir", True), ("slurm", True)]
    assert "--cpus-per-task=1" in made.body["sbatch"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), ["~/venv 1/bin/python", "-I", "-c"]),
        (
            ("slurm.container=apptainer", "image=~/train 1.sif"),
            [
                *("apptainer", "exec", "--bind", "~/work 1", "--bind", "/data/a b"),
                *("--pwd", "~/work 1/jobs/digits-abcde", "~/train 1.sif", "~/venv 1/bin/python", "-I", "-c"),
            ],
        ),
        (
            ("slurm.container=pyxis", "image=docker://registry.example/train:1"),
            [
                *("--container-image=docker://registry.example/train:1", "--no-container-mount-home"),
                *("--container-workdir=~/work 1/jobs/digits-abcde",),
                *("--container-mounts=~/work 1:~/work 1,/data/a b:/data/a b", "~/venv 1/bin/python", "-I", "-c"),
            ],
        ),
    ],
)
def test_script_starts_the_agents_with_whole_words(
    settings: tuple[str, ...], words: list[str], render: Callable[..., Request], tmp_path: Path
) -> None:
    """srun gets each path as one word, in an image too, and nothing in a closed attempt.

    bash runs the script, with functions in the programs' place.
    """
    home = tmp_path / "home 1"
    places = ("slurm.workdir=~/work 1", "inputs={train: /data/a b}", "slurm.python=~/venv 1/bin/python")
    made = render(PLAIN, *places, *settings)
    folder = home / "work 1/jobs/digits-abcde/attempt-1"
    (folder / "node-0").mkdir(parents=True)
    told = {f"BASH_FUNC_{name}%%": "() { :; }" for name in ("scontrol", "apptainer")}
    told["BASH_FUNC_srun%%"] = "() { printf '%s\\0' \"$@\" > words; touch head.json; }"
    for is_open in (False, True):
        if is_open:
            (folder / "open").touch()
        script, env = made.body["script"], {"HOME": str(home), **told}
        assert subprocess.run(["bash", "-s"], input=script, cwd=folder, env=env, text=True).returncode == 0
        assert (folder / "words").exists() == is_open
    found = (folder / "words").read_text().replace(str(home), "~").replace("/attempt-1", "").split("\0")
    begin = found.index("--cpus-per-task=4") + 1
    assert found[begin : begin + len(words)] == words
    job = "~/work 1/jobs/digits-abcde"
    assert found[begin + len(words) + 1 :] == [f"{job}/package", f"{job}/order.json", ""]


@pytest.mark.parametrize(
    ("code", "stop", "requeues", "report"), [(143, False, 5, True), (143, True, 0, False), (137, False, 0, True)]
)
def test_script_requeues_a_job_without_agents_a_limited_number_of_times(
    code: int, stop: bool, requeues: int, report: bool, render: Callable[..., Request], tmp_path: Path
) -> None:
    """An interpreter that is killed is a failure; TERM is a pre-emption, up to 5 times in a row, unless a stop came."""
    (tmp_path / "node-0").mkdir()
    (tmp_path / "open").touch()
    stops = "echo > node-0/stop.json;" * stop
    told = {
        "BASH_FUNC_srun%%": f"() {{ {stops} return {code}; }}",
        "BASH_FUNC_squeue%%": "() { echo RUNNING; }",
        "BASH_FUNC_scontrol%%": "() { echo $1 >> told; }",
        "BASH_FUNC_sleep%%": "() { :; }",
    }
    for _ in range(requeues + 1):
        done = subprocess.run(["bash", "-s"], input=render(PLAIN).body["script"], cwd=tmp_path, env=told, text=True)
    assert done.returncode == (75 if stop else code)
    assert (tmp_path / "told").exists() == bool(requeues)
    assert (tmp_path / "node-0/exit.json").exists() == report
    assert not requeues or len((tmp_path / "told").read_text().split()) == requeues
