"""The table of primitives: from a name to its facts, its rule, and what becomes of it.

`attach_rules` gives every op of a graph its rule: the user's own from a RuleBook, else the table's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import GraphError
from autopar.ir.graph import Graph, Op
from autopar.ir.rule import Kind, Rule
from autopar.ir.values import Literal, Value
from autopar.rules import (
    contract,
    index,
    kernels,
    linalg,
    pointwise,
    random,
    reduce,
    shape,
    window,
)
from autopar.rules.custom import RuleBook
from autopar.rules.primitive import Primitive, replicated_rule, unknown_rule

# No rule is asked for these: what becomes of them, then the names.
_HANDLED: Mapping[str, str] = {
    "its function is planned in its place": """
        call call_hi_primitive closed_call composite core_call custom_jvp_call
        custom_jvp_call_jaxpr custom_linear_solve custom_vjp_call custom_vmap_call eval_jaxpr jit
        linear_call pjit remat_opt xla_metadata_call
    """,
    "its bodies are planned with it": "checkpoint cond remat2 scan while",
    "whole on every device: its function is not looked into": """
        call_hi_primitive_linearized custom_lin program_order run_state shard_map
    """,
}
CONTROL: Mapping[str, str] = {
    name: how for how, names in _HANDLED.items() for name in names.split()
}

# Stand only inside a region that the user wrote for each device, which we leave alone; the front
# end writes sums over a dim that vmap named as sums over a dim.
PARALLEL = frozenset(
    """
    all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
    all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast
    pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax pmin ppermute ppermute_done
    ppermute_start precv preduced psend psum psum_done psum_invariant
    psum_invariant_start psum_start pvary ragged_all_to_all
    reduce_scatter reduce_scatter_done reduce_scatter_start reduced_vary_cast reduced_vary_cast_p
    unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter
    unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p
    """.split()
)

_FOREIGN = "code we cannot see into: give it a rule in a RuleBook"

# Known, and whole on every device on purpose: the reason, then the names.
_WHOLE_BECAUSE: Mapping[str, str] = {
    "orders effects and holds no data": "after_all create_token dce_sink",
    "runs on the host, which wants whole arrays": """
        buffer_callback check compute_on debug_callback debug_print inspect_sharding io_callback
        pure_callback
    """,
    _FOREIGN: """
        cudnn_fusion custom_partitioning dot_product_attention_bwd
        dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
        dot_product_attention_fwd_wrapper ffi_call scaled_dot scaled_matmul
        scaled_matmul_wrapper tpu_custom_call xla_metadata_value
    """,
    "mutable cells are read and written whole": """
        accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear empty_ref free_ref
        freeze get log_extend log_read new_box new_log new_ref pin swap unpin
        with_memory_space_constraint
    """,
    "speaks of the layout of a whole array": "relayout",
    "makes or reads key words, which are never sharded": "from_edtype to_edtype",
    "a buffer without contents, made whole by its reader": "empty2",
    "never stands in a traced step": "stage unreachable zeros_like",
    "XLA of jaxlib 0.10 cannot compile it in a program for several devices": """
        mulhi philox2x32 philox4x32
    """,
}
REPLICATED: Mapping[str, str] = {
    name: reason for reason, names in _WHOLE_BECAUSE.items() for name in names.split()
}

FAMILIES = (
    pointwise, shape, contract, window, index, reduce, linalg, kernels, random,
)  # fmt: skip
PRIMITIVES: Mapping[str, Primitive] = {
    **{name: row for family in FAMILIES for name, row in family.PRIMITIVES.items()},
    **{
        name: Primitive(unknown_rule if reason == _FOREIGN else replicated_rule)
        for name, reason in REPLICATED.items()
    },
}
_UNKNOWN = Primitive(unknown_rule)
# Those whose FLOPs count; all others take as long as their bytes.
HEAVY = frozenset(name for name, row in PRIMITIVES.items() if row.terms is not None)


def primitive(kind: str) -> Primitive:
    """The facts of a primitive; one that we do not know has no rule, and the facts of most."""
    return PRIMITIVES.get(kind, _UNKNOWN)


def rule_for(op: Op, operands: Sequence[Value], book: RuleBook = RuleBook()) -> Rule:
    """The rule of an op: the user's own, else ours, else one that replicates and says so.

    `operands` are the op's operands as values, literals as nameless scalars.
    """
    own = book.rule_for(op, operands)
    if own is not None:
        return own
    rule = primitive(op.kind).rule(op, operands)
    # Typed random keys are never sharded: their factors must be whole.
    values, tensors = (*operands, *op.results), (*rule.operands, *rule.results)
    keys = {
        f
        for value, dims in zip(values, tensors, strict=True)
        if value.dtype.startswith("key")
        for dim in dims
        for f in dim
    }
    if not keys:
        return rule
    factors = tuple(
        replace(factor, kind=Kind.REPLICATE) if f in keys else factor
        for f, factor in enumerate(rule.factors)
    )
    return replace(rule, factors=factors)


def has_rule(kind: str) -> bool:
    """True if we know the primitive, be it that it must stay whole."""
    return kind in PRIMITIVES


def primitive_names() -> frozenset[str]:
    """The primitives that have a rule of their own, those replicated on purpose left out."""
    return frozenset(PRIMITIVES) - frozenset(REPLICATED)


def primitive_fates() -> tuple[tuple[str, str], ...]:
    """The primitives that we know and what becomes of each, by name."""
    fates = {
        **CONTROL,
        **{name: f"whole on every device: {why}" for name, why in REPLICATED.items()},
    }
    for family in FAMILIES:
        subject = str(family.__doc__).splitlines()[0].rstrip(".")
        for prefix in ("Rules of ", "The rule of "):
            subject = subject.removeprefix(prefix)
        for name, row in family.PRIMITIVES.items():
            is_whole = row.rule is replicated_rule
            fates[name] = f"{'whole on every device' if is_whole else 'sharded'} as {subject}"
    for name in PARALLEL:
        over_rows = name in ("psum", "pmax", "pmin")
        fates[name] = "left as it is within a shard_map" + (
            "; over a dim that vmap named, planned as a reduction" if over_rows else ""
        )
    return tuple(sorted(fates.items()))


# -- the rules of a graph ------------------------------------------------------------------------


def attach_rules(graph: Graph, book: RuleBook = RuleBook()) -> Graph:
    """The graph with a rule on each op; ops that hold bodies get theirs within."""
    (ruled,) = attach_alike((graph,), book)
    return ruled


def attach_alike(graphs: Sequence[Graph], book: RuleBook = RuleBook()) -> tuple[Graph, ...]:
    """Graphs with a rule on each op; one op that stands in several stays one op."""
    seen: dict[object, Rule] = {}
    ruled: dict[int, Op] = {}  # by the id of the op without its rule, which the graphs keep
    for graph in graphs:
        for op in graph.ops:
            if id(op) not in ruled:
                ruled[id(op)] = _with_rule(graph, op, book, seen)
    return tuple(replace(g, ops=tuple([ruled[id(op)] for op in g.ops])) for g in graphs)


def unknown_ops(graph: Graph) -> tuple[Op, ...]:
    """Ops of a graph with rules whose primitive has none, the first of each primitive."""
    first: dict[str, Op] = {}
    for op in graph.walk():
        if op.rule is not None and not op.rule.known:
            first.setdefault(op.kind, op)
    return tuple(first.values())


def _with_rule(graph: Graph, op: Op, book: RuleBook, seen: dict[object, Rule]) -> Op:
    if op.graphs:
        bodies = (
            replace(body, ops=tuple([_with_rule(body, o, book, seen) for o in body.ops]))
            for body in op.graphs
        )
        return replace(op, graphs=tuple(bodies))
    operands = tuple(graph.value(o) for o in op.operands)
    results = tuple((v.shape, v.dtype) for v in op.results)
    literals = tuple(o.text if isinstance(o, Literal) else None for o in op.operands)
    key = (op.kind, tuple((v.shape, v.dtype) for v in operands), literals, results, op.params)
    if key not in seen:
        try:
            # A copy, as a rule that two kinds of ops share must not make them one.
            seen[key] = replace(rule_for(op, operands, book))
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            # Rules trust that an op's parameters and shapes are those of its primitive.
            where = op.origin.line or op.origin.module or graph.name
            shapes = ", ".join(v.type_text for v in operands)
            raise GraphError(
                f"{op.kind} at {where} cannot take {shapes} with its parameters "
                f"({type(error).__name__}: {error})"
            ) from error
    return op.with_rule(seen[key])
