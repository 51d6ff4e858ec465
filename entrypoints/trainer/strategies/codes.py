"""Codes for a few entries of a long vector: 16 bits for each entry, which hold the gap to the entry before and a sign.

A word holds the number of skipped positions, 0 to 32766, in the lower 15 bits, and the sign in the highest bit. The
word 32767 is an escape: it skips 32767 positions and names no entry. At densities of 10 %, 1 % and 0.1 % the code is
20, 200 and 2000 times smaller than fp32; the entropy allows 56, 352 and 2579 times. Golomb and Rice codes come near the
entropy, but are read bit by bit: 3 us an entry in Python.

All functions work on the device of their arguments. `nonzero` and the escapes make a GPU wait for its host.
"""

from __future__ import annotations

import torch

_ESCAPE = 0x7FFF
_SIGN = 1 << 15
_CHUNK = 1 << 18  # entries in the processor's cache: 13 ms for 10 M entries, and 34 ms without chunks (one thread)


def find(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the positions, ascending, of the entries whose magnitude is at least the threshold.

    `values` is a vector. Entries that are not finite may be missing.
    """
    size = min(len(values), _CHUNK) if values.device.type == "cpu" else len(values)
    if not size:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    magnitudes, hits = torch.empty_like(values[:size]), torch.empty_like(values[:size], dtype=torch.bool)
    found = []
    for number, part in enumerate(torch.split(values, size)):
        count = len(part)
        torch.abs(part, out=magnitudes[:count])
        torch.ge(magnitudes[:count], threshold, out=hits[:count])
        found.append(hits[:count].nonzero().view(-1).add_(number * size))
    return torch.cat(found)


def encode(positions: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Return the code of ascending positions and of their signs, `negative` or not, as int16."""
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    signs = negative.to(torch.int32) * _SIGN
    longest = int(gaps.max()) if len(gaps) else 0
    if longest < _ESCAPE:
        return _words(gaps.to(torch.int32) + signs)
    escapes = gaps // _ESCAPE
    places = torch.arange(len(gaps), device=gaps.device) + escapes.cumsum(0)
    words = torch.full((int(places[-1]) + 1,), _ESCAPE, dtype=torch.int32, device=gaps.device)
    words[places] = (gaps % _ESCAPE).to(torch.int32) + signs
    return _words(words)


def decode(code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions, ascending, and whether each is negative."""
    skipped = code & _ESCAPE
    is_entry = skipped != _ESCAPE
    steps = skipped.to(torch.int64) + is_entry
    places = steps.cumsum(0) - 1
    if bool(is_entry.all()):
        return places, code < 0
    return places[is_entry], code[is_entry] < 0


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return values from 0 to 65535 as int16 with the same bits."""
    return torch.where(values < _SIGN, values, values - 2 * _SIGN).to(torch.int16)
