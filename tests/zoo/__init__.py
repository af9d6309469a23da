"""Train steps as users write them, for comparing a parallel step with the plain one."""

from tests.zoo.case import Case as Case
from tests.zoo.case import Optimizer as Optimizer
from tests.zoo.registry import KINDS as KINDS
from tests.zoo.registry import cases as cases
from tests.zoo.registry import of_each_kind as of_each_kind
