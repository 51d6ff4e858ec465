"""`cloudtrain ui`: a page in the browser with jobs, log lines, curves and costs."""

from __future__ import annotations

import click

from ..errors import UsageError
from ..text.extras import install
from ..text.terminal import say
from .options import WholeNumber, flag

_EXTRA = ("starlette", "uvicorn", "anyio", "h11")


@click.command("ui")
@click.option("--port", type=WholeNumber(1, 65535), help="The port; without it a free one.")
@flag("--no-open", help="Do not open the browser.")
@flag("--read-only", help="Without buttons: stop and resume nothing, send no alerts.")
def command(port: int | None, no_open: bool, read_only: bool) -> int:
    """Show jobs, their lines, curves and costs on a page that only this machine reaches, until Ctrl-C.

    While it runs it also watches: it sends alerts and the retries of `retry`, as `watch` does.
    """
    try:
        from ..ui.server import serve

        serve(port=port or 0, opens=not no_open, is_read_only=read_only)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _EXTRA:
            raise
        raise UsageError(f"`{error.name}` is not installed", hint=install("server")) from None
    except KeyboardInterrupt:
        pass
    say("the page is closed; the jobs continue")
    return 0
