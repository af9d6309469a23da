# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Runs HiGHS in a thread of its own, so that Ctrl-C gets through, and stops it by a count.

HiGHS asks whether to go on at places of its search that do not depend on the time, so that so many
questions are the same work on every machine; its own limits leave out what it does at the root.
"""

from __future__ import annotations

import threading

import highspy

_TICK_SECONDS = 0.1  # between looks whether it is done
_PATIENCE_SECONDS = 0.5  # for HiGHS to stop; it does not ask within a large linear program


def run_highs(solver: highspy.Highs, questions: int | None = None) -> int:
    """Solve what the solver holds, until it has asked so often whether to go on.

    Returns how often it asked. Raises what interrupts the caller; HiGHS then stops.
    """
    stop, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []
    asked = 0

    def ask(event: highspy.HighsCallbackEvent) -> None:
        nonlocal asked
        asked += 1
        enough = questions is not None and asked > questions
        if (stop.is_set() or enough) and event.data_in is not None:
            event.data_in.user_interrupt = True

    def run() -> None:
        try:
            solver.run()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    callbacks = solver.cbMipInterrupt, solver.cbSimplexInterrupt
    for callback in callbacks:
        callback.subscribe(ask)
    thread = threading.Thread(target=run, name="HiGHS")
    try:
        thread.start()
        while not done.wait(_TICK_SECONDS):
            pass
    except BaseException:
        stop.set()
        done.wait(_PATIENCE_SECONDS)
        raise
    for callback in callbacks:
        callback.unsubscribe(ask)
    if failed:
        raise failed[0]
    return asked
