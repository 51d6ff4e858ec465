"""The comparison of a request with a platform's record, of its words for the states, and of its times."""

from typing import Any

import pytest

from cloudtrain.launcher.backend import accepted
from cloudtrain.launcher.backend.accepted import Accepted
from cloudtrain.launcher.job import State
from cloudtrain.launcher.selftest import report

STAGES = [["Starting", "Pending"], ["Training"], ["Stopping"], ["Stopped", "Failed"]]


@pytest.mark.parametrize(
    ("sent", "there"),
    [
        ("PT1H30M", "PT90M"),
        (3600, "3600s"),
        (2, "2"),
        ("role", "arn:aws:iam::123456789012:role/role"),
        ("projects/name/global/networks/n", "projects/1234/global/networks/n"),
        ("/subscriptions/1/resourceGroups/g", "/subscriptions/1/resourcegroups/g"),
        ("codes/{}/versions/1", "codes/0f3a/versions/1"),
        (False, None),
        (
            [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}],
            [{"Key": "b", "Value": "2"}, {"Key": "a", "Value": "1"}],
        ),
    ],
)
def test_harmless_conversion_is_no_change(sent: Any, there: Any) -> None:
    """Another unit, a number as a text, an ARN for a name, another case or order of names are the same."""
    came = accepted.of_requests([Accepted({"value": sent}, {"value": there}, ())])
    assert (came["changed"], came["left_out"], came["added"]) == ([], [], [])


@pytest.mark.parametrize(
    ("sent", "there", "words"),
    [
        (600, 300, "value: 600, accepted 300"),
        ("PT10M", "PT10S", "value: PT10M, accepted PT10S"),
        ("secret", "sec", "value: 6 characters, accepted 3 characters"),
        ("codes/{}/versions/1", "codes/0f3a/versions/2", "value: 19 characters, accepted 21 characters"),
    ],
)
def test_change_is_told_without_the_users_texts(sent: Any, there: Any, words: str) -> None:
    """Numbers are told, other texts only by their length."""
    assert accepted.of_requests([Accepted({"value": sent}, {"value": there}, ())])["changed"] == [words]


def test_added_and_left_out_values_are_named() -> None:
    """Names of keys alone; what a send of cloudtrain adds is not the platform's."""
    sent, there = (
        {"tags": {"a": "1"}, "env": [], "spot": True},
        {"tags": {"cloudtrain.owner": "x", "acme": "y"}, "kms": "key", "spot": False, "/subscriptions/1": "z"},
    )
    came = accepted.of_requests([Accepted(sent, there, ())] * 2)
    assert came["changed"] == ["spot: True, accepted False"]
    assert (came["left_out"], came["added"]) == (["tags.a"], ["?", "kms", "tags.?"])


@pytest.mark.parametrize(
    ("words", "unknown", "back"),
    [
        (["Starting", "Training", "Stopping", "Stopped"], [], []),
        (["Starting", "Training", "Failed"], [], []),
        (["Pending", "Starting", "Training", "Stopped"], [], []),
        (["Starting", "Warming", "Training", "Stopped"], ["Warming"], []),
        (["Training", "Starting", "Training", "Stopped"], [], ["Starting after Training"]),
        (["Starting", "Starting", "Training"], [], ["Starting after Starting"]),
    ],
)
def test_words_of_the_platform_keep_the_order_of_its_stages(
    words: list[str], unknown: list[str], back: list[str]
) -> None:
    """An unknown word, a word of an earlier stage and a repeated word are named; a stage may be skipped."""
    came = accepted.of_words([words], STAGES)
    assert (came["unknown"], came["back"], came["words"]) == (unknown, back, words)


@pytest.mark.parametrize(
    ("state", "clock_off_s", "billed_off_s"),
    [
        (State("stopped", started_s=110.0, ended_s=140.0, billed_s=30.0), 0.0, 0.0),
        (State("stopped", started_s=110.0, ended_s=140.0, billed_s=45.0), 0.0, 0.0),  # the machines' time before it
        (State("stopped", started_s=110.0, ended_s=140.0, billed_s=60.0), 0.0, 10.0),
        (State("stopped", started_s=110.0, ended_s=140.0, billed_s=0.0), 0.0, -30.0),
        (State("stopped", started_s=110.0 - 3600, ended_s=140.0), -3590.0, 0.0),
        (State("stopped", started_s=110.0, ended_s=140.0 + 7200), 7190.0, 0.0),
    ],
)
def test_times_of_the_platform_are_within_ours(state: State, clock_off_s: float, billed_off_s: float) -> None:
    """A start before the send, an end after the seen end, and a bill that does not fit are told in seconds."""
    came = report.of_times([(100.0, state, 150.0)])
    assert came == {"clock_off_s": clock_off_s, "billed_off_s": billed_off_s}
