"""Real runs of the shared trainer: two ranks over gloo on loopback, interrupted in the ways of the clouds."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainerruns import TASK, Run, joined, parameters, run, whole_run

from cloudtrain.entrypoints.trainer import evaluate
from doubles import damage
from doubles.aws.handle import Aws

# Replaces TASK's model: weights in bf16, and computation in bf16.
BF16 = """
class Low(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(16).bfloat16()
    def forward(self, x):
        return self.net(x.bfloat16())

def model(params):
    return Low()
"""


def resume_from(other: Run, folder: Path, step: int) -> None:
    """Copy the checkpoint of a step from the other run to the new run's folder."""
    name = f"checkpoints/step-{step:08d}"
    shutil.copytree(other.folder / name, folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_killed_run_resumes_bit_for_bit(strategy: str, whole: Callable[[str], Run], tmp_path: Path) -> None:
    """SIGKILL in step 13, inside an epoch: from checkpoint 10 on, all numbers equal the uninterrupted run's.

    `resume: never` holds for the first start: torchrun's own restart resumes from the job's checkpoint.
    """
    never = {"resume": "never"}
    killed = run(tmp_path, do="kill:1:26", strategy=strategy, checkpoint=never)
    assert killed.code != 0
    again = run(tmp_path, strategy=strategy, checkpoint=never)
    assert again.only("restart")["step"] == 10
    assert again.only("restart")["changed"] == []
    for event, name in [("step", "loss"), ("step", "grad_norm"), ("step", "lr"), ("eval", "loss")]:
        expected = whole(strategy).values(event, name)
        joined = killed.values(event, name) | again.values(event, name)
        assert {step: value.hex() for step, value in joined.items()} == {s: v.hex() for s, v in expected.items()}


@pytest.mark.slow
def test_lines_of_a_run_parse(whole: Callable[[str], Run]) -> None:
    """Every line of standard output is an event with text before the event, and the events are complete."""
    done = whole("ddp")
    assert len(done.events) == len(done.output.splitlines())
    rest = [found["e"] for found in done.events if found["e"] not in ("step", "eval", "checkpoint")]
    assert rest == ["start", "done"]
    assert sorted(done.values("checkpoint", "bytes")) == [5, 10, 15, 16]
    assert sorted(done.values("eval", "loss")) == [6, 12, 16]
    assert done.only("done")["metrics"] == {"loss": done.values("eval", "loss")[16]}
    assert done.outcome() == {
        "outcome": "done",
        "reason": None,
        "step": 16,
        "checkpoint": str(done.folder / "checkpoints/step-00000016"),
        "metrics": done.only("done")["metrics"],
    }


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_on_all(whole: Callable[[str], Run], tmp_path: Path) -> None:
    """SIGTERM to rank 1's process group with its data loaders: both ranks save after the step and exit 75."""
    stopped = run(tmp_path, do="term:1:13", num_workers=1)
    assert stopped.outcome()["outcome"] == "saved"
    assert stopped.only("preempt")["reason"] == "sigterm"
    assert stopped.only("preempt")["step"] == stopped.outcome()["step"]
    assert stopped.outcome()["step"] in (6, 7)  # inside step 7, or after step 7
    # torchrun fails instead of reporting if the second rank ends just before its closing signal
    assert "exitcode  : 75" in stopped.errors or "ProcessLookupError" in stopped.errors
    assert "exitcode  : -" not in stopped.errors  # no rank was killed
    assert stopped.values("step", "loss").items() <= whole("ddp").values("step", "loss").items()


@pytest.mark.slow
def test_deadline_saves_and_the_resumed_end_is_the_same(whole: Callable[[str], Run], tmp_path: Path) -> None:
    """A deadline stops the run inside a step with a save; the resumed run equals a run without a deadline."""
    stopped = run(tmp_path, ranks=1, cold=True, env={"CLOUDTRAIN_DEADLINE": "1"})
    assert (stopped.code, stopped.only("preempt")["reason"], stopped.outcome()["step"]) == (75, "deadline", 0)
    again = whole_run(tmp_path, ranks=1)
    losses = stopped.values("step", "loss") | again.values("step", "loss")
    assert losses == pytest.approx(whole("ddp").values("step", "loss"), abs=1e-5)


@pytest.mark.slow
def test_changed_model_is_a_task_error(whole: Callable[[str], Run], tmp_path: Path) -> None:
    """The error names the parameter whose shape differs, before training."""
    resume_from(whole("ddp"), tmp_path, 10)
    wrong = run(tmp_path, ranks=1, params={"width": 8})
    assert wrong.code == 1
    assert "the checkpoint belongs to a different model: the shape differs of first.weight (16, 6)" in wrong.errors
    assert wrong.values("step", "loss") == {}


@pytest.mark.slow
def test_nan_stops_all_ranks_and_is_never_saved(tmp_path: Path) -> None:
    """A nan loss on one rank ends the run with step and learning rate in the error; the last checkpoint is older."""
    failed = run(tmp_path, do="nan:1:13")
    assert failed.code == 1
    assert failed.errors.count("NonFiniteError: loss is nan at step 7, learning rate") == 2
    assert failed.only("error")["step"] == 7
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


@pytest.mark.slow
def test_full_disk_ends_all_ranks_and_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    """A save that does not fit fails on every rank with a message, and the older checkpoint stays intact."""
    failed = run(tmp_path, do="full:0:12")
    assert failed.code == 1
    assert failed.errors.count("CheckpointError: cannot save step 10") == 2
    assert "the checkpoint of step 5 is intact" in failed.errors
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of one rank that has saved at steps 5 and 10."""
    return run(tmp_path_factory.mktemp("short"), ranks=1, max_steps=10, eval_every=None)


@pytest.mark.slow
def test_contradiction_falls_back_to_the_older(tmp_path: Path) -> None:
    """Every contradictory checkpoint is named and set aside; training resumes from the newest that is whole."""
    settings: dict[str, Any] = {"ranks": 1, "max_steps": 50, "eval_every": None}
    saves = {"every_steps": 1, "keep": 50}
    first = run(tmp_path, checkpoint=saves, **settings)
    checkpoints = tmp_path / "checkpoints"
    damaged = {f"step-{step:08d}": form for step, form in enumerate(reversed(damage.FORMS), 51 - len(damage.FORMS))}
    for path in [*checkpoints.glob("step-*")]:
        if damage.OLDER < path.name < min(damaged):
            shutil.rmtree(path)
    for name, form in damaged.items():
        damage.FORMS[form](checkpoints / name)
    again = run(tmp_path, checkpoint=saves, **settings)
    assert (again.code, again.only("restart")["step"]) == (0, 5), again.errors
    assert "Traceback" not in again.output + again.errors
    for name, form in damaged.items():
        assert f"checkpoint {name} is damaged (" in again.output, form
        assert len([*checkpoints.glob(f"{name}.damaged-*")]) == 1 or "link" in form, form
    assert again.values("step", "loss") == {step: first.values("step", "loss")[step] for step in range(6, 51)}


def cut_off(checkpoint: Path) -> None:
    """Leave the last 100 bytes of rank 1's shard out."""
    shard = checkpoint / "shard-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.slow
@pytest.mark.parametrize("form", [damage.FORMS["shard beyond its end"], damage.FORMS["file"], cut_off])
def test_two_ranks_fall_back_together(form: Callable[[Path], Any], whole: Callable[[str], Run], tmp_path: Path) -> None:
    """Both ranks fall back, no matter which rank has read the damaged file; a line says so, and the end is the same."""
    for step in (5, 10):
        resume_from(whole("ddp"), tmp_path, step)
    form(tmp_path / "checkpoints/step-00000010")
    again = run(tmp_path)
    assert (again.code, again.only("restart")["step"]) == (0, 5), again.errors
    assert "step-00000010 is damaged (" in again.output
    expected = whole("ddp").values("step", "loss")
    assert again.values("step", "loss") == {step: expected[step] for step in range(6, 17)}


@pytest.mark.slow
def test_job_never_starts_over_without_permission(short: Run, tmp_path: Path) -> None:
    """If all checkpoints are damaged, every start ends with their names and faults, until `start-over` is set."""
    for step in (5, 10):
        resume_from(short, tmp_path, step)
    damage.swap(tmp_path / "checkpoints/step-00000010")
    for _ in range(2):
        failed = run(tmp_path, ranks=1, max_steps=10)
        assert (failed.code, failed.values("step", "loss")) == (1, {})
        assert "AllDamagedError: all checkpoints in" in failed.errors
        assert "step-00000010: trainer.json is of step 5, which contradicts the folder's name" in failed.errors
        assert "Traceback" not in failed.errors
    allowed = run(tmp_path, ranks=1, max_steps=10, checkpoint={"all_damaged": "start-over"})
    assert (allowed.code, sorted(allowed.values("step", "loss"))) == (0, list(range(1, 11))), allowed.errors
    assert "is damaged (trainer.json is of step 5" in allowed.output


@pytest.mark.slow
def test_epochs_sgd_and_bf16_resume_under_fsdp(tmp_path: Path) -> None:
    """Two epochs of 37 in steps of 8 are 10 steps, stopped in between; sgd has no state to save, and bf16 trains."""
    settings = {"max_steps": None, "epochs": 2, "precision": "bf16", "strategy": "fsdp", "optimizer": {"name": "sgd"}}
    stopped = run(tmp_path, do="term:1:9", **settings)
    done = whole_run(tmp_path, **settings)
    assert sorted(stopped.values("step", "loss")) + sorted(done.values("step", "loss")) == list(range(1, 11))
    assert (tmp_path / "output/model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"precision": "fp16", "num_workers": 2, "ema_decay": 0.9}, marks=pytest.mark.soak),
        pytest.param({"precision": "bf16", "optimizer": {"name": "lamb", "lr": 0.01}}, marks=pytest.mark.soak),
        {"precision": "fp16", "strategy": "fsdp", "optimizer": {"name": "radam", "lr": 0.01}},
        # test_strategies.py tests the exactness of powersgd's state, too.
        pytest.param(
            {"compression": "powersgd", "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}},
            marks=pytest.mark.soak,
        ),
        {
            "compression": "threshold",
            "precision": "fp16",
            "params": {"width": 40},  # the layers have 1600 weights, and tensors below 1000 are dense
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        },
    ],
    ids=["fp16-ema-workers", "bf16-lamb", "fp16-fsdp-radam", "powersgd-momentum", "threshold-fp16-momentum"],
)
def test_stopped_run_resumes_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Scaler, average and error feedback have their own state: after two stops the end is the same."""
    undisturbed = whole_run(tmp_path / "whole", **settings)
    parts = [run(tmp_path / "parts", do=do, **settings) for do in ("term:1:9", "term:0:11", "")]
    assert [part.only("preempt")["reason"] for part in parts[:2]] == ["sigterm", "sigterm"]
    assert joined(*parts) == undisturbed.values("step", "loss")
    assert parameters(parts[-1]) == parameters(undisturbed)


@pytest.mark.slow
@pytest.mark.soak  # the same sums: test_strict_has_the_same_bits_on_any_number_of_ranks of test_strategies.py
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_strict_is_the_same_on_any_number_of_ranks(tmp_path: Path, strategy: str) -> None:
    """4 -> 2 -> 1 -> 4 ranks, stopped inside epochs: losses, evaluations and all tensors are equal bit for bit."""
    settings = {"strategy": strategy, "reproducible": "strict"}
    undisturbed = whole_run(tmp_path / "whole", ranks=4, **settings)
    turns = [(4, "term:1:4"), (2, "term:1:8"), (1, "term:0:13"), (4, "")]
    parts = [run(tmp_path / "parts", ranks=ranks, do=do, **settings) for ranks, do in turns]
    assert joined(*parts) == undisturbed.values("step", "loss")
    evaluated = {step: loss for part in parts for step, loss in part.values("eval", "loss").items()}
    assert evaluated == undisturbed.values("eval", "loss")
    assert parameters(parts[-1]) == parameters(undisturbed)
    assert all(part.only("restart")["changed"] == [] for part in parts[1:])


@pytest.mark.slow
def test_kill_during_a_save_in_the_background(whole: Callable[[str], Run], tmp_path: Path) -> None:
    """A kill during background saves loses no durable checkpoint; the losses are equal bit for bit."""
    behind = {"blocking": False, "every_steps": 2}
    killed = run(tmp_path, do="kill:0:21", checkpoint=behind)
    durable = max(killed.values("checkpoint", "bytes"), default=0)
    again = whole_run(tmp_path, checkpoint=behind)
    assert max((e["step"] for e in again.events if e["e"] == "restart"), default=0) >= durable
    assert joined(killed, again) == whole("ddp").values("step", "loss")


@pytest.mark.slow
def test_stop_inside_an_accumulation_leaves_the_step_undone(tmp_path: Path) -> None:
    """The ranks agree after each micro-batch, as a step may take minutes; changes of buffers are undone."""
    slow = TASK.replace("    call = next(calls)\n", "    call = next(calls); time.sleep(0.3)\n")
    # The second of step 4's four micro-batches.
    stopped = run(tmp_path / "parts", ranks=1, do="term:0:14", text=slow, max_steps=4)
    assert stopped.only("preempt")["step"] == 3
    again = run(tmp_path / "parts", ranks=1, max_steps=4)
    undisturbed = run(tmp_path / "whole", ranks=1, max_steps=4)
    assert joined(stopped, again) == undisturbed.values("step", "loss")
    assert parameters(again) == parameters(undisturbed)


@pytest.mark.slow
def test_nan_step_is_skipped_on_request(tmp_path: Path) -> None:
    """After a nan loss on one rank, neither rank takes the step, and training continues."""
    done = whole_run(tmp_path, do="nan:1:13", on_nan="skip")
    assert [e["step"] for e in done.events if e.get("skipped")] == [7]
    assert sorted(done.values("step", "loss")) == [step for step in range(1, 17) if step != 7]


@pytest.mark.slow
def test_residuals_of_a_left_out_step_and_of_other_ranks_are_dropped(tmp_path: Path) -> None:
    """With top-k a nan step changes no residual; on fewer ranks the residuals are dropped, and the event says so."""
    settings = {"compression": "topk", "params": {"width": 40}, "on_nan": "skip"}
    done = run(tmp_path, do="nan:1:13", **settings)
    assert [e["step"] for e in done.events if e.get("skipped")] == [7]
    assert all(math.isfinite(norm) for norm in done.values("step", "residual_norm").values())
    assert 0 < min(done.values("step", "bytes_sent").values()) < 4000
    again = run(tmp_path, ranks=1, **{**settings, "max_steps": 18})
    assert any("residuals of compression, is dropped" in text for text in again.only("restart")["changed"])
    assert "one rank sends nothing" in again.output
    assert again.outcome()["step"] == 18


@pytest.mark.slow
def test_best_checkpoint_is_kept_and_patience_stops(tmp_path: Path) -> None:
    """With a ruinous rate, training stops after two evaluations without progress, and the best is kept.

    After the early stop a new start trains no further step.
    """
    settings = {"eval_every": 2, "monitor": {"metric": "loss", "patience": 2}, "optimizer": {"name": "sgd", "lr": 9.0}}
    done = run(tmp_path, ranks=1, max_steps=60, checkpoint={"keep": 1, "keep_best": True, "every_steps": 1}, **settings)
    assert (done.code, done.outcome()["reason"]) == (0, "early stop")
    found = done.values("eval", "loss")
    best = min(found, key=lambda step: found[step])
    assert (done.only("done")["best_step"], done.only("done")["step"]) == (best, max(found))
    kept = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-????????"))
    assert kept == sorted({best, max(found)})
    again = run(tmp_path, ranks=1, max_steps=60, **settings)
    assert (again.code, again.only("done")["step"]) == (0, max(found))
    assert again.values("step", "loss") == {}


@pytest.mark.slow
def test_metrics_files_and_logger(tmp_path: Path) -> None:
    """Event files, the task's own logger, tokens a second, MFU, and the averaged weights in safetensors."""
    text = TASK + "\ndef on_event(event, fields):\n    open('own.log', 'a').write(event + ' ')\n"
    text += "    if event == 'done': raise RuntimeError('the service is down')\n"
    settings = {"tokens_per_sample": 6, "peak_tflops": 0.01, "ema_decay": 0.5, "tensorboard": True}
    done = whole_run(tmp_path, ranks=1, text=text, checkpoint={"export": "safetensors"}, **settings)
    last = [found for found in done.events if found["e"] == "step"][-1]
    assert last["tokens_per_s"] == pytest.approx(6 * last["samples_per_s"], rel=0.01)
    assert last["tokens"] == 6 * last["samples"] > 0
    assert 0 < last["mfu"] < 1
    assert {"data_s", "compute_s", "checkpoint_s", "memory_bytes"} <= set(last)
    assert (tmp_path / "own.log").read_text().split() == [found["e"] for found in done.events]
    assert "on_event failed and is not called any more: RuntimeError: the service is down" in done.output
    assert len(list((tmp_path / "output/tensorboard").iterdir())) == 1
    assert (tmp_path / "output/model.safetensors").stat().st_size > 723 * 4


@pytest.mark.slow
def test_nan_in_the_data_spoils_no_running_statistics(tmp_path: Path) -> None:
    """A nan sample: its step is skipped with batch norm's statistics, so saves continue."""
    spoilt = "        if self.count == 37 and index == 11: x = x * math.nan\n        return x +"
    text = TASK.replace("        return x +", spoilt)
    done = whole_run(tmp_path, ranks=1, text=text, on_nan="skip", micro_batch_size=8)
    assert len([e for e in done.events if e.get("skipped")]) >= 2
    assert sorted(done.values("checkpoint", "bytes")) == [5, 10, 15, 16]


@pytest.mark.slow
def test_modules_in_eval_mode_stay_so_and_masks_may_be_infinite(tmp_path: Path) -> None:
    """A frozen module keeps its mode over evaluations, so a resume is exact; a mask of -inf is no broken weight."""
    frozen = "    net = Net(params.get('width', 16)); net.layers[0].eval()\n"
    frozen += "    net.register_buffer('mask', torch.full((2, 2), -math.inf).triu(1)); return net\n"
    settings = {"ranks": 1, "text": TASK.replace('    return Net(params.get("width", 16))\n', frozen), "eval_every": 3}
    whole = whole_run(tmp_path / "whole", **settings)
    parts = [run(tmp_path / "parts", do=do, **settings) for do in ("term:0:29", "")]
    assert joined(*parts) == whole.values("step", "loss")


@pytest.mark.slow
def test_evaluation_that_raises_loses_no_training(tmp_path: Path) -> None:
    """By default the only evaluation follows the last step, and the step is saved before."""
    text = TASK.replace("def evaluate(model, batch):\n", "def evaluate(model, batch):\n    raise KeyError('oops')\n")
    failed = run(tmp_path, ranks=1, text=text, eval_every=None, checkpoint={"every_steps": None, "blocking": False})
    assert failed.code == 1
    again = run(tmp_path, ranks=1, eval_every=None)
    assert (again.only("restart")["step"], again.only("done")["step"]) == (16, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (", reduction='none')", "must return one number, the mean; it returned 2: call .mean() on it"),
        (").detach()", "a tensor without a gradient; was it detached"),
        (").item()", "must return a tensor; it returned "),
    ],
)
def test_invalid_loss_is_named(given: str, said: str, tmp_path: Path) -> None:
    """The message names the user's mistake and the fix."""
    right = "    return F.cross_entropy(model(batch[0]), batch[1])\n\ndef evaluate"
    failed = run(tmp_path, ranks=1, text=TASK.replace(right, right.replace("batch[1])", f"batch[1]{given}")))
    assert (failed.code, said in failed.errors) == (1, True), failed.errors


@pytest.mark.slow
def test_optimizer_state_keeps_its_type(tmp_path: Path) -> None:
    """A user's optimizer with fp32 averages of bf16 weights resumes bit for bit."""
    own = """
class Slow(torch.optim.Optimizer):
    def __init__(self, params): super().__init__(params, {"lr": 0.01})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
            mean.mul_(0.9).add_(p.grad.float())
            p.sub_(0.01 * mean)

def optimizer(model, params):
    return Slow(model.parameters())
"""
    text = TASK.replace("), batch[1])", ").float(), batch[1])") + own
    text = text.replace('def model(params):\n    return Net(params.get("width", 16))', BF16)
    whole = whole_run(tmp_path / "whole", ranks=1, text=text, eval_every=None, clip_norm=None)
    resume_from(whole, tmp_path / "again", 10)
    again = run(tmp_path / "again", ranks=1, text=text, eval_every=None, clip_norm=None)
    expected = {step: loss for step, loss in whole.values("step", "loss").items() if step > 10}
    assert again.values("step", "loss") == expected


@pytest.mark.slow
def test_optimizer_state_follows_a_changed_weight_type(whole: Callable[[str], Run], tmp_path: Path) -> None:
    """If the model turns to bf16 after the save, AdamW's state follows, and training continues."""
    resume_from(whole("ddp"), tmp_path, 10)
    text = TASK.replace("16))", "16)).bfloat16()")
    text = text.replace("self.first(x)", "self.first(x.bfloat16())").replace("), batch[1])", ").float(), batch[1])")
    again = run(tmp_path, ranks=1, text=text)
    assert (again.code, again.only("done")["step"]) == (0, 16), again.errors


@pytest.mark.slow
def test_checkpoints_of_a_different_job_are_refused(short: Run, tmp_path: Path) -> None:
    """Two jobs with one folder: the error names the owner, and the setting that allows the resume."""
    resume_from(short, tmp_path, 5)
    other = run(tmp_path, ranks=1, job="other")
    assert other.code == 1
    assert "are of the job test, this one is other; set checkpoint.resume to" in other.errors
    assert "take only the weights by `init_from: {job: test}` (on every backend)" in other.errors
    path = str(tmp_path / "checkpoints/step-00000005")
    assert run(tmp_path, ranks=1, job="other", checkpoint={"resume": path}).only("restart")["step"] == 5


@pytest.mark.slow
def test_mirror_is_used_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    """If every local checkpoint is broken, the mirror's is fetched; the mirror keeps as many as the folder."""
    mirror = {"mirror": str(tmp_path / "second"), "keep": 2}
    stopped = run(tmp_path, ranks=1, do="term:0:50", checkpoint=mirror)
    step = stopped.only("preempt")["step"]
    assert len(list((tmp_path / "second/test").glob("step-*/manifest.json"))) == 2
    for shard in (tmp_path / "checkpoints").glob("step-*/shard-*"):
        shard.write_bytes(shard.read_bytes()[:-1])
    again = run(tmp_path, ranks=1, checkpoint=mirror)
    assert again.only("restart")["step"] == step
    shutil.rmtree(tmp_path / "second")  # as if the last start had been killed before the upload
    assert run(tmp_path, ranks=1, checkpoint=mirror).code == 0
    assert (tmp_path / "second/test/step-00000016/manifest.json").exists()
    assert run(tmp_path / "other", ranks=1, job="other", checkpoint=mirror).only("start")["step"] == 0
    assert (tmp_path / "second/other/step-00000016/manifest.json").exists()


@pytest.mark.slow
def test_unreadable_mirror_and_an_older_checkpoint_end_the_start(s3_store: Aws, tmp_path: Path) -> None:
    """If an earlier attempt has saved a later step than the folder has; without such a save the start goes on."""
    checkpoint = {"mirror": "s3://cloudtrain-tests/a"}
    run(tmp_path, ranks=1, max_steps=10, checkpoint=checkpoint)
    s3_store.fault("*", "error", status=403, code="AccessDenied")
    failed = run(tmp_path, ranks=1, checkpoint={**checkpoint, "saved_step": 15})
    assert failed.code != 0
    assert "step 15 is not here, and the mirror cannot be read" in failed.errors
    assert "resume test --from-older` goes on from step 10" in failed.errors
    assert failed.values("step", "loss") == {}
    assert run(tmp_path, ranks=1, checkpoint={**checkpoint, "saved_step": 10}).only("restart")["step"] == 10


@pytest.mark.slow
def test_damaged_folder_waits_for_the_bucket(s3_store: Aws, tmp_path: Path) -> None:
    """If all local checkpoints are damaged and the bucket is unreachable, the start fails; later its copy is used."""
    settings: dict[str, Any] = {"ranks": 1, "max_steps": 10, "checkpoint": {"mirror": "s3://cloudtrain-tests/a"}}
    run(tmp_path, **settings)
    for shard in (tmp_path / "checkpoints").glob("step-*/shard-*"):
        shard.write_bytes(shard.read_bytes()[:-1])
    s3_store.fault("*", "error", status=403, code="AccessDenied")
    failed = run(tmp_path, **settings)
    assert failed.code != 0
    assert "are damaged, and the mirror cannot be read: no access to s3://" in failed.errors
    assert failed.values("step", "loss") == {}
    s3_store.clear_faults()
    assert run(tmp_path, **settings).only("restart")["step"] == 10


@pytest.mark.slow
def test_changes_are_reported_before_training(short: Run, tmp_path: Path) -> None:
    """A changed dataset, task file or batch is in the message, and a dataset smaller than a step too."""
    resume_from(short, tmp_path, 5)
    changed = run(tmp_path, ranks=1, text=TASK.replace("Points(37 if", "Points(7 if"), max_steps=6)
    said = " ".join(changed.only("restart")["changed"])
    assert "the dataset had 37 items, now 7" in said
    assert "or `dataset` splits them without a fixed seed" in said
    assert "the task file differs" in said
    assert "the 7 training samples are fewer than a step takes" in changed.output
    assert sorted(changed.values("step", "loss")) == [6]


@pytest.mark.slow
def test_log_lines_are_few_by_default(tmp_path: Path) -> None:
    """Without log_every the trainer prints about a line every two seconds, so 400 short steps print few lines.

    A file `save-now` in the folder of checkpoints causes a save, and is removed.
    """
    (tmp_path / "checkpoints").mkdir(parents=True)
    (tmp_path / "checkpoints/save-now").touch()
    seldom = {"log_every": None, "eval_every": None, "checkpoint": {"every_steps": None}}
    begin_s = time.monotonic()
    done = whole_run(tmp_path, ranks=1, max_steps=400, **seldom)
    assert 1 <= len(done.values("step", "loss")) <= 10 + (time.monotonic() - begin_s) / 2
    assert len(done.output.splitlines()) == len(done.events)
    assert sorted(done.values("checkpoint", "bytes")) == [1, 400]
    assert not (tmp_path / "checkpoints/save-now").exists()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_counts_each_sample_once(ranks: int) -> None:
    """Over all ranks the weighted batches are the split, and every rank has the same number of forward passes."""
    plans = [evaluate.shares(11, 2, None, rank, ranks) for rank in range(ranks)]
    counted = sorted(index for plan in plans for keys, weight in plan if weight for _, index in keys)
    assert counted == list(range(11))
    assert len({len(plan) for plan in plans}) == 1


def test_evaluation_limit_is_per_rank() -> None:
    """eval_batches caps the forward passes of each rank."""
    assert len(evaluate.shares(100, 2, 3, rank=0, ranks=2)) == 3


# The example with little text and TASK's kill: DO is kill:RANK:CALL, evaluations included.
CHARLM = (Path(__file__).parents[2] / "examples" / "charlm" / "task.py").read_text()
CHARLM = (
    CHARLM.replace("TEXT_BYTES = 1_000_000", "TEXT_BYTES = 20_000")
    + """
import os, signal
plain_loss, calls = loss, 0

def loss(model, batch):
    global calls
    calls += 1
    todo = os.environ["DO"].split(":")
    if todo[0] == "kill" and os.environ.get("RANK", "0") == todo[1] and calls == int(todo[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_loss(model, batch)
"""
)
# With a head of its own: the gradients of a tied parameter are added in another order in a pipeline.
UNTIED = CHARLM.replace(
    "self.norm = nn.LayerNorm(width)", "self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)"
)
UNTIED = UNTIED.replace("F.linear(self.norm(x), self.characters.weight)", "self.head(self.norm(x))")
# A head that is registered with the embedding's weight, and positions from a buffer that each block gets.
BOUND = CHARLM.replace("F.linear(self.norm(x), self.characters.weight)", "self.head(self.norm(x))")
BOUND = BOUND.replace(
    "        self.apply(self.initialise)",
    "        self.apply(self.initialise)\n"
    "        self.head = nn.Linear(width, VOCABULARY, bias=False)\n"
    "        self.head.weight = self.characters.weight\n"
    "        self.register_buffer('waves', torch.arange(context).float().sin()[:, None])",
)
BOUND = BOUND.replace("x = block(x)", "x = block(x, self.waves[: text.shape[1]])")
BOUND = BOUND.replace("def forward(self, x):\n        x = x +", "def forward(self, x, waves):\n        x = x + waves +")
# Batch norm, a constant buffer that autograd saves, and operations that change the input of a block in place.
NORMED = UNTIED.replace(
    "def forward(self, x):\n        x = x +",
    (
        "def forward(self, x):\n        x *= self.waves[: x.shape[1]]\n        x = x + self.steady(x.mT).mT\n"
        "        x = x +"
    ),
)
NORMED = NORMED.replace(
    "        self.norm_attention,",
    "        self.steady = nn.BatchNorm1d(width)\n"
    "        self.register_buffer('waves', 1 + torch.arange(64).float().sin()[:, None] / 8)\n"
    "        self.norm_attention,",
    1,
)
LANGUAGE = {
    "text": CHARLM,
    "params": {"context": 16, "layers": 2, "heads": 2, "width": 16, "dropout": 0.1},
    "max_steps": 12,
    "eval_every": 4,
    "ema_decay": 0.9,
}


@pytest.mark.slow
@pytest.mark.soak  # test_job_resumes_on_another_layout begins with split layers
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (4, "ddp"), (4, "fsdp")])
def test_split_layers_resume_bit_for_bit(tmp_path: Path, ranks: int, strategy: str) -> None:
    """Two ranks share the layers of charlm, groups of ranks the data: a kill -9 changes no loss and no weight."""
    settings = {**LANGUAGE, "strategy": strategy, "parallel": {"tensor": 2}}
    undisturbed = whole_run(tmp_path / "whole", ranks=ranks, **settings)
    split = f"{ranks} ranks / 2 that share each layer x {8 // ranks} accumulation x 2 = 8 samples a step"
    assert split in undisturbed.output
    killed = run(tmp_path / "parts", ranks=ranks, do=f"kill:{ranks - 1}:{116 // ranks}", **settings)
    again = run(tmp_path / "parts", ranks=ranks, **settings)
    assert (killed.code != 0, again.code) == (True, 0), again.errors
    assert joined(killed, again) == undisturbed.values("step", "loss")
    assert again.values("eval", "loss").items() <= undisturbed.values("eval", "loss").items()
    assert parameters(again) == parameters(undisturbed)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run of charlm on one rank."""
    return whole_run(tmp_path_factory.mktemp("language"), ranks=1, **LANGUAGE)


@pytest.mark.slow
def test_exported_weights_are_the_average(language: Run) -> None:
    """The exported weights equal the average bit for bit, not the trained weights."""
    saved = language.saved()
    for name, value in language.exported().items():
        both = [saved[f"{kind}.{name}"] for kind in ("ema", "model")]
        assert [torch.equal(value, each) for each in both] == [True, False], name


@pytest.mark.slow
def test_job_resumes_on_another_layout(language: Run, tmp_path: Path) -> None:
    """tensor 2 x pipeline 2 -> fsdp 4 -> pipeline 2 -> tensor 2 -> 1 rank: losses and evaluations as on one rank."""
    turns = [
        (4, "kill:3:14", {"parallel": {"tensor": 2, "pipeline": 2}}),
        (4, "kill:2:13", {"strategy": "fsdp"}),
        (2, "kill:0:45", {"parallel": {"pipeline": 2}}),
        (2, "kill:0:9", {"parallel": {"tensor": 2}, "checkpoint": {"every_steps": 1}}),
        (1, "", {}),
    ]
    parts = [
        run(tmp_path / "parts", ranks=n, do=do, **{**LANGUAGE, "checkpoint": {"every_steps": 3}, **more})
        for n, do, more in turns
    ]
    assert parts[-1].code == 0, parts[-1].errors
    losses = {step: loss for part in parts for step, loss in part.values("step", "loss").items()}
    assert losses == pytest.approx(language.values("step", "loss"), rel=1e-6)
    assert [part.only("restart")["step"] for part in parts[1:]] == [3, 6, 9, 11]
    changed = "; ".join(parts[1].only("restart")["changed"])
    assert "the ranks that share a layer were 2, now 1" in changed
    assert "the stages were 2, now 1" in changed
    last = parts[-1].values("eval", "loss")
    assert last == pytest.approx({step: language.values("eval", "loss")[step] for step in last}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {"parallel": {"tensor": 2, "pipeline": 2}},
            marks=pytest.mark.soak,  # test_job_resumes_on_another_layout begins with this layout
        ),
        pytest.param(
            {"parallel": {"tensor": 2, "sequence": True, "pipeline": 2}, "params": {"dropout": 0.0}, "text": UNTIED},
            marks=pytest.mark.soak,  # a sequence that is split: tests/entrypoints/test_tensor.py
        ),
        {"parallel": {"pipeline": 2}},
        pytest.param(
            {"parallel": {"pipeline": 2}, "strategy": "fsdp", "activation_checkpointing": True},
            marks=pytest.mark.soak,  # fsdp: test_stages_on_other_machines_are_saved; recomputed: the test below
        ),
        pytest.param({"parallel": {"pipeline": 2}, "text": BOUND}, marks=pytest.mark.soak),
        pytest.param(
            {
                "parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
                "strategy": "fsdp",
                "activation_checkpointing": True,
                "params": {"layers": 4},
                "text": UNTIED,
            },
            marks=pytest.mark.soak,  # the schedule is in the test below, the rest as above
        ),
    ],
    ids=["tensor", "sequence", "ddp", "fsdp", "bound", "interleaved fsdp"],
)
def test_stages_train_as_one_rank(language: Run, tmp_path: Path, more: dict[str, Any]) -> None:
    """Stages of two ranks each, with a tied embedding: losses, evaluations and the export as on one rank."""
    settings = {**LANGUAGE, **more, "params": {**LANGUAGE["params"], **more.get("params", {})}}
    one = run(tmp_path / "one", ranks=1, **{**settings, "parallel": {}}) if "text" in more else language
    done = whole_run(tmp_path / "four", ranks=4, **settings)
    assert done.values("step", "loss") == pytest.approx(one.values("step", "loss"), rel=1e-6)
    assert done.values("eval", "loss") == pytest.approx(one.values("eval", "loss"), rel=1e-5)
    exported, whole = done.exported(), one.exported()
    assert exported.keys() == whole.keys()
    assert all(torch.allclose(value, whole[name], rtol=1e-3, atol=1e-4) for name, value in exported.items())


STAGES = {**LANGUAGE, "text": UNTIED, "params": {**LANGUAGE["params"], "layers": 4}}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run of STAGES on one rank."""
    return whole_run(tmp_path_factory.mktemp("one"), ranks=1, **STAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        # two stages: test_stages_with_buffers_are_one_process_bit_for_bit
        pytest.param(2, {"parallel": {"pipeline": 2}}, marks=pytest.mark.soak),
        pytest.param(
            *(2, {"parallel": {"pipeline": 2, "schedule": "gpipe", "cut": [1]}, "activation_checkpointing": True}),
            marks=pytest.mark.soak,  # gpipe: the test with buffers; recomputed: test_memory_savers_change_no_bit
        ),
        pytest.param(4, {"parallel": {"pipeline": 4, "cut": "timed"}}, marks=pytest.mark.soak),
        (2, {"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2}}),
    ],
    ids=["1f1b", "gpipe recomputed", "4 stages, timed", "interleaved"],
)
def test_pipeline_is_one_process_bit_for_bit(one_rank: Run, tmp_path: Path, ranks: int, more: dict[str, Any]) -> None:
    """With dropout and clipping; killed in a step, the resumed run ends with the same losses, weights and export."""
    calls = 57 * more["parallel"].get("chunks", 1)  # of the loss, after the trace
    killed = run(tmp_path, ranks=ranks, do=f"kill:1:{1 + calls}", **STAGES, **more)
    again = run(tmp_path, ranks=ranks, **STAGES, **more)
    assert (killed.code != 0, again.code) == (True, 0), again.errors
    assert again.only("restart")["step"] == 5
    assert joined(killed, again) == one_rank.values("step", "loss")
    assert killed.values("eval", "loss") | again.values("eval", "loss") == one_rank.values("eval", "loss")
    assert parameters(again) == parameters(one_rank)
    exported, whole = again.exported(), one_rank.exported()
    assert exported.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in exported.items())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.soak)])
