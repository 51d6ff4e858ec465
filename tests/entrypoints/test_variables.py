"""Tests of the job's own variables in arguments and environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.entrypoints.rank import variables

VALUES = {"CLOUDTRAIN_JOB": "digits-1", "CLOUDTRAIN_CHECKPOINT_DIR": "/ck pt/$HOME", "CLOUDTRAIN_INPUT_TRAIN": "/in"}
VALUES["CLOUDTRAIN_OUTPUT_DIR"] = "$CLOUDTRAIN_JOB"


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("--out=$CLOUDTRAIN_CHECKPOINT_DIR/x ${CLOUDTRAIN_JOB}y", "--out=/ck pt/$HOME/x digits-1y"),
        ("$CLOUDTRAIN_INPUT_TRAIN.", "/in."),
        ("$CLOUDTRAIN_OUTPUT_DIR", "$CLOUDTRAIN_JOB"),
        ("--resume=$CLOUDTRAIN_RESUME_PATH", "--resume="),  # a first start has no checkpoint to resume from
    ],
)
def test_both_forms_are_replaced_once(text: str, expanded: str) -> None:
    """A name ends at the brace or at the first character that is invalid in a name; a value stays unchanged."""
    assert variables.expanded(text, VALUES) == expanded


def test_two_dollars_escape_a_reference() -> None:
    """One of the two dollars is removed, and the name stays as text."""
    assert variables.expanded("$$CLOUDTRAIN_JOB $${CLOUDTRAIN_JOB}", VALUES) == "$CLOUDTRAIN_JOB ${CLOUDTRAIN_JOB}"
    found = variables.references("$$CLOUDTRAIN_JOB $CLOUDTRAIN_NOPE ${CLOUDTRAIN_X}")
    assert list(found) == ["CLOUDTRAIN_NOPE", "CLOUDTRAIN_X"]


def test_argument_has_the_numbers_of_its_rank() -> None:
    """Only torchrun's names, whole, in both forms, and once; two dollars escape them too."""
    values = {**VALUES, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "CLOUDTRAIN_CODE_DIR": "/$RANK"}
    values["MASTER_ADDR"] = "h0"
    text = "--local_rank=$LOCAL_RANK $RANK/$WORLD_SIZE $RANKS $$RANK $HOME $CLOUDTRAIN_JOB $CLOUDTRAIN_CODE_DIR"
    assert variables.of_rank(text, values) == "--local_rank=1 3/8 $RANKS $RANK $HOME digits-1 /$RANK"
    assert (
        variables.of_rank("${RANK}x tcp://$MASTER_ADDR:1 $${RANK} ${rank}", values) == "3x tcp://h0:1 ${RANK} ${rank}"
    )


@given(st.text(alphabet=st.sampled_from("$${}ab_ 1\\'\"`CLOUDTRAIN\n\t\u20ac"), max_size=40))
def test_further_text_stays_byte_for_byte(text: str) -> None:
    """Dollars, braces, quotes and line ends without a reference pass unchanged."""
    if "CLOUDTRAIN_" not in text:
        assert variables.expanded(text, VALUES) == text
