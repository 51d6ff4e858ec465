"""The routes of the page and their handlers."""

from __future__ import annotations

import gc
import hmac
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs

from anyio import CancelScope, to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..backend import LogLine
from ..errors import CapacityError, CloudtrainError, ConfigError, NoSuchJobError, UnreachableError, UsageError
from ..jobs import stopping
from ..logs.stream import LogStream
from ..logs.view import parse_ranks
from ..report.page import report_html
from ..report.sweep_page import sweep_html
from ..store.registry import Registry
from ..text import visible
from ..text.terminal import say
from . import pages
from .feeds import LogQuery
from .guard import CSRF_FIELD, CSRF_HEADER, Guard
from .site import Site
from .sse import Shown, stream

MOST_COMPARED = 8
MOST_FIELDS = 20
MOST_DOWNLOADS = 4  # at the same time; each holds a page of lines and some open files
PIECE_BYTES = 1 << 18  # of text that waits for the client
# A report is a whole page with its own script: sandboxed, without network access and without forms.
_REPORT_HEADERS = {
    "content-security-policy": "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


def make(site: Site, port: int, used: Callable[[], None] = lambda: None) -> Guard:
    """Return the application for a server on the given port of the loopback interface."""
    handlers = _Handlers(site)
    routes = [
        Route("/", handlers.page(handlers.jobs)),
        Route("/stream", handlers.jobs_stream),
        Route("/compare", handlers.page(handlers.compare)),
        Route("/spend", handlers.page(handlers.spend)),
        Route("/static/{name}", handlers.static),
        Route("/favicon.ico", handlers.static),  # for a page that names no icon
        Route("/jobs/{job}", handlers.page(handlers.job)),
        Route("/jobs/{job}/stream", handlers.job_stream),
        Route("/jobs/{job}/curves", handlers.curves),
        Route("/jobs/{job}/log", handlers.download),
        Route("/jobs/{job}/report", handlers.page(handlers.report, _REPORT_HEADERS)),
    ]
    if not site.is_read_only:
        routes += [
            Route("/jobs/{job}/stop", handlers.stop, methods=["POST"]),
            Route("/jobs/{job}/resume", handlers.page(handlers.offer), methods=["GET"]),
            Route("/jobs/{job}/resume", handlers.resume, methods=["POST"]),
        ]
    of_errors = {CloudtrainError: handlers.refused, 404: handlers.missing, 500: handlers.broken}
    app = Starlette(routes=routes, exception_handlers=of_errors, lifespan=site.running)
    # Around the whole app: Starlette runs its own middleware inside the layer that handles our errors.
    return Guard(app, keys=site.keys, port=port, used=used)


class _Handlers:
    """The handlers of all routes; blocking work runs in a thread."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def page(
        self, show: Callable[[Registry, Request], str], headers: dict[str, str] | None = None
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a whole page; `show` runs in a thread."""

        async def handle(request: Request) -> Response:
            if headers is None:  # a report does not change
                self.site.asked()
            text = await self.site.read(lambda registry: show(registry, request))
            return HTMLResponse(_encoded(text), headers=headers)

        return handle

    def jobs(self, registry: Registry, request: Request) -> str:
        choice = pages.JobListQuery.of(request.query_params)
        table = self._table(registry, choice).parts["jobs"]
        values = {"choice": choice, "table": table, "states": pages.STATES, "stream": f"/stream{choice.query()}"}
        return self.site.pages.render("jobs.html", **values, **pages.choices(registry))

    async def jobs_stream(self, request: Request) -> Response:
        choice = pages.JobListQuery.of(request.query_params)
        return stream(self.site, request, lambda registry: self._table(registry, choice), None)

    def _table(self, registry: Registry, choice: pages.JobListQuery) -> Shown:
        listed = pages.listed(registry, choice)
        is_live = any(job["exit_code"] is None for job in listed["jobs"])
        values = {"choice": choice, "listed": listed, "faults": self.site.faults}
        return Shown({"jobs": self.site.pages.render("_jobs.html", **values)}, is_live=is_live)

    def compare(self, registry: Registry, request: Request) -> str:
        """The curves of chosen jobs in the same charts, and their figures side by side."""
        names = list(dict.fromkeys(request.query_params.getlist("job")))
        if not 2 <= len(names) <= MOST_COMPARED:
            raise UsageError(f"choose 2 to {MOST_COMPARED} jobs to compare")
        return self.site.pages.render("compare.html", jobs=[pages.job_values(registry, name) for name in names])

    def job(self, registry: Registry, request: Request) -> str:
        values = pages.job_values(registry, _name(request))
        shown = self._job(registry, values["job"]["job"])
        return self.site.pages.render("job.html", parts=shown.parts, **values)

    async def job_stream(self, request: Request) -> Response:
        """Changes of the job's page, and new log lines."""
        wanted = await self.site.read(lambda registry: _wanted(registry, request))
        return stream(self.site, request, lambda registry: self._job(registry, wanted.job), wanted)

    def _job(self, registry: Registry, job_id: str) -> Shown:
        return pages.job_parts(self.site.pages, registry, job_id, self.site.faults.get(job_id, ""))

    async def curves(self, request: Request) -> Response:
        self.site.asked()
        text = await self.site.read(lambda registry: pages.curves(registry, _name(request)))
        return Response(text, media_type="application/json")

    async def download(self, request: Request) -> Response:
        """All matching log lines, as a file."""
        return Download(self.site, await self.site.read(lambda registry: _wanted(registry, request)))

    def report(self, registry: Registry, request: Request) -> str:
        """The page that `cloudtrain report` writes."""
        job = registry.find(_name(request))
        return (sweep_html if job.config.get("sweep") else report_html)(registry, job, time.time())

    async def stop(self, request: Request) -> Response:
        """Ask the job to save and stop."""
        is_now = (await self._form(request)).get("now") == "1"
        return await self._done(request, lambda registry: stopping.ask(registry, _name(request), now=is_now).words)

    def offer(self, registry: Registry, request: Request) -> str:
        """The attempt that a resume would send, with the button to send."""
        budget = request.query_params.get("budget", "").strip()
        values = pages.job_values(registry, _name(request))
        offered = pages.resume_offer(registry, values["job"]["job"], budget)
        return self.site.pages.render("resume.html", offer=offered, budget=budget, **values)

    async def resume(self, request: Request) -> Response:
        """Send the offered attempt."""
        form = await self._form(request)
        numbers = {name: form.get(name, "") for name in ("attempt", "worst_micro")}
        if not numbers["attempt"].isdecimal() or not (numbers["worst_micro"] or "0").isdecimal():
            raise UsageError("the form lacks the attempt or the worst case")
        worst_micro = int(numbers["worst_micro"]) if numbers["worst_micro"] else None
        attempt, budget = int(numbers["attempt"]), form.get("budget", "").strip()

        def work(registry: Registry) -> str:
            return pages.resume(registry, _name(request), attempt=attempt, worst_micro=worst_micro, budget=budget)

        return await self._done(request, work)

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the form's fields. Raises UsageError if the form does not come from our own page."""
        text = (await request.body()).decode("utf-8", "replace")
        try:
            fields = parse_qs(text, keep_blank_values=True, max_num_fields=MOST_FIELDS)
        except ValueError:
            raise UsageError("the form has too many fields") from None
        form = {name: values[0] for name, values in fields.items()}
        given = request.headers.get(CSRF_HEADER) or form.get(CSRF_FIELD, "")
        if not hmac.compare_digest(given.encode(), self.site.keys.csrf.encode()):
            raise _ForgedError("this form is not from this page, or the server has started again since")
        return form

    async def _done(self, request: Request, work: Callable[[Registry], str]) -> Response:
        """Return the message: to our script as JSON, else as a redirect to the job."""
        words = await self.site.read(work)
        self.site.watcher.wake()
        if _wants_json(request):
            return JSONResponse({"said": words})
        return RedirectResponse(f"/jobs/{_name(request)}", 303)

    def spend(self, registry: Registry, request: Request) -> str:
        month, by = request.query_params.get("month", ""), request.query_params.get("by", "")
        return self.site.pages.render("spend.html", **pages.spend_values(registry.database, month, by))

    async def static(self, request: Request) -> Response:
        found = self.site.assets.get(request.path_params.get("name", "icon.svg"))
        if found is None:
            return Response("There is no such file.", 404, media_type="text/plain")
        headers = {"cache-control": "private, max-age=31536000, immutable"} if "v" in request.query_params else {}
        return Response(found[0], headers=headers, media_type=found[1])

    async def refused(self, request: Request, error: Exception) -> Response:
        """An error page for a refused request."""
        status = {2: 400, 8: 404}.get(getattr(error, "exit_code", 1), 409)
        return self._error(request, str(error), 403 if isinstance(error, _ForgedError) else status)

    async def missing(self, request: Request, error: Exception) -> Response:
        """An error page for an unknown address."""
        return self._error(request, "There is no such page.", 404)

    async def broken(self, request: Request, error: Exception) -> Response:
        """An error page for an internal error."""
        words = f"cloudtrain itself failed: {type(error).__name__}: {error}"
        say(f"error: {request.url.path}: {words}")
        if os.environ.get("CLOUDTRAIN_DEBUG"):
            traceback.print_exception(error)
        return self._error(request, words, 500)

    def _error(self, request: Request, words: str, status: int) -> Response:
        if _wants_json(request):
            return JSONResponse({"error": words}, status)
        return HTMLResponse(_encoded(self.site.pages.render("error.html", words=words)), status)


class _ForgedError(ConfigError):
    """A form that our own page has not made."""


def _wanted(registry: Registry, request: Request) -> LogQuery:
    """Return the log lines that the address selects. Raises UsageError, NoSuchJobError."""
    query = request.query_params
    job = registry.find(_name(request))
    attempt, node = query.get("attempt", ""), query.get("node", "")
    if any(word and not (word.isascii() and word.isdecimal() and len(word) < 8) for word in (attempt, node)):
        raise UsageError("an attempt and a node are numbers")
    if attempt and not 1 <= int(attempt) <= job.attempt.number:
        raise NoSuchJobError(f"`{job.id}` has no attempt {attempt}")
    number = int(attempt) if attempt else job.attempt.number
    ranks = parse_ranks(words) if (words := query.get("ranks", "").strip()) else None
    return LogQuery(job.id, number, ranks, int(node) if node else None, query.get("grep", ""))


def _name(request: Request) -> str:
    return str(request.path_params["job"])


def _wants_json(request: Request) -> bool:
    return "application/json" in request.headers.get("accept", "")


def _encoded(text: str) -> bytes:
    """Return the page's bytes; characters that UTF-8 cannot encode become question marks."""
    return text.encode("utf-8", "replace")


class Download(StreamingResponse):
    """The lines up to this moment. Raises UsageError for an invalid pattern, CapacityError with too many downloads."""

    def __init__(self, site: Site, wanted: LogQuery) -> None:
        wanted.view()
        self._site, self._text = site, _log_text(site.folder, wanted)
        name = f"{wanted.job}-attempt-{wanted.attempt}.log"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(self._text, media_type="text/plain; charset=utf-8", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines; close the log's files also if the client leaves early."""
        if self._site.downloads >= MOST_DOWNLOADS:
            raise CapacityError(f"{MOST_DOWNLOADS} downloads are under way already", hint="cancel a download, or wait")
        self._site.downloads += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._site.downloads -= 1
            with CancelScope(shield=True):
                await to_thread.run_sync(self._close)

    def _close(self) -> None:
        self._text.close()
        if not self._site.downloads:
            gc.collect()  # an ended connection is a cycle of objects that holds all unsent lines


def _log_text(folder: Path | None, wanted: LogQuery) -> Generator[bytes, None, None]:
    view = wanted.view()
    with closing(Registry(folder)) as registry:
        job = registry.find(wanted.job)
        attempt = registry.attempt(job, wanted.attempt)
        is_alone = attempt.plan.ranks == 1
        stream = LogStream(registry, job, attempt, view, now=True)
        try:
            while True:
                lines = [line for line in view.chosen(stream.read()) if not line.text.endswith("\r")]
                text = _encoded("".join(_line(line, is_alone=is_alone) for line in lines))
                for start in range(0, len(text), PIECE_BYTES):
                    yield text[start : start + PIECE_BYTES]
                if stream.is_over or not stream.came:
                    return
        except UnreachableError as error:
            yield _encoded(f"[the log cannot be read on for now: {error.message}]\n")
        finally:
            stream.close()


def _line(line: LogLine, *, is_alone: bool) -> str:
    who = "" if is_alone else f"[r{line.rank}] " if line.rank is not None else f"[node{line.node}] "
    return f"{who}{visible.shown(line.text, colour=False)}\n"
