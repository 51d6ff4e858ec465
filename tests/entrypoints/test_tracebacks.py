"""The frames of a traceback that are shown."""

from cloudtrain.entrypoints.rank import tracebacks

OWN = '  File "data.py", line 9, in __getitem__\n    return self.rows[index]\n           ~~~~~~~~~^^^^^^^\n'
FOREIGN = "".join(f'  File "/lib/{n}.py", line {n}, in f\n    call()\n' for n in range(9))
MADE = '  File "<string>", line 2, in __init__\n'


def shown(trace: str, most: int) -> list[str]:
    """Return the chosen lines, with at most the given number besides the gaps."""
    frames = tracebacks.frames_of(trace)[0]
    return tracebacks.chosen(frames, lambda lines: len(lines) - lines.count(tracebacks.GAP) <= most)


def test_traceback_that_fits_is_shown_whole() -> None:
    """The carets are shown too, and no gap."""
    trace = f"Traceback (most recent call last):\n{OWN}{MADE}ValueError: x\n  more"
    assert shown(trace, 10) == [*OWN.splitlines(), *MADE.splitlines()]
    assert tracebacks.frames_of(trace)[1] == ["ValueError: x", "  more"]


def test_deepest_frame_of_the_user_is_kept_if_nothing_fits() -> None:
    """Neither a library's frame nor a frame without a file replaces the user's frame."""
    caller = '  File "train.py", line 1, in <module>\n    main()\n'
    found = shown(f"{caller}{OWN}{FOREIGN}{MADE}ValueError: x", 0)
    assert found == ["  ...", *OWN.splitlines()[:2], "  ..."]


def test_frames_without_any_of_the_user_are_the_last_ones() -> None:
    """Without a frame of the user, the place of the raise is the most useful frame."""
    assert shown(f"{FOREIGN}ValueError: x", 4) == ["  ...", *FOREIGN.splitlines()[-4:]]
    assert shown("ValueError: x", 4) == []


def test_frames_quoted_by_a_message_count() -> None:
    """A data loader's worker fails in the user's dataset, and the message contains the worker's traceback."""
    message = f"Caught IndexError in worker 0.\nOriginal Traceback:\n{OWN}IndexError: 3"
    trace = f"Traceback (most recent call last):\n{FOREIGN}IndexError: {message}"
    assert '  File "data.py", line 9, in __getitem__' in shown(trace, 2)
    assert tracebacks.frames_of(trace)[1] == ["IndexError: 3"]
