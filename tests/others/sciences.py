"""Graphs, distributions, reinforcement learning, samplers and solvers of other packages."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.errors import BatchError, BatchStatisticError, RowsError
from tests.others.case import Other, Refusal, rows, tokens

_WIDTH = 8
_value_and_grad: Any = eqx.filter_value_and_grad


def _dense(key: Any, inputs: int, outputs: int) -> Any:
    return {"w": jax.random.normal(key, (inputs, outputs)) * 0.3, "b": jnp.zeros((outputs,))}


def _apply(layer: Any, x: Any) -> Any:
    return x @ layer["w"] + layer["b"]


def _descended(params: Any, grads: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def _keyed(name: str) -> Any:
    return pytest.importorskip(name)


# -- graphs ----------------------------------------------------------------------------------


def jraph_network() -> Other:
    jraph = _keyed("jraph")
    # Eight graphs of four nodes and six edges each, in one.
    drawn = np.random.default_rng(0)
    senders = (drawn.integers(0, 4, (8, 6)) + 4 * np.arange(8)[:, None]).reshape(-1)
    receivers = (drawn.integers(0, 4, (8, 6)) + 4 * np.arange(8)[:, None]).reshape(-1)

    def batch(seed: int) -> Any:
        return jraph.GraphsTuple(
            nodes=rows(_WIDTH, seed, 32), edges=rows(4, seed + 1, 48), globals=None,
            senders=senders.astype(np.int32), receivers=receivers.astype(np.int32),
            n_node=np.full((8,), 4, np.int32), n_edge=np.full((8,), 6, np.int32),
        )  # fmt: skip

    def step(params: Any, graph: Any) -> Any:
        def loss_of(p: Any) -> Any:
            net = jraph.GraphNetwork(
                update_edge_fn=lambda e, s, r, g: jnp.tanh(
                    _apply(p["edge"], jnp.concatenate([e, s, r], -1))),
                update_node_fn=lambda n, s, r, g: jnp.tanh(
                    _apply(p["node"], jnp.concatenate([n, s, r], -1))),
            )  # fmt: skip
            return jnp.mean((net(graph).nodes - graph.nodes) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return _descended(params, grads), loss

    def create() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        return {"edge": _dense(one, 20, 8), "node": _dense(two, 8 + 16, _WIDTH)}

    mixed = Refusal(BatchError, "its arguments have 8 or 32 or 48 rows")
    return Other(step, create, batch, refusals={"microbatches": mixed, "stages": mixed})


# -- distributions and flows -----------------------------------------------------------------


def distrax_policy() -> Other:
    distrax = _keyed("distrax")

    def step(params: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> Any:
            policy = distrax.Categorical(
                logits=_apply(p["head"], jnp.tanh(_apply(p["in"], batch["x"])))
            )
            gained = policy.log_prob(batch["action"]) * batch["gain"]
            return -jnp.mean(gained) - 0.01 * jnp.mean(policy.entropy())

        loss, grads = jax.value_and_grad(loss_of)(params)
        return _descended(params, grads), loss

    def batch(seed: int) -> Any:
        action = tokens(1, 4, seed)[:, 0]
        return {"x": rows(_WIDTH, seed), "action": action, "gain": rows(1, seed)[:, 0]}

    def create() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        return {"in": _dense(one, _WIDTH, 16), "head": _dense(two, 16, 4)}

    return Other(step, create, batch)


def flowjax_flow() -> Other:
    flows = _keyed("flowjax.flows")
    normal = _keyed("flowjax.distributions").Normal
    wrappers = _keyed("paramax")
    tx = optax.adam(1e-2, eps=1e-3)

    def create() -> Any:
        flow = flows.masked_autoregressive_flow(
            jax.random.key(0), base_dist=normal(jnp.zeros(4)), flow_layers=2, nn_width=8, nn_depth=1
        )
        return flow, tx.init(eqx.filter(flow, eqx.is_inexact_array))

    def step(state: Any, x: Any) -> Any:
        flow, opt = state
        params, static = eqx.partition(
            flow, eqx.is_inexact_array, is_leaf=lambda n: isinstance(n, wrappers.NonTrainable)
        )

        def loss_of(p: Any) -> Any:
            return -wrappers.unwrap(eqx.combine(p, static)).log_prob(x).mean()

        loss, grads = _value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (eqx.combine(eqx.apply_updates(params, updates), static), opt), loss

    return Other(step, create, lambda seed: rows(4, seed), plain=eqx.filter_jit, rtol=1e-3)


# -- reinforcement learning ------------------------------------------------------------------


def rlax_dqn() -> Other:
    rlax = _keyed("rlax")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-2, eps=1e-3))

    def values(params: Any, x: Any) -> Any:
        return _apply(params["out"], jax.nn.relu(_apply(params["in"], x)))

    def step(state: Any, batch: Any) -> Any:
        online, target, opt, count = state

        def loss_of(p: Any) -> Any:
            error = jax.vmap(rlax.double_q_learning)(
                values(p, batch["x"]), batch["action"], batch["gain"], batch["go_on"],
                values(target, batch["next"]), values(p, batch["next"]),
            )  # fmt: skip
            return jnp.mean(rlax.huber_loss(error))

        loss, grads = jax.value_and_grad(loss_of)(online)
        updates, opt = tx.update(grads, opt, online)
        online = optax.apply_updates(online, updates)
        target = optax.periodic_update(online, target, count, 2)
        return (online, target, opt, count + 1), loss

    def batch(seed: int) -> Any:
        return {
            "x": rows(_WIDTH, seed), "next": rows(_WIDTH, seed + 9), "gain": rows(1, seed)[:, 0],
            "action": tokens(1, 4, seed)[:, 0], "go_on": np.full((16,), 0.9, np.float32),
        }  # fmt: skip

    def create() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        params = {"in": _dense(one, _WIDTH, 16), "out": _dense(two, 16, 4)}
        return params, jax.tree.map(jnp.copy, params), tx.init(params), jnp.ones((), jnp.int32)

    return Other(step, create, batch)


def rlax_vtrace() -> Other:
    rlax = _keyed("rlax")

    def step(params: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> Any:
            h = jnp.tanh(_apply(p["in"], batch["x"]))  # [rows, time, width]
            v = _apply(p["value"], h)[..., 0]
            out = jax.vmap(rlax.vtrace_td_error_and_advantage)(
                v[:, :-1], v[:, 1:], batch["gain"], jnp.full_like(batch["gain"], 0.9),
                jnp.ones_like(batch["gain"]),
            )  # fmt: skip
            return jnp.mean(out.errors**2) - jnp.mean(out.pg_advantage)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return _descended(params, grads), loss

    def batch(seed: int) -> Any:
        return {"x": rows(5 * _WIDTH, seed).reshape(-1, 5, _WIDTH), "gain": rows(4, seed)}

    def create() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        return {"in": _dense(one, _WIDTH, 16), "value": _dense(two, 16, 1)}

    return Other(step, create, batch)


def mctx_search() -> Other:
    mctx = _keyed("mctx")

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            h = jnp.tanh(x @ w["root"])
            logits, value = h @ w["policy"], (h @ w["value"])[:, 0]
            fixed = jax.lax.stop_gradient(w)

            def recur(held: Any, rng: Any, action: Any, embedding: Any) -> Any:
                e = jnp.tanh(embedding @ held["step"] + held["action"][action])
                v = (e @ held["value"])[:, 0]
                out = mctx.RecurrentFnOutput(
                    reward=0 * v, discount=jnp.full_like(v, 0.99), value=v,
                    prior_logits=e @ held["policy"],
                )  # fmt: skip
                return out, e

            root = mctx.RootFnOutput(
                prior_logits=jax.lax.stop_gradient(logits), value=jax.lax.stop_gradient(value),
                embedding=jax.lax.stop_gradient(h),
            )  # fmt: skip
            out = mctx.gumbel_muzero_policy(
                fixed, jax.random.key(0), root, recur, num_simulations=3
            )
            wanted = jnp.sum(out.action_weights * jax.nn.log_softmax(logits), -1)
            return -jnp.mean(wanted) + jnp.mean((value - out.search_tree.node_values[:, 0]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return _descended(w, grads), loss

    def create() -> Any:
        sizes = {"root": (8, 16), "step": (16, 16), "action": (4, 16), "policy": (16, 4),
                 "value": (16, 1)}  # fmt: skip
        keys = jax.random.split(jax.random.key(0), len(sizes))
        return {
            n: jax.random.normal(k, s) * 0.3 for k, (n, s) in zip(keys, sizes.items(), strict=True)
        }

    # The search reads tree[arange(rows), node] in the library's own code.
    indexed = Refusal(BatchError, "the batch size is used as an index")
    refusals = {"microbatches": indexed, "stages": indexed}
    return Other(step, create, lambda seed: rows(_WIDTH, seed), refusals=refusals)


# -- samplers --------------------------------------------------------------------------------


def _log_density(w: Any, x: Any, y: Any) -> Any:
    return -0.5 * jnp.sum((x @ w - y) ** 2) - 0.5 * jnp.sum(w**2)


def _regression(seed: int) -> Any:
    return {"x": rows(4, seed), "y": rows(1, seed + 1)[:, 0]}


def blackjax_hmc() -> Other:
    blackjax = _keyed("blackjax")

    def step(state: Any, batch: Any) -> Any:
        place, key = state
        key, own = jax.random.split(key)
        sampler = blackjax.hmc(
            lambda w: _log_density(w, batch["x"], batch["y"]), step_size=0.05,
            inverse_mass_matrix=jnp.ones(4), num_integration_steps=3,
        )  # fmt: skip
        place, info = sampler.step(own, sampler.init(place.position))
        return (place, key), info.acceptance_rate

    def create() -> Any:
        batch = _regression(0)
        sampler = blackjax.hmc(
            lambda w: _log_density(w, batch["x"], batch["y"]), 0.05, jnp.ones(4), 3
        )
        return sampler.init(jnp.zeros(4)), jax.random.key(1)

    in_loop = Refusal(BatchStatisticError, "a statistic of the batch is used inside a loop")
    refusals = {"microbatches": in_loop, "stages": in_loop}
    return Other(step, create, _regression, refusals=refusals)


def blackjax_nuts_chains() -> Other:
    """Chains side by side: each ends its tree on its own."""
    blackjax = _keyed("blackjax")

    def step(places: Any, batch: Any) -> Any:
        def one(w: Any, shift: Any, key: Any) -> Any:
            sampler = blackjax.nuts(
                lambda v: -0.5 * jnp.sum((v - shift) ** 2), step_size=0.3,
                inverse_mass_matrix=jnp.ones(2), max_num_doublings=3,
            )  # fmt: skip
            place, _ = sampler.step(key, sampler.init(w))
            return place.position

        keys = jax.random.split(jax.random.key(0), places.shape[0])
        found = jax.vmap(one)(places, batch, keys)
        return found, found.mean()

    in_state = Refusal(BatchError, "it traces on 16 rows but not on 8")  # the chains are state
    refusals = {"microbatches": in_state, "stages": in_state}
    return Other(step, lambda: jnp.zeros((16, 2)), lambda seed: rows(2, seed), refusals=refusals)


def numpyro_svi() -> Other:
    numpyro = _keyed("numpyro")
    dist = numpyro.distributions

    def model(x: Any, y: Any = None) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    guide = _keyed("numpyro.infer.autoguide").AutoNormal(model)
    svi = numpyro.infer.SVI(
        model, guide, numpyro.optim.Adam(1e-2, eps=1e-3), numpyro.infer.Trace_ELBO()
    )

    def step(state: Any, batch: Any) -> Any:
        return svi.update(state, batch["x"], y=batch["y"])

    def create() -> Any:
        batch = _regression(0)
        return svi.init(jax.random.key(0), batch["x"], y=batch["y"])

    return Other(step, create, _regression)


# -- solvers ---------------------------------------------------------------------------------

# Equinox asks whether any row failed, and has Python raise the error, before all rows go on.
_CHECKED = Refusal(RowsError, "Python would be called once for each microbatch")


def diffrax_ode() -> Other:
    diffrax = _keyed("diffrax")

    def field(t: Any, y: Any, net: Any) -> Any:
        return net(y)

    def step(net: Any, y0: Any) -> Any:
        def loss_of(n: Any) -> Any:
            def solved(y: Any) -> Any:
                return diffrax.diffeqsolve(
                    diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.25, y, n,
                    stepsize_controller=diffrax.ConstantStepSize(),
                    adjoint=diffrax.RecursiveCheckpointAdjoint(), max_steps=8,
                ).ys[-1]  # fmt: skip

            return jnp.mean((jax.vmap(solved)(y0) - 1.0) ** 2)

        loss, grads = _value_and_grad(loss_of)(net)
        return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    def create() -> Any:
        return eqx.nn.MLP(4, 4, 8, 1, jnp.tanh, key=jax.random.key(0))

    return Other(
        step, create, lambda seed: rows(4, seed), plain=eqx.filter_jit, rtol=1e-3,
        refusals={"microbatches": _CHECKED, "stages": _CHECKED},
    )  # fmt: skip


def diffrax_adaptive() -> Other:
    """Each row takes as many steps as it needs."""
    diffrax = _keyed("diffrax")

    def step(w: Any, y0: Any) -> Any:
        def loss_of(w: Any) -> Any:
            def solved(y: Any) -> Any:
                return diffrax.diffeqsolve(
                    diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y)), diffrax.Tsit5(), 0.0, 1.0,
                    0.1, y, w, stepsize_controller=diffrax.PIDController(1e-3, 1e-3), max_steps=16,
                ).ys[-1]  # fmt: skip

            return jnp.mean(jax.vmap(solved)(y0) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grads, loss

    joined = Refusal(BatchStatisticError, "a statistic of the batch is used inside a loop")
    return Other(
        step, lambda: jax.random.normal(jax.random.key(0), (4, 4)), lambda seed: rows(4, seed),
        rtol=1e-3, refusals={"microbatches": joined, "stages": joined},
    )  # fmt: skip


def optimistix_newton() -> Other:
    optx = _keyed("optimistix")

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            def root(row: Any) -> Any:
                found = optx.root_find(
                    lambda y, args: y + 0.1 * jnp.tanh(args[0] @ y) - args[1],
                    optx.Newton(1e-4, 1e-4), row, (w, row), max_steps=8,
                )  # fmt: skip
                return found.value

            return jnp.mean(jax.vmap(root)(x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grads, loss

    return Other(
        step, lambda: jax.random.normal(jax.random.key(0), (4, 4)) * 0.3,
        lambda seed: rows(4, seed), rtol=1e-3,
        refusals={"microbatches": _CHECKED, "stages": _CHECKED},
    )  # fmt: skip


def lineax_solve() -> Other:
    lx = _keyed("lineax")

    def step(w: Any, x: Any) -> Any:
        def loss_of(w: Any) -> Any:
            operator = lx.MatrixLinearOperator(
                w.T @ w + 4 * jnp.eye(4), lx.positive_semidefinite_tag
            )

            def solved(row: Any) -> Any:
                return lx.linear_solve(operator, row, lx.Cholesky()).value

            return jnp.mean(jax.vmap(solved)(x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grads, loss

    return Other(
        step, lambda: jax.random.normal(jax.random.key(0), (4, 4)), lambda seed: rows(4, seed),
        rtol=1e-3, refusals={"microbatches": _CHECKED, "stages": _CHECKED},
    )  # fmt: skip


def chex_dataclass() -> Other:
    chex = _keyed("chex")

    class Fields:
        params: Any
        mean: Any
        count: Any

    State: Any = chex.dataclass(Fields)

    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(_apply(p, x)) - x) ** 2))(
            state.params
        )
        params = _descended(state.params, grads)
        mean = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, state.mean, params)
        return State(params=params, mean=mean, count=state.count + 1), loss

    def create() -> Any:
        params = _dense(jax.random.key(0), _WIDTH, _WIDTH)
        mean = jax.tree.map(jnp.zeros_like, params)
        return State(params=params, mean=mean, count=jnp.zeros((), jnp.int32))

    return Other(step, create, lambda seed: rows(_WIDTH, seed))
