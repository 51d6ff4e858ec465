"""The preflight's report: each injected defect is named with its host and the command against the defect."""

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.channel.master import fault_of
from cloudtrain.backends.ssh import hosts_placement, preflight
from cloudtrain.backends.ssh.preflight.folding import fold, local, ranges, remote
from cloudtrain.backends.ssh.preflight.hostcheck import HostRequirements
from cloudtrain.backends.ssh.preflight.reachcheck import dialled
from cloudtrain.entrypoints.host import survey
from cloudtrain.entrypoints.host.calls import Here
from cloudtrain.launcher.backend import Check

WISH = HostRequirements(ranks=8, gpus=8)
Fact = dict[str, Any]


def gpu(index: int, host: str = "h0", **more: Any) -> Fact:
    """Return a GPU without a fault."""
    told = {"index": index, "uuid": f"GPU-{host}-{index}", "name": "NVIDIA A100-SXM4-80GB", "memory_mb": 81920}
    return {**told, "driver": "550.54.15", "mig": False, "slices": [], "fault": None, **more}


def fit(number: int, **changes: Any) -> Fact:
    """Return the facts of a host without faults, except for the changes."""
    name = f"h{number}"
    fact: Fact = {
        "name": name,
        "boot_id": f"boot-{number}",
        "kernel": "6.1.0-25-amd64",
        "machine": "x86_64",
        "user": "alice",
        "workdir": "/home/alice/.cloudtrain",
        "cores": 96,
        "own_name": {"name": name, "addresses": [f"10.0.0.{number + 1}"]},
        "interfaces": [
            {"name": "lo", "address": "127.0.0.1", "mtu": 65536},
            {"name": "docker0", "address": "172.17.0.1", "mtu": 1500},
            {"name": "eth0", "address": f"10.0.0.{number + 1}", "mtu": 9000},
        ],
        "gpus": {"gpus": [gpu(index, name) for index in range(8)], "fault": None},
        "gpu_processes": [],
        "holders": [],
        "disk": {"path": "/home/alice/.cloudtrain", "size_mb": 1 << 20, "free_mb": 820_000, "inodes": 10**7},
        "shm": {"path": "/dev/shm", "size_mb": 64 << 10, "free_mb": (64 << 10) - number, "inodes": 10**6},
        "limits": {"nofile": [1 << 20, 1 << 20], "memlock": [-1, -1]},
        "infiniband": ["mlx5_0"],
        "write": {"error": None},
        "leftovers": [],
        "logind": {"kills": False},
        "python": {
            "version": "3.11.2",
            "executable": "/usr/bin/python3",
            "torch": "2.13.0",
            "cuda": "12.8",
            "nccl": "2.27.5",
        },
        "errors": {},
        "ahead_s": 0.001 * number,
    }
    return {**fact, **changes}


def with_one(count: int = 16, bad: int = 15, **changes: Any) -> dict[str, Fact | str]:
    """Return hosts, with changed facts for one host."""
    return {f"h{number}": fit(number, **(changes if number == bad else {})) for number in range(count)}


def told(facts: Mapping[str, Fact | str], requirements: HostRequirements = WISH) -> list[Check]:
    """Return the checks that a submit would report: all but the good ones."""
    return [check for check in preflight.checks(facts, requirements) if check.verdict != "ok"]


def test_fit_hosts_give_no_report() -> None:
    """Each check is one line, for all hosts."""
    found = preflight.checks(with_one(), WISH)
    assert {check.verdict for check in found} == {"ok"}
    lines = {check.name: check.found for check in found}
    assert lines["torch"] == "2.13.0: all 16 hosts"
    assert lines["GPUs"] == "8 x NVIDIA A100-SXM4-80GB: all 16 hosts"
    assert lines["free"] == "8 of 8: all 16 hosts"
    assert lines["MTU"] == "9000: all 16 hosts"
    assert lines["disk"] == "more than 500 GB free in /home/alice/.cloudtrain: all 16 hosts"
    assert len(lines) == len(found)


def python(**changes: Any) -> Fact:
    """Return an interpreter's facts, changed."""
    return {"python": {**fit(0)["python"], **changes}}


