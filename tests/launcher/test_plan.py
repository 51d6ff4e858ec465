"""The plan: ranks, the split of a batch, time limit and worst-case bill; and the job spec for the nodes."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Capacity, Terms
from cloudtrain.launcher.config import JobConfig
from cloudtrain.launcher.errors import BudgetError, ConfigError
from cloudtrain.launcher.metering import rate
from cloudtrain.launcher.metering.rate import Rate
from cloudtrain.launcher.plan import Batch, Plan
from cloudtrain.launcher.planning import plan_text
from cloudtrain.launcher.planning import planner as plans
from cloudtrain.launcher.planning.job_spec import job_spec
from doubles.signatures import MakeProject

CPU = Capacity(0, 0.0, "your own machine")
MakePlan = Callable[..., Plan]
BATCH_64 = "training.global_batch_size=64"
TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., JobConfig]:
    """Return a function that loads a task, or a script, with the given settings, each `key=value`."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "train.py").write_text("")

    def load(*settings: str, run: str = "task: task.py") -> JobConfig:
        (tmp_path / "cloudtrain.yaml").write_text(f"name: x\n{run}\n")
        return configs.load(tmp_path / "cloudtrain.yaml", overrides=settings)

    return load


@pytest.fixture
def planned(loaded: Callable[..., JobConfig]) -> MakePlan:
    """Return a function that plans a task with the given settings."""
    return lambda *settings, capacity=CPU: plans.make(loaded(*settings), capacity)


@pytest.fixture
def of_script(loaded: Callable[..., JobConfig]) -> MakePlan:
    """Return a function that plans a script with the given settings."""
    return lambda *settings, capacity=CPU: plans.make(loaded(*settings, run="script: train.py"), capacity)


@pytest.fixture
def spec(loaded: Callable[..., JobConfig]) -> Callable[..., dict[str, Any]]:
    """Return a function that makes the nodes' spec of a task with the given settings."""
    return lambda *settings: job_spec(plans.make(loaded(*settings), CPU), loaded(*settings), "x-12345", 1).dump()


def test_plan_counts_a_rank_for_each_gpu(planned: MakePlan) -> None:
    """`auto` is the number of GPUs of the instance, or a single rank; the product of ranks is written out."""
    gpus = planned("resources.instances=2", BATCH_64, capacity=Capacity(8, 32.0, "list"))
    assert (gpus.instances, gpus.nproc_per_node, gpus.ranks) == (2, 8, 16)
    assert planned("resources.instances=2").ranks == 2
    lines = plan_text.lines(planned("resources.instances=2", "distributed.nproc_per_node=8", BATCH_64))
    assert lines[0].startswith("2 instances x 8 = 16 ranks")


@pytest.mark.parametrize(
    ("settings", "batch"),
    [
        (("training.global_batch_size=256",), Batch(256, 64, 1)),
        (("training.global_batch_size=256", "training.micro_batch_size=16"), Batch(256, 16, 4)),
        (("training.global_batch_size=4",), Batch(4, 1, 1)),
    ],
)
def test_plan_splits_the_batch(planned: MakePlan, settings: tuple[str, ...], batch: Batch) -> None:
    """global = micro x ranks x accumulation; the default micro-batch is a rank's whole share."""
    plan = planned("resources.instances=4", *settings)
    assert plan.batch == batch
    assert batch.global_size == batch.micro_size * plan.ranks * batch.accumulation


LAYOUT = ("resources.instances=2", "distributed.nproc_per_node=4", "training.global_batch_size=32")


