"""The contract of every backend, end to end: the installed command, real processes, torchrun.

To test a new backend, add its name with its config to `SETTINGS` of tests/wholejobs.py, and the fixture of its
stand-in to `STAND_INS`; no new test code is necessary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wholejobs import SETTINGS, STAND_INS, TASK, events

from cloudtrain.launcher.backend import BUILT_IN

pytestmark = pytest.mark.slow

REAL = {"local"}  # real interpreters; the other backends start the same code
LIKE_SAGEMAKER = ("azureml", "vertex")  # a container with the same agent, and the same base of the three clouds
WITHOUT_KILL = {"sagemaker", "azureml", "vertex"}  # platforms that always let a job save before the end
# The smallest time limit of a platform, or of a slow machine's start, plus one unit; else 46 s.
SHORTEST_S = {"azureml": 61, "slurm": 120, "vertex": 90}

PAUSED = """\
task: task.py
env: {OMP_NUM_THREADS: "1"}
retry: {max_attempts: 3}
training:
  global_batch_size: 16
  max_steps: 9
  optimizer: {name: adamw, lr: 1e-2}
  schedule: {name: cosine}
  log_every: 1
  seed: 3
"""

SWEEP = """\
sweep:
  space: {training.optimizer.lr: [1e-4, 1e-3, 1e-2]}
  algorithm: halving
  trials: 3
  first_rung: 3
  parallel: 2
"""

# Prints its identity and numbered lines; then runs until a stop request, and saves before it exits.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

rank, folder = int(os.environ["RANK"]), Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
names = ("JOB", "ATTEMPT", "NODE_RANK", "NUM_NODES", "OUTPUT_DIR", "DEADLINE")
print(json.dumps({"rank": rank, "world": int(os.environ["WORLD_SIZE"]), "argv": sys.argv[1:],
                  "env": os.environ.get("GREETING"), "filled": os.environ.get("FILLED"),
                  "secret": len(os.environ.get("API_TOKEN", "")),
                  "saved": sorted(p.name for p in folder.iterdir() if p.name.startswith("saved")),
                  "kept": sorted(str(p) for p in (Path("work.pt"), *Path("out").glob("*")) if p.exists()),
                  "resumes": os.path.exists(sys.argv[-1]),
                  **{name: os.environ["CLOUDTRAIN_" + name] for name in names}}), flush=True)

def save(signum, frame):
    (folder / f"saved-{rank}").write_text("x")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
if os.environ.get("GREETING") == "fail":
    if rank == 1:
        raise ValueError("boom of rank one")
    sys.exit(0)
for number in range(500 * ("lines" in sys.argv)):
    print("line", rank, number)
    sys.stdout.flush()
    time.sleep(0.004)
if "loop" in sys.argv:
    os.makedirs("out", exist_ok=True)
    Path(f"out/part-{rank}.pt").write_text("x")
    if rank == 0:
        Path("work.pt").write_text("x")
    print("looping", flush=True)
    while True:
        time.sleep(0.05)
"""


def cases(*names: str, soaked: tuple[str, ...]) -> pytest.MarkDecorator:
    """Return the parameters for the named backends; `make soak` has more, which repeat the same code."""
    more = [pytest.param(name, marks=pytest.mark.soak) for name in soaked]
    return pytest.mark.parametrize("backend", [*names, *more], indirect=True)


@pytest.fixture(params=sorted(SETTINGS))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the backend's name; its stand-in runs, and the command finds it."""
    name: str = request.param
    if name in STAND_INS:
        for key, value in request.getfixturevalue(STAND_INS[name]).environ.items():
            monkeypatch.setenv(key, value)
    return name


