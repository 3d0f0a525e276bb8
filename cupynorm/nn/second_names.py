"""Arguments that have a second name, which is another library's."""

from __future__ import annotations


def either(**spellings: object) -> object:
    """The one of two spellings that is given, None if neither is. Raises TypeError for both."""
    given = {name: value for name, value in spellings.items() if value is not None}
    if len(given) > 1:
        raise TypeError(
            f"{' and '.join(given)} are given; expected one of these two names of one argument"
        )
    return next(iter(given.values()), None)
