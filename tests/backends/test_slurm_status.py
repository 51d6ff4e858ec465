"""Slurm's words about jobs, as a real Slurm writes them, become our states."""

import shlex
import time

import pytest

from cloudtrain.backends.slurm import status
from cloudtrain.backends.slurm.status import SlurmJob
from doubles.slurm.handle import Slurm
from doubles.waiting import until

RULES = {"is_asked": False, "is_resumable": True, "limit_reason": "budget"}


@pytest.mark.soak
def test_words_of_a_real_slurm_are_read(slurm: Slurm) -> None:
    """Both commands agree on a job that waits, runs, is requeued and is cancelled, also in a strange shell."""
    (slurm.home() / ".bashrc").write_text("export SQUEUE_FORMAT=%j SACCT_FORMAT=User SLURM_TIME_FORMAT=relative\n")
    begun = time.time()
    number = slurm.submit("sleep 100", "--hold", "--comment='a JobState=X b'")
    held = _shown(slurm, number)
    assert (held.state, held.reason, held.started_s) == ("PENDING", "JobHeldUser", None)
    assert status.state_of(held, **RULES).detail == f"is held: scontrol release {number}"  # type: ignore[arg-type]
    slurm.ssh(f"scontrol release {number}")
    slurm.wait(number, "RUNNING")
    assert (running := _shown(slurm, number)) is not None
    assert (running.state, running.nodes, running.restarts) == ("RUNNING", "node0", 0)
    assert abs((running.started_s or 0) - begun) < 20
    slurm.ssh(f"scontrol requeue {number}")
    until(lambda: _shown(slurm, number).state == "PENDING")
    slurm.ssh(f"scontrol update job={number} StartTime=now+2")
    slurm.wait(number, "RUNNING")
    slurm.ssh(f"scancel {number}")
    until(lambda: (job := _recorded(slurm, number)) is not None and job.state == "CANCELLED")
    over = _recorded(slurm, number)
    assert over.restarts == 1
    assert over.seconds is not None
    assert 0 <= over.seconds < 30
    assert status.state_of(over, **RULES).reason == "user"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        *(("CONFIGURING", "pending", None), ("RESIZING", "running", None), ("COMPLETING", "running", None)),
        *(("COMPLETED", "succeeded", None), ("CANCELLED by 2001", "stopped", "user")),
        *(("CANCELLED+", "stopped", "user"), ("TIMEOUT", "stopped", "budget"), ("PREEMPTED", "stopped", "preempted")),
        *(("NODE_FAIL", "failed", "node_failure"), ("OUT_OF_MEMORY", "failed", "error")),
        ("A_NEW_STATE", "failed", "error"),
    ],
)
def test_each_state_has_its_meaning(name: str, state: str, reason: str | None) -> None:
    """The table of states; only the first word counts."""
    told = status.state_of(SlurmJob(1, name), **RULES)  # type: ignore[arg-type]
    assert (told.state, told.reason) == (state, reason)


@pytest.mark.parametrize(
    ("job", "end"),
    [
        (SlurmJob(1, "DEADLINE"), ("failed", "no_machines")),
        (SlurmJob(1, "DEADLINE", nodes="node0"), ("stopped", "budget")),
        (SlurmJob(1, "DEADLINE", restarts=1), ("stopped", "budget")),  # ranks have run before the requeue
    ],
    ids=str,
)
def test_deadline_before_the_start_is_a_lack_of_machines(job: SlurmJob, end: tuple[str, str]) -> None:
    """Slurm removes a job that would begin too late for its deadline."""
    told = status.state_of(job, **RULES)  # type: ignore[arg-type]
    assert (told.state, told.reason) == end


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        *(("FAILED", "0:53", "slurm.workdir"), ("OUT_OF_MEMORY", "0:125", "slurm.mem")),
        ("FAILED", "1:0", "Slurm says FAILED 1:0"),
        ("FAILED", "138:0", "Slurm says FAILED 138:0: ended by SIGUSR1 (User defined signal 1)"),
        ("FAILED", "0:9", "Slurm says FAILED 0:9: ended by SIGKILL (Killed)"),
    ],
)
def test_failure_without_a_report_names_the_key(name: str, code: str, words: str) -> None:
    """A workdir on a disk of the login node alone, and too little memory, are told as the cure."""
    told = status.state_of(SlurmJob(1, name, exit_code=code), **RULES)  # type: ignore[arg-type]
    assert words in (told.error or {})["message"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("(Resources)", "waits for free nodes"),
        ("QOSGrpCPUMinutesLimit", "waits, as the QOS has too little time left (QOSGrpCPUMinutesLimit): see `sshare`"),
        ("AssocGrpGRES", "waits, as the account is at a limit (AssocGrpGRES)"),
        ("ReqNodeNotAvail,_UnavailableNodes:node0", "waits for nodes that are down, drained or reserved"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "waits for nodes that are down, drained or reserved"),
        ("SomethingNew", "waits: SomethingNew"),
    ],
)
def test_reason_of_a_wait_is_told_in_words(reason: str, words: str) -> None:
    """A user reads why the job waits, and what to do."""
    told = status.wait_in_words(SlurmJob(1, "PENDING", reason))
    assert told.startswith(words)


def _shown(slurm: Slurm, number: int) -> SlurmJob:
    job = status.of_scontrol(_told(slurm, "scontrol", "show", "job", "-o", str(number)))
    assert job is not None
    return job


def _recorded(slurm: Slurm, number: int) -> SlurmJob | None:
    fields = "JobIDRaw,State,ExitCode,Start,End,NodeList"
    return status.of_sacct(_told(slurm, "sacct", "-nPXD", "-j", str(number), "-o", fields))


def _told(slurm: Slurm, *words: str) -> str:
    environ = ("env", "-u", "SACCT_FORMAT", "SLURM_TIME_FORMAT=%s")  # as the verb `run`
    done = slurm.ssh(shlex.join([*environ, *words]))
    assert done.returncode == 0, done.stderr
    return done.stdout