def gpus(*there: Fact, fault: Fact | None = None) -> Fact:
    """Return a host's GPUs."""
    return {"gpus": {"gpus": list(there), "fault": fault}}


EIGHT = [gpu(index, "h15") for index in range(8)]
BUSY = [{"pid": 4321, "gpu": "GPU-h15-3", "name": "python train.py", "memory_mb": 9, "owner": "bob", "job": None}]
OWN_NAME = {"own_name": {"name": "h15", "addresses": ["127.0.1.1"]}}
SMALL_MTU = {"interfaces": [{"name": "eth1", "address": "10.0.0.16", "mtu": 1500}]}
MISMATCH = {"kind": "mismatch", "text": "Failed to initialize NVML: Driver/library version mismatch"}

# Changed facts of h15 of 16 hosts, check, verdict, words of the finding, words of the remedy.
DEFECTS: list[tuple[Fact, str, str, str, str]] = [
    (python(torch="2.12.1"), "torch", "fail", "2.13.0: h0-h14 | 2.12.1: h15", "install torch==2.13.0"),
    (python(torch=None, cuda=None, nccl=None), "torch", "fail", "none in /usr/bin/python3: h15", "pip"),
    (python(torch="2.13.0", cuda=None), "torch", "fail", "built for the CPU", "ssh h15 "),
    (python(version="3.12.1"), "python", "warn", "3.11.2: h0-h14 | 3.12.1: h15", "ssh h15 "),
    (python(version="3.8.10"), "python", "fail", "3.8.10: h15", "ssh.python, or `python` of the host"),
    (
        python(torch=None, managed=True),
        "torch",
        "fail",
        "none in /usr/bin/python3: h15",
        "ssh h15 '/usr/bin/python3 -m venv ~/venv && ~/venv/bin/pip install torch==2.13.0'; then ssh.python",
    ),
    (
        python(cuda=None, managed=True),
        "torch",
        "fail",
        "built for the CPU",
        "-m venv ~/venv && ~/venv/bin/pip install torch",
    ),
    (python(nccl="2.21.5", managed=True), "NCCL", "fail", "2.21.5: h15", "~/venv/bin/pip install torch"),
    (python(torch="2.12.1", managed=True), "torch", "fail", "2.12.1: h15", "~/venv/bin/pip install torch==2.13.0"),
    ({"python": {"error": "python3 is not there"}}, "python", "fail", "not there: h15", "ssh.python"),
    (python(torch="2.12.1", pip=False), "torch", "fail", "2.12.1: h15", "-m ensurepip && "),
    (python(nccl="2.21.5"), "NCCL", "fail", "2.27.5: h0-h14 | 2.21.5: h15", "ssh h15 "),
    ({"kernel": "5.15.0-1"}, "kernel", "warn", "5.15.0-1: h15", "ssh -t h15 "),
    ({"machine": "aarch64"}, "processor", "warn", "aarch64: h15", "ssh.hosts"),
    ({"cores": 4}, "cores", "warn", "4 cores: h15", "distributed.nproc_per_node=4"),
    (gpus(*EIGHT[:7]), "GPUs", "fail", "8 are planned, usable are 7: h15", "accelerators: A100:7"),
    (gpus(gpu(0, fault="name is ERR!"), *EIGHT[1:]), "GPUs", "fail", "GPU 0: name is ERR!: h15", "-i 0"),
    (gpus(*[{**g, "name": "Tesla V100"} for g in EIGHT]), "GPUs", "warn", "8 x Tesla V100: h15", "hosts"),
    (gpus(*[{**g, "driver": "535.1"} for g in EIGHT]), "driver", "warn", "535.1: h15", "ssh -t h15 "),
    (gpus(*[{**g, "driver": "470.1"} for g in EIGHT]), "driver", "fail", "needs 525.60: h15", "h15"),
    (gpus(fault=MISMATCH), "GPUs", "fail", "version mismatch: h15", "ssh -t h15 'sudo reboot'"),
    ({"gpu_processes": BUSY}, "free", "fail", "h15: GPU 3: pid 4321 of bob, python train.py", "ps -fp 4321"),
    (OWN_NAME, "own name", "warn", "127.0.1.1 there: h15", "10.0.0.16 h15"),
    ({"own_name": {"name": "h15", "addresses": []}}, "own name", "warn", "does not resolve", "/etc/hosts"),
    ({"disk": {"path": "/w", "free_mb": 30, "inodes": None}}, "disk", "fail", "30 MB free in /w: h15", "du -xh"),
    ({"disk": {"path": "/w", "free_mb": 99999, "inodes": 12}}, "disk", "fail", "12 files more", "df -ih /w"),
    ({"shm": {"size_mb": 4096, "free_mb": 4000}}, "/dev/shm", "warn", "4000 MB of 4096 MB free: h15", "size=8G"),
    ({"shm": {"size_mb": 63, "free_mb": 63}}, "/dev/shm", "fail", "63 MB of 63 MB free: h15", "remount"),
    ({"shm": {"size_mb": 65536, "free_mb": 9}}, "/dev/shm", "fail", "9 MB of 65536 MB free", "ls -lhS"),
    ({"limits": {"nofile": [1024, 4096], "memlock": [-1, -1]}}, "open files", "warn", "1024: h15", "limits.d"),
    ({"limits": {"nofile": [-1, -1], "memlock": [65536, 65536]}}, "locked memory", "warn", "64 kB", "unlimited"),
    ({"ahead_s": -1.4}, "clock", "warn", "1.4 s behind: h15", "ssh -t h15 'sudo timedatectl set-ntp true'"),
    ({"ahead_s": 40.0}, "clock", "fail", "40.0 s ahead: h15", "set-ntp"),
    (SMALL_MTU, "MTU", "warn", "1500: h15", "eth1 mtu 9000"),
    ({"write": {"error": "/w: Permission denied"}}, "workdir", "fail", "Permission denied: h15", "install -d -o alice"),
    (
        {"write": {"error": "/w: no file locks there", "no_locks": True}},
        "workdir",
        "fail",
        "/w: no file locks there: h15",
        "ssh.workdir=/a/folder/on/a/local/disk",
    ),
    (
        {"tmp": {"path": "/t", "free_mb": 64, "noexec": False, "absent": False}},
        "TMPDIR",
        "warn",
        "64 MB free in /t",
        "env.TMPDIR=/",
    ),
    (
        {"tmp": {"path": "/t", "free_mb": 64_000, "noexec": True, "absent": False}},
        "TMPDIR",
        "warn",
        "/t is mounted noexec",
        "env.TMPDIR",
    ),
    ({"tmp": {"path": "/t", "absent": True}}, "TMPDIR", "warn", "/t is not there: h15", "env.TMPDIR"),
    ({"leftovers": [{"pid": 7, "job": "x-1"}]}, "processes", "warn", "of job x-1", "ssh h15 'kill -9 7'"),
    ({"logind": {"kills": True}}, "logout", "fail", "when ssh logs out: h15", "KillExcludeUsers"),
    ({"gpus": None, "errors": {"gpus": "no answer"}}, "gpus", "fail", "no answer: h15", "ssh h15 "),
    ({"boot_id": "boot-0", "name": "h0", "interfaces": fit(0)["interfaces"]}, "hosts", "fail", "h0, h15", "ssh -G"),
]