@pytest.fixture
def job(backend: str, project: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a project for the backend: `job("args: [loop]")`."""

    def write(more: str = "", alone: str = "distributed: {allow_alone: true}\n") -> Path:  # without a process group
        return project(SETTINGS[backend] + alone + more, script="train.py", text=SCRIPT)

    return write


def told(logs: str) -> list[dict[str, Any]]:
    """Return the data that each rank printed."""
    lines = [json.loads(line) for line in logs.splitlines()]
    return sorted((json.loads(at["text"]) for at in lines if at["text"].startswith("{")), key=lambda x: x["rank"])


def running(cli: Any) -> None:
    """Wait until both ranks are looping."""
    cli.watch("looping", "logs", "-f", "last", count=2)


def test_every_built_in_backend_is_tested() -> None:
    """Every built-in backend has an entry here; `processes` is the plug-in of examples/plugin."""
    assert set(SETTINGS) == {*BUILT_IN, "processes"}


@pytest.mark.parametrize(
    ("backend", "is_real"),
    [
        *((name, name in REAL) for name in BUILT_IN if name not in LIKE_SAGEMAKER),
        *(pytest.param(name, False, marks=pytest.mark.soak) for name in LIKE_SAGEMAKER),
        *(pytest.param(name, True, marks=pytest.mark.soak) for name in sorted(SETTINGS.keys() - REAL)),
    ],
    indirect=["backend"],
)
def test_job_is_followed_stopped_resumed_and_fails(
    cli: Any, job: Any, home: Path, is_real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job shows the ways of a job, from a submit whose launcher is killed to a rank that fails after a resume.

    - Two instances are two nodes; arguments and variables arrive unchanged with any content. `PYTHONPATH` finds the
      user's modules and hides none of ours; a secret's value is in no file, log or registry.
    - kill -9 of a following submit does not affect the job; `logs -f` then shows every line once, in order.
    - A stop lets the ranks save; a resume is the next attempt, whose ranks see all saved and kept files.
    - A failure is exit code 1; `status` shows the exception of the rank that raised it, not torchrun's; no retry.
    - All that is kept in the home folder is open to its owner only, even if the folder itself is open to all.

    With `is_real` torchrun and the ranks are real interpreters, not forks of a warm process.
    """
    hostile = "a b;touch $HOME/x `id` \"q\" 'q' é \\n $(id) --max *"
    secret = "s3cr3t-value-of-the-token"
    filled = "$CLOUDTRAIN_ATTEMPT $$CLOUDTRAIN_JOB ${CLOUDTRAIN_NUM_NODES}$$"
    cold = ", COLD_PYTHON: '1'" if is_real else ""
    variables = f"{{GREETING: {json.dumps(hostile)}, PYTHONPATH: lib, FILLED: {json.dumps(filled)}{cold}}}"
    keep = 'keep: [out/, "wor*.pt"]\nresume_args: [--resume, $CLOUDTRAIN_RESUME_PATH]\n'
    args = f"args: [{json.dumps(hostile)}, '', {json.dumps(filled)}, lines, loop]\n"
    folder = job(f"{args}env: {variables}\nsecrets: [API_TOKEN]\n{keep}")
    (folder / "lib").mkdir()
    (folder / "lib" / "mine.py").write_text("word = 'found it'")
    (folder / "train.py").write_text(f"import mine\nprint(mine.word, flush=True)\n{SCRIPT}")
    monkeypatch.setenv("API_TOKEN", secret)
    home.mkdir(exist_ok=True)
    home.chmod(0o755)

    cli.watch("line 0", "submit", "-y", count=20, cwd=folder)  # then killed
    running(cli)
    assert cli("stop", "last", "-y").code == 0
    status = cli("status", "last", "--json").json
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "user", True)
    assert (status["attempt"], status["ranks"]) == (1, 2)
    done = cli("logs", "-f", "last", "--json")
    assert done.code == cli("wait", "last").code == 9
    first = done.stdout
    texts = [json.loads(line)["text"] for line in first.splitlines()]
    ranks = told(first)
    numbers = [(r["rank"], r["world"], r["NODE_RANK"], r["NUM_NODES"]) for r in ranks]
    assert numbers == [(0, 2, "0", "2"), (1, 2, "1", "2")]
    argv = [hostile, "", "1 $CLOUDTRAIN_JOB 2$$", "lines", "loop"]
    assert [(r["argv"], r["env"], r["filled"]) for r in ranks] == [(argv, hostile, argv[2])] * 2
    assert {r["secret"] for r in ranks} == {len(secret)}
    assert texts.count("found it") == 2
    for rank in (0, 1):
        assert [int(text.split()[2]) for text in texts if text.startswith(f"line {rank}")] == list(range(500))

    assert cli("resume", "last", "-y", "--set", "env.GREETING=fail").code == 1
    status = cli("status", "last", "--json").json
    assert (status["state"], status["reason"], status["restarts"]) == ("failed", "error", 0)
    assert (status["error"]["rank"], status["error"]["type"]) == (1, "ValueError")
    assert status["error"]["lines"], "what the rank printed before it"
    assert "boom of rank one" in cli("status", "last").stdout
    again = told(cli("logs", "last", "--json").stdout)
    assert [(r["ATTEMPT"], r["saved"], r["env"]) for r in again] == [("2", ["saved-0", "saved-1"], "fail")] * 2
    assert [r["kept"] for r in again] == [["out/part-0.pt", "out/part-1.pt", "work.pt"]] * 2
    assert all(r["resumes"] and r["argv"][4:6] == ["loop", "--resume"] for r in again)
    assert told(cli("logs", "last", "--attempt", "1", "--json").stdout)[0]["ATTEMPT"] == "1"
    fetched = cli("artifacts", "last", "-o", "home", "--json", cwd=folder).json["files"]
    assert {"home/work.pt", "home/out/part-0.pt", "home/out/part-1.pt"} <= set(fetched)
    assert not [path for path in home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert secret not in first
    assert [each.name for each in home.iterdir() if each.lstat().st_mode & 0o077] == []


@cases("local", soaked=("processes", "ssh", "slurm", "azureml", "sagemaker", "vertex"))
def test_stop_now_does_not_wait_for_a_save(cli: Any, job: Any, backend: str) -> None:
    """`--now` kills if the platform can; the job is stopped by its user, without a save to resume from."""
    cli("submit", "-y", "-d", cwd=job("args: [loop]\n"))
    running(cli)
    assert cli("stop", "last", "--now", "-y").code == 0
    status = cli("status", "last", "--json").json
    assert (status["state"], status["reason"]) == ("stopped", "user")
    assert status["resumable"] is (backend in WITHOUT_KILL)


@cases("local", soaked=("processes", "ssh", "slurm", "sagemaker", "azureml", "vertex"))  # ssh has local's agent
def test_budget_holds_without_a_launcher(cli: Any, content_cli: Any, job: Any, backend: str) -> None:
    """The limit works without a launcher: SIGTERM with time to save first, and no dollar above the budget.

    The rest of the money is too little for a further run; with more money a resume continues from the save.
    """
    folder, limit_s = job("args: [loop]\n"), SHORTEST_S.get(backend, 46)
    price = ("--price-per-hour", "36")
    ample = ("--set", f"limits.max_duration={limit_s}s", "--set", "budget.limit=1000 USD")
    plan = cli("plan", "--json", *price, *ample, cwd=folder).json
    limit_usd = (plan["worst_case_micro"] - 1) / 1e6
    budget = ("--set", f"budget.limit={limit_usd:.6f}")
    content_cli.watch("looping", "submit", "-y", *price, *budget, cwd=folder)  # then killed
    assert cli("wait", "last").code == 6
    status = cli("status", "last", "--json").json
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "budget", True)
    assert 0 < status["spend_usd"] <= limit_usd
    assert status["ended_s"] - status["started_s"] < limit_s + 12
    assert content_cli("resume", "last", "-y").code == 6
    assert content_cli("resume", "last", "-y", "-d", "--budget", "+10USD").code == 0
    running(cli)
    assert told(cli("logs", "last", "--json").stdout)[0]["saved"] == ["saved-0", "saved-1"]
    cli("stop", "last", "--now", "-y")


