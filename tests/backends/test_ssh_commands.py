"""The commands for the user's own machines, on real hosts: GPU use, a shell, artifacts, the doctor."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.host import Host
from doubles.terminals import Terminal
from doubles.waiting import until

pytestmark = pytest.mark.slow

# Replaces torchrun: records a rank's variables, leaves files, and runs until a file `go` appears.
TRAIN = """\
import json, os, time
from pathlib import Path

rank, out = int(os.environ["RANK"]), Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
(out / "seen.json").write_text(json.dumps({k: v for k, v in os.environ.items() if k.startswith(("C", "G", "API"))}))
(out / "same.txt").write_text("the same")
(out / "weights.bin").write_bytes(bytes([rank]) * 9_000_000)
(out / "one line\\nor two; $(touch pwned) -x").write_text("odd")
while not (out / "go").exists():
    time.sleep(0.05)
"""
SMI = """\
#!/bin/sh
case "$*" in
*--query-gpu*) for i in 0 1; do echo "$i, GPU-{host}-$i, NVIDIA Test, 81920, 550.54, Disabled"; done;;
*--query-compute-apps*) cat /opt/gpu-processes 2>/dev/null;;
esac
exit 0
"""


def config(more: str = "", hosts: str = "h0, h1", instances: int = 2, ssh: str = "") -> str:
    """Return the config of a job on the hosts."""
    return f"""\
backend: ssh
resources: {{instances: {instances}}}
env: {{GREETING: "a b 'c'"}}
{more}
ssh: {{hosts: [{hosts}], ssh_config: "${{SSH_CONFIG}}", python: {lightpython.PATH}{ssh}}}
"""


@pytest.fixture
def submit(cli: Any, project: Callable[..., Path]) -> Iterator[Callable[..., str]]:
    """Return a function that submits a job and returns its id when its ranks run; all jobs are stopped in the end."""
    jobs: list[str] = []

    def send(text: str, running: bool = True, **more: Any) -> str:
        where = project(text, script="train.py", text=TRAIN)
        done = cli.ok("submit", "-d", "-y", "--json", cwd=where, **more)
        jobs.append(done.json["job"])
        if running:
            until(lambda: cli("status", jobs[-1], "--json").json["state"] == "running", 60, 1.0)
        return jobs[-1]

    yield send
    for job in jobs:
        cli("stop", job, "--now", "-y")


def output_of(host: Host, job: str) -> Path:
    """Return a job's output folder as seen from this machine."""
    return host.home / ".cloudtrain/jobs" / job / "output"


def seen(host: Host, job: str) -> dict[str, str]:
    """Return the variables of the rank on the host."""
    path = output_of(host, job) / "weights.bin"
    until(lambda: path.exists() and path.stat().st_size == 9_000_000, 60)
    return json.loads((output_of(host, job) / "seen.json").read_text())


def add_gpus(host: Host) -> None:
    """Install a tool on the host that reports two GPUs."""
    (host.bin / "nvidia-smi").write_text(SMI.format(host=host.name))
    (host.bin / "nvidia-smi").chmod(0o755)


def test_jobs_are_removed_from_their_hosts_too(cli: Any, pair: Cluster, submit: Any, project: Any) -> None:
    """`rm` and `hosts --disk` name what stays; --everywhere removes it, and keeps a job whose host is off."""
    one, two = submit(config(instances=1)), submit(config(instances=1, hosts="h1"))
    for job, host in ((one, pair.hosts[0]), (two, pair.hosts[1])):
        seen(host, job)
        cli("stop", job, "--now", "-y")
        until(lambda job=job: cli("status", job, "--json").json["state"] not in ("running", "stopping", "pending"), 60)
    held = cli("hosts", "--disk", cwd=project(config()))
    assert held.code == 0
    assert f"h0:/home/root/.cloudtrain/jobs/{one} " in held.stdout, held.stdout
    asked = cli("rm", one)
    assert f"h0:/home/root/.cloudtrain/jobs/{one}  11 MiB" in asked.stderr, asked.stderr
    assert "stays: --everywhere removes it, too" in asked.stderr
    done = cli("rm", "-y", "--everywhere", one)
    assert (done.code, (pair.hosts[0].home / ".cloudtrain/jobs" / one).exists()) == (0, False), done.stderr
    assert (pair.hosts[0].home / ".cloudtrain/runtime").exists()
    pair.hosts[1].power_off()
    stuck = cli("rm", "-y", "--everywhere", two)
    assert (stuck.code, f"{two} stays in the list: h1:" in stuck.stderr) == (7, True), stuck.stderr
    assert two in cli("list", "--all").stdout
    pair.hosts[1].boot()
    again = cli("rm", "-y", "--everywhere", two)
    assert (again.code, list((pair.hosts[1].home / ".cloudtrain/jobs").glob("*"))) == (0, []), again.stderr


