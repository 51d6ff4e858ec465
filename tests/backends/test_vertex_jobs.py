"""Whole jobs on Google's stand-in: real replicas, torchrun, gloo; trained, killed, preempted, with inputs."""

from pathlib import Path
from typing import Any

import pytest
import wholejobs

from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT, REGION
from doubles.waiting import until

pytestmark = pytest.mark.slow

CONFIG = wholejobs.config_of(
    "vertex",
    "n1-standard-4",
    f"project: {PROJECT}, location: {REGION}, staging_bucket: {BUCKET}",
    "retry: {max_attempts: 3}\n",
)


@pytest.mark.soak  # the test below trains a whole task on Vertex AI
def test_digits_example_reaches_its_accuracy(cli: Any, google_project: Google, tmp_path: Path) -> None:
    """The README's example on two replicas: 97 % of unseen samples, and the weights are fetched."""
    where = ("project", PROJECT), ("location", REGION), ("staging_bucket", BUCKET)
    wholejobs.train_digits(cli, tmp_path, "vertex", "n1-standard-4", *(f"vertex.{key}={value}" for key, value in where))
    assert google_project.unserved() == []


@pytest.mark.soak
def test_killed_replica_changes_nothing(
    cli: Any, google_project: Google, folder: Path, whole: wholejobs.Results
) -> None:
    """A machine is lost in mid-run and Vertex AI restarts all replicas, on empty disks: the weights are the same."""
    process = cli.start("submit", "--force", "-y", "--name", "broken", cwd=folder)
    until(lambda: "cloudtrain/checkpoints/broken/latest.json" in google_project.objects(), 120, 0.1)
    google_project.preempt("broken-1", "workerpool1-0")
    shown, said = process.communicate(timeout=200)
    assert process.returncode == 0, shown + said
    status = cli("status", "broken", "--json").json
    assert (status["state"], status["attempt"], status["step"]) == ("succeeded", 1, 100)
    restarts = wholejobs.events(cli("logs", "broken", "--json", "--raw").stdout, "restart")
    [again] = [event for event in restarts if event["step"]]
    assert again["step"] >= 10
    wholejobs.assert_equal(wholejobs.weights(cli, "broken", folder), whole.weights)
    assert wholejobs.losses(cli, "broken").items() <= whole.losses.items()  # a line may be lost with its machine
    assert len(google_project.jobs()) == 1


# Rank 0 alone saves, as most scripts do; without a checkpoint, rank 1 is lost after the save was uploaded: replicas
# scan every 20 s. A younger save may be lost with the replica, on a slow machine repeatedly.
SAVER = """
import os, sys, time
from pathlib import Path
folder, rank = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]), os.environ["RANK"]
seen = (folder / "last").read_text() if (folder / "last").exists() else "nothing"
print("found", seen, flush=True)
if rank == "0":
    (folder / "last").write_text("saved")
if seen == "nothing":
    time.sleep(25 if "rank" in sys.argv and rank == "1" else 300)
    os.kill(os.getpid(), 9)
Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"], f"out-{rank}").write_text("done")
"""


@pytest.mark.soak  # a task after the loss of a machine: the test above; scripts: tests/entrypoints/test_keep.py
@pytest.mark.parametrize("lost", ["machine", "rank"])
def test_scripts_checkpoints_survive_a_loss(cli: Any, google_project: Google, folder: Path, lost: str) -> None:
    """After the loss of a machine or a rank, all nodes find the save of one node; the output is fetched."""
    wholejobs.as_script(folder, SAVER)
    process = cli.start("submit", "--force", "-y", "--name", "saves", "--set", f"args=[{lost}]", cwd=folder)
    if lost == "machine":
        until(lambda: "cloudtrain/checkpoints/saves/last" in google_project.objects(), 120, 0.1)
        google_project.preempt("saves-1", "workerpool0-0")
    shown, said = process.communicate(timeout=200)
    assert process.returncode == 0, shown + said
    # All replicas may restart before the files of the last seconds were uploaded: then a further restart follows.
    assert (shown.count("found nothing") >= 2, shown.count("found saved")) == (True, 2)
    fetched = cli("artifacts", "saves", "-o", folder / "out", "--json")
    names = {Path(path).name for path in fetched.json["files"] if not Path(path).name.startswith(".")}
    assert names == {"last", "out-0", "out-1"}


