"""Notifications to users, sent to real receivers on loopback: delivered, refused, hanging, hostile."""

import contextlib
import email
import email.policy
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cloudtrain.entrypoints.notices import receivers as posts
from cloudtrain.entrypoints.notices import transports
from cloudtrain.entrypoints.notices.facts import JobFacts, StepFacts
from cloudtrain.entrypoints.notices.message import DeliveryError, Notice, compose, masked
from cloudtrain.entrypoints.notices.resume_cost import amount, cap_s, more
from cloudtrain.entrypoints.notices.sending import Channel, back_off_s, send, try_all
from cloudtrain.entrypoints.terms import CostRate, Terms
from doubles import receivers
from doubles.certificates import Authority

# The server of these tests requests a password in clear text, on the same machine.
pytestmark = pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")

FACTS = JobFacts("digits-x1", "local", 1, spent_micro=2_500_000, limit_micro=5_000_000, burn_micro_h=600_000)
HOSTILE = "x\r\nBcc: all@example.org\r\n<!channel> <https://evil.example|click> `a` & **b** ж\u202e\x1b[31m"


def notice(headline: str = "50 % of the budget is spent", facts: JobFacts = FACTS) -> Notice:
    """Return a typical notice."""
    return compose("budget:50@5000000", "budget", headline, facts, 1000.0)


def why(channel: Channel) -> DeliveryError:
    """Return the channel's error for a notice."""
    with pytest.raises(DeliveryError) as caught:
        send(channel, notice())
    return caught.value


def test_webhook_gets_fields_and_text() -> None:
    """A program finds numbers, a person a text of any script, and all tries have the same id."""
    with receivers.hooks() as told:
        send(Channel("webhook", told.url), notice("損失 über 50 % 🎉"))
    _, headers, body = told.asked[0]
    assert body["title"] == "digits-x1: 損失 über 50 % 🎉"
    assert (body["event"], body["spend_usd"], body["limit_usd"], body["job"]) == ("budget", 2.5, 5.0, "digits-x1")
    assert "2.50 USD of 5.00 USD (50 %), 0.60 USD an hour" in body["text"]
    assert headers["Idempotency-Key"] == body["id"] == notice().id


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_transient_failure_is_reported_without_the_address(status: int) -> None:
    """The path of a webhook's address is a secret: the path alone allows posts."""
    with receivers.hooks([status]) as told:
        fault = why(Channel("webhook", told.url))
    assert f"HTTP {status}" in fault.message
    assert "secret-part" not in f"{fault} {fault.cure}"


def test_retry_after_of_the_receiver_is_used() -> None:
    """Slack sends Retry-After with 429."""
    with receivers.hooks([429]) as told:
        told.headers["Retry-After"] = "7"
        fault = why(Channel("slack", told.url))
    assert (fault.after_s, back_off_s(1, fault), back_off_s(1)) == (7.0, 7.0, 0.5)


@pytest.mark.parametrize(("status", "cure"), [(404, "make a new webhook"), (302, "use the target address")])
def test_refusal_names_its_remedy(status: int, cure: str) -> None:
    """A redirected POST would arrive as a GET, so redirects are not followed."""
    with receivers.hooks([status]) as told:
        told.headers["Location"] = told.url
        fault = why(Channel("webhook", told.url))
    assert cure in fault.cure
    assert len(told.asked) == 1


@pytest.mark.parametrize("address", ["", "nonsense", "ftp://host/x", "http://[half", "http://a b/", "http://a\nb/"])
def test_invalid_address_is_a_fault(address: str) -> None:
    """Any invalid value of a variable gives a message, and a port without a listener "cannot be reached"."""
    assert why(Channel("webhook", address)).message
    assert "cannot be reached" in why(Channel("webhook", f"http://127.0.0.1:{receivers.free_port()}/x")).message


@pytest.mark.parametrize("way", [receivers.HANG, receivers.TRICKLE])
def test_hang_is_cut(way: int) -> None:
    """A receiver that never answers, or sends a byte now and then, holds up no further receiver."""
    with receivers.hooks([way]) as stuck, receivers.hooks() as told:
        begin_s = time.monotonic()
        sends = [partial(send, Channel("webhook", hook.url), notice()) for hook in (stuck, told)]
        first, second = try_all(sends, 0.4)
        assert (first and first.message, second) == ("no answer within 0 s", None)
        assert time.monotonic() - begin_s < 5.0


ENDLESS = {  # what a receiver sends at once, and then again and again
    "100 for ever": ("webhook", "", "HTTP/1.1 100 Continue\r\n\r\n"),
    "a head without an end": ("webhook", "HTTP/1.1 200 OK\r\nX: ", "x"),
    "replies without an end": ("email", "220-hello\r\n", "220-" + "x" * 4000 + "\r\n"),
    "a reply without an end": ("email", "", "2"),
}


