"""The words of Slurm's failed commands, and of the channel to the login node, become errors with the key to change."""

import pytest

from cloudtrain.backends.slurm import channel
from cloudtrain.backends.slurm import jobs_submission as submission
from cloudtrain.launcher.errors import ConfigError, UnreachableError

FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (f"{FAILED}Invalid account or account/partition combination specified", "slurm.account", "Invalid account or"),
        (f"{FAILED}Invalid qos specification", "slurm.qos", "Invalid qos specification"),
        (f"{FAILED}Invalid license specification", "slurm.licenses", "Invalid license specification"),
        (f"{FAILED}Requested reservation is invalid", "slurm.reservation", "Requested reservation is invalid"),
        (f"{FAILED}Invalid feature specification", "slurm.constraint", "Invalid feature specification"),
        (f"{FAILED}Invalid generic resource (gres) specification", "resources.accelerators", "Invalid generic"),
        (f"{FAILED}Invalid node name specified", "slurm.nodelist", "Invalid node name specified"),
        (
            f"sbatch: error: invalid partition specified: nowhere\n{FAILED}Invalid partition name specified\n",
            "slurm.partition",
            "invalid partition specified: nowhere; Invalid partition name specified",
        ),
        (
            "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information\n",
            "slurm.raw",
            "unrecognized option '--bogus'",
        ),
        ("allocation failure: A new reason", "slurm", "A new reason"),
    ],
)
def test_refusal_names_the_key(words: str, key: str, message: str) -> None:
    """Each refusal has one key and a hint; two lines of Slurm are two sentences."""
    error = submission.fault(words)
    assert isinstance(error, ConfigError)
    (fault,) = error.faults
    assert (fault.key, fault.message.startswith(f"Slurm refuses the job: {message}")) == (key, True), fault
    assert fault.hint


def test_silent_controller_is_no_refusal() -> None:
    """A controller that does not answer is no fault of the config."""
    error = submission.fault(f"{FAILED}Unable to contact slurm controller (connect failure)")
    assert isinstance(error, UnreachableError)


def test_channel_names_the_keys_of_the_block() -> None:
    """The channel is shared with the ssh backend, and the printed faults have the keys of the block `slurm`."""
    hint = "name one that is there: ssh.python, or `python` of this host"
    printed = str(channel.in_our_words(ConfigError("login: cannot be used; set ssh.workdir", hint=hint)))
    assert "slurm.workdir" in printed
    assert printed.endswith("hint: name one that is there: slurm.python")


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("infinite", None), ("30:00", 30), ("1:00:00", 60), ("2-00:00:00", 2880), ("1-06:30:00", 1830)],
)
def test_time_limit_is_read(limit: str, minutes: float | None) -> None:
    """The limit of a partition as sinfo writes the limit."""
    assert submission.SlurmPartition("main", True, limit, 1, True, ()).minutes == minutes
