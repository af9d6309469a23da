"""The facts of primitives: what sharding each allows, how it fuses, what it costs."""

from autopar.rules.custom import RuleBook as RuleBook
from autopar.rules.custom import parse_rule as parse_rule
from autopar.rules.primitive import Fusion as Fusion
from autopar.rules.primitive import Primitive as Primitive
from autopar.rules.primitive import Work as Work
from autopar.rules.table import CONTROL as CONTROL
from autopar.rules.table import HEAVY as HEAVY
from autopar.rules.table import PARALLEL as PARALLEL
from autopar.rules.table import REPLICATED as REPLICATED
from autopar.rules.table import attach_alike as attach_alike
from autopar.rules.table import attach_rules as attach_rules
from autopar.rules.table import has_rule as has_rule
from autopar.rules.table import primitive as primitive
from autopar.rules.table import primitive_fates as primitive_fates
from autopar.rules.table import primitive_names as primitive_names
from autopar.rules.table import rule_for as rule_for
from autopar.rules.table import unknown_ops as unknown_ops
