"""Makes state where it will live, so that no leaf is ever whole on one device.

Each submesh runs all of the user's function and is asked for its own leaves only, so that the
compiler need not compute the rest; random bits are those of the whole.

    create(key) = {w: [8, 4], v: [8]}     plan: w[0:4], w[4:8] and v
        mesh0 runs create, returns w[0:4]       \\
        mesh1 runs create, returns w[4:8], v    /   {w: StackedPieces, v: array of mesh1}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.errors import PlanMismatchError
from autopar.ir.plan import Argument, leaf_arguments
from autopar.ir.sharding import Sharding
from autopar.ir.values import Role
from autopar.runtime.bind import host_of, is_key, named_sharding, without_pieces
from autopar.runtime.pieces import StackedPieces
from autopar.runtime.spanning import elsewhere, spread


@dataclass(frozen=True)
class _Piece:
    """A leaf of the state, or some rows of it, on the submesh that keeps it."""

    submesh: int
    sharding: Sharding
    rows: slice | None = None


_Pieces = tuple[_Piece, ...]  # of a leaf, in the order of its rows


@dataclass(frozen=True)
class _Place:
    """The type and the devices of a piece. Of other processes' pieces no device is here."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    rows: slice | None

    @property
    def is_here(self) -> bool:
        """True if some of its devices are this process's own."""
        return bool(self.sharding.addressable_devices)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Its description for JAX."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)


def init(
    create: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    planned: Sequence[Argument] | None,
    meshes: Sequence[Mesh],
) -> Any:
    """The state that `create` makes, each leaf or piece of one born on the submesh that keeps it.

    `planned` are the plan's arguments; before there is a plan every leaf is cut up evenly over the
    one mesh. Raises PlanMismatchError where the plan has no such state.
    """
    tree, places = _described(create, args, kwargs, planned, meshes)
    own: dict[Mesh, dict[tuple[int, int], _Place]] = {}
    born: dict[tuple[int, int], Any] = {}
    for i, pieces in enumerate(places):
        for k, place in enumerate(pieces):
            if place.is_here:
                mesh: Any = place.sharding.mesh
                own.setdefault(mesh, {})[i, k] = place
            else:
                born[i, k] = without_pieces(place.shape, place.dtype, place.sharding)
    for mesh, here in own.items():
        with jax.set_mesh(None):  # one of the user's would have to be this mesh
            born.update(_born(create, args, kwargs, here, mesh))
    made = ([born[i, k] for k in range(len(pieces))] for i, pieces in enumerate(places))
    return jax.tree_util.tree_unflatten(tree, list(map(_joined, made)))


def abstract_state(
    create: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    planned: Sequence[Argument] | None,
    meshes: Sequence[Mesh],
) -> Any:
    """Shapes, dtypes and shardings of what `init` makes; nothing is computed."""
    tree, places = _described(create, args, kwargs, planned, meshes)
    abstract = [_joined([place.abstract for place in pieces]) for pieces in places]
    return jax.tree_util.tree_unflatten(tree, abstract)


def _joined(pieces: Sequence[Any]) -> Any:
    return StackedPieces(tuple(pieces)) if len(pieces) > 1 else pieces[0]


def _described(
    create: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    planned: Sequence[Argument] | None,
    meshes: Sequence[Mesh],
) -> tuple[Any, list[list[_Place]]]:
    """The structure of the state that `create` makes, and for each leaf the places of its pieces.

    Scalars of other processes' submeshes are born here too: all processes have them.
    """
    leaves, tree = jax.tree_util.tree_flatten(jax.eval_shape(create, *args, **kwargs))
    if planned is None:
        axes, count = meshes[0].axis_names, meshes[0].devices.size
        found: list[_Pieces] = [(_Piece(0, even_sharding(leaf, axes, count)),) for leaf in leaves]
    else:
        found = _matched(leaves, planned)
    host = host_of(meshes)

    def place(leaf: Any, piece: _Piece) -> _Place:
        mesh, shape = meshes[piece.submesh], leaf.shape
        if not host.owns(piece.submesh) and not shape:
            mesh = elsewhere(host.others(piece.submesh))
        if piece.rows is not None:
            shape = (len(range(shape[0])[piece.rows]), *shape[1:])
        return _Place(shape, leaf.dtype, named_sharding(piece.sharding, mesh), piece.rows)

    pairs = zip(leaves, found, strict=True)
    return tree, [[place(leaf, piece) for piece in pieces] for leaf, pieces in pairs]


def _born(
    create: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    own: dict[tuple[int, int], _Place],
    mesh: Mesh,
) -> dict[tuple[int, int], Any]:
    """The pieces that one submesh keeps, by leaf and number."""

    def part(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        leaves = jax.tree_util.tree_leaves(create(*args, **kwargs))
        return [
            leaves[i] if place.rows is None else leaves[i][place.rows]
            for (i, _), place in own.items()
        ]

    whole = named_sharding(Sharding(()), mesh)
    there = jax.tree_util.tree_map(
        lambda x: spread(x, whole) if isinstance(x, jax.Array) else x, (args, kwargs)
    )
    layout = [place.sharding for place in own.values()]
    return dict(zip(own, jax.jit(part, out_shardings=layout)(*there), strict=True))


# -- before there is a plan --------------------------------------------------------------------


def even_layout(abstract: Any, mesh: Mesh) -> Any:
    """A sharding for each leaf that cuts it evenly over all devices, where it divides."""
    names, count = mesh.axis_names, mesh.devices.size

    def layout(leaf: Any) -> NamedSharding:
        return named_sharding(even_sharding(leaf, names, count), mesh)

    return jax.tree_util.tree_map(layout, abstract)


def even_sharding(leaf: Any, axes: Sequence[str], count: int) -> Sharding:
    """The first largest dim that `count` divides, cut up over all axes; of keys none is."""
    shape = () if is_key(leaf.dtype) else leaf.shape
    able = [n if n % count == 0 and n > 0 else 0 for n in shape]
    if not any(able):
        return Sharding(((),) * len(shape))
    best = able.index(max(able))
    return Sharding(tuple(tuple(axes) if d == best else () for d in range(len(shape))))


# -- as a plan has it --------------------------------------------------------------------------


def _matched(leaves: Sequence[Any], planned: Sequence[Argument]) -> list[_Pieces]:
    """The pieces of consecutive leaves of the plan's state that have the shapes of these."""
    state = list(leaf_arguments(a for a in planned if a.role == Role.STATE.value))
    shapes = [tuple(leaf.shape) for leaf in leaves]
    for start in range(len(state) - len(shapes) + 1):
        run = state[start : start + len(shapes)]
        if [leaf.shape for leaf in run] == shapes:
            return [
                tuple(_Piece(a.submesh, a.sharding, a.rows) for a in leaf.arguments) for leaf in run
            ]
    pairs = zip(shapes, state, strict=False)
    differing = (
        f"{leaf.path} is {list(leaf.shape)} in the plan and {list(shape)} here"
        for shape, leaf in pairs
        if shape != leaf.shape
    )
    raise PlanMismatchError(
        f"the state has {len(shapes)} arrays, and the plan keeps {len(state)}, of other "
        f"shapes: {next(differing, 'one has more arrays than the other')}. Plan for this state, or "
        "create the state that the plan is for. A number that is an argument by itself is no state "
        "to autopar, as any loss looks like it: say by state_argnums which arguments are."
    )
