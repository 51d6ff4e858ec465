"""Selects the frames of a traceback if not all frames fit: the user's own frame is never left out.

A frame of the user's code has a relative path, because `worker.py` takes the code folder off. All other frames are of
libraries, or have no file (`<string>`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

GAP = "  ..."
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_CARETS = re.compile(r" +[~^]+[~^ ]*$")

Frame = Sequence[str]  # its lines


def frames_of(trace: str) -> tuple[list[Frame], list[str]]:
    """Return the frames, the deepest last, and the lines of the exception below them.

    A message may quote the traceback of another process, as torch's data loader does; its frames are the deepest then.
    """
    frames: list[list[str]] = []
    end: list[str] = []
    for line in trace.splitlines():
        if _FRAME.match(line):
            frames.append([line])
            end = []
        elif frames and not end and line.startswith(("    ", "  [Previous line")):
            frames[-1].append(line)
        else:
            end.append(line)
    return list(frames), end if frames else trace.splitlines()


def chosen(frames: Sequence[Frame], fits: Callable[[list[str]], bool]) -> list[str]:
    """Return the lines of the deepest frames that fit, and always the deepest frame of the user's code.

    GAP stands for frames left out. Lines of carets are left out if not all frames fit.
    """
    if not frames or fits(found := [line for frame in frames for line in frame]):
        return found if frames else []
    frames = [[line for line in frame if not _CARETS.match(line)] for frame in frames]
    last = len(frames) - 1
    files = [match[1] if (match := _FRAME.match(frame[0])) else "<" for frame in frames]
    kept = {max((index for index, file in enumerate(files) if not file.startswith(("/", "<"))), default=last)}
    for index in range(last, -1, -1):
        if not fits(_joined(frames, {*kept, index})):
            break
        kept.add(index)
    return _joined(frames, kept)


def _joined(frames: Sequence[Frame], kept: Collection[int]) -> list[str]:
    lines: list[str] = []
    for index, frame in enumerate(frames):
        if index in kept:
            lines += frame
        elif lines[-1:] != [GAP]:
            lines.append(GAP)
    return lines
