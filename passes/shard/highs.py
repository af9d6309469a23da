# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Runs HiGHS in a thread of its own, so that Ctrl-C gets through while it solves."""

from __future__ import annotations

import threading

import highspy

_TICK_SECONDS = 0.1  # between looks whether it is done
_PATIENCE_SECONDS = 0.5  # for HiGHS to stop; it does not ask within a large linear program


def run_highs(solver: highspy.Highs) -> None:
    """Solve what the solver holds; raises what interrupts the caller, and HiGHS then stops."""
    stop, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def ask(event: highspy.HighsCallbackEvent) -> None:
        if stop.is_set() and event.data_in is not None:
            event.data_in.user_interrupt = True

    def run() -> None:
        try:
            solver.run()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    asked = solver.cbMipInterrupt, solver.cbSimplexInterrupt
    for callback in asked:
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
    for callback in asked:
        callback.unsubscribe(ask)
    if failed:
        raise failed[0]