@pytest.mark.parametrize(("changes", "name", "verdict", "found", "cure"), DEFECTS)
def test_injected_defect_is_named_with_host_and_remedy(
    changes: Fact, name: str, verdict: str, found: str, cure: str
) -> None:
    """Fifteen hosts are fit: one line names the sixteenth and the command."""
    checks = told(with_one(**changes))
    line = next(check for check in checks if check.name == name and check.verdict == verdict)
    assert found in line.found
    assert "h15" in line.found
    assert cure in line.cure
    assert all(check.cure for check in checks)
    assert "h3" not in " ".join(check.found for check in checks)


def test_load_of_other_processes_is_a_warning_for_jobs_on_cpus() -> None:
    """Processes without a lock of cloudtrain slow the ranks; a job for GPUs has its own check of them."""
    facts = with_one(load={"mean": 12.4, "cores": 2})
    on_cpus = [check for check in told(facts, HostRequirements(ranks=1, gpus=0)) if check.name == "load"]
    assert [(check.verdict, check.found) for check in on_cpus] == [("warn", "12 processes run on 2 cores: h15")]
    assert "load" not in [check.name for check in told(facts)]


@pytest.mark.parametrize(
    ("words", "found", "cure"),
    [
        ("No ED25519 host key is known for h3 and you have requested strict checking.\nHost key verification failed.",
         "its host key is not known here: h3", "ssh h3"),
        ("@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@\nHost key verification failed.",
         "its host key has changed: h3", "ssh-keygen -R h3"),
        ("alice@h3: Permission denied (publickey,password).", "it refuses this login: h3", "ssh-copy-id h3"),
        ("ssh: Could not resolve hostname h3: Name or service not known", "its name cannot be resolved: h3",
         "ssh -G h3"),
        ("ssh: connect to host h3 port 22: Connection timed out", "it does not answer: h3", "ping -c 3 h3"),
        ("ssh: connect to host h3 port 22: Connection refused", "nothing listens on its port: h3", "systemctl start"),
        ("sh: 1: python3: not found", "has no Python: h3", "ssh -t h3 'sudo apt install python3'"),
        ("h3 has no interpreter `~/venv/bin/python`: No such file", "has no interpreter `~/venv/bin/python`: h3",
         "ssh h3 'command -v python3': name one that is there in ssh.python, or `python` of the host"),
        ("h3 has no interpreter `python3`: not found", "has no interpreter `python3`: h3", "sudo apt install python3"),
        ("kex_exchange_identification: Connection closed by remote host", "it closes the connection: h3", "MaxStart"),
        ("h3: something new\n  hint: none", "something new: h3", "ssh -v h3 true"),
    ],
)  # fmt: skip
def test_unreachable_host_gives_a_reason(words: str, found: str, cure: str) -> None:
    """The reason is short, for every message of ssh."""
    facts = {**with_one(8), "h3": words}
    line = told(facts)[0]
    assert (line.name, line.verdict, line.found) == ("reachable", "fail", found)
    assert cure in line.cure
    assert "2.13.0: h0-h2, h4-h7" in [check.found for check in preflight.checks(facts, WISH)]