def test_plan_divides_the_ranks_by_the_layout(planned: MakePlan) -> None:
    """Two copies of the model on eight ranks; the plan says how long the stages of the pipeline wait."""
    micro = "training.micro_batch_size=4"
    plan = planned(*LAYOUT, micro, "training.parallel.tensor=2", "training.parallel.pipeline=2")
    assert plan.batch == Batch(32, 4, 4, tensor=2, pipeline=2, bubble=0.2)
    assert Plan.load(plan.dump()) == plan
    lines = list(plan_text.lines(plan))
    assert "global batch 32 = 4 x 8 ranks / 2 that share each layer / 2 stages x 4 accumulated" in lines
    assert "pipeline: each stage waits at least 20 % of a step; 8 micro-batches or more would waste less" in lines


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        (("interleaved", "chunks=2"), "pipeline: each stage waits at least 20 % of a step; 8 micro-batches"),
        (("async",), "pipeline: weights are up to 1 micro-batches old, which costs accuracy; no bubble"),
    ],
)
def test_plan_says_what_a_schedule_costs(planned: MakePlan, schedule: tuple[str, ...], line: str) -> None:
    """Chunks shorten the wait; without a wait the weights are old."""
    name, *more = schedule
    keys = ["pipeline=2", f"schedule={name}", *more]
    plan = planned(*LAYOUT, "training.micro_batch_size=4", *(f"training.parallel.{key}" for key in keys))
    assert any(found.startswith(line) for found in plan_text.lines(plan))


@pytest.mark.parametrize(
    ("layout", "key", "why"),
    [
        (
            ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2"),
            "training.parallel.schedule",
            "a multiple of 2 micro-batches a step, and there are 1",
        ),
        (("parallel.tensor=3",), "training.parallel.tensor", "does not divide the 4 ranks of an instance"),
        (("parallel.pipeline=3",), "training.parallel.pipeline", "`parallel.pipeline` 3 does not divide the 8 ranks"),
        (("parallel.tensor=4", "micro_batch_size=32"), "training.global_batch_size", "over 2 groups of 4 ranks"),
    ],
)
def test_layout_that_does_not_fit_is_refused(planned: MakePlan, layout: tuple[str, ...], key: str, why: str) -> None:
    """The refusal names the key, and numbers that fit."""
    with pytest.raises(ConfigError) as refused:
        planned(*LAYOUT, *(f"training.{each}" for each in layout))
    (fault,) = refused.value.faults
    assert (fault.key, why in fault.message) == (key, True)
    assert fault.hint.startswith("use ")


@pytest.mark.parametrize(
    ("size", "micro", "near"), [(96, 16, "64 or 128"), (3, 1, "4"), (10, None, "8 or 16"), (48, 16, "64")]
)
def test_plan_refuses_a_batch_that_cannot_be_split(planned: MakePlan, size: int, micro: int | None, near: str) -> None:
    """The hint has the nearest sizes that can be split."""
    settings = ["resources.instances=4", f"training.global_batch_size={size}"]
    with pytest.raises(ConfigError, match=f"batch of {size} cannot be split over 4 ranks") as caught:
        planned(*settings, *([f"training.micro_batch_size={micro}"] if micro else []))
    assert near in caught.value.faults[0].hint


def test_price_in_a_plan_is_counted_or_unknown(planned: MakePlan) -> None:
    """The worst case is every instance for the longest duration; unknown prices are not 0; own GPUs count hours."""
    plan = planned("resources.instances=3", "limits.max_duration=90m", "training.global_batch_size=3",
                   capacity=Capacity(0, 2.0, "a list of today"))  # fmt: skip
    assert (plan.hourly_usd, plan.worst_case_usd) == (6.0, 9.0)
    wanted = ("resources.instances=2", "limits.max_duration=90m", BATCH_64)
    plan = planned(*wanted, capacity=Capacity(8, 0.0, "your cluster"))
    assert "no cost: your cluster, at most 24.00 GPU-hours" in plan_text.lines(plan)
    assert "no cost: your own machine" in plan_text.lines(planned(*wanted))
    plan = planned(capacity=Capacity(0, None, "nobody knows"))
    assert (plan.hourly_usd, plan.worst_case_usd) == (None, None)
    assert "price unknown: nobody knows" in plan_text.lines(plan)


