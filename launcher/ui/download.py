"""A job's lines as a file: all of them that are wanted, as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from starlette.responses import StreamingResponse

from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.logs import plain
from cloudtrain.launcher.ui.feeds import Wanted
from cloudtrain.launcher.ui.pool import Pool

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import LogLine

__all__ = ["lines_of"]


def lines_of(pool: Pool, wanted: Wanted) -> StreamingResponse:
    """Return the lines that are there now, of a job that runs up to this moment. Raises UsageError for a pattern."""
    wanted.test()
    name = f"{wanted.job}-attempt-{wanted.attempt}.log"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(_text(pool, wanted), media_type="text/plain; charset=utf-8", headers=headers)


def _text(pool: Pool, wanted: Wanted) -> Iterator[bytes]:
    from cloudtrain.launcher.logs.stream import Stream

    wants, find = wanted.test(), wanted.pattern()
    with pool.one() as registry:
        job = registry.find(wanted.job)
        attempt = registry.attempt(job, wanted.attempt)
        is_alone = attempt.plan["ranks"] == 1
        stream = Stream(registry, job, attempt, ranks=wanted.ranks, now=True, find=find)
        try:
            while True:
                lines = [line for line in stream.read() if wants(line) and not line.text.endswith("\r")]
                yield "".join(_line(line, is_alone=is_alone) for line in lines).encode("utf-8", "replace")
                if stream.is_over or not stream.is_behind:
                    return
        except UnreachableError as error:
            yield f"[the log cannot be read on for now: {error.message}]\n".encode("utf-8", "replace")
        finally:
            stream.close()


def _line(line: LogLine, *, is_alone: bool) -> str:
    who = "" if is_alone else f"[r{line.rank}] " if line.rank is not None else f"[node{line.node}] "
    return f"{who}{plain.shown(line.text, colour=False)}\n"
