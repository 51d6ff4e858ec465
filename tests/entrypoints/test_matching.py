"""The names of saved weights against a model's: every weight is paired, skipped by a pattern, or refused."""

import random
import re
import time

import pytest
import yaml

from cloudtrain.entrypoints.checkpoints.matching import Paired, Shape, pair
from cloudtrain.entrypoints.contract import InitSettings
from cloudtrain.entrypoints.errors import TaskError

PLAIN = InitSettings()
PARTS = ("encoder", "backbone", "head", "layer", "norm", "0", "1", "fc", "attn", "x+y")


def state_dict(drawn: random.Random) -> dict[str, Shape]:
    """Return names and shapes of a random model."""
    count = drawn.randint(1, 12)
    names = {
        ".".join(drawn.choices(PARTS, k=drawn.randint(1, 3))) + drawn.choice((".weight", ".bias")) for _ in range(count)
    }
    return {name: tuple(drawn.choices((2, 3, 4), k=drawn.randint(1, 3))) for name in sorted(names)}


def changed(drawn: random.Random, model: dict[str, Shape]) -> dict[str, Shape]:
    """Return a parent's names and shapes: the model's, with weights left out, added, moved and reshaped."""
    found: dict[str, Shape] = {}
    for name, shape in model.items():
        fate = drawn.random()
        if fate < 0.15:
            continue
        if fate < 0.3:
            shape = (shape[0] + 1, *shape[1:])
        found[f"base.{name}" if drawn.random() < 0.2 else name] = shape
    return found | {name: shape for name, shape in state_dict(drawn).items() if drawn.random() < 0.3}


def suggested(message: str) -> InitSettings:
    """Return the patterns that the message offers, read as YAML."""
    offers = re.search(r"to go on, write (.*?[}\]]); (?:the parent|this model|the shape)", message)
    assert offers, message
    text = offers[1].replace(" and skip: ", "\nskip: ")
    found = yaml.safe_load(text)
    return InitSettings(rename=found.get("rename", {}), skip=tuple(found.get("skip", ())))


def accounted(saved: dict[str, Shape], model: dict[str, Shape], found: Paired) -> None:
    """Fail unless each name of both sides is in the answer once, and each pair has one shape."""
    assert sorted([*found.sources, *found.kept]) == sorted(model)
    assert sorted([*found.sources.values(), *found.unused]) == sorted(saved)
    assert all(saved[old] == model[name] for name, old in found.sources.items())


@pytest.mark.parametrize("seed", range(200))
def test_no_weight_is_missed_silently(seed: int) -> None:
    """Strict pairs all or names every difference; the offered lines mend the difference, or nothing is left to load."""
    drawn = random.Random(seed)
    model = state_dict(drawn)
    saved = changed(drawn, model)
    if saved == model:
        accounted(saved, model, pair(saved, model, PLAIN))
        return
    with pytest.raises(TaskError) as refusal:
        pair(saved, model, PLAIN)
    message = str(refusal.value)
    differing = [name for name in {*saved, *model} if saved.get(name) != model.get(name)]
    assert [name for name in differing if name not in message] == []
    try:
        accounted(saved, model, pair(saved, model, suggested(message)))
    except TaskError:  # skip leaves out every weight
        assert all(model.get(name) != shape for name, shape in saved.items())
    lax = InitSettings(strict=False)
    try:
        accounted(saved, model, pair(saved, model, lax))
    except TaskError:
        assert any(name in model for name in saved if saved[name] != model.get(name)) or not {*saved} & {*model}


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (InitSettings(skip=("^haed",)), "skip '^haed' finds no name; the nearest is head.weight"),
        (InitSettings(rename={"^bone": "x"}), "rename '^bone' finds no name"),
        (InitSettings(rename={"(": "x"}), "rename '(' is no regular expression"),
        (InitSettings(rename={"^body": r"\9"}), "cannot be filled in"),
        (InitSettings(rename={"^.*weight": "w"}), "the same name w"),
        (InitSettings(skip=(".",)), "leaves out every weight"),
    ],
)
def test_pattern_without_effect_is_refused(wishes: InitSettings, words: str) -> None:
    """A pattern that finds no name, or names two weights alike, is a fault even where all else fits."""
    shapes: dict[str, Shape] = {"body.weight": (2, 2), "head.weight": (3, 2)}
    with pytest.raises(TaskError, match=re.escape(words)):
        pair(shapes, shapes, wishes)


def test_head_of_another_size_is_renamed_and_skipped() -> None:
    """The body is taken under its new name, the head keeps its own start, and both are in the answer."""
    saved: dict[str, Shape] = {"backbone.0.weight": (8, 4), "head.weight": (10, 8)}
    model: dict[str, Shape] = {"encoder.0.weight": (8, 4), "head.weight": (3, 8)}
    with pytest.raises(TaskError, match=r"head\.weight differs: 10x8 in the parent, 3x8 here, only in the first"):
        pair(saved, model, PLAIN)
    found = pair(saved, model, InitSettings(rename={r"^backbone\.": "encoder."}, skip=(r"^head\.",)))
    assert dict(found.sources) == {"encoder.0.weight": "backbone.0.weight"}
    assert (found.kept, found.unused) == (("head.weight",), ("head.weight",))


def test_thousands_of_names_are_compared_within_seconds() -> None:
    """A prefix before 720 names is found as one pattern, and first in the message, which may be cut."""
    model: dict[str, Shape] = {f"net.layers.{n}.{part}.weight": (8, 8) for n in range(90) for part in "qkvopudg"}
    saved = {f"model.{name}": shape for name, shape in model.items()}
    begin_s = time.process_time()
    with pytest.raises(TaskError, match=r"^init_from: to go on, write rename: \{'\^model"):
        pair(saved, model, PLAIN)
    assert time.process_time() - begin_s < 5


def test_message_is_one_line_of_limited_length() -> None:
    """A line break in a name is escaped, also in the pattern that finds the name; long lists and names are cut."""
    odd = "a\nb.weight\ud800"
    with pytest.raises(TaskError) as refusal:
        pair({"w": (1,), odd: (2,)}, {"w": (1,)}, PLAIN)
    message = str(refusal.value)
    assert (message.isprintable(), r"this model has no a\nb.weight\ud800 2" in message) == (True, True)
    assert pair({"w": (1,), odd: (2,)}, {"w": (1,)}, suggested(message)).unused == (odd,)
    model: dict[str, Shape] = {f"{n:04d}": (n,) for n in range(3000)}
    saved: dict[str, Shape] = {f"{n:04d}": (n + n % 2,) for n in range(3000)} | {"x" * 200_000: (1,)}
    with pytest.raises(TaskError, match="1480 more shapes differ") as refusal:
        pair(saved, model, PLAIN)
    assert len(str(refusal.value)) < 5000


def test_tied_weight_needs_one_of_its_names() -> None:
    """A parent that has dropped one name of tied weights fits, and the reverse too."""
    one: dict[str, Shape] = {"e.weight": (5, 2)}
    both: dict[str, Shape] = {**one, "o.weight": (5, 2)}
    tied = {name: frozenset(both) for name in both}
    assert dict(pair(one, both, PLAIN, tied).sources) == {"e.weight": "e.weight"}
    with pytest.raises(TaskError, match=r"has no o\.weight 5x2"):
        pair(one, both, PLAIN)