WORKSPACE = "subscription: 00000000-0000-0000-0000-000000000000, resource_group: ml, workspace: r"


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ("sagemaker: {region: us-eest-1, role: 'arn:aws:iam::111122223333:role/train'}", "sagemaker.region"),
        (f"azureml: {{{WORKSPACE}, region: eastuss}}", "azureml.region"),
        ("vertex: {project: my-project, location: us-centrall1, staging_bucket: gs://b-1}", "vertex.location"),
    ],
)
def test_budget_without_a_price_names_the_unknown_region(cli: Any, project: MakeProject, block: str, key: str) -> None:
    """The region is a fault with its place, beside the missing price, which follows from the region."""
    settings = "resources: {accelerators: 'A100:8'}\nbudget: {limit: 50 USD}\n"
    done = cli("plan", cwd=project(f"backend: {block.partition(':')[0]}\n{settings}{block}\n"))
    assert (done.code, f", {key}\n" in done.stderr, "a budget needs a price" in done.stderr) == (3, True, True)
    assert "did you mean" in done.stderr


@pytest.mark.parametrize(
    ("duration", "cap_s", "deadline_s"), [("12h", 43200, 43080), ("60s", 60, 45), ("8m", 480, 360)]
)
def test_plan_leaves_time_to_save_before_the_cap(planned: MakePlan, duration: str, cap_s: int, deadline_s: int) -> None:
    """The reserve is two minutes, or a quarter of a short job."""
    plan = planned(f"limits.max_duration={duration}")
    assert (plan.cap_s, plan.deadline_s) == (cap_s, deadline_s)


LISTED = Capacity(8, 2.0, "a type, list price of 2026-08-20", Terms(tail_s=300, lead_s=300), 1.05, "2026-08-20")


def test_plan_shows_the_parts_of_its_worst_case(planned: MakePlan) -> None:
    """The parts are the price with source and age, the rate, the cap, the worst case, and the alert sums."""
    text = plan_text.lines(planned("resources.instances=2", BATCH_64, "budget.limit=21 USD", capacity=LISTED))
    most = "at most 4h 55m, as long as the budget allows, up to 5m of it for image and data"
    assert text[2] == f"{most}; after 4h 48m it saves and stops"
    assert text[3].startswith("4.00 USD an hour: 2 x 2.00 (a type, list price of 2026-08-20, ")
    assert text[3].endswith(" days old), at worst 21.00 USD")
    assert text[4] == "  includes prices up to 1.05 times the list price; 5m that are billed after the job ends"
    assert text[5] == (
        "budget 21 USD: the job leaves at about 19.54 USD at the list price;"
        " 1.46 USD is the reserve for saving, billing after the end and higher prices"
    )
    assert text[6] == "  alerts at 10.50, 16.80 USD and when the budget ends the job"


def test_plan_shows_only_reachable_thresholds(planned: MakePlan) -> None:
    """A short run holds much of the budget back; a run that a time limit ends shows the sum at that limit."""
    short = plan_text.lines(planned("budget.limit=2 USD", BATCH_64, capacity=LISTED))
    assert "leaves at about 1.68 USD at the list price; 0.32 USD is the reserve" in short[5]
    assert short[6] == "  alerts at 1, 1.60 USD and when the budget ends the job"
    timed = planned("budget.limit=50 USD", "limits.max_duration=1h", BATCH_64, capacity=LISTED)
    assert plan_text.lines(timed)[5:] == [
        "budget 50 USD: at most about 1.94 USD will be used at the list price, because the time limit comes first"
    ]
    alerted = plan_text.lines(planned("budget.limit=2 USD", "budget.on_limit=alert", BATCH_64, capacity=LISTED))
    assert alerted[5].endswith(
        "it only sends alerts (on_limit: alert), and ends no job; the worst case is 48.58 USD over it"
    )
    assert alerted[6] == "  alerts at 1, 1.60, 2 USD"


