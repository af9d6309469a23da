"""Hand-written layouts: the step under each has the loss of the plain step, on eight devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from benchmarks import models
from benchmarks.hand.decoder import data_layouts, decoder_layouts
from benchmarks.hand.layout import Layout, hand_step, spec_of, split_more
from benchmarks.hand.named import recommender_layouts, transformer_layouts
from benchmarks.models import Model
from benchmarks.zoo.dit import dit
from benchmarks.zoo.dlrm import dlrm
from benchmarks.zoo.mamba import mamba
from benchmarks.zoo.scanned_gpt import lora, scanned_gpt
from benchmarks.zoo.t5 import t5
from benchmarks.zoo.two_tower import two_tower
from benchmarks.zoo.vit import vit
from benchmarks.zoo.wide_resnet import wide_resnet

P = PartitionSpec
MODELS = {
    "llama": lambda: models.llama(1, 16, 16, 8, 32, vocab=32, sequence=8, batch=8),
    "moe": lambda: models.moe(1, 16, 8, 8, 32, vocab=32, sequence=8, batch=8, remat=True),
    "vit": lambda: vit(1, 16, 8, 8, 2, 16, 8),
    "wide-resnet": lambda: wide_resnet((1,), 32, 1, 8, 8, 8),
    # Wide enough for the layouts to cut up their matrices, 64 Ki elements and more.
    "scanned-gpt": lambda: scanned_gpt(2, 256, 8, 256, 8, 8, remat=True),
    "t5": lambda: t5(1, 256, 8, 256, 256, 8, 8),
    "two-tower": lambda: two_tower(1, 256, 8, 256, 8, 8, 8),
    "dlrm": lambda: dlrm((1024, 512), 128, 4, (8,), (8,), 16),
    "mamba": lambda: mamba(1, 256, 8, 256, 8, 8, remat=True),
    "dit": lambda: dit(1, 256, 8, 4, 4, 2, 256, 8),
    "lora": lambda: lora(2, 256, 8, 8, 256, 8, 8),
}
PAIRS = [
    ("dlrm", "rows+columns 4x2"),
    pytest.param("llama", "fsdp+tp 2x4", marks=pytest.mark.ci),
    *(
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in (
            ("wide-resnet", "fsdp 8"),
            ("moe", "fsdp+ep 1x8"),
            ("vit", "fsdp+tp 2x4"),
            ("llama", "zero1 8"),
            ("scanned-gpt", "fsdp+tp 2x4"),
            ("lora", "fsdp 8"),
            ("t5", "fsdp+tp 4x2"),
            ("two-tower", "fsdp+tp 2x4"),
            ("mamba", "tp 8"),
            ("dit", "fsdp+tp 4x2"),
            ("dlrm", "rows 8"),
            ("dlrm", "columns 8"),
        )
    ),
]


def layout_named(model: str, name: str) -> Layout:
    if model == "wide-resnet":
        return dict(data_layouts(8))[name]
    if model == "dlrm":
        return dict(recommender_layouts(8))[name]
    if model not in ("llama", "moe", "vit"):
        return dict(transformer_layouts(8))[name]
    found = decoder_layouts(8, experts=8 if model == "moe" else 0)
    return dict(found)[name]


def arrays_of(model: Model) -> list[np.ndarray]:
    """The state and a batch of a model, as flat host arrays."""
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(8, size=a.shape).astype(np.dtype(a.dtype))
        for name, a in model.example_batch.items()
    }
    state = jax.jit(model.create_state)(jax.random.key(0))
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, batch))]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_layout_changes_where_not_what(name: str, layout: str) -> None:
    model, given = MODELS[name](), layout_named(name, layout)
    names, sizes = zip(*given.axes, strict=True)
    grid = np.array(jax.devices()[:8]).reshape(sizes)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    step = hand_step(model, given, mesh)
    arrays = arrays_of(model)
    placed = [jax.device_put(a, s.sharding) for a, s in zip(arrays, step.arguments, strict=True)]

    new = step.jitted(*placed)

    tree = jax.tree.structure(
        (jax.eval_shape(model.create_state, jax.random.key(0)), model.example_batch)
    )
    _, metrics = jax.jit(model.step)(*jax.tree.unflatten(tree, arrays))
    np.testing.assert_allclose(new[-1], metrics["loss"], rtol=5e-3)  # bfloat16 adds up elsewhere


def test_a_stack_of_layers_lies_as_its_rows_do() -> None:
    layout = dict(transformer_layouts(8))["fsdp+tp 2x4"]
    specs = {
        "/".join(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)): spec_of(
            path, leaf.shape, layout
        )
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            (jax.eval_shape(MODELS["lora"]().create_state, jax.random.key(0)), {})
        )[0]
    }
    assert specs["layers/mlp/up/kernel"] == P(None, "data", "model")
    assert specs["layers/mlp/down/bias"] == P(None)  # small: everywhere
    assert specs["layers/attention/query/wide"] == P(None, None, "model")
    assert specs["head/kernel"] == P("data", "model")


def test_tables_are_cut_by_rows_and_columns() -> None:
    layouts = dict(recommender_layouts(8))
    table = "tables/table_0", (1024, 128)
    assert layouts["rows 8"].used(*table) == P("data")
    assert layouts["columns 8"].used(*table) == P(None, "data")
    assert layouts["rows+columns 4x2"].updated(*table) == P("data", "model")
    assert layouts["rows 8"].stored("top/dense_0/kernel", (1024, 1024)) == P()


def test_fsdp_keeps_an_eighth_of_every_matrix() -> None:
    axes = (("data", 8),)
    layout = dict(data_layouts(8))["fsdp 8"]
    assert layout.axes == axes
    assert layout.stored("layer0/mlp/up/kernel", (16, 64)) == P(None, "data")
    assert layout.used("layer0/mlp/up/kernel", (16, 64)) == P()
    assert layout.stored("norm/scale", (12,)) == P(None)


def test_megatron_cuts_columns_then_rows() -> None:
    layout = dict(decoder_layouts(8))["fsdp+tp 2x4"]
    assert layout.used("layer0/mlp/up/kernel", (16, 64)) == P(None, "model")
    assert layout.used("layer0/mlp/down/kernel", (64, 16)) == P("model", None)
    assert layout.stored("layer0/mlp/down/kernel", (64, 16)) == P("model", "data")


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (6, 8), P(None, "data")),
        (P(None, "model"), (8, 64), P("data", "model")),
        (P(), (3, 5), P(None, None)),
        (P(), (), P()),
    ],
)
def test_one_more_axis_takes_the_largest_dim_that_divides(
    spec: PartitionSpec, shape: tuple[int, ...], expected: PartitionSpec
) -> None:
    assert split_more(spec, shape, "data", 8) == expected
