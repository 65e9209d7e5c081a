"""When Python looks for garbage: rarely while a command starts, because imports make many objects and no garbage."""

import gc

USUAL = gc.get_threshold()
MANY_OBJECTS = 100_000


def starting() -> None:
    """Look for garbage rarely: each search goes through all objects of all modules."""
    gc.set_threshold(MANY_OBJECTS)


def started() -> None:
    """After `starting`: search as usual from now on, but not among the objects that exist already."""
    if gc.get_threshold()[0] == MANY_OBJECTS:  # a program of the user that calls `launch` has rules of its own
        gc.freeze()
        gc.set_threshold(*USUAL)