@pytest.mark.parametrize(
    ("on_limit", "said"),
    [
        ("stop", "then the job ends without a save"),
        ("alert", "it only sends alerts"),
        ("checkpoint-and-stop", "it saves"),
    ],
)
def test_plan_describes_the_action_at_the_limit(planned: MakePlan, on_limit: str, said: str) -> None:
    """The text appears before the job is sent."""
    plan = planned("budget.limit=2 USD", f"budget.on_limit={on_limit}", BATCH_64, capacity=LISTED)
    assert any(said in line for line in plan_text.lines(plan))
    assert (plan.cap_reason, plan.cap_s < 86_400) == (
        ("time_limit", False) if on_limit == "alert" else ("budget", True)
    )


def test_starts_by_the_platform_are_counted(planned: MakePlan) -> None:
    """Unless a rule spans all starts, each start may take the whole time limit."""
    plan = planned("limits.max_duration=1h", capacity=Capacity(0, 3.0, "a list", Terms(starts=4)))
    assert (plan.worst_case_micro, plan.terms.starts) == (12_000_000, 4)
    assert any("4 starts by the platform" in line for line in plan_text.lines(plan))


def test_too_small_budget_is_refused_with_a_sufficient_sum(planned: MakePlan) -> None:
    """The sum is exact: accepted unchanged, refused if a micro-dollar is missing."""

    def of(micro: int) -> Plan:
        limit = f"budget.limit={micro / 1e6:.6f}"
        return planned(limit, BATCH_64, capacity=LISTED)

    with pytest.raises(BudgetError, match=r"the budget of 0\.10 USD buys no run at 2\.00 USD an hour") as caught:
        of(100_000)
    enough = caught.value.enough_micro
    assert enough is not None
    assert of(enough).cap_s == 380
    with pytest.raises(BudgetError):
        of(enough - 1)


def test_age_of_a_price(planned: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """In days, empty for an unknown date; a vendor's undated table counts from the beginning of the year."""
    monkeypatch.setattr(rate, "today", lambda: date(2026, 11, 22))
    assert (plan_text.age("2026-08-20"), plan_text.age("2026-11-21")) == ("94 days old", "1 day old")
    assert (plan_text.age(None), plan_text.age("2025 or so")) == ("", "")
    source = Rate(2.0, "<=2025 (undated)", "a table").words
    text = plan_text.lines(planned(BATCH_64, capacity=Capacity(8, 2.0, source, Terms(), 1.2, "2025-01-01")))
    assert "(list price of 2025 or earlier, counted as " in text[3]


def test_plan_of_a_script_has_no_batch_and_promises_no_save(of_script: MakePlan) -> None:
    """Only the script knows how it uses its ranks; it gets a signal; only `on_stop: save` or `keep` saves files."""
    assert of_script().batch is None
    text = plan_text.lines(of_script("limits.max_duration=12h", "budget.limit=21 USD", capacity=LISTED))
    assert text[1].endswith(
        "the script gets SIGTERM, and only files in CLOUDTRAIN_CHECKPOINT_DIR are saved; `keep` names others"
    )
    assert "is the reserve for leaving, billing after the end" in text[4]
    assert "it saves and stops" in plan_text.lines(of_script("on_stop=save"))[1]
    assert plan_text.lines(of_script("keep=[out/]"))[1].endswith(
        "the script gets SIGTERM, and the files of `keep` are saved"
    )
    assert "only files in CLOUDTRAIN_CHECKPOINT_DIR" in plan_text.lines(of_script("keep=['!out/']"))[1]


def test_plan_of_an_example_has_at_most_twelve_lines(cli: Any) -> None:
    """A person reads all lines before the submit."""
    file = Path(__file__).parents[2] / "examples" / "digits" / "cloudtrain.yaml"
    lines = cli("plan", "-f", str(file)).stdout.splitlines()
    assert len(lines) <= 12
    assert "budget 5 USD: at most about 0.094 USD will be used, because the time limit comes first" in lines
    assert "  includes 20 s that count after the job ends" in lines  # for the user's own price, which nobody bills
    assert "ignored on local: resources.spot" in lines


def test_stored_plan_is_read_back_unchanged(planned: MakePlan) -> None:
    """Unknown keys of a newer version are ignored; scripts read the published names from --json."""
    whole = Plan(instances=2, nproc_per_node=4, ranks=8, cap_s=60, batch=Batch(16, 2, 1), alert_micro=(5, 10))
    assert Plan.load({**json.loads(json.dumps(whole.dump())), "of_a_newer_version": {}}) == whole
    assert {"instances", "ranks", "hourly_usd", "cap_s", "deadline_s", "worst_case_usd"} <= set(planned().dump())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": None}, "Plan lacks `ranks`"),
        ({"cap_s": "60"}, "Plan has '60' as `cap_s`"),
        ({"batch": {"global_size": 8}}, "Batch lacks `micro_size`"),
        ({"alert_micro": ["1"]}, "Plan has '1' as `alert_micro`"),
    ],
)
def test_stored_plan_with_a_wrong_type_is_refused(change: dict[str, Any], words: str) -> None:
    """The registry shows the row as damaged."""
    with pytest.raises(ValueError, match=words):
        Plan.load({"instances": 2, "nproc_per_node": 4, "ranks": 8, "cap_s": 60, **change})


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        (("training.global_batch_size=12", "training.micro_batch_size=2"), [1, 2, 3]),
        (("training.global_batch_size=12",), [1, 2, 3]),
        (("training.global_batch_size=9",), [1, 3]),
        (("training.global_batch_size=12", "training.micro_batch_size=4"), [1, 3]),
        (("training.global_batch_size=24", "training.micro_batch_size=2", "distributed.nproc_per_node=2"), [1, 2, 3]),
        (("training.global_batch_size=12", "training.strategy=hsdp", "training.shard_size=3"), [3]),
    ],
)
def test_node_counts_divide_the_micro_batches_evenly(
    spec: Callable[..., dict[str, Any]], settings: tuple[str, ...], counts: list[int]
) -> None:
    """A node count whose ranks cannot share the micro batches evenly is excluded."""
    assert spec("resources.instances=3", "resources.min_instances=1", *settings)["node_counts"] == counts


