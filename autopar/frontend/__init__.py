"""JAX's way in: a step becomes a sealed program and a plain graph."""

from autopar.frontend.compat import goes_through as goes_through
from autopar.frontend.trace.arguments import StepSpec as StepSpec
from autopar.frontend.trace.arguments import defined_at as defined_at
from autopar.frontend.trace.arguments import split_static as split_static
from autopar.frontend.trace.call import Call as Call
from autopar.frontend.trace.call import CallFacts as CallFacts
from autopar.frontend.trace.call import read_call as read_call
from autopar.frontend.trace.graph import build as build
from autopar.frontend.trace.objects import pure_creation as pure_creation
from autopar.frontend.trace.same_trace import is_same_trace as is_same_trace
from autopar.frontend.trace.step import trace as trace
from autopar.frontend.traced import TracedStep as TracedStep
