"""Writes a model folder from a checkpoint: beside the place, checked, then renamed. No torch in this process.

The checksums of the whole checkpoint are verified by a thread while the weights are copied; the folder gets its name
after both. The model card (README.md) is written from config.json and check.json, in the form of Hugging Face's cards.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from .. import foreign
from ..atomic_json import read_json, sync
from ..checkpoints import folder as checkpoints
from ..models import folder as folders
from ..models import scratch, tensors
from ..models.order import HUGGINGFACE, ExportOrder

_SPARE_BYTES = 50_000_000  # for code and documents

_Stored: TypeAlias = Mapping[str, tensors.StoredTensor]


class ExportError(Exception):
    """The export ended without a folder; `hint` says how to go on."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def build(order: ExportOrder) -> dict[str, Any]:
    """Write the folder and return its check and digest. Raises ExportError, and leaves no folder."""
    place, source = Path(order.place).absolute(), Path(order.checkpoint)
    if os.path.lexists(place):  # also a link to nothing
        raise ExportError(f"{place} exists", "name another folder with -o, or remove it")
    try:
        trainer, stored = _opened(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch.scratch(place) as hidden:
            partial, work = hidden / "model", hidden / "work"
            partial.mkdir()
            work.mkdir()
            check = _filled(order, partial, work, trainer, stored)
            os.rename(partial, place)  # noqa: PTH104  # unlike Path.replace, replaces no file
            sync(place.parent)
    except OSError as error:
        hint = "free some room, or name a folder on another disk with -o" if error.errno == errno.ENOSPC else ""
        raise ExportError(f"the folder cannot be written: {error.strerror or error}", hint) from error
    except (checkpoints.CheckpointError, folders.ModelFolderError, foreign.BundleError, ValueError) as error:
        raise ExportError(str(error)) from error
    files = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    return {"place": str(place), "digest": folders.file_sha256(place / folders.SUMS), "check": check, "files": files}


def card(config: Mapping[str, Any], check: Mapping[str, Any]) -> str:
    """Return the card. `config`: the whole config.json, which is of transformers' layout if our content has a key."""
    library = "transformers" if folders.OWN in config else "pytorch"
    return "\n".join(_card_lines(config.get(folders.OWN, config), check, library)) + "\n"


def _opened(source: Path) -> tuple[dict[str, Any], dict[str, tensors.StoredTensor]]:
    """Return the checkpoint's trainer.json and tensors; no checksum of a shard is verified yet."""
    if not source.is_dir():
        raise ExportError(f"there is no checkpoint {source}")
    if fault := checkpoints.verify(source, only=(checkpoints.TRAINER, checkpoints.PLAIN)):
        raise ExportError(f"checkpoint {source} is damaged: {fault}", "export an older one: --checkpoint step-N")
    trainer = checkpoints.read_trainer(source)
    if others := ", ".join(map(str, trainer.get("extra", []))):
        fault = f"the model keeps state that is no tensor: {others}; safetensors has no room for it"
        raise ExportError(fault, "no option exports the weights without this state")
    files = [source / name for name in checkpoints.read_manifest(source) if name.startswith("shard-")]
    return trainer, tensors.find(files)


def _filled(order: ExportOrder, partial: Path, work: Path, trainer: dict[str, Any], stored: _Stored) -> dict[str, Any]:
    """Write all files of the folder; return the check."""
    weights = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("model."))
    needed = weights * len({*order.forms} - {HUGGINGFACE}) + _SPARE_BYTES
    if (free := shutil.disk_usage(partial).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes needed, {free:,} free there")
    if order.archive is not None:
        foreign.unpack(Path(order.archive), order.archive_sha256 or "", work / "bundle")
        shutil.copytree(work / "bundle" / "code", partial / folders.CODE)  # a link becomes a copy of its target
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(checkpoints.verify, Path(order.checkpoint))
        reference = _reference(order, partial, work, stored)
        if order.needed in reference["left_out"]:
            hint = "--form safetensors exports the weights alone"
            raise ExportError(f"without {order.needed}: {reference['left_out'][order.needed]}", hint)
        chosen = _chosen(stored, reference.get("tied", {}))
        try:
            sums = tensors.write(partial, chosen)
        finally:
            fault = verified.result()
            if fault:
                hint = "export an older one: --checkpoint step-N"
                raise ExportError(f"checkpoint {order.checkpoint} is damaged: {fault}", hint)
    config = _config(order, trainer, chosen, reference)
    described = work / HUGGINGFACE
    is_described = HUGGINGFACE in order.forms and HUGGINGFACE not in reference["left_out"]
    whole = {**read_json(described / folders.CONFIG), folders.OWN: config} if is_described else config
    _write_json(partial / folders.CONFIG, whole)
    for path in described.glob("generation_config.json"):
        path.rename(partial / path.name)
    for name in (folders.PT2, folders.ONNX):
        if (work / name).exists():
            (work / name).rename(partial / name)
    check = _checked(order, partial, work, reference)
    _write_json(partial / folders.CHECK, check)
    (partial / folders.CARD).write_text(card(whole, check), encoding="utf-8")
    folders.write_sums(partial, sums)
    if order.key is not None:
        folders.sign(partial, Path(order.key))
    return check


def _reference(order: ExportOrder, partial: Path, work: Path, stored: _Stored) -> dict[str, Any]:
    """Return the answer of the process `reference`; without the task, only the forms left out."""
    is_averaged = any(name.startswith("ema.") for name in stored)
    if order.archive is not None:
        _write_json(work / "order.json", order.dump())
        _run("reference", [partial / folders.CODE, work], order.environment)
        answer: dict[str, Any] = read_json(work / "reference.json") or {"fault": _last_line(work / "reference.log")}
        if "fault" not in answer and (order.is_unchecked or "no_calls" not in answer):
            return answer
        fault = answer.get("fault") or f"the model cannot be called, so it cannot be checked: {answer['no_calls']}"
        if not order.is_unchecked or is_averaged:
            hint = "--input NAME=PATH gives the job's inputs; --unchecked exports the weights without a check"
            raise ExportError(fault, hint)
        return {"fault": fault, "left_out": {kind: fault for kind in order.forms if kind != "safetensors"}}
    if is_averaged or not order.is_unchecked:
        why = "names of shared weights are needed for its average" if is_averaged else "nothing can be checked"
        hint = "export the job, by its id" + ("" if is_averaged else ", or add --unchecked")
        raise ExportError(f"the code of this checkpoint's job is not known here: {why}", hint)
    return {"left_out": {kind: "the task's code is not known" for kind in order.forms if kind != "safetensors"}}


def _chosen(stored: _Stored, tied: Mapping[str, str]) -> dict[str, tensors.StoredTensor]:
    """Return the evaluated tensors: the average where kept, in the type of the weights, by all names of a tensor."""
    chosen = {}
    for name, tensor in stored.items():
        kind, _, own = name.partition(".")
        if kind == "model":
            average = stored.get(f"ema.{tied.get(own, own)}")
            chosen[own] = tensor if average is None else replace(average, written=tensor.dtype)
    return chosen


def _config(
    order: ExportOrder, trainer: Mapping[str, Any], chosen: _Stored, reference: Mapping[str, Any]
) -> dict[str, Any]:
    manifest = folders.file_sha256(Path(order.checkpoint) / checkpoints.MANIFEST)
    return {
        "format": folders.FORMAT,
        "name": order.name,
        "task": order.task,
        "params": dict(order.params),
        "dtypes": sorted({tensor.target for tensor in chosen.values()}),
        "tensors": len(chosen),
        "bytes": sum(tensor.nbytes for tensor in chosen.values()),
        "tied": reference.get("tied", {}),
        "classes": reference.get("classes"),
        "call": reference.get("call"),
        "inputs": reference.get("inputs", []),
        "outputs": reference.get("outputs", []),
        "checkpoint": {"step": trainer["step"], "manifest_sha256": manifest, "trainer": dict(trainer)},
        "job": dict(order.facts),
    }


def _checked(order: ExportOrder, partial: Path, work: Path, reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of check.json. Raises ExportError if a form's results differ from the checkpoint's."""
    about = {"ended_s": time.time(), **{name: reference.get(name) for name in ("split", "torch", "left_out")}}
    if order.is_unchecked:
        why = reference.get("fault") or "asked for with --unchecked"
        why += f"; the model could not be called: {reference['no_calls']}" if "no_calls" in reference else ""
        return {"passed": None, "why": why, "forms": {}, **about}
    _run("check", [partial, work], order.environment)
    forms: dict[str, Any] | None = read_json(work / "check-result.json")
    if forms is None:
        raise ExportError(f"the check did not run: {_last_line(work / 'check.log')}")
    wrong = [f"{form}: {found['fault']}" for form, found in forms.items() if not found["passed"]]
    if wrong:
        hint = "nothing was kept; --form without this form, or --unchecked, exports the rest"
        raise ExportError(f"the check failed: {'; '.join(wrong)}", hint)
    return {"passed": True, "samples": [8, 1, 3], "forms": forms, **about}


def _run(module: str, arguments: list[Path], environment: Mapping[str, str]) -> None:
    """Run a module of this room in a new process; the last argument is the folder for its output."""
    command = [sys.executable, "-m", f"cloudtrain.entrypoints.export.{module}", *map(str, arguments)]
    with (arguments[-1] / f"{module}.log").open("wb") as log:
        env = {**os.environ, **environment}
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, check=False)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "its process ended without a message"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=True) + "\n", encoding="utf-8")


def _card_lines(config: Mapping[str, Any], check: Mapping[str, Any], library: str) -> Iterator[str]:
    yield from ("---", f"library_name: {library}", "tags: [cloudtrain]", "---", "", f"# {config['name']}", "")
    yield f"{config['tensors']:,} tensors, {config['bytes']:,} bytes, {', '.join(config['dtypes'])}."
    yield from ("", "## Results", "")
    yield from _metrics(config["checkpoint"]["trainer"], config["job"])
    yield from ("", "## Origin", "", "| | |", "| --- | --- |")
    yield from (f"| {name} | {_cell(value)} |" for name, value in _origin(config) if value is not None)
    yield from ("", "## Check", "", *_check_lines(check))
    yield from ("", "## Use", "", *_use_lines(config))


def _metrics(trainer: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the test, and the last evaluation: of this step as the job reported it, else the last before the save."""
    test = facts.get("test") or {}
    if test.get("metrics"):
        again = "" if test.get("looks", 1) < 2 else f" The split was looked at {test['looks']} times."
        same = " These are the samples of `eval`, which may have chosen the checkpoint." if test["same_as_eval"] else ""
        yield f"On the split `test`, {test.get('samples')} samples.{again}{same}"
        yield from ("", "| metric | value |", "| --- | --- |")
        yield from (f"| {_cell(name)} | {value} |" for name, value in test["metrics"].items())
        yield ""
    step, metrics = trainer["step"], facts.get("metrics")
    if not metrics:
        step, metrics = trainer.get("evaluated_step"), trainer.get("metrics")
    if not metrics or step is None:
        yield "This checkpoint was not evaluated."
        return
    yield f"On the split `eval`, at step {step}. The split may have chosen the checkpoint: unseen data may give other"
    yield from ("figures.", "", "| metric | value |", "| --- | --- |")
    yield from (f"| {_cell(name)} | {value} |" for name, value in metrics.items())


def _origin(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    trainer, facts = config["checkpoint"]["trainer"], config["job"]
    yield "job", facts.get("job") or trainer.get("job")
    yield "step", trainer["step"]
    yield "checkpoint, sha256 of its manifest", config["checkpoint"]["manifest_sha256"]
    yield "commit", facts.get("commit")
    yield "uncommitted changes", ("yes: code/ has them" if facts["dirty"] else "no") if "dirty" in facts else None
    yield "started from", facts.get("parent")
    yield "backend", facts.get("backend")
    yield "cost, USD", facts.get("cost_usd")
    names = {"strategy": "strategy", "world_size": "ranks", "precision": "precision", "global_batch_size": "batch"}
    names |= {"samples": "samples seen", "dataset_length": "training samples", "parameters": "parameters"}
    names |= {"dataset_fingerprint": "training data, fingerprint", "code_sha256": "task file, sha256", "torch": "torch"}
    yield from ((name, trainer.get(key)) for key, name in names.items())


def _check_lines(check: Mapping[str, Any]) -> Iterator[str]:
    if check["passed"] is None:
        yield f"**This folder was not checked**: {check['why']}."
    else:
        yield "A new process opened each file, and compared its results with those of the checkpoint's own model, on"
        yield f"{', '.join(map(str, check['samples']))} samples of the split `{check['split']}`."
        yield from ("", "| form | result |", "| --- | --- |")
        for form, found in check["forms"].items():
            differs = f"differs by {found['difference']:.1e} of the largest value"
            yield f"| {form} | {'the same bits' if found['same_bits'] else differs} |"
    yield from (f"\nWithout {form}: {_cell(reason)}" for form, reason in check["left_out"].items())


def _use_lines(config: Mapping[str, Any]) -> Iterator[str]:
    yield "`cloudtrain serve .` answers requests over HTTP. `sha256sum -c SHA256SUMS` checks the files."
    if config["inputs"]:
        yield from ("", "| tensor | type | shape |", "| --- | --- | --- |")
        yield from _tensors("in", config["inputs"])
        yield from _tensors("out", config["outputs"])
    yield "\nThe model's inputs are those that `dataset` and `collate` of the task make: a program that calls the"
    yield "model must prepare its data as they do (resize, scale, tokenize)."
    if config["classes"]:
        yield from ("", "Classes in order: " + ", ".join(map(_cell, config["classes"])))


def _tensors(way: str, slots: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for slot in slots:
        sides = ["any" if side is None else str(side) for side in slot["shape"]]
        yield f"| {way}: {_cell(slot['name'])} | {slot['dtype']} | {' x '.join(sides) or 'scalar'} |"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
