"""A job's lines as a file: all of them that are wanted, as they are read."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.responses import StreamingResponse

from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.ui.feeds import Wanted, plain
from cloudtrain.launcher.ui.pool import Pool

__all__ = ["lines_of"]


def lines_of(pool: Pool, wanted: Wanted) -> StreamingResponse:
    """Return the lines that are there now, of a job that runs up to this moment. Raises UsageError for a pattern."""
    wanted.test()
    name = f"{wanted.job}-attempt-{wanted.attempt}.log"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(_text(pool, wanted), media_type="text/plain; charset=utf-8", headers=headers)


def _text(pool: Pool, wanted: Wanted) -> Iterator[bytes]:
    from cloudtrain.launcher.logs.stream import Stream

    wants = wanted.test()
    with pool.one() as registry:
        job = registry.find(wanted.job)
        attempt = registry.attempt(job, wanted.attempt)
        many = attempt.plan["ranks"] > 1
        stream = Stream(registry, job, attempt, ranks=wanted.ranks, now=True)
        try:
            while attempt.ref is not None:
                try:
                    lines = stream.read()
                except UnreachableError as error:
                    yield f"[the log cannot be read on for now: {error.message}]\n".encode("utf-8", "replace")
                    return
                text = "".join(
                    f"{f'[r{line.rank}] ' if line.rank is not None else f'[node{line.node}] '}{plain(line.text)}\n"
                    if many
                    else f"{plain(line.text)}\n"
                    for line in lines
                    if wants(line) and not line.text.endswith("\r")
                )
                if text:
                    yield text.encode("utf-8", "replace")
                if stream.is_over or not stream.is_behind:
                    return
        finally:
            stream.close()
