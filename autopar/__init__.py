"""An auto-parallelizing compiler for JAX train steps."""

from autopar import errors as errors
from autopar.api import ParallelStep as ParallelStep
from autopar.api import load as load
from autopar.api import parallelize as parallelize
from autopar.api import plan as plan
from autopar.api import save as save
from autopar.api import verify as verify
from autopar.cluster import Cluster as Cluster
from autopar.ir.mesh import MeshShape as MeshShape
from autopar.ir.plan import Plan as Plan
from autopar.rules import RuleBook as RuleBook

__all__ = [
    "Cluster",
    "MeshShape",
    "ParallelStep",
    "Plan",
    "RuleBook",
    "errors",
    "load",
    "parallelize",
    "plan",
    "save",
    "verify",
]