def test_remedies_of_ssh_faults_match_our_own_messages() -> None:
    """The transport has its own sentences for the same faults."""
    for words, found in (
        ("Host key verification failed.", "its host key is not known here"),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!", "its host key has changed"),
        ("Permission denied (publickey).", "it refuses this login"),
        ("Could not resolve hostname h0", "its name cannot be resolved"),
        ("Connection refused", "nothing listens on its port"),
        ("Connection timed out", "it does not answer"),
    ):
        assert told({"h0": str(fault_of(words, "h0", "ssh h0"))})[0].found == f"{found}: h0"


def test_unknown_host_has_one_exit_code(cli: Any, project: Callable[..., Path]) -> None:
    """For `submit` and `hosts` an unknown name is a config fault (3), and a silent resolver is unreachable (7)."""
    where = "ssh: Could not resolve hostname h0"
    assert fault_of(f"{where}: Name or service not known", "h0", "ssh h0").exit_code == 3
    assert fault_of(f"{where}: Temporary failure in name resolution", "h0", "ssh h0").exit_code == 7
    folder = project("backend: ssh\nssh: {hosts: [nosuch.invalid]}\n")
    hosts, submit = cli("hosts", cwd=folder), cli("submit", "-d", "-y", cwd=folder)
    assert hosts.code == submit.code, hosts.stdout + submit.stderr
    assert hosts.code in (3, 7)


@pytest.mark.parametrize("hosts", ["[nosuch.invalid]", "[nosuch.invalid, also.invalid]"])
def test_unknown_host_leaves_no_row(cli: Any, project: Callable[..., Path], hosts: str) -> None:
    """A submit connects to the hosts before a job is registered, and names all hosts that do not answer."""
    folder = project(f"backend: ssh\nssh: {{hosts: {hosts}}}\n")
    submit = cli("submit", "-d", "-y", cwd=folder)
    assert submit.code in (3, 7), submit.stderr
    assert all(host in submit.stderr for host in hosts.strip("[]").split(", ")), submit.stderr
    assert cli("list", "--all", "--json", cwd=folder).json["jobs"] == []


