"""The errors that autopar raises on purpose.

* AutoparError
  x InputError               something the caller handed in
    + ClusterError           a cluster name, file or figure that cannot be used
    + MeshError              a mesh that does not fit its cluster, or a bad mesh text
    + PinError               a pin that matches nothing, cannot be kept, or contradicts another
    + TraceError             the step could not be traced
    + ArgumentError          arguments that do not fit the step or its plan
    + GraphSyntaxError       text that does not parse as a graph
    + GraphError             a graph that breaks its own laws
    + BatchError             a step that cannot be cut into microbatches exactly
      - RowsError            an operation mixes rows of the batch, or may do so
      - BatchStatisticError  a statistic of the whole batch decides what becomes of its rows
    + ScheduleError          a schedule that is unknown, or cannot be made or timed as asked
  x PlanError                a plan and what it meets
    + PlanFileError          a plan file that is damaged, or of another version
    + PlanMismatchError      a plan that was made for another model, cluster or JAX
    + VerifyError            a plan's program of which no compiler could be asked, or answered
  x InfeasibleError          no plan satisfies the limits
    + MemoryLimitError       the devices' memory is too small
  x CheckpointError          a checkpoint that cannot be written, read, or taken as a step's state
  x JobError                 processes of a job that do not agree, or one that is lost
  x SolverError              no solver could be run, or it stopped with no answer
"""

import reprlib

_SHOWN = 60


class AutoparError(Exception):
    """The base of every error raised on purpose."""


class InputError(AutoparError):
    """Something the caller handed in cannot be used."""


class ClusterError(InputError):
    """A cluster name, file or figure that cannot be used."""


class MeshError(InputError):
    """A mesh that does not fit its cluster, or a mesh text that does not parse."""


class PinError(InputError):
    """A pin that matches nothing, cannot be kept, or contradicts another."""


class TraceError(InputError):
    """The step could not be traced."""


class ArgumentError(InputError):
    """Arguments that do not fit the step or its plan."""


class GraphSyntaxError(InputError):
    """Text that does not parse as a graph."""


class GraphError(InputError):
    """A graph that breaks its own laws."""


class BatchError(InputError):
    """A step that cannot be cut into microbatches exactly."""


class RowsError(BatchError):
    """An operation mixes rows of the batch, or may do so."""


class BatchStatisticError(BatchError):
    """A statistic of the whole batch decides what becomes of its rows."""


class ScheduleError(InputError):
    """A schedule that is unknown, or that cannot be made or timed for what was asked."""


class PlanError(AutoparError):
    """A plan and what it meets do not fit."""


class PlanFileError(PlanError):
    """A plan file that is damaged, or of another version."""


class PlanMismatchError(PlanError):
    """A plan that was made for another model, cluster or JAX."""


class LoweringError(PlanError):
    """The stages of a plan cannot be lowered to one program, as was asked for."""


class VerifyError(PlanError):
    """The compiler to ask about a plan's program is not installed, or it gave no answer."""


class InfeasibleError(AutoparError):
    """No plan satisfies the limits and pins."""


class MemoryLimitError(InfeasibleError):
    """The devices' memory is too small for every plan."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written or read, or is of another state."""


class JobError(AutoparError):
    """The processes of a job do not agree on what they run, or one of them is lost."""


class SolverError(AutoparError):
    """No solver could be run, or it stopped with no answer."""


def bulleted(headline: str, faults: list[str], remedy: str) -> str:
    """A message of a headline, a bullet for each fault, and what to do."""
    return "\n".join([headline, *(f"* {fault}" for fault in faults), remedy])


def shown(value: object) -> str:
    """A value as it is written, cut short where it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = _SHOWN
    try:
        text = " ".join(short.repr(value).split())
    except Exception:  # a repr of the user's may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def refused(option: str, given: object, accepted: str) -> str:
    """The message for an option that cannot be used."""
    return f"{option} is {shown(given)}; it takes {accepted}"
