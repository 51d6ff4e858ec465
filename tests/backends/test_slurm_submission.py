"""At most one job for an attempt, whatever answer is lost, on a real Slurm."""

import secrets
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from cloudtrain.backends.slurm import jobs_submission as submission
from cloudtrain.backends.slurm.channel import Done
from cloudtrain.launcher.errors import CloudtrainError, ConfigError
from doubles.slurm.handle import Slurm

SCRIPT = "#!/bin/bash\n[ -e open ] || exit 0\necho ran > ran\nsleep 100\n"


@pytest.fixture
def attempt(slurm: Slurm) -> str:
    """Return the folder of an attempt on the shared disk, with a batch script and an open door."""
    folder = slurm.home() / "attempt"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "job.sh").write_text(SCRIPT)
    assert submission.open_door(partial(_run, slurm), "/home/alice/attempt")
    return "/home/alice/attempt"


@pytest.fixture
def name() -> str:
    """Return the platform's name of an attempt, which is unique: Slurm shows a job for some time after its end."""
    return f"digits-{secrets.token_hex(4)}-1"


@pytest.mark.soak
def test_job_is_made_once_and_runs(slurm: Slurm, attempt: str, name: str) -> None:
    """The usual submit: one job, released, below the attempt's name; a second submitter finds the door taken."""
    run = partial(_run, slurm)
    number = submission.submit(run, attempt, name, _options(name))
    slurm.wait(number, "RUNNING")
    assert submission.find(run, name, 0) == number
    assert not submission.open_door(run, attempt)


@pytest.mark.soak
def test_silent_controller_makes_one_job(slurm: Slurm, attempt: str, name: str) -> None:
    """sbatch itself gives up while the controller stands still; the request is in the backlog, and becomes the job."""
    slurm.configure(MessageTimeout="2")
    slurm.slurmctld.pause()
    answers: list[Done] = []

    def run(argv: Sequence[str]) -> Done:
        done = _run(slurm, argv)
        if "sbatch" in argv:
            answers.append(done)
            slurm.slurmctld.resume()
        return done

    number = submission.submit(run, attempt, name, _options(name), patience=10)
    assert [(done.code, "timed out" in done.stderr) for done in answers] == [(1, True)]
    slurm.wait(number, "RUNNING")
    assert slurm.admin("squeue", "-h", "-o", "%i").split() == [str(number)]


@pytest.mark.soak
def test_request_that_never_arrived_is_told(slurm: Slurm, attempt: str, name: str) -> None:
    """Without a job at the end of the patience, the submit fails; the site's configuration sets the patience."""
    run = partial(_run, slurm)
    slurm.lose_answers(1, "refused")
    with pytest.raises(CloudtrainError, match="no job of this name"):
        submission.submit(run, attempt, name, _options(name), patience=0)
    assert slurm.admin("squeue", "-h", "-o", "%i") == ""
    assert submission.patience_s(run) == 15.0  # MessageTimeout is 5 s on this site


@pytest.mark.soak
def test_late_job_behind_a_closed_door_does_nothing(slurm: Slurm, attempt: str, name: str) -> None:
    """A late job of an abandoned submission ends without work, and the door stays closed."""
    run = partial(_run, slurm)
    assert submission.close(run, attempt)
    assert not submission.open_door(run, attempt)
    number = submission.submit(run, attempt, name, _options(name))
    slurm.wait(number, "COMPLETED")
    assert not (slurm.home() / "attempt/ran").exists()


@pytest.mark.soak
def test_refusal_is_told_in_slurms_words(slurm: Slurm, attempt: str, name: str) -> None:
    """A partition that does not exist is the user's error, and no search begins."""
    with pytest.raises(ConfigError, match="invalid partition specified: nowhere"):
        submission.submit(partial(_run, slurm), attempt, name, [*_options(name), "--partition=nowhere"])


@pytest.mark.soak
def test_of_several_jobs_the_oldest_is_kept(slurm: Slurm, attempt: str, name: str) -> None:
    """Racing senders of one attempt leave one job."""
    ask = f"sbatch --hold --parsable --chdir={attempt} --job-name={name} {attempt}/job.sh"
    with ThreadPoolExecutor(3) as pool:
        numbers = sorted(int(done.stdout) for done in pool.map(slurm.ssh, [ask] * 3))
    assert submission.find(partial(_run, slurm), name, 0) == numbers[0]
    assert slurm.admin("squeue", "-h", "-o", "%i").split() == [str(numbers[0])]


def _options(name: str) -> list[str]:
    return ["--output=log", "--nodes=1", f"--job-name={name}"]


def _run(slurm: Slurm, argv: Sequence[str]) -> Done:
    done = slurm.ssh(shlex.join(argv))
    return Done(done.returncode, done.stdout, done.stderr)