def test_message_of_a_host_is_no_fault_of_ssh() -> None:
    """A start file's "Permission denied" is no refused login; its own remedy is kept."""
    words = "h0 does not run our first program; its login has ended: Permission denied\n  hint: mend its .bashrc"
    line = told({"h0": words})[0]
    assert line.found == "does not run our first program; its login has ended: Permission denied: h0"
    assert line.cure == "mend its .bashrc"


def test_remedy_of_an_own_name_works(tmp_path: Path) -> None:
    """The command removes Debian's line for 127.0.1.1, even a last line, and adds the address for the network."""
    line = told(with_one(**OWN_NAME))[0]
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 h15.lab h15\n")
    command = shlex.split(line.cure)[-1].replace("sudo ", "").replace("/etc/hosts", str(hosts))
    subprocess.run(["sh", "-c", command], check=True)
    assert hosts.read_text() == "127.0.0.1 localhost\n10.0.0.16 h15\n"


def test_same_fault_everywhere_is_one_line() -> None:
    """Sixteen hosts have a low limit, and two of them refuse the login."""
    low = {"limits": {"nofile": [1024, 4096], "memlock": [-1, -1]}}
    facts: dict[str, Fact | str] = {f"h{number}": fit(number, **low) for number in range(14)}
    facts |= {"h14": "Permission denied (publickey).", "h15": "Permission denied (publickey)."}
    checks = told(facts)
    assert [check.found for check in checks] == ["it refuses this login: h14, h15", "1024: h0-h13"]
    assert checks[0].cure.startswith("for h in h14 h15; do ssh-copy-id $h; done")
    assert "for h in $(seq -f h%g 0 13); do ssh -t $h " in checks[1].cure


def test_sixty_four_hosts_fit_on_a_screen() -> None:
    """For any number of hosts each check has one short line."""
    facts = with_one(64, bad=40, kernel="5.4.0")
    start = time.process_time()
    found = preflight.checks(facts, WISH)
    assert time.process_time() - start < 1.0
    assert len(found) < 20
    assert max(len(check.found) for check in found) < 120
    kernel = next(check for check in found if check.name == "kernel")
    assert kernel.found == "6.1.0-25-amd64: h0-h39, h41-h63 | 5.4.0: h40"


def test_gpus_without_a_plan_are_refused() -> None:
    """The message gives the config's line; a user who has chosen the ranks only gets a warning."""
    facts = with_one(2)
    line = next(check for check in told(facts, HostRequirements(1, 0)) if check.name == "GPUs")
    assert line.verdict == "fail"
    assert line.found == "the job is planned without them: 8 x NVIDIA A100-SXM4-80GB: h0, h1"
    assert "resources: {accelerators: A100:8}" in line.cure
    found = told(facts, HostRequirements(1, 0, ranks_are_chosen=True))
    assert [check.verdict for check in found if check.name == "GPUs"] == ["warn"]


def test_hosts_without_gpus_train_on_the_cpu() -> None:
    """Missing GPUs are no fault."""
    bare = {f"h{number}": fit(number, **gpus(), **python(cuda=None)) for number in (0, 1)}
    assert told(bare, HostRequirements(2, 0)) == []


def test_locked_gpus_name_the_job_and_its_owner() -> None:
    """The user can stop an own job, a foreign job has a named owner; allow_busy does not share GPUs of jobs."""
    mine = {"user": "alice", "owner": "alice", "job": "x-abcde", "pid": 5, "since_s": time.time() - 7300}
    locks = [{**mine, "name": f"GPU-h1-{index}"} for index in range(4)]
    line = told(with_one(2, 1, holders=locks), HostRequirements(8, 8, allow_busy=True))[0]
    assert line.verdict == "fail"
    assert line.name in preflight.TAKEN
    assert line.found == "4 of 8 GPUs are free, 8 wanted: h1: GPU 0-3: alice's job x-abcde, since 2 h"
    assert line.cure == "cloudtrain stop x-abcde"
    theirs = [{**lock, "user": "bob", "owner": "bob"} for lock in locks]
    assert told(with_one(2, 1, holders=theirs))[0].cure == "ask bob: cloudtrain hosts"
    assert told(with_one(2, 1, holders=locks), HostRequirements(4, 4)) == []  # the free GPUs are enough


