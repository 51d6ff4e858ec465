"""Whole jobs on SageMaker's stand-in: real containers, torchrun, gloo; trained, interrupted, restarted."""

from pathlib import Path
from typing import Any

import pytest
import wholejobs

from doubles.aws.handle import ROLE, Aws

pytestmark = pytest.mark.slow

CONFIG = wholejobs.config_of(
    "sagemaker", "ml.g5.xlarge", f'role: "{ROLE}", bucket: cloudtrain-tests', "distributed: {nproc_per_node: 1}\n"
)


@pytest.mark.soak  # the tutorial's test trains a whole task on SageMaker
def test_digits_example_reaches_its_accuracy(cli: Any, account: Aws, tmp_path: Path) -> None:
    """The README's example on two instances: 97 % of unseen samples, and the weights are fetched."""
    where = "sagemaker.region=us-east-1", "sagemaker.bucket=cloudtrain-tests"
    wholejobs.train_digits(cli, tmp_path, "sagemaker", "ml.m5.xlarge", *where)


@pytest.mark.soak
def test_spot_interruption_changes_nothing(cli: Any, account: Aws, folder: Path, whole: wholejobs.Results) -> None:
    """Interrupted in mid-run, new machines resume from S3: equal weights bit for bit, and every step once."""
    assert cli("submit", "--force", "-d", "-y", "--name", "broken", cwd=folder).code == 0
    cli.watch("step 30/100", "logs", "-f", "broken")
    account.interrupt("broken-1")
    done = cli("logs", "-f", "broken", timeout_s=200)
    status = cli("status", "broken", "--json").json
    assert (done.code, status["state"], status["restarts"]) == (0, "succeeded", 1), done.stdout + done.stderr
    lines = cli("logs", "broken", "--json", "--raw").stdout
    [again] = wholejobs.events(lines, "restart")
    assert again["step"] >= 20
    wholejobs.assert_equal(wholejobs.weights(cli, "broken", folder), whole.weights)
    assert wholejobs.losses(cli, "broken") == whole.losses
    assert len(whole.losses) == 10


# Rank 0 alone saves, into its working directory; rank 1 is killed after the file exists long enough to be kept.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
saved, rank = Path("out/step.pt"), dist.get_rank()
print("found", saved.read_text() if saved.exists() else "nothing", sys.argv[1:], flush=True)
if not saved.exists():
    dist.barrier()
    if rank == 0:
        Path("snapshot.pt").write_text("rank 0")
        saved.write_text("rank 0")
    time.sleep(3)
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
print("snapshot", Path("snapshot.pt").read_text(), flush=True)
"""


@pytest.mark.soak  # the kept files of two nodes: tests/entrypoints/test_keep.py
@pytest.mark.usefixtures("account")
def test_kept_files_reach_all_containers_at_a_restart(cli: Any, folder: Path) -> None:
    """SageMaker shares no folder between running containers, so the nodes gather the files from each other."""
    (folder / "train.py").write_text(SCRIPT)
    config = CONFIG.partition("training:")[0].replace("task: task.py", "script: train.py").replace("spot: true", "")
    keep = 'keep: [out/, "snap*.pt"]\nresume_args: [--from, $CLOUDTRAIN_RESUME_PATH]\n'
    (folder / "cloudtrain.yaml").write_text(f"{config}{keep}limits: {CONFIG.partition('limits: ')[2]}")
    done = cli.ok("submit", "-y", "--name", "kept", cwd=folder, timeout_s=200)
    shown = done.stdout
    assert (shown.count("found nothing"), shown.count("found rank 0 ['--from'")) == (2, 2), shown
    assert shown.count("snapshot rank 0") == 2


READS = """
import os
from pathlib import Path
folder = Path(os.environ["CLOUDTRAIN_INPUT_TRAIN"])
print("train", *sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()), flush=True)
print("one", open(os.environ["CLOUDTRAIN_INPUT_ONE"]).read(), flush=True)
"""


def test_inputs_are_the_folder_and_the_file_of_their_addresses(cli: Any, account: Aws, folder: Path) -> None:
    """A folder without its slash brings no siblings; a file is a file, although another name begins as the file's."""
    for key in ("train/a.txt", "train/sub/b.txt", "train_holdout/h.txt", "train.csv", "one.csv", "one.csv.bak"):
        account.client("s3").put_object(Bucket="cloudtrain-tests", Key=f"data/{key}", Body=key.encode())
    (folder / "train.py").write_text(READS)
    config = CONFIG.partition("training:")[0].replace("task: task.py", "script: train.py").replace("spot: true", "")
    config = config.replace("nproc_per_node: 1", "nproc_per_node: 1, allow_alone: true")
    places = "inputs: {train: s3://cloudtrain-tests/data/train, one: s3://cloudtrain-tests/data/one.csv}\n"
    (folder / "cloudtrain.yaml").write_text(f"{config}{places}limits: {CONFIG.partition('limits: ')[2]}")
    shown = cli.ok("submit", "-y", "--name", "reads", cwd=folder, timeout_s=200).stdout
    assert "train a.txt sub/b.txt\n" in shown
    assert "one one.csv\n" in shown


