"""Steps of other people's packages: planned and cut up in every way, they give what they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.others import networks, optimizers, sciences
from tests.others.case import WAYS, Other, check_same, expected, planned, ran

_QUICK: Sequence[Callable[[], Other]] = (
    networks.haiku_batch_norm,
    networks.linen_batch_norm,
    networks.nnx_jitted,
    networks.nnx_shared,
    networks.equinox_plain,
    networks.equinox_batch_norm,
    optimizers.multi_transform,
    optimizers.inject_hyperparams,
    optimizers.multi_steps,
    optimizers.apply_if_finite,
    optimizers.lookahead,
    optimizers.schedule_free,
    optimizers.sam,
    optimizers.jaxopt_solver,
    sciences.jraph_network,
    sciences.distrax_policy,
    sciences.rlax_dqn,
    sciences.rlax_vtrace,
    sciences.blackjax_hmc,
    sciences.lineax_solve,
    sciences.chex_dataclass,
)
# These take some seconds to trace, or to compile plain, or are much like others.
_LONG: Sequence[Callable[[], Other]] = (
    networks.haiku_mlp,
    networks.linen_train_state,
    networks.nnx_functional,
    networks.nnx_returned,
    networks.equinox_mlp,
    networks.equinox_gru,
    networks.haiku_lstm,
    networks.haiku_codebook,
    networks.linen_adversaries,
    networks.equinox_ensemble,
    optimizers.private_gradients,
    optimizers.mechanic,
    optimizers.meta_learner,
    optimizers.sequence_labels,
    networks.haiku_attention,
    networks.linen_scanned_transformer,
    networks.nnx_transformer,
    networks.equinox_attention,
    networks.transformers_gpt2,
    networks.transformers_bert,
    networks.transformers_llama,
    optimizers.muon,
    optimizers.lbfgs,
    sciences.flowjax_flow,
    sciences.mctx_search,
    sciences.blackjax_nuts_chains,
    sciences.numpyro_svi,
    sciences.diffrax_ode,
    sciences.diffrax_adaptive,
    sciences.optimistix_newton,
)


def _name(make: Callable[[], Other]) -> str:
    return make.__name__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", _QUICK, ids=_name)
def test_in_one_program_and_in_microbatches(make: Callable[[], Other]) -> None:
    _check(make(), ("forced", "microbatches"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [networks.haiku_mlp, networks.equinox_plain, networks.nnx_jitted])
def test_in_stages(make: Callable[[], Other]) -> None:
    _check(make(), ("stages",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", _QUICK, ids=_name)
def test_every_step_in_stages_and_as_is_best(make: Callable[[], Other]) -> None:
    _check(make(), ("auto", "stages"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", _LONG, ids=_name)
def test_long_steps_in_every_way(make: Callable[[], Other]) -> None:
    _check(make(), tuple(WAYS))


def _check(case: Other, ways: Sequence[str]) -> None:
    wanted = expected(case)
    for way in ways:
        refusal = case.refusals.get(way)
        try:
            if refusal is None:
                check_same(ran(case, planned(case, way)), wanted, case.rtol)
                continue
            with pytest.raises(refusal.kind, match=refusal.told) as error:
                ran(case, planned(case, way))
            assert len(str(error.value)) < 1000
        except Exception as error:
            error.add_note(f"under {way}: {dict(WAYS[way])}")
            raise