@pytest.mark.parametrize("form", ENDLESS)
def test_hostile_receiver_holds_no_thread(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that answers on and on is cut at the limit of a try: else each try would leave a busy thread."""
    kind, first, again = ENDLESS[form]
    monkeypatch.setattr(transports, "LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection = listener.accept()[0]
            with connection, contextlib.suppress(OSError):
                connection.sendall(first.encode())
                while True:
                    connection.sendall(again.encode())
                    time.sleep(0.05 if len(again) == 1 else 0)

        threading.Thread(target=answer, daemon=True).start()
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        place = Channel(kind, f"http://{at}/x") if kind == "webhook" else Channel(kind, "me@here", f"smtp://{at}")
        (fault,) = try_all([partial(send, place, notice())], 8.0)
    assert fault is None or "within 8 s" not in fault.message


def test_receipt_holds_whatever_follows() -> None:
    """A 2xx is a receipt, also with a body that never comes; a redirect to anything is one refusal in words."""
    with receivers.hooks([200, 302]) as told:
        told.headers |= {"Content-Length": "10000000000", "Location": "http://[::"}
        begin_s = time.monotonic()
        send(Channel("webhook", told.url), notice())
        assert time.monotonic() - begin_s < 5.0
        assert "redirects to another address" in why(Channel("webhook", told.url)).message


def test_slack_escapes_links_and_mentions() -> None:
    """Slack would interpret <!channel> in any text in its own format; a long error is cut, never inside an escape."""
    body = posts.slack_body(notice(HOSTILE))
    assert "<" not in body["text"]
    assert "&lt;!channel&gt;" in body["text"]
    hostile = Notice("", "k", "failed", "t", ("```<!here>",))
    assert posts.slack_body(hostile)["blocks"][1]["text"]["text"] == "```'''&lt;!here&gt;```"
    body = posts.slack_body(notice("<" * 5000))
    assert len(body["blocks"][0]["text"]["text"]) <= 150
    assert len(body["text"]) <= 3000
    assert body["text"].removesuffix("…").endswith(";")


def test_teams_gets_a_card_without_markup() -> None:
    """Teams is recognised by its host; text runs are never read as markdown."""
    assert posts.is_teams("https://x.webhook.office.com/a")
    assert not posts.is_teams("https://webhook.office.com.evil.example/a")
    card = posts.teams_body(notice())["attachments"][0]["content"]
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}


def test_mail_arrives() -> None:
    """A mail has a subject, a date, and an id that a repeat keeps."""
    with receivers.letters() as post:
        send(Channel("email", "team@example.org", f"smtp://127.0.0.1:{post.port}", "train@example.org"), notice())
    sender, to, raw = post.got[0]
    letter = email.message_from_bytes(raw, policy=email.policy.default)
    assert (sender, to) == ("train@example.org", ["team@example.org"])
    assert letter["Subject"] == "digits-x1: 50 % of the budget is spent"
    assert letter["Message-ID"] == f"<{notice().id}@cloudtrain>"
    assert "0.60 USD an hour" in letter.get_content()


def test_mail_of_a_hostile_job_adds_no_header() -> None:
    """A line end in an error becomes a blank in the subject; the text arrives."""
    with receivers.letters() as post:
        send(Channel("email", "team@example.org", f"smtp://127.0.0.1:{post.port}"), notice(HOSTILE))
    letter = email.message_from_bytes(post.got[0][2], policy=email.policy.default)
    assert letter["Bcc"] is None
    assert post.got[0][1] == ["team@example.org"]
    assert "Bcc: all@example.org <!channel>" in letter["Subject"]
    assert "ж" in letter["Subject"]


def test_mail_with_a_password_needs_tls_except_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback cannot be intercepted; the password of a URL may contain any character."""
    with receivers.letters("p@ss:w/rd") as post:
        url = f"smtp://me%40here:p%40ss%3Aw%2Frd@127.0.0.1:{post.port}"
        send(Channel("email", "team@example.org", url), notice())
        monkeypatch.setattr(transports, "_is_here", lambda host: False)
        assert "never sent in clear text" in why(Channel("email", "team@example.org", url)).message
    assert (post.logins, post.got[0][0]) == (["me@here"], "me@here")


def test_refused_mail_login_is_reported_without_the_password() -> None:
    """The address in the message has neither user nor password."""
    with receivers.letters("right") as post:
        fault = why(Channel("email", "a@example.org", f"smtp://me%40here:wrong@127.0.0.1:{post.port}"))
    assert "refuses the login (535)" in fault.message
    assert "wrong" not in str(fault)


@pytest.mark.parametrize("at_once", [False, True])
def test_mail_goes_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """Mail uses STARTTLS or TLS from the first byte, and never a server with an untrusted certificate."""
    authority = Authority(tmp_path)
    with receivers.letters("pw", authority.context("localhost"), at_once=at_once) as post:
        url = f"smtp{'s' if at_once else ''}://me%40here:pw@localhost:{post.port}"
        assert "no certificate that can be trusted" in why(Channel("email", "a@example.org", url)).message
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        send(Channel("email", "a@example.org", url), notice())
    assert len(post.got) == 1


@pytest.mark.parametrize("answer", ["451 later", "550 no such user"])
def test_mail_that_is_refused_is_a_fault(answer: str) -> None:
    """The message contains the server's code."""
    with receivers.letters() as post:
        post.refusals.append(answer)
        assert answer[:3] in why(Channel("email", "a@example.org", f"smtp://127.0.0.1:{post.port}")).message


@pytest.mark.parametrize("smtp", ["", "host:25", "http://host", "smtp://", "smtp://h:port"])
def test_invalid_mail_server_is_reported_with_the_right_form(smtp: str) -> None:
    """Any invalid value of the variable gives the right form."""
    assert "smtp://USER:PASSWORD@HOST" in why(Channel("email", "a@example.org", smtp)).cure


def test_channel_never_shows_its_address() -> None:
    """The address appears neither in logs nor in tracebacks."""
    hook = Channel("slack", "https://hooks.slack.com/services/T/secret")
    post = Channel("email", "a@example.org", "smtp://me:secret@host")
    assert "secret" not in f"{hook!r} {hook.shown} {post!r} {post.shown}"
    assert masked("https://user:secret@host:8443/secret?token=secret") == "https://host:8443/..."


def test_save_without_a_step_is_a_known_checkpoint() -> None:
    """The words are the words of `status`; a known step comes before the words."""
    saved = replace(FACTS, is_saved=True)
    assert "  checkpoint  saved, step not reported\n" in notice("ends", saved).text
    assert "  checkpoint  no checkpoint reported\n" in notice("ends", FACTS).text
    assert "  checkpoint  step 0\n" in notice("ends", replace(saved, progress=StepFacts(checkpoint_step=0))).text


def test_unknown_sum_is_shown_as_unknown() -> None:
    """An unknown sum is never shown as a number."""
    told = notice("ends", JobFacts("j-1", "ssh", 2, state="failed"))
    assert told.fields["spend_usd"] is None
    assert "unknown" in told.text


RATE, TERMS = CostRate(1, 3_600_000), Terms(tail_s=30)


def test_extension_costs_the_remaining_steps_a_start_and_a_save() -> None:
    """100 of 200 steps in 1000 s, saved at 80: 1200 s more, a tenth on top, a start, two minutes to save."""
    progress = StepFacts(100, 200, 80, eta_s=1000.0)
    found = more(1_000_000, 900_000, RATE, TERMS, progress)
    exact = (1200 * 11 // 10 + 30 + 120 + 30) * 1000 - 100_000
    assert exact == 1_400_000 <= found.micro == 1_400_000
    assert amount(found.micro) == "1.40USD"
    assert found.words == "1.20 to finish, 0.30 in reserve for start and end, less 0.10 left"


def test_extension_begins_at_the_next_save() -> None:
    """A running job does 400 of its 1000 s: 600 s more, a tenth, a start and a save."""
    found = more(1_000_000, 500_000, RATE, TERMS, StepFacts(eta_s=1000.0), until_s=400)
    assert found.micro == 740_000  # 660, 30, 120 and 30 s, of which 100 s are paid for
    assert more(10_000_000, 0, RATE, TERMS, StepFacts(eta_s=10.0), until_s=400) is None


def test_job_with_seconds_left_needs_no_second_budget() -> None:
    """200 USD an hour, 15 s left, 1.86 of 5 USD left, and the shortest run takes a minute."""
    rate, terms = CostRate(1, 200_000_000), Terms(tail_s=20, least_s=60)
    found = more(5_000_000, 3_140_000, rate, terms, StepFacts(340, 500, 340, eta_s=15.0))
    assert found.micro == 2_700_000
    assert found.words == "0.83 to finish, 3.73 in reserve for start and end, less 1.86 left"


def test_save_after_the_last_reported_step_counts() -> None:
    """At the deadline a job saves its current step, between two lines of its log."""
    unknown = StepFacts(100, 200, None, saved_after=90, eta_s=1000.0)
    assert cap_s(unknown, TERMS) == cap_s(replace(unknown, checkpoint_step=90), TERMS)
    late = StepFacts(100, 200, 150, eta_s=1000.0)
    assert cap_s(late, TERMS) == 500 * 1.1 + 30 + 120
    assert cap_s(replace(late, checkpoint_step=200), TERMS) == 30 + 10


@pytest.mark.parametrize(
    ("lacking", "asked"), [(37.2, "38USD"), (204.8, "210USD"), (2.611, "2.70USD"), (0.001, "0.01USD")]
)
def test_requested_sum_has_two_digits(lacking: float, asked: str) -> None:
    """Two significant digits, rounded up."""
    rate = CostRate(1, round(lacking * 3600e6 / 60))
    found = more(1, 1, rate, Terms(least_s=60), StepFacts(eta_s=0.0))
    assert amount(found.micro) == asked


def test_extension_of_unknown_length_costs_as_much_again() -> None:
    """A script without steps: as much as before, and at least the cost of the shortest useful run."""
    found = more(1_000_000, 900_000, RATE, TERMS, StepFacts())
    assert (found.micro, found.finish_micro) == (1_000_000, None)
    least = more(1_000_000, 900_000, RATE, replace(TERMS, least_s=3570), StepFacts())
    assert least.micro == 3_500_000
