"""All-reduces that amount to less: of which a device keeps or gives only its own slice."""

from __future__ import annotations

from autopar.cost.collective import CollectiveKind
from autopar.cost.hlo_text import Computation, Instruction, Leaf, Module

# Ops that only pass a value on, so what uses their result uses the value.
PASSING = frozenset(
    {"bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element", "copy-start",
     "copy-done"}
)  # fmt: skip


def is_scatter(computation: str) -> bool:
    """Whether TPU gives this name to the fusion of an all-reduce and each device's slice of it."""
    return computation.startswith("all-reduce-scatter")


def lesser_kinds(
    reduce: Instruction, computation: Computation, module: Module
) -> dict[int, CollectiveKind]:
    """What operands of an all-reduce amount to that is less than one, by their place.

    Of an operand that comes out only to be sliced by device that is a reduce-scatter; of one that
    is zero but for the slice of each device an all-gather (TPU writes many small ones in one op).
    """
    if is_scatter(computation.name):
        return dict.fromkeys(range(len(reduce.operands)), "reduce-scatter")
    by_device = _by_device(computation, module)
    kinds: dict[int, CollectiveKind] = {}
    for at, name in enumerate(reduce.operands):
        if _is_own_slice(name, computation, module, by_device):
            kinds[at] = "all-gather"
        elif _is_sliced(reduce, at, computation, module, by_device):
            kinds[at] = "reduce-scatter"
    return kinds


def _is_sliced(
    reduce: Instruction, at: int, computation: Computation, module: Module, by_device: set[str]
) -> bool:
    users = computation.users.get(reduce.name, ())
    done = [user for user in users if user.opcode == "all-reduce-done"]
    result = done[0] if done else reduce
    if len(reduce.operands) == 1:
        return _one_slice(result.name, computation, module, by_device)
    return _element_sliced(result, at, computation, module, by_device)


def _is_own_slice(name: str, computation: Computation, module: Module, by_device: set[str]) -> bool:
    made = computation.by_name.get(name)
    while made and made.opcode in PASSING and made.operands:
        made = computation.by_name.get(made.operands[0])
    if made is None:
        return False
    if made.opcode == "dynamic-update-slice":
        base, _, *offsets = made.operands
        return _is_zero(base, computation) and bool(by_device & set(offsets))
    inner = module.computations.get(next(iter(made.called("calls")), ""))
    root = inner.root if inner and made.opcode == "fusion" else None
    if inner is None or root is None or root.opcode != "dynamic-update-slice":
        return False
    outer = {p.name: o for p, o in zip(inner.parameters, made.operands, strict=False)}
    base, _, *offsets = root.operands
    zero = _is_zero(base, inner) or _is_zero(outer.get(base, ""), computation)
    return zero and bool(by_device & {outer.get(o, "") for o in offsets})


def _is_zero(name: str, computation: Computation) -> bool:
    made = computation.by_name.get(name)
    while made and made.opcode in ("broadcast", *PASSING) and made.operands:
        made = computation.by_name.get(made.operands[0])
    return made is not None and made.opcode == "constant" and made.literal in ("0", "0.0")


def _element_sliced(
    result: Instruction, at: int, computation: Computation, module: Module, by_device: set[str]
) -> bool:
    users = computation.users.get(result.name, ())
    takers = [u for u in users if u.attributes.get("index") == str(at)]
    if result.is_root or any(u.opcode != "get-tuple-element" for u in users):
        return False
    return bool(takers) and all(
        _one_slice(taker.name, computation, module, by_device) for taker in takers
    )


def _by_device(
    computation: Computation, module: Module, given: frozenset[str] = frozenset()
) -> set[str]:
    """Names of the values that depend on which device runs (`given` ones do)."""
    found = set(given)
    for instruction in computation.instructions:
        inner = [module.computations.get(name) for name in instruction.called("calls")]
        asks = any(
            i.opcode in ("partition-id", "replica-id") for c in inner if c for i in c.instructions
        )
        if asks or instruction.opcode in ("partition-id", "replica-id"):
            found.add(instruction.name)
        # A big value may differ by device as well; only small ones serve as offsets.
        elif found & set(instruction.operands) and all(
            leaf.nbytes <= 64 and leaf.dtype[0] in "su" for leaf in instruction.leaves
        ):
            found.add(instruction.name)
    return found


def _one_slice(value: str, computation: Computation, module: Module, by_device: set[str]) -> bool:
    """Whether a device keeps one slice of a value: of two different ones it needs the whole."""
    return len(_slice_shapes(value, computation, module, by_device) or ()) == 1


def _slice_shapes(
    value: str, computation: Computation, module: Module, by_device: set[str]
) -> set[tuple[Leaf, ...]] | None:
    """Shapes of the dynamic-slices at offsets that depend on the device; None for another use."""
    users = computation.users.get(value, ())
    if not users or computation.by_name[value].is_root:
        return None
    shapes: set[tuple[Leaf, ...]] = set()
    for user in users:
        found = _shapes_of_user(user, value, computation, module, by_device)
        if found is None:
            return None
        shapes |= found
    return shapes


def _shapes_of_user(
    user: Instruction, value: str, computation: Computation, module: Module, by_device: set[str]
) -> set[tuple[Leaf, ...]] | None:
    if user.opcode in PASSING:
        return _slice_shapes(user.name, computation, module, by_device)
    if user.opcode == "dynamic-slice":
        is_slice = user.operands[0] == value and bool(by_device & set(user.operands[1:]))
        return {user.leaves} if is_slice else None
    if user.opcode not in ("fusion", "call"):
        return None
    inner = module.computations.get(next(iter(user.called("calls", "to_apply")), ""))
    if inner is None:
        return None
    given = frozenset(
        parameter.name
        for parameter, operand in zip(inner.parameters, user.operands, strict=False)
        if operand in by_device
    )
    offsets = _by_device(inner, module, given)
    shapes: set[tuple[Leaf, ...]] = set()
    for parameter, operand in zip(inner.parameters, user.operands, strict=False):
        if operand == value:
            found = _slice_shapes(parameter.name, inner, module, offsets)
            if found is None:
                return None
            shapes |= found
    return shapes
