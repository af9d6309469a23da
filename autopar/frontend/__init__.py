"""JAX's way in: a step becomes a sealed program and a plain graph."""

from autopar.frontend.arguments import StepSpec as StepSpec
from autopar.frontend.arguments import split_static as split_static
from autopar.frontend.build import build as build
from autopar.frontend.objects import pure_creation as pure_creation
from autopar.frontend.signature import Call as Call
from autopar.frontend.signature import read_call as read_call
from autopar.frontend.trace import trace as trace
from autopar.frontend.traced import TracedStep as TracedStep
