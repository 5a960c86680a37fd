"""The nearest valid numbers, as text for a message."""

from __future__ import annotations


def multiples(value: int, of: int) -> str:
    """The multiples of `of` around `value`, as text: `96 or 128`."""
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if below else str(above)


def divisors(number: int, near: int) -> str:
    """The divisors of `number` around `near`, as text."""
    reach = 10_000  # a bound, so that absurd numbers are fast too
    below = next((d for d in range(min(near, number), max(0, near - reach), -1) if number % d == 0), 1)
    above = next((d for d in range(near, min(number, near + reach) + 1) if number % d == 0), below)
    return " or ".join(str(d) for d in dict.fromkeys((below, above)))