def test_places_of_the_config_are_one_jobs_and_go_with_the_job(cli: Any, pair: Cluster, project: Any) -> None:
    """A place on a host that holds another job's files is refused; `rm --everywhere` takes the job's own alone."""
    home = pair.hosts[0].home
    places = "checkpoint: {uri: ~/own}\noutputs: {model: ~/models}"
    where = project(config(places, hosts="h0", instances=1), script="train.py", text=TRAIN)
    (home / "models/one").mkdir(parents=True)
    (home / "models/one/weights.bin").write_text("of another")
    done = cli("submit", "-d", "-y", "--name", "one", cwd=where)
    refused = "h0: /home/root/models/one holds files of another job" in done.stderr
    assert (done.code, refused) == (3, True), done.stderr
    cli.ok("submit", "-d", "-y", "--name", "two", cwd=where)
    until(lambda: (output_of(pair.hosts[0], "two") / "weights.bin").exists(), 60)
    (home / "models/two/weights.bin").write_text("of two")
    cli("stop", "two", "--now", "-y")
    until(lambda: cli("status", "two", "--json").json["state"] not in ("running", "stopping", "pending"), 60)
    cli.ok("rm", "-y", "--everywhere", "two")
    assert sorted(path.name for folder in ("own", "models") for path in (home / folder).glob("*")) == ["one"]


# -- hosts -----------------------------------------------------------------------------------------------------------


def test_hosts_lists_the_use_of_gpus(cli: Any, pair: Cluster, project: Callable[..., Path], submit: Any) -> None:
    """Free GPUs, a job's GPUs, foreign processes, and a machine that is off, which gives exit code 7."""
    for host in pair.hosts:
        add_gpus(host)
    where = project(config("", instances=1), script="train.py", text=TRAIN)
    told = cli("hosts", cwd=where)
    assert (told.code, told.stdout.count("free")) == (0, 4), told.stderr
    (pair.hosts[1].folder / "opt/gpu-processes").write_text("1, GPU-h1-1, python3, 4000\n")
    job = submit(with_gpus(1, instances=1, hosts="{host: h0, user: alice}"), running=False)
    (where / "cloudtrain.yaml").write_text(f"name: loop\nscript: train.py\n{config(instances=1)}")
    told = cli("hosts", "--json", cwd=where).json["hosts"]
    uses = {(each["host"], each["unit"]): each for each in told}
    assert uses["h0", "0"] | {"user": "alice", "job": job, "use": "held"} == uses["h0", "0"]
    assert [uses[key]["use"] for key in (("h0", "1"), ("h1", "0"), ("h1", "1"))] == ["free", "free", "busy"]
    assert uses["h1", "1"]["user"] == "root"
    text = cli("hosts", cwd=where).stdout
    assert f"alice: {job}, for " in text
    assert "(not of cloudtrain)" in text
    pair.hosts[1].power_off()
    told = cli("hosts", cwd=where)
    assert told.code == 7
    assert "unreachable: h1" in told.stdout
    assert f"alice: {job}" in told.stdout


# -- exec ------------------------------------------------------------------------------------------------------------