def test_micro_batch_stays_on_fewer_nodes(spec: Callable[..., dict[str, Any]]) -> None:
    """The default depends on the ranks and decides the split of the samples; an elastic job fixes the micro batch."""
    asked = ("resources.instances=3", "training.global_batch_size=12")
    assert spec(*asked, "resources.min_instances=1")["training"]["micro_batch_size"] == 2
    assert spec(*asked, "resources.min_instances=3")["training"]["micro_batch_size"] is None
    assert spec(*asked)["min_nodes"] == 3


@pytest.mark.parametrize(
    ("settings", "micro"),
    [
        (("resources.instances=3", "training.global_batch_size=60"), 10),
        (("resources.instances=3", "training.global_batch_size=63"), 21),
        (("resources.instances=4", BATCH_64), 16),
        (("resources.instances=4", "training.global_batch_size=48"), 4),
        (("resources.instances=4", "training.global_batch_size=48", "training.reproducible=strict"), 12),
        (("resources.instances=3", "training.global_batch_size=60", "training.micro_batch_size=20"), 20),
    ],
)
def test_default_micro_batch_suits_all_numbers_of_instances(
    planned: MakePlan, settings: tuple[str, ...], micro: int
) -> None:
    """From `min_instances` on, where the global batch can be shared at all; a chosen size stays."""
    batch = planned("resources.min_instances=2", *settings).batch
    assert batch is not None
    assert batch.micro_size == micro