def test_busy_gpus_are_shared_with_allow_busy() -> None:
    """allow_busy turns the fault into a warning; the user's own process has a command that ends it."""
    own = [{**BUSY[0], "owner": "alice"}]
    line = told(with_one(gpu_processes=own))[0]
    cure = "ssh h15 'kill 4321'; to share all the same: --set ssh.allow_busy=true"
    assert (line.verdict, line.cure) == ("fail", cure)
    shared = told(with_one(gpu_processes=BUSY), HostRequirements(8, 8, allow_busy=True))
    assert [check.verdict for check in shared] == ["warn"]


def test_job_takes_gpus_without_a_foreign_process_first() -> None:
    """With `allow_busy` a job takes a busy GPU only if too few GPUs are free."""
    facts = fit(15, gpu_processes=[{**BUSY[0], "gpu": "GPU-h15-0"}], holders=[{"name": "GPU-h15-1"}])
    assert hosts_placement._free(facts, 2, is_queued=False)[0] == ("GPU-h15-2", "GPU-h15-3")
    free = [f"GPU-h15-{index}" for index in range(2, 8)]
    assert hosts_placement._free(facts, 7, is_queued=False)[0] == (*free, "GPU-h15-0")


def test_machine_held_by_a_job_is_taken() -> None:
    """Jobs without GPUs take the whole machine."""
    lock = {"name": "machine", "user": "bob", "owner": "bob", "job": "y-1", "since_s": time.time() - 60}
    bare = fit(1, **gpus(), holders=[lock])
    line = told({"h1": bare}, HostRequirements(2, 0))[0]
    assert (line.name, line.verdict, line.found) == ("free", "fail", "bob's job y-1, since 1 min holds the machine: h1")


def test_slices_of_a_gpu_count_and_are_reported() -> None:
    """A rank can use a slice, but NCCL cannot connect two slices."""
    cut = gpu(0, mig=True, slices=["MIG-a", "MIG-b"])
    facts = {"h0": fit(0, gpus={"gpus": [cut], "fault": None})}
    assert told(facts, HostRequirements(1, 1)) == []
    assert ["cut into MIG slices" in check.found for check in told(facts, HostRequirements(2, 2))] == [True]


def test_gpus_that_differ_from_the_config_are_reported() -> None:
    """The price and the plan are for a different model."""
    assert told(with_one(2), HostRequirements(8, 8, gpu_model="a100")) == []
    assert told(with_one(2), HostRequirements(8, 8, gpu_model="nvidia-tesla-a100")) == []
    line = told(with_one(2), HostRequirements(8, 8, gpu_model="H100"))[0]
    assert "the config says H100: NVIDIA A100-SXM4-80GB: h0, h1" in line.found
    assert line.cure.endswith("--set resources.accelerators=A100:8")


def test_clock_that_differs_from_all_hosts_is_the_users() -> None:
    """In this case the fault is on the user's machine, not on the hosts."""
    facts: dict[str, Fact | str] = {f"h{number}": fit(number, ahead_s=40.0 + number / 100) for number in range(4)}
    line = told(facts)[0]
    assert (line.verdict, line.found) == ("warn", "this machine is 40.0 s behind all hosts")


def test_control_characters_of_foreign_names_are_replaced() -> None:
    """A process may have any name."""
    evil = [{**BUSY[0], "name": "a\x1b]0;x\x07\n"}]
    line = told(with_one(gpu_processes=evil))[0]
    assert "a?]0;x??" in line.found


def _call(name: str, how: str = "timeout") -> Fact:
    return {"name": name, "how": how, "text": f"10.0.0.9 port 20001 ({how})"}


def _round(failed: Callable[[str, str], bool], count: int = 8, how: str = "timeout") -> list[Check]:
    hosts = [f"h{number}" for number in range(count)]
    calls = {a: [_call(b, how) for b in hosts if a != b and failed(a, b)] for a in hosts}
    return dialled({}, calls, [20000, 27999])


