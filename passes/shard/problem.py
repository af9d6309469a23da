"""The sharding problem and its file form: what the solvers take, and how it is read and written."""

from autopar.passes.shard.arrays import Edge as Edge
from autopar.passes.shard.arrays import Floats as Floats
from autopar.passes.shard.arrays import Problem as Problem
from autopar.passes.shard.arrays import Usage as Usage
from autopar.passes.shard.iopddl import read_iopddl as read_iopddl
from autopar.passes.shard.iopddl import write_iopddl as write_iopddl
