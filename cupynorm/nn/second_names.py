"""Arguments that have a second name, which is another library's."""

from __future__ import annotations


def either(**spellings: object) -> object:
    """The one of two spellings that is given, None if neither is. Raises TypeError for both."""
    present = {name: value for name, value in spellings.items() if value is not None}
    if len(present) > 1:
        raise TypeError(
            f"{' and '.join(present)} are given; expected one of these two names of one argument"
        )
    return next(iter(present.values()), None)
