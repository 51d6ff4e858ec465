"""A vendor's answer for a machine type: a price, or the reason why no price was found; and doctor's check of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.metering.rate import Kind, Quote, Rate

__all__ = ["compared"]

DIFFERENCE = 0.01  # the smallest relative difference to report


def compared(ask: Callable[[], Quote], known: Mapping[Kind, Rate]) -> Check:
    """Return a check of the vendor's price today against the known price, with advice if they differ.

    A price list that cannot be read is a warning, never an error.
    """
    try:
        quote = ask()
    except CloudtrainError as error:
        return Check("price", "warn", error.message, error.hint or "a job does not need it")
    key, rate = quote.key, quote.rate
    cure = f"cloudtrain prices refresh --backend {key.backend}"
    if rate is None:
        return Check("price", "warn", quote.reason, f"is it the right region? Else set {key.backend}.price_per_hour")
    text = f"{key.instance_type} in {key.region}: {rate.usd:.3f} USD an hour, {key.kind.replace('_', ' ')}"
    text = f"{text}, by {rate.source}"
    ours = known.get(key.kind)
    if ours is None:
        return Check("price", "warn", text, f"our table knows none: {cure}")
    if abs(rate.usd - ours.usd) > DIFFERENCE * ours.usd:
        return Check("price", "warn", text, f"our table says {ours.usd:.3f}, as of {ours.as_of}: {cure}")
    return Check("price", "ok", text)