def test_stages_with_buffers_are_one_process_bit_for_bit(tmp_path: Path, schedule: str) -> None:
    """Batch norm counts each step once, as on one rank; the passes in flight keep the buffers that they have saved."""
    settings = {**STAGES, "text": NORMED, "max_steps": 6}
    one = whole_run(tmp_path / "one", ranks=1, **settings)
    two = whole_run(tmp_path / "two", ranks=2, **settings, parallel={"pipeline": 2, "schedule": schedule})
    assert two.values("step", "loss") == one.values("step", "loss")
    assert two.values("eval", "loss") == one.values("eval", "loss")
    exported, whole = two.exported(), one.exported()
    assert exported["blocks.3.steady.num_batches_tracked"] == 6
    assert all(torch.equal(value, exported[name]) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.soak
def test_stale_weights_resume_bit_for_bit(tmp_path: Path) -> None:
    """With the schedule async the pipeline is empty at saves by steps, so a kill changes no loss and no weight."""
    settings = {**STAGES, "clip_norm": None, "log_every": 2, "parallel": {"pipeline": 2, "schedule": "async"}}
    undisturbed = whole_run(tmp_path / "whole", ranks=2, **settings)
    assert "stages wait 0 % of a step, assuming equal stages; the weights of stage 1" in undisturbed.output
    killed = run(tmp_path / "parts", ranks=2, do="kill:1:38", **settings)
    again = run(tmp_path / "parts", ranks=2, **settings)
    assert (killed.code != 0, again.code) == (True, 0), again.errors
    assert joined(killed, again) == undisturbed.values("step", "loss")
    assert parameters(again) == parameters(undisturbed)
    stale = undisturbed.values("step", "staleness")
    assert stale
    assert all(0 < value <= 1 for value in stale.values())
    assert all(0 <= share < 1 for share in undisturbed.values("step", "bubble").values())


@pytest.mark.slow
@pytest.mark.soak
def test_stages_on_other_machines_are_saved(one_rank: Run, tmp_path: Path) -> None:
    """Stages that do not see rank 0's folder send their tensors at a save, and get them at a resume."""
    elsewhere = (
        'import os\nif os.environ.get("RANK") in ("2", "3"): os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] += "/else"\n'
    )
    settings = {**STAGES, "text": elsewhere + UNTIED, "strategy": "fsdp", "parallel": {"pipeline": 2}}
    killed = run(tmp_path, ranks=4, do="kill:1:33", **settings)
    again = run(tmp_path, ranks=4, **settings)
    assert (killed.code != 0, again.code) == (True, 0), again.errors
    assert again.only("restart")["step"] == 5
    losses = {**killed.values("step", "loss"), **again.values("step", "loss")}
    assert losses == pytest.approx(one_rank.values("step", "loss"), rel=1e-6)
    assert parameters(again).keys() == parameters(one_rank).keys()
    last = killed.values("step", "loss").keys() & again.values("step", "loss").keys()
    assert last
    assert all(killed.values("step", "loss")[step] == again.values("step", "loss")[step] for step in last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "more", "why"),
    [
        (
            "part(x).unflatten(-1, (-1, self.head_width))",
            "part(x).view(*x.shape[:2], x.shape[2] // self.head_width, self.head_width)",
            {},
            "take the sizes of views from the tensor, for example -1 for the number of heads",
        ),
        ("", "", {"plan": {"characters": "embedding"}}, "a module's weight is used outside the module"),
        ("x = block(x)", "x = block(x) + x", {"pipeline": 2, "tensor": 1}, "is used again in a later block"),
        ("x = block(x)", "x = block(x); x = block(x)", {"pipeline": 2, "tensor": 1}, "blocks.0 is called twice"),
        (
            "        for block in self.blocks:\n            x = block(x)\n        return F.linear(self.norm(x)",
            (
                "        first = x\n        for block in self.blocks:\n            x = block(x)\n"
                "        return F.linear(self.norm(x + first)"
            ),
            {"pipeline": 2, "tensor": 1},
            "a value from before the blocks is used again",
        ),
        ("", "", {"pipeline": 2, "tensor": 1, "cut": [2]}, "must be 1 rising numbers from 1 to 1"),
        ("", "", {"pipeline": 2, "tensor": 1, "schedule": "async"}, "because two stages share it; set 1f1b"),
        (
            "self.apply(self.initialise)\n",
            (
                "self.apply(self.initialise)\n        for part in (self.characters, self.positions, self.blocks[0]):\n"
                "            part.requires_grad_(False)\n        self.head = nn.Linear(width, VOCABULARY)\n"
            ),
            {"pipeline": 2, "tensor": 1},
            "stage 1 of 2 computes nothing that needs gradients",
        ),
        (
            "def evaluate(model, batch):\n",
            "def evaluate(model, batch):\n    model(batch[0])\n",
            {"pipeline": 2, "tensor": 1},
            "evaluate(model, batch) calls the model twice",
        ),
    ],
    ids=["views", "tied", "residual", "twice", "skip", "cut", "stale", "frozen", "evaluate"],
)
def test_model_that_cannot_be_split_is_refused(
    tmp_path: Path, old: str, new: str, more: dict[str, Any], why: str
) -> None:
    """The start ends with one sentence: what is wrong, and what to change."""
    done = run(
        tmp_path, **{**LANGUAGE, "text": CHARLM.replace(old, new), "parallel": {"tensor": 2, **more}, "clip_norm": None}
    )
    assert done.code == 1
    assert "TaskError" in done.errors
    assert why in done.errors


