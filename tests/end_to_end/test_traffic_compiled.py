"""Collective bytes of planned steps beside what XLA's GPU compiler makes of them, ahead of time.

The zoo's models are planned for eager devices, so that even `auto` cuts them up, and compiled for
eight H100s that need not be here.
"""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.cluster import Cluster
from autopar.runtime.aot.launch import compile_ahead
from autopar.verifying.programs import export_whole
from tests.end_to_end.combos import Combo, sampled_combos
from tests.end_to_end.exceptions import less_on_gpus, merged, refusal
from tests.end_to_end.running import EAGER, predicted_bytes, traffic_gaps, zoo_case
from tests.runtime.aot_programs import needs_gpu_compiler

CLUSTER = Cluster.parse("8xh100")
# Sums that are added, a loop, an all-to-all.
FAST = {"gqa_llama-2x4-auto-adam", "gpt_scan-8-fsdp-sgd", "moe-2x4-expert-adam"}
COMBOS = sorted((c for c in sampled_combos() if refusal(c) is None), key=str)


def _marks(combo: Combo) -> list[pytest.MarkDecorator]:
    return [] if str(combo) in FAST else [pytest.mark.slow]


@needs_gpu_compiler
@pytest.mark.parametrize("combo", [pytest.param(c, id=str(c), marks=_marks(c)) for c in COMBOS])
def test_a_gpu_sends_what_was_planned(combo: Combo) -> None:
    case = zoo_case(combo.model, combo.optimizer)
    step = autopar.parallelize(case.step, cluster=EAGER, mesh=combo.mesh, method=combo.method)
    state = jax.eval_shape(case.create_state, jax.random.key(0))
    planned = step.planned(state, case.batch(0))
    exported = export_whole(planned.trace, planned.program, CLUSTER)
    predicted, compiled = predicted_bytes(planned.plan), compile_ahead(exported).bytes_by_kind
    gaps = traffic_gaps(predicted, compiled)
    excused = merged(combo) | less_on_gpus(combo)
    fewer = {kind for kind in excused if compiled.get(kind, 0) < predicted[kind]}
    assert not [text for kind, text in gaps.items() if kind not in fewer]
