"""Tests of the job's own variables in arguments and environment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.entrypoints.rank import variables

VALUES = {"CLOUDTRAIN_JOB": "digits-1", "CLOUDTRAIN_CHECKPOINT_DIR": "/ck pt/$HOME", "CLOUDTRAIN_INPUT_TRAIN": "/in"}


def test_both_forms_are_replaced() -> None:
    """A name ends at the brace or at the first character that is invalid in a name."""
    text = "--out=$CLOUDTRAIN_CHECKPOINT_DIR/x ${CLOUDTRAIN_JOB}y $CLOUDTRAIN_INPUT_TRAIN."
    assert variables.expanded(text, VALUES) == "--out=/ck pt/$HOME/x digits-1y /in."


def test_value_is_not_expanded_again() -> None:
    """A value that contains a reference stays unchanged."""
    assert variables.expanded("$CLOUDTRAIN_JOB", {"CLOUDTRAIN_JOB": "$CLOUDTRAIN_JOB"}) == "$CLOUDTRAIN_JOB"


def test_two_dollars_escape_a_reference() -> None:
    """One of the two dollars is removed, and the name stays as text."""
    assert variables.expanded("$$CLOUDTRAIN_JOB $${CLOUDTRAIN_JOB}", VALUES) == "$CLOUDTRAIN_JOB ${CLOUDTRAIN_JOB}"
    assert list(variables.references("$$CLOUDTRAIN_JOB $CLOUDTRAIN_NOPE ${CLOUDTRAIN_X}")) == [
        "CLOUDTRAIN_NOPE",
        "CLOUDTRAIN_X",
    ]


def test_variable_without_value_becomes_empty() -> None:
    """At a first start no checkpoint to resume from exists."""
    assert variables.expanded("--resume=$CLOUDTRAIN_RESUME_PATH", VALUES) == "--resume="


@given(st.text(alphabet=st.sampled_from("$${}ab_ 1\\'\"`CLOUDTRAIN\n\t\u20ac"), max_size=40))
def test_further_text_stays_byte_for_byte(text: str) -> None:
    """Dollars, braces, quotes and line ends without a reference pass unchanged."""
    if "CLOUDTRAIN_" not in text:
        assert variables.expanded(text, VALUES) == text