@cases("local", soaked=("processes", "ssh", "slurm", "azureml", "sagemaker", "vertex"))
def test_missing_secret_is_reported_before_the_submit(cli: Any, job: Any) -> None:
    """A name without a value in the environment is a config error, and no job exists."""
    done = cli("submit", "-y", cwd=job("secrets: [API_TOKEN]\n"))
    assert done.code == 3
    assert "`API_TOKEN` is not set" in done.stderr
    assert cli("list", "--json").json["jobs"] == []


@cases("local", soaked=("ssh", "slurm", "sagemaker", "azureml", "vertex"))  # agent and trainer are the same everywhere
def test_paused_job_is_resumable_and_goes_on_exactly(backend: str, cli: Any, tmp_path: Path) -> None:
    """A pause is a good end: exit code 0, no retry; further pauses and the end equal a run without a pause."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "task.py").write_text(TASK.replace("time.sleep(0.01)", "pass"))
    (folder / "cloudtrain.yaml").write_text(f"name: j\n{SETTINGS[backend]}{PAUSED}")
    cli.ok("submit", "-y", "--name", "paused", "--set", "training.pause_at=2", cwd=folder)
    status = cli("status", "paused", "--json").json
    names = ("state", "reason", "resumable", "exit_code", "attempt", "step", "checkpoint_step", "error")
    assert [status[name] for name in names] == ["stopped", "paused", True, 0, 1, 2, 2, None]
    shown = cli("status", "paused").stdout
    assert "paused (step 2 of 9)" in shown
    assert "cloudtrain resume paused --set training.pause_at=null" in shown
    assert "paused (step 2 of 9)" in cli("list").stdout
    assert cli("resume", "paused", "-y", "--set", "training.pause_at=5").code == 0
    assert cli("wait", "paused").code == 0
    assert cli("status", "paused", "--json").json["step"] == 5
    assert cli("resume", "paused", "-y", "--set", "training.pause_at=null").code == 0
    status = cli("status", "paused", "--json").json
    assert (status["state"], status["step"], status["attempt"]) == ("succeeded", 9, 3)
    assert cli("submit", "-y", "--name", "whole", cwd=folder).code == 0
    assert losses(cli, "paused", 1, 2, 3) == losses(cli, "whole", 1)


# Reads a folder and a file that go along; the training's data are gone from the code folder.
ALONG = """\
task: task.py
env: {OMP_NUM_THREADS: "1"}
inputs: {train: ./data, one: labels 1}
training: {global_batch_size: 16, max_steps: 3, optimizer: {name: adamw, lr: 1e-2}, log_every: 1, seed: 3}
"""
READS = """
import os
from pathlib import Path
folder = Path(os.environ["CLOUDTRAIN_INPUT_TRAIN"])
values = [float(line) for line in (folder / "sub dir" / "ü +#%&.txt").read_text().split()]
scale = float(Path(os.environ["CLOUDTRAIN_INPUT_ONE"]).read_text())
"""


@cases("local", soaked=("ssh", "slurm", "sagemaker", "azureml", "vertex"))  # the transfers: test_local_data.py
def test_local_data_goes_along_to_equal_losses(backend: str, cli: Any, tmp_path: Path) -> None:
    """One file with `inputs: {train: ./data}` trains the same on a backend as here; a second submit sends nothing."""
    folder = tmp_path / "project"
    (folder / "data" / "sub dir").mkdir(parents=True)
    (folder / "data" / "sub dir" / "ü +#%&.txt").write_text("\n".join(str(i % 7 / 7) for i in range(256)))
    (folder / "data" / "empty").touch()
    (folder / "labels 1").write_text("0.5")
    text = TASK.replace("time.sleep(0.01)", "pass").replace("return x, x", "return x * values[i], scale * x")
    (folder / "task.py").write_text(READS + text)
    found = {}
    for name, where in (("here", "local"), ("there", backend), ("again", backend)):
        (folder / "cloudtrain.yaml").write_text(f"name: j\n{SETTINGS[where]}{ALONG}")
        done = cli.ok("submit", "-y", "--name", name, cwd=folder)
        found[name] = losses(cli, name, 1)
        is_sent = name == "there" and backend in ("sagemaker", "azureml", "vertex")
        assert ("uploading" in done.stderr) == is_sent
    assert found["here"] == found["there"] == found["again"]
    assert len(found["here"]) == 3


INITIAL = """\
task: task.py
env: {OMP_NUM_THREADS: "1"}
training: {global_batch_size: 16, max_steps: 4, optimizer: {name: adamw, lr: 1e-2}, log_every: 1, seed: 3}
checkpoint: {every_steps: 2, keep: 3}
"""


@cases(soaked=("local", "ssh", "slurm", "sagemaker", "azureml", "vertex"))  # local: test_evaluations.py
def test_child_begins_with_the_parents_weights(backend: str, cli: Any, tmp_path: Path) -> None:
    """The nodes fetch the parent's checkpoint by themselves; the first evaluation is the parent's, bit for bit."""
    folder = tmp_path / "project"
    folder.mkdir()
    text = TASK.replace("time.sleep(0.01)", "pass")
    text = text.replace("else None", "else torch.utils.data.Subset(Data(), range(9, 50))")
    (folder / "task.py").write_text(text + "def evaluate(model, batch): return {'loss': loss(model, batch)}\n")
    (folder / "cloudtrain.yaml").write_text(f"name: j\n{SETTINGS[backend]}{INITIAL}")
    cli.ok("submit", "-y", "--name", "parent", cwd=folder)
    child = cli.ok("submit", "-y", "--name", "child", "--set", "init_from=parent@last", cwd=folder)
    is_paid = backend in ("sagemaker", "azureml", "vertex")
    assert ("weights fit the model" in child.stderr) == is_paid, child.stderr
    at_end, at_start = (
        events(cli("logs", job, "--json", "--raw").stdout, "eval")[place]["metrics"]["loss"]
        for job, place in (("parent", -1), ("child", 0))
    )
    assert at_end.hex() == at_start.hex()
    parent = cli("status", "child", "--json").json["parent"]
    assert (parent["job"], parent["step"], len(parent["sha256"])) == ("parent", 4, 64)
    assert f"parent      parent step 4, sha256 {parent['sha256'][:12]}" in cli("status", "child").stdout
    tested = cli.ok("evaluate", "parent", "-y", "--split", "eval", cwd=folder)
    assert tested.stdout.startswith(f"loss {at_end:.4g}"), tested.stdout
    refused = cli("submit", "-y", "--set", "init_from=nobody", cwd=folder)
    assert (refused.code, "no job `nobody`" in refused.stderr) == (3, True)


@cases("local", soaked=("ssh", "slurm", "sagemaker", "azureml", "vertex"))  # agent and trainer are the same everywhere
def test_sweep_trains_its_trials_on_both_nodes(backend: str, cli: Any, tmp_path: Path) -> None:
    """The best trial's file, submitted as a job of its own, has the trial's loss bit for bit."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "task.py").write_text(
        TASK.replace("time.sleep(0.01)", "pass").replace('if split == "train" else None', "")
    )
    (folder / "cloudtrain.yaml").write_text(f"name: j\n{SETTINGS[backend]}{PAUSED}{SWEEP}")
    cli.ok("submit", "-y", "--name", "search", cwd=folder, timeout_s=200)
    shown = cli("status", "search", "--json").json["sweep"]
    assert shown["is_finished"]
    assert [(each["step"], each["done"], each["failed"]) for each in shown["rungs"]] == [(3, 3, 0), (9, 1, 0)]
    best = cli("best", "search", "--json", "-o", "best.yaml", cwd=folder).json
    assert (best["trial"], best["step"]) == (shown["best"][0]["trial"], 9)
    words = ["--backend", "local", "--set", "resources={}", "--name", "alone", "--force"]
    cli.ok("submit", "best.yaml", "-y", *words, cwd=folder)
    assert cli("status", "alone", "--json").json["metrics"]["loss"] == best["value"]


def losses(cli: Any, job: str, *attempts: int) -> list[tuple[int, str]]:
    """Return step and loss of each step of the attempts, in the order of the log."""
    lines = [cli("logs", job, "--json", "--raw", "--attempt", attempt).stdout for attempt in attempts]
    return [(event["step"], event["loss"].hex()) for each in lines for event in events(each, "step")]
