"""The model card: README.md of a model folder, from config.json and check.json, in the form of Hugging Face's cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..models.folder import OWN


def text(config: Mapping[str, Any], check: Mapping[str, Any]) -> str:
    """Return the card. `config`: the whole config.json, which is of transformers' layout if our content has a key."""
    library = "transformers" if OWN in config else "pytorch"
    return "\n".join(_lines(config.get(OWN, config), check, library)) + "\n"


def _lines(config: Mapping[str, Any], check: Mapping[str, Any], library: str) -> Iterator[str]:
    trainer, facts = config["checkpoint"]["trainer"], config["job"]
    yield from ("---", f"library_name: {library}", "tags: [cloudtrain]", "---", "", f"# {config['name']}", "")
    yield f"{config['tensors']:,} tensors, {config['bytes']:,} bytes, {', '.join(config['dtypes'])}."
    yield from ("", "## Results", "")
    yield from _metrics(trainer, facts)
    yield from ("", "## Origin", "", "| | |", "| --- | --- |")
    yield from (f"| {name} | {_cell(value)} |" for name, value in _origin(trainer, facts, config) if value is not None)
    yield from ("", "## Check", "", *_check(check))
    yield from ("", "## Use", "", *_use(config, check))


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


def _origin(
    trainer: Mapping[str, Any], facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
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


def _check(check: Mapping[str, Any]) -> Iterator[str]:
    if check["passed"] is None:
        yield f"**This folder was not checked**: {check['why']}."
    else:
        yield "A new process opened each file, and compared its results with those of the checkpoint's own model, on"
        yield f"{', '.join(map(str, check['samples']))} samples of the split `{check['split']}`."
        yield from ("", "| form | result |", "| --- | --- |")
        for form, found in check["forms"].items():
            same = (
                "the same bits" if found["same_bits"] else f"differs by {found['difference']:.1e} of the largest value"
            )
            yield f"| {form} | {same} |"
    yield from (f"\nWithout {form}: {_cell(reason)}" for form, reason in check["left_out"].items())


def _use(config: Mapping[str, Any], check: Mapping[str, Any]) -> Iterator[str]:
    yield "`cloudtrain serve .` answers requests over HTTP. `sha256sum -c SHA256SUMS` checks the files."
    if config["inputs"]:
        yield from ("", "| tensor | type | shape |", "| --- | --- | --- |")
        yield from _tensors("in", config["inputs"])
        yield from _tensors("out", config["outputs"])
    yield from (
        "",
        "The model's inputs are those that `dataset` and `collate` of the task make: a program that calls the",
    )
    yield "model must prepare its data as they do (resize, scale, tokenize)."
    if config["classes"]:
        yield from ("", "Classes in order: " + ", ".join(map(_cell, config["classes"])))


def _tensors(way: str, slots: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for slot in slots:
        sides = ["any" if side is None else str(side) for side in slot["shape"]]
        yield f"| {way}: {_cell(slot['name'])} | {slot['dtype']} | {' x '.join(sides) or 'scalar'} |"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