@pytest.mark.slow
@pytest.mark.soak
def test_sharded_optimizer_resumes_bit_for_bit(tmp_path: Path) -> None:
    """ZeRO-1, killed on 2 ranks, killed on 1 rank, ended on 2: with `strict` all losses and tensors are equal."""
    settings = {**LANGUAGE, "eval_every": None, "shard": "optimizer", "reproducible": "strict"}
    undisturbed = whole_run(tmp_path / "whole", **settings)
    turns = [(2, "kill:1:14"), (1, "kill:0:26"), (2, "")]
    parts = [run(tmp_path / "parts", ranks=ranks, do=do, **settings) for ranks, do in turns]
    assert parts[-1].code == 0, parts[-1].errors
    assert [part.only("restart")["step"] for part in parts[1:]] == [5, 10]
    assert joined(*parts) == undisturbed.values("step", "loss")
    assert parameters(parts[-1]) == parameters(undisturbed)


@pytest.mark.slow
@pytest.mark.soak
def test_job_resumes_with_other_shards(tmp_path: Path) -> None:
    """ZeRO-1 on 4 ranks -> ZeRO-2 -> ddp -> ZeRO-1 on 2 -> fsdp -> 1 rank: the losses of one rank, to rounding."""
    settings = {**LANGUAGE, "eval_every": None, "checkpoint": {"every_steps": 2}}
    one = whole_run(tmp_path / "one", ranks=1, **settings)
    turns = [
        (4, "kill:1:4", {"shard": "optimizer"}),
        (4, "kill:2:4", {"shard": "gradients", "strategy": "fsdp"}),
        (2, "kill:0:6", {}),
        (2, "kill:1:6", {"shard": "optimizer"}),
        (2, "kill:1:6", {"strategy": "fsdp"}),
        (1, "", {"shard": "optimizer"}),
    ]
    parts = [run(tmp_path / "parts", ranks=n, do=do, **settings, **more) for n, do, more in turns]
    assert parts[-1].code == 0, parts[-1].errors
    losses = {step: loss for part in parts for step, loss in part.values("step", "loss").items()}
    assert losses == pytest.approx(one.values("step", "loss"), rel=1e-6)
    assert [part.only("restart")["step"] for part in parts[1:]] == [2, 4, 6, 8, 10]
    for part, change in ((4, "the strategy was ddp, now fsdp"), (5, "the ranks were 2, now 1")):
        assert any(change in text for text in parts[part].only("restart")["changed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"precision": "bf16"}),
        pytest.param(2, {"strategy": "fsdp", "activation_checkpointing": True}, marks=pytest.mark.soak),
        pytest.param(2, {"parallel": {"tensor": 2}}, marks=pytest.mark.soak),
    ],
    ids=["autocast", "fsdp-recomputed", "tensor"],
)
def test_offloaded_activations_change_no_bit(tmp_path: Path, ranks: int, settings: dict[str, Any]) -> None:
    """Activations that wait in host memory give the same losses and weights, also with shards and split layers."""
    both = [
        run(tmp_path / str(moves), ranks=ranks, activation_offload=moves, **{**LANGUAGE, "max_steps": 4, **settings})
        for moves in (False, True)
    ]
    assert [one.code for one in both] == [0, 0], both[1].errors
    assert both[0].values("step", "loss") == both[1].values("step", "loss")
    assert parameters(both[0]) == parameters(both[1])


@pytest.mark.slow
def test_sharded_optimizer_of_the_task(tmp_path: Path) -> None:
    """Under ZeRO-1 a task's own optimizer gets shards too, even if created with state; the checkpoint is ddp's."""
    own = "\ndef optimizer(model, params):\n    return torch.optim.Adagrad(model.parameters(), lr=0.1)\n"
    settings = {"text": TASK + own, "max_steps": 4, "eval_every": None, "clip_norm": None}
    whole, sharded = (run(tmp_path / str(shard), shard=shard, **settings) for shard in (None, "optimizer"))
    assert sharded.code == 0, sharded.errors
    assert sharded.values("step", "loss") == whole.values("step", "loss")
    assert parameters(sharded) == parameters(whole)
    assert "optimizer.first.weight.sum" in parameters(sharded)