TOOLKITS = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--data", default=os.environ["SM_CHANNEL_TRAIN"])
parser.add_argument("--one", default=os.environ["SM_CHANNEL_ONE"])
parser.add_argument("--gpus", type=int, default=os.environ["SM_NUM_GPUS"])
parser.add_argument("--hosts", type=json.loads, default=os.environ["SM_HOSTS"])
given = parser.parse_args()
training = json.loads(os.environ["SM_TRAINING_ENV"])
found = (os.listdir(given.data), os.listdir(given.one), given.hosts, os.environ["SM_CURRENT_HOST"], given.gpus)
print("told", *found, os.environ["SM_HP_LR"], training["hyperparameters"], os.environ["SM_CHANNELS"], flush=True)
for folder in (given.model_dir, os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_OUTPUT_INTERMEDIATE_DIR"]):
    open(f"{folder}/saved-{os.path.basename(folder)}", "w").close()
"""


def test_script_for_the_toolkit_works_and_its_files_are_kept(cli: Any, account: Aws, folder: Path) -> None:
    """The toolkit's variables are set, also in a rehearsal; what is saved in its folders is among the artifacts."""
    for key in ("train/a.txt", "one.csv"):
        account.client("s3").put_object(Bucket="cloudtrain-tests", Key=f"sm/{key}", Body=key.encode())
    (folder / "train.py").write_text(TOOLKITS)
    config = CONFIG.partition("training:")[0].replace("task: task.py", "script: train.py").replace("spot: true", "")
    config = config.replace("nproc_per_node: 1", "nproc_per_node: 1, allow_alone: true")
    places = (
        "inputs: {train: s3://cloudtrain-tests/sm/train/, one: s3://cloudtrain-tests/sm/one.csv}\nargs: {lr: 0.1}\n"
    )
    (folder / "cloudtrain.yaml").write_text(f"{config}{places}limits: {CONFIG.partition('limits: ')[2]}")
    done = cli.ok("submit", "-y", "--name", "kit", cwd=folder, timeout_s=200)
    assert "lost" not in done.stdout + done.stderr
    hosts = "['algo-1', 'algo-2']"
    values = '0 0.1 {\'lr\': 0.1} ["one","train"]'
    assert f"told ['a.txt'] ['one.csv'] {hosts} algo-1 {values}" in done.stdout
    assert f"told ['a.txt'] ['one.csv'] {hosts} algo-2 {values}" in done.stdout
    cli.ok("artifacts", "kit", "-o", folder / "out")
    names = {"saved-model", "saved-data", "saved-intermediate"}
    assert {path.name for path in (folder / "out").rglob("saved-*")} == names
    rehearsed = cli("rehearse", cwd=folder, timeout_s=200)
    assert (rehearsed.code, "it runs" in rehearsed.stdout) == (0, True), rehearsed.stdout + rehearsed.stderr