@pytest.mark.parametrize(
    ("sizes", "hint"),
    [
        ({"global_batch_size": 60, "micro_batch_size": 20}, "leave `micro_batch_size` out, or write 10"),
        ({"global_batch_size": 63}, "write `global_batch_size` 60 or 66, without `micro_batch_size`"),
        ({"global_batch_size": 3}, "write `global_batch_size` 6, without `micro_batch_size`"),
        ({"global_batch_size": 60}, None),
    ],
)
@pytest.mark.parametrize("command", ["validate", "plan"])
def test_min_instances_without_effect_is_refused(
    cli: Any, tmp_path: Path, command: str, sizes: dict[str, int], hint: str | None
) -> None:
    """No fewer machines could share the batch: the job would fail with its first machine. A cloud ignores the key."""
    (tmp_path / "task.py").write_text(TASK)
    config: dict[str, Any] = {"name": "x", "task": "task.py", "backend": "ssh", "ssh": {"hosts": ["a", "b", "c"]}}
    config |= {"resources": {"instances": 3, "min_instances": 2}, "training": sizes}
    (tmp_path / "cloudtrain.yaml").write_text(json.dumps(config))
    found = cli(command, cwd=tmp_path)
    assert found.code == (3 if hint else 0), found.stderr
    assert ("`min_instances` 2 has no effect: 2 instances cannot share" in found.stderr) == bool(hint)
    assert hint is None or hint in found.stderr
    (tmp_path / "cloudtrain.yaml").write_text(json.dumps({**config, "backend": "vertex"}))
    assert "has no effect" not in cli(command, cwd=tmp_path).stderr


HOSTS = "ssh: {hosts: [a, b, c, d]}\nbackend: ssh\n"
COPIED = "; checkpoints are copied to the next machine"
NOT_THERE = "; checkpoints are not on the machines"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            "resources: {instances: 3, min_instances: 2}\ntraining: {global_batch_size: 60}\n"
            "retry: {max_attempts: 3}\n" + HOSTS,
            "if a machine dies: at most 2 retries (1 spare host, which the job takes by itself), "
            "else the job goes on with 2 of 3 (min_instances)" + COPIED,
        ),
        (
            "resources: {instances: 2}\n" + HOSTS,
            "if a machine dies: the job fails (no `retry`, no `min_instances`)" + COPIED,
        ),
        (HOSTS, "if the machine dies: the job fails (no `retry`); checkpoints are lost (no mirror)"),
        (
            "retry: {max_attempts: 2}\ncheckpoint: {mirror: /mnt/nas}\n" + HOSTS,
            "if the machine dies: at most 1 retry (3 spare hosts); checkpoints have copies in /mnt/nas",
        ),
        ("retry: {max_attempts: 2, on: [error]}\nbackend: local\n", ""),
        (
            "retry: {max_attempts: 2, on: [preempted]}\n" + HOSTS,
            "if the machine dies: the job fails (no `node_failure` in `retry.on`); checkpoints are lost (no mirror)",
        ),
        (
            "backend: slurm\nslurm: {login: c, cpus_per_node: 2}\nretry: {max_attempts: 2}\n",
            "if the machine dies: Slurm starts it again, at most 3 times, else at most 1 retry" + NOT_THERE,
        ),
    ],
)
def test_plan_says_what_follows_the_death_of_a_machine(cli: Any, tmp_path: Path, more: str, line: str) -> None:
    """One line names min_instances, retries, spare hosts and copies; the machine of a local job is the user's own."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text(f"name: x\ntask: task.py\n{more}")
    assert cli.ok("plan", "--json", cwd=tmp_path).json["machine_loss"] == line
    shown = cli.ok("plan", cwd=tmp_path, env={"COLUMNS": "300"}).stdout.splitlines()
    assert [each for each in shown if "machine dies" in each] == [line] * bool(line)


def test_time_of_a_save_is_told_to_the_minute_after_days(cli: Any, tmp_path: Path) -> None:
    """`1d 11h` would hide 58 minutes of a limit of 36 hours."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text("name: x\ntask: task.py\nlimits: {max_duration: 36h}\n")
    assert "at most 1d 12h; after 1d 11h 58m it saves and stops" in cli.ok("plan", cwd=tmp_path).stdout


def test_hang_timeout_is_longer_than_the_collectives_timeout(spec: Callable[..., dict[str, Any]]) -> None:
    """A collective's own timeout names the cause, so the collective's timeout must come first."""
    assert spec("distributed.timeout_s=60")["hang_timeout_s"] == 360
