"""An auto-parallelizing compiler for JAX train steps."""

from typing import TYPE_CHECKING

from autopar.lazy_imports import later

if TYPE_CHECKING:
    from autopar import errors as errors
    from autopar.api import OwnRows as OwnRows
    from autopar.api import ParallelStep as ParallelStep
    from autopar.api import distributed as distributed
    from autopar.api import lint as lint
    from autopar.api import parallelize as parallelize
    from autopar.api import partition_spec as partition_spec
    from autopar.api import plan as plan
    from autopar.api import shardings as shardings
    from autopar.api import verify as verify
    from autopar.api import why_not as why_not
    from autopar.cluster import Cluster as Cluster
    from autopar.ir.plan import Plan as Plan
    from autopar.ir.sharding import MeshShape as MeshShape
    from autopar.pages import write_report as write_report
    from autopar.plans import compare as compare
    from autopar.plans import inspect as inspect
    from autopar.plans import load as load
    from autopar.plans import save as save
    from autopar.reasons import explain as explain
    from autopar.rules import RuleBook as RuleBook
else:
    __getattr__, __dir__ = later(__name__)

# fmt: off
__all__ = [
    "Cluster", "MeshShape", "OwnRows", "ParallelStep", "Plan", "RuleBook", "compare",
    "distributed", "errors", "explain", "inspect", "lint", "load", "parallelize",
    "partition_spec", "plan", "save", "shardings", "verify", "why_not", "write_report",
]