def test_exec_has_the_ranks_environment(cli: Any, pair: Cluster, submit: Any) -> None:
    """Folder, variables, arguments with blanks and quotes, output, standard input and exit code; also after the end."""
    job = submit(config("secrets: [API_TOKEN]"), env={"API_TOKEN": "s3cret"})
    seen(pair.hosts[1], job)
    words = ["a b", "it's", '"q"', "$HOME;*", ""]
    echo = "import sys, os, json; print(json.dumps([sys.argv[1:], dict(os.environ), os.listdir()]))"
    told = cli.ok("exec", job, "--node", "1", "--", lightpython.PATH, "-c", echo, *words)
    argv, variables, files = json.loads(told.stdout)
    assert argv == words
    assert "train.py" in files
    assert (variables["CLOUDTRAIN_NODE_RANK"], variables["GREETING"]) == ("1", "a b 'c'")
    assert variables["CLOUDTRAIN_JOB"] == job
    assert "CLOUDTRAIN_LOG_DIR" not in variables
    assert cli("exec", job, "--", "sh", "-c", "cat; echo no >&2; exit 41", stdin="hello").stdout == "hello"
    code = cli("exec", job, "--", "sh", "-c", "echo no >&2; exit 41", stdin="")
    assert (code.code, code.stdout, code.stderr) == (41, "", "no\n")
    assert cli("exec", job, "--node", "2", "--", "true").code == 2
    for host in pair.hosts:
        (output_of(host, job) / "go").touch()
    assert cli("wait", job).code == 0
    told = cli("exec", job, "--node", "1", "--", lightpython.PATH, "-c", echo, *words)
    after = json.loads(told.stdout)[1]
    assert "train.py" in json.loads(told.stdout)[2]
    kept = ("CLOUDTRAIN_NODE_RANK", "CLOUDTRAIN_OUTPUT_DIR", "CLOUDTRAIN_JOB", "GREETING")
    assert [after[key] for key in kept] == [variables[key] for key in kept]
    assert "API_TOKEN" not in after


def test_ssh_gives_a_shell_on_a_terminal(cli: Any, home: Path, pair: Cluster, submit: Any) -> None:
    """A prompt, the code's folder, the terminal's size, Ctrl-C only for the remote program, and its exit code."""
    job = submit(config())
    shell = Terminal(home, [*cli.command, "ssh", job, "--node", "1"])
    shell.resize(111, 33)
    shell.press("echo rank=$CLOUDTRAIN_NODE_RANK; pwd; stty size; tty; echo that was a''ll\n")
    shell.see("that was all")
    text = shell.output.decode()
    assert "/dev/pts/" in text
    assert "rank=1" in text
    assert "/node-1/code" in text
    assert "33 111" in text
    shell.press("sleep 60\n")
    until(lambda: any("sleep 60" in line for _, line in pair.hosts[1].processes()), 20)
    shell.press("\x03")
    until(lambda: not any("sleep 60" in line for _, line in pair.hosts[1].processes()), 20)
    shell.press("exit 7\n")
    assert shell.end() == 7
    shell.close()
    assert cli("status", job, "--json").json["state"] == "running"


# -- artifacts -------------------------------------------------------------------------------------------------------


def test_artifacts_fetches_the_files_of_every_node(cli: Any, pair: Cluster, submit: Any, tmp_path: Path) -> None:
    """Equal files arrive once, different files by node, with any name; an interrupted copy is repeated."""
    job = submit(config())
    for host in pair.hosts:
        seen(host, job)
    into = tmp_path / "got"
    pair.hosts[1].cut()
    told = cli("artifacts", job, "-o", into)
    assert (told.code, (into / "same.txt").read_text()) == (7, "the same")
    assert "h1 cannot be reached: what only it has is missing" in told.stderr
    pair.hosts[1].join()
    told = cli.ok("artifacts", job, "-o", into, "--json")
    got = {str(Path(path).relative_to(into)) for path in told.json["files"]}
    odd = "one line\nor two; $(touch pwned) -x"
    assert got == {"seen.json", "same.txt", "weights.bin", odd, "node-1/seen.json", "node-1/weights.bin"}
    assert (into / "weights.bin").read_bytes() == bytes(9_000_000)
    assert (into / "node-1/weights.bin").read_bytes() == bytes([1]) * 9_000_000


def test_artifacts_writes_nothing_outside_the_folder(cli: Any, pair: Cluster, submit: Any, tmp_path: Path) -> None:
    """A link in a circle is not followed endlessly, and a local link is not written through."""
    job = submit(config(instances=1))
    seen(pair.hosts[0], job)
    (output_of(pair.hosts[0], job) / "café \x1b[31m.txt").write_text("latin")
    (output_of(pair.hosts[0], job) / "loop").symlink_to(".")
    into, elsewhere = tmp_path / "got", tmp_path / "elsewhere"
    into.mkdir()
    elsewhere.mkdir()
    (into / "weights.bin").symlink_to(elsewhere / "weights.bin")
    told = cli.ok("artifacts", job, "-o", into, "--json")
    assert not any("loop" in path for path in told.json["files"])
    assert (into / "café \x1b[31m.txt").read_text() == "latin"
    assert list(elsewhere.iterdir()) == []
    assert (into / "weights.bin").stat().st_size == 9_000_000


