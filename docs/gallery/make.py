"""Plans the models of the gallery and writes its page: `python -m docs.gallery.make`.

`--reports FOLDER` writes the report of each plan there, too: they are large, and kept nowhere. The
plans take a minute or two, so it is a slow test that makes the page again and compares.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console, RenderableType

import autopar
from autopar.ir.plan import Plan
from autopar.report.inspection import axes, collectives_by_kind
from autopar.report.plan import headline, margins_line
from benchmarks import models
from benchmarks.deepseek import Sizes, deepseek
from benchmarks.models import Model
from benchmarks.zoo.unet import unet
from benchmarks.zoo.vit import vit
from examples import gpt

PAGE = Path(__file__).parent / "index.md"
_WIDTH = 100

_HEAD = """\
# Gallery

Plans of known models, on clusters that nobody needs to have: what `autopar` chooses, the textbook
recipes beside it, and its collectives. All figures are predicted. `python -m docs.gallery.make`
makes this page; with `--reports FOLDER` it writes the [report](../how-to/read-a-report.md) of each
plan there, half a megabyte each.
"""


@dataclass(frozen=True)
class Entry:
    """A model on a cluster, with what is worth looking at in its plan."""

    title: str
    told: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    cluster: str
    options: dict[str, Any]


def _of(model: Model) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A model's step, and the shapes that it is called with."""
    return model.step, (jax.eval_shape(model.create_state, jax.random.key(0)), model.example_batch)


def dlrm(
    tables: int = 26, rows: int = 4_000_000, width: int = 128, batch: int = 65536
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """DLRM (Naumov et al., 2019): tables of categories, two MLPs, and products of pairs of rows."""
    bottom, top = (13, 512, 256, width), ((tables + 1) * tables // 2 + width, 1024, 512, 1)
    shape: Any = jax.ShapeDtypeStruct

    def mlp(layers: list[jax.Array], x: jax.Array) -> jax.Array:
        for i, w in enumerate(layers):
            x = x @ w if i == len(layers) - 1 else jax.nn.relu(x @ w)
        return x

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        dense = mlp(params["bottom"], batch["dense"])
        found = [params["tables"][t][batch["ids"][:, t]] for t in range(tables)]
        vectors = jnp.stack([dense, *found], axis=1)
        pairs = jnp.einsum("bid,bjd->bij", vectors, vectors)
        i, j = jnp.triu_indices(tables + 1, 1)
        logits = mlp(params["top"], jnp.concatenate([dense, pairs[:, i, j]], axis=1))[:, 0]
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]))

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.01 * g, params, grads), loss

    params = {
        "bottom": [shape(s, jnp.float32) for s in pairwise(bottom)],
        "tables": [shape((rows, width), jnp.float32) for _ in range(tables)],
        "top": [shape(s, jnp.float32) for s in pairwise(top)],
    }
    given = {
        "dense": shape((batch, 13), jnp.float32),
        "ids": shape((batch, tables), jnp.int32),
        "clicks": shape((batch,), jnp.float32),
    }
    return step, (params, given)


ENTRIES = (
    Entry(
        "GPT, 3.6 billion parameters",
        "The model of `examples/gpt.py`, its 16 layers in a scan, on two hosts of GPUs.",
        lambda: (gpt.train_step, gpt.example_args()),
        "2x8xh100",
        {"mesh": (2, 8)},
    ),
    Entry(
        "LLaMA, 70 billion parameters",
        "80 layers in a scan, rematerialized, on 256 GPUs.",
        lambda: _of(models.llama(80, 8192, 64, 8, 28672, batch=256, scan=True, remat=True)),
        "32x8xh100",
        {"mesh": (32, 8)},
    ),
    Entry(
        "DeepSeek-V3-like, a tenth of its layers",
        "Latent attention, and 256 experts beside a shared one: 6 of 61 layers, on TPUs.",
        lambda: _of(deepseek(Sizes(layers=6), optimizer="sgd")),
        "v5p:4x4x4",
        {"mesh": (16, 4)},
    ),
    Entry(
        "ViT, 300 million parameters",
        "ViT-L/14 on one host of GPUs.",
        lambda: _of(vit()),
        "8xh100",
        {"mesh": (8,)},
    ),
    Entry(
        "U-Net",
        "A diffusion U-Net with attention, convolutions throughout, on one host of GPUs.",
        lambda: _of(unet()),
        "8xh100",
        {"mesh": (8,)},
    ),
    Entry(
        "DLRM, 13 billion parameters",
        "26 tables of four million rows, which no device holds together, and small MLPs.",
        dlrm,
        "8xh100",
        {"mesh": (8,)},
    ),
)


def page(reports: Path | None = None) -> str:
    """The page's text."""
    return "\n".join([_HEAD, *_sections(reports)])


def _sections(reports: Path | None) -> Iterator[str]:
    for entry in ENTRIES:
        step, args = entry.make()
        plan = autopar.plan(step, *args, cluster=entry.cluster, **entry.options)
        if reports is not None:
            reports.mkdir(parents=True, exist_ok=True)
            autopar.write_report(plan, reports / f"{entry.title.split()[0].strip(',')}.html")
        yield f"## {entry.title}\n\n{entry.told}\n\n```text\n{_shown(plan)}\n```\n"


def _shown(plan: Plan) -> str:
    """The plan's headline, its axes, the recipes and the collectives, as the terminal has them."""
    found = autopar.inspect(plan)
    parts: list[RenderableType] = [headline(plan), axes(found.axes, plan)]
    if plan.outcome.recipes:
        parts.append(margins_line(plan))
    parts.append(collectives_by_kind(found, plan))
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    for part in parts:
        console.print(part)
        console.print()
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


if __name__ == "__main__":
    folder = Path(sys.argv[2]) if sys.argv[1:2] == ["--reports"] else None
    PAGE.write_text(page(folder), encoding="utf-8")
