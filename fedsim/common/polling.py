"""How long to wait before the next question for something that may come at any time."""

FIRST_SECONDS, LAST_SECONDS = 0.25, 3.0  # between two questions; a SuperLink writes to its database for each
SHARE = 1 / 20  # an answer is late by at most this fraction of the time waited so far


def pause(waited: float) -> float:
    """Seconds until the next question, after `waited` seconds: short at first, and longer the longer it takes."""
    return min(max(FIRST_SECONDS, SHARE * waited), LAST_SECONDS)