def test_artifacts_of_a_broken_connection_can_be_fetched_again(
    cli: Any, pair: Cluster, submit: Any, tmp_path: Path
) -> None:
    """After a break in a large file, a partial file never counts as the whole."""
    job = submit(config(instances=1, hosts="h0"))
    seen(pair.hosts[0], job)
    large = output_of(pair.hosts[0], job) / "a large one"
    large.write_bytes(b"x" * 40_000_000)
    into = tmp_path / "got"
    pair.client.slow(rate_mbit_s=40)
    fetching = cli.start("artifacts", job, "-o", into)
    until(lambda: (part := into / ".a large one.part").exists() and part.stat().st_size > 4_000_000, 60)
    pair.hosts[0].kill_sshd(with_sessions=True)
    complaint = fetching.communicate(timeout=60)[1]
    assert (fetching.returncode, list(into.glob("*large*"))) == (7, []), complaint
    pair.hosts[0].start_sshd()
    pair.client.join()
    assert cli("artifacts", job, "-o", into).code == 0
    assert (into / "a large one").read_bytes() == large.read_bytes()


# -- GPUs ------------------------------------------------------------------------------------------------------------


def with_gpus(count: int, more: str = "", **options: Any) -> str:
    """Return the config of a job that takes the given number of GPUs on each host."""
    text = config(more, **options)
    return text.replace("resources: {", f"resources: {{accelerators: 'Test:{count}', ")


def test_job_takes_gpus_by_their_uuids(cli: Any, pair: Cluster, submit: Any, project: Any) -> None:
    """The ranks see the free GPUs; a second user's submit names the holder, with exit code 5."""
    for host in pair.hosts:
        add_gpus(host)
    job = submit(with_gpus(1, instances=2))
    assert seen(pair.hosts[1], job)["CUDA_VISIBLE_DEVICES"] == "GPU-h1-0"
    alice = with_gpus(2, instances=1, hosts="h0", ssh=", user: alice")
    told = cli("submit", "-d", "-y", cwd=project(alice, script="train.py", text=TRAIN))
    assert told.code == 5, told.stderr
    assert f"GPU 0: root's job {job}, since " in told.stderr
    second = submit(with_gpus(1, instances=1, hosts="h0", ssh=", user: alice"))
    path = pair.hosts[0].home_of("alice") / ".cloudtrain/jobs" / second / "output/seen.json"
    until(lambda: path.exists() and path.read_text())
    assert json.loads(path.read_text())["CUDA_VISIBLE_DEVICES"] == "GPU-h0-1"


def test_foreign_processes_refuse_a_job_without_allow_busy(cli: Any, pair: Cluster, submit: Any, project: Any) -> None:
    """A GPU with a foreign process counts as taken; `allow_busy` overrides the rule."""
    add_gpus(pair.hosts[0])
    (pair.hosts[0].folder / "opt/gpu-processes").write_text("1, GPU-h0-0, python3, 4000\n")
    told = cli("submit", "-d", "-y", cwd=project(with_gpus(2, instances=1, hosts="h0"), script="train.py", text=TRAIN))
    assert told.code == 5, told.stderr
    assert "allow_busy" in told.stderr
    job = submit(with_gpus(2, instances=1, hosts="h0", ssh=", allow_busy: true"))
    assert seen(pair.hosts[0], job)["CUDA_VISIBLE_DEVICES"] == "GPU-h0-1,GPU-h0-0"  # the free GPU first


def test_host_with_unrequested_gpus_is_refused(cli: Any, pair: Cluster, project: Any) -> None:
    """The message gives the config's line."""
    add_gpus(pair.hosts[0])
    told = cli("submit", "-d", "-y", cwd=project(config(instances=1, hosts="h0"), script="train.py", text=TRAIN))
    assert told.code == 3, told.stderr
    assert "accelerators" in told.stderr


# -- spare hosts, money ----------------------------------------------------------------------------------------------