def test_peers_that_reach_each_other_are_one_line() -> None:
    """One line has all hosts."""
    checks = _round(lambda a, b: False)
    assert [(check.verdict, check.found) for check in checks] == [("ok", "each is reached: all 8 hosts")]


@pytest.mark.parametrize(
    ("failed", "found"),
    [
        (lambda a, b: b == "h3", ["h3 cannot be reached by all others"]),
        (lambda a, b: a == "h3", ["h3 reaches no other host"]),
        (lambda a, b: "h3" in (a, b), ["h3 and the others do not reach each other"]),
        (lambda a, b: b in ("h3", "h5"), ["h3 cannot be reached by all others", "h5 cannot be reached by all others"]),
        (lambda a, b: (a, b) == ("h1", "h2"), ["h1 -> h2"]),
        (lambda a, b: {a, b} == {"h1", "h2"}, ["h1 <-> h2"]),
        (lambda a, b: a in ("h1", "h2") and b == "h5", ["h1, h2 -> h5"]),
        (lambda a, b: (a < "h4") != (b < "h4"), ["h0-h3 <-> h4-h7"]),
    ],
)
def test_host_that_is_the_cause_is_named_alone(failed: Callable[[str, str], bool], found: list[str]) -> None:
    """Of 56 pairs only the distinguishing ones are named."""
    checks = _round(failed)
    assert [check.found.partition(" (")[0] for check in checks] == found
    assert all(check.verdict == "fail" and "ufw allow 20000:27999/tcp" in check.cure for check in checks)


def test_one_blocked_host_of_sixty_four_is_one_line() -> None:
    """63 callers fail, and one remedy fixes the fault."""
    checks = _round(lambda a, b: b == "h40", 64)
    assert len(checks) == 1
    assert checks[0].found.startswith("h40 cannot be reached by all others (timeout: from h0, ")
    assert "ssh -t h40 " in checks[0].cure


def test_kind_of_failure_decides_the_remedy() -> None:
    """A firewall, no route, a wrong machine at the address, and a host that cannot listen have their own remedies."""
    cures = [_round(lambda a, b: a == "h0", 2, how)[0].cure for how in ("unreachable", "wrong answer")]
    assert "ssh h0 'ip route get 10.0.0.9'" in cures[0]
    assert "set `address` of h1 in ssh.hosts" in cures[1]
    line = dialled({"h1": "cannot listen on 10.0.0.9: no such address"}, {"h0": []}, [20000, 27999])[0]
    assert line.found == "cannot listen on 10.0.0.9: no such address: h1"


def test_names_fold_and_commands_expand() -> None:
    """Neighbours become ranges, by the number of the first label; a shell gets every name."""
    assert ranges(["n08", "n09", "n10", "n12", "head"]) == "head, n08-n10, n12"
    assert ranges(["gpu1.lab2", "gpu2.lab2", "gpu3.lab2"]) == "gpu1.lab2-gpu3.lab2"
    assert ranges(["10.0.0.9", "10.0.0.10", "10.0.0.11"]) == "10.0.0.9-10.0.0.11"
    assert fold({"a": "x", "b": "x"}, 2) == "x: all 2 hosts"
    assert fold({"a": "x"}, 1) == "x: a"
    names = [f"n{number:03}.lab" for number in range(7, 12)]
    typed = local([*names, "head"], "echo {}")
    done = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["head", *names]
    assert remote(["a b"], "it's") == """ssh 'a b' 'it'"'"'s'"""


def test_this_machine_can_be_checked(tmp_path: Path) -> None:
    """The checks read the facts in the survey's format."""
    facts = json.loads(json.dumps(survey.facts(Here(tmp_path, "", 0o022, "h1"), python="python3")))
    found = preflight.checks({"here": facts}, HostRequirements(1, 0, ranks_are_chosen=True))
    assert {"reachable", "python", "kernel", "workdir", "/dev/shm", "open files"} <= {check.name for check in found}
    assert all(check.cure for check in found if check.verdict != "ok")