def test_files_in_the_platforms_own_folders_are_artifacts(cli: Any, google_project: Google, folder: Path) -> None:
    """A script saves below AIP_MODEL_DIR and AIP_CHECKPOINT_DIR, as on Vertex AI by /gcs; each job has its own."""
    wholejobs.as_script(
        folder,
        "import os\nfrom pathlib import Path\n"
        "for name in ('MODEL', 'CHECKPOINT', 'TENSORBOARD_LOG') if os.environ['RANK'] == '0' else ():\n"
        "    place = Path(os.environ[f'AIP_{name}_DIR'].replace('gs://', '/gcs/'))\n"
        "    assert not place.exists()\n"
        "    place.mkdir(parents=True)\n"
        "    (place / 'a').write_text(name)\n",
    )
    for number, settings in enumerate(((), ("--set", f"outputs.all=gs://{BUCKET}/shared"), ())):
        given = ("--name", f"own{number}", "--set", "distributed.allow_alone=true", *settings)
        cli.ok("submit", "--force", "-y", *given, cwd=folder)
        out = folder / f"out{number}"
        cli.ok("artifacts", f"own{number}", "-o", out)
        found = {path.parent.name: path.read_text() for path in out.rglob("a")}
        assert found == {"model": "MODEL", "checkpoints": "CHECKPOINT", "logs": "TENSORBOARD_LOG"}


@pytest.mark.soak
def test_inputs_are_copied_if_nothing_is_mounted(cli: Any, google_project: Google, folder: Path) -> None:
    """A folder and a file of the bucket are copied on a machine without /gcs, and read in place with /gcs."""
    google_project.settings(gcs=False)
    google_project.put_object("data/train/a b.txt", b"one")
    google_project.put_object("data/train/sub/c.txt", b"two")
    google_project.put_object("data/labels.csv", b"three")
    wholejobs.as_script(
        folder,
        "import os\nfrom pathlib import Path\nif os.environ['RANK'] == '1':\n"
        "    train, labels = (Path(os.environ['CLOUDTRAIN_INPUT_' + name]) for name in ('TRAIN', 'LABELS'))\n"
        "    print(train, (train / 'a b.txt').read_text(), (train / 'sub/c.txt').read_text(), labels.read_text())\n",
    )
    given = [f"inputs.train=gs://{BUCKET}/data/train", f"inputs.labels=gs://{BUCKET}/data/labels.csv"]
    done = cli.ok("submit", "--force", "-y", *(part for each in given for part in ("--set", each)), cwd=folder)
    assert "[r1] /tmp/cloudtrain/inputs/train one two three" in done.stdout
    google_project.settings(gcs=True)
    done = cli("submit", "--force", "-y", *(part for each in given for part in ("--set", each)), cwd=folder)
    assert f"[r1] /gcs/{BUCKET}/data/train one two three" in done.stdout, done.stdout + done.stderr
    assert (
        cli("submit", "-d", "--force", "-y", "--set", f"inputs.train=gs://{BUCKET}/data/nothing", cwd=folder).code == 0
    )
    assert cli("wait", "last").code == 1  # a follower would look for the last lines for half a minute
    assert f"the input train: there is nothing at gs://{BUCKET}/data/nothing" in cli("status", "last").stdout


def test_prebuilt_image_runs_the_boot_as_a_package(cli: Any, google_project: Google, folder: Path) -> None:
    """Google's own images accept a Python package: the boot program is one, and starts the script."""
    wholejobs.as_script(
        folder, "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
    )
    image = "image=us-docker.pkg.dev/vertex-ai/training/pytorch-cpu.2-4.py310:latest"
    done = cli.ok("submit", "--force", "-y", "--set", image, cwd=folder)
    assert ("[r0] rank 0 of 2" in done.stdout, "[r1] rank 1 of 2" in done.stdout) == (True, True)
    [job] = google_project.jobs()
    assert "pythonPackageSpec" in google_project.job(job["id"])["body"]["jobSpec"]["workerPoolSpecs"][0]