def test_unfit_host_is_left_out_if_a_spare_exists(
    cli: Any, cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, project: Any
) -> None:
    """Of three hosts for two instances the first lacks the interpreter; the rest run the job, with a message."""
    three = cluster(3)
    three.apply(monkeypatch)
    for host in three.hosts[1:]:
        lightpython.install(host)
    where = project(config(hosts="h0, h1, h2"), script="train.py", text=TRAIN)
    told = cli.ok("submit", "-d", "-y", "--json", cwd=where)
    left = next(words for words in told.stderr.splitlines() if words.startswith("h0 is left out: "))
    assert left.endswith("(check `reachable`)")
    job = told.json["job"]
    hosts = {each["host"]: each["use"] for each in cli("hosts", "--json", cwd=where).json["hosts"]}
    assert (hosts["h1"], hosts["h2"]) == ("held", "held")
    assert cli("stop", job, "--now", "-y").code in (0, 9)


def test_budget_is_metered_by_the_time_that_hosts_were_held(cli: Any, pair: Cluster, submit: Any) -> None:
    """Two hosts at a price: the price gives the limit, and the spend counts from the moment the hosts were taken."""
    begin_s = time.time()
    job = submit(config("budget: {limit: 200 USD}", ssh=', price_per_hour: "3600 USD"'))
    cap = cli("status", job, "--json").json
    for host in pair.hosts:
        seen(host, job)
        (output_of(host, job) / "go").touch()
    cli("wait", job)
    held_s = time.time() - begin_s
    spent = cli("status", job, "--json").json["spend_usd"]
    assert 0 < spent <= 2 * held_s
    assert cap["spend_usd"] <= spent


@pytest.mark.soak  # agents alone: tests/entrypoints/test_membership.py
def test_nodes_that_wait_for_each_other_end_at_the_deadline(cli: Any, pair: Cluster, submit: Any) -> None:
    """No route leads from node 1 to node 0: both end before the join timeout, within the budget."""
    first, second = pair.hosts
    # The preflight passes, so the route is removed when node 0's agent exists.
    agent = ".cloudtrain/jobs/*/attempt-1/node-0/state.json"
    cutter = threading.Thread(
        target=lambda: (
            until(lambda: any(first.home.glob(agent)), 60),
            second.run(["ip", "route", "add", "blackhole", f"{first.address}/32"]),
        )
    )
    cutter.start()
    job = submit(
        config("budget: {limit: 200 USD}\nlimits: {max_duration: 20s}", ssh=', price_per_hour: "3600 USD"'),
        running=False,
    )
    cutter.join()
    waiting = cli("status", job, "--json").json
    assert (waiting["state"], waiting["spend_usd"] > 0) == ("pending", True)
    assert cli("wait", job).code == 1
    ended = cli("status", job, "--json").json
    assert (ended["state"], ended["reason"], ended["error"]) == ("stopped", "time_limit", None)
    assert waiting["spend_usd"] < ended["spend_usd"] <= 2 * 20
    exits = [host.home / f".cloudtrain/jobs/{job}/attempt-1/node-{n}/exit.json" for n, host in enumerate(pair.hosts)]
    until(lambda: all(map(Path.exists, exits)), 60)
    told = [json.loads(path.read_text()) for path in exits]
    assert [(each["state"], each["reason"]) for each in told] == [("stopped", "time_limit")] * 2


# -- doctor, dry run -------------------------------------------------------------------------------------------------


def test_doctor_gives_every_remedy(cli: Any, pair: Cluster, project: Any) -> None:
    """Equal lines appear once; each failure has a command; --json has the same content."""
    where = project(config(), script="train.py", text=TRAIN)
    told = cli.ok("doctor", "ssh", "-f", "cloudtrain.yaml", cwd=where)
    lines = told.stdout.splitlines()
    assert len(lines) == len(set(lines))
    assert any(("torch: " in line and "both" in line) or "all 2" in line for line in lines), told.stdout
    pair.hosts[1].kill_sshd(with_sessions=True)
    told = cli("doctor", "ssh", "--json", cwd=where)
    failed = [check for check in told.json["ssh"] if check["verdict"] == "fail"]
    assert told.code == 1
    assert any("h1" in check["found"] and "sshd" in check["cure"] for check in failed), failed
