"""Which models plans are judged by: how many layers are kept, how many rows, what memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks import models
from benchmarks.hand.decoder import data_layouts, decoder_layouts
from benchmarks.hand.layout import Layout
from benchmarks.hand.named import recommender_layouts, transformer_layouts
from benchmarks.models import Model
from benchmarks.zoo.dit import dit
from benchmarks.zoo.dlrm import dlrm
from benchmarks.zoo.functional import FrozenBase
from benchmarks.zoo.gan import gan
from benchmarks.zoo.mamba import mamba
from benchmarks.zoo.resnet import resnet
from benchmarks.zoo.scanned_gpt import lora, scanned_gpt
from benchmarks.zoo.t5 import t5
from benchmarks.zoo.two_tower import two_tower
from benchmarks.zoo.unet import unet
from benchmarks.zoo.vit import vit
from benchmarks.zoo.wide_resnet import wide_resnet

_STATE = 12  # bytes a parameter: it and two moments, in float32
_WHOLE = 6  # a layer's weights whole: a bfloat16 copy and a float32 gradient
_FROZEN = 2  # bytes of a parameter that is not trained, cut up or whole
_LOGIT = 10  # bytes a logit: float32, its gradient and a bfloat16 copy


@dataclass(frozen=True)
class Case:
    """A model of which `kept` of all `layers` are kept, with `rows` of the batch on each device.

    `build` takes layers, rows in all and whether layers are rematerialised; `logits` are those
    of one row.
    """

    name: str
    build: Callable[[int, int, bool], Model]
    kept: int
    layers: int
    rows: int
    logits: int
    layouts: Callable[[int], Iterator[tuple[str, Layout]]]
    tensor: bool = True  # whether Megatron's recipes are made for it
    experts: bool = False
    scanned: bool = False  # by hand it is tried with its layers kept and rematerialised

    def model(self, devices: int, memory_bytes: int, remat: bool = False) -> Model:
        """The cut model, with a batch for so many devices of so much memory."""
        return self.build(self.kept, self.rows_on(memory_bytes) * devices, remat)

    def rows_on(self, memory_bytes: int) -> int:
        """Rows of one device: fewer on chips with a fraction of a large GPU's memory."""
        return self.rows if memory_bytes > 40 * 2**30 else max(1, self.rows // 4)

    def limit_bytes(self, devices: int, memory_bytes: int) -> int:
        """What a device may hold, so that memory binds the cut model as it does the whole one.

        F + (device - F) * kept / layers, where F does not shrink with the layers: the state
        outside of them cut up over all devices, the logits of a device's rows, and one layer's
        weights whole.
        """
        one, two = (self.build(n, devices, False) for n in (1, 2))
        (few, frozen_few), (more, frozen_more) = ((parameters(m), frozen(m)) for m in (one, two))
        layer, outside = more - few, 2 * few - more
        fixed = outside * _STATE // devices + layer * _WHOLE
        layer, outside = frozen_more - frozen_few, 2 * frozen_few - frozen_more
        fixed += outside * _FROZEN // devices + layer * _FROZEN
        fixed += self.rows_on(memory_bytes) * self.logits * _LOGIT
        return fixed + (memory_bytes - fixed) * self.kept // self.layers


def parameters(model: Model) -> int:
    """How many parameters of a model are trained."""
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    return _elements(state.params)


def frozen(model: Model) -> int:
    """How many parameters of a model are not trained."""
    state = jax.eval_shape(model.create_state, jax.random.key(0))
    return _elements(state.base) if isinstance(state, FrozenBase) else 0


def _elements(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _gpt(width: int, heads: int, layers: int, rows: int, remat: bool) -> Model:
    return models.gpt(layers, width, heads, 50304, 2048, rows, remat=remat)


def _llama(layers: int, rows: int, remat: bool) -> Model:
    return models.llama(layers, sequence=2048, batch=rows, remat=remat)


def _moe(layers: int, rows: int, remat: bool) -> Model:
    return models.moe(layers, 4096, 32, 8, 14336, 32000, sequence=2048, batch=rows, remat=remat)


def _vit(layers: int, rows: int, remat: bool) -> Model:
    return vit(layers, batch=rows, remat=remat)


def _wide_resnet(blocks: int, rows: int, remat: bool) -> Model:
    return wide_resnet((blocks,) * 4, batch=rows, remat=remat)


def _unet(blocks: int, rows: int, remat: bool) -> Model:
    return unet(blocks, batch=rows, remat=remat)


def _gan(layers: int, rows: int, remat: bool) -> Model:
    del layers, remat  # it has neither
    return gan(batch=rows)


def _resnet(blocks: int, rows: int, remat: bool) -> Model:
    del remat  # it has none
    return resnet((blocks,) * 4, batch=rows)


def _scanned_gpt(layers: int, rows: int, remat: bool) -> Model:
    return scanned_gpt(layers, 2048, 16, sequence=2048, batch=rows, remat=remat)


def _t5(layers: int, rows: int, remat: bool) -> Model:
    return t5(layers, batch=rows, remat=remat)


def _two_tower(layers: int, rows: int, remat: bool) -> Model:
    return two_tower(layers, batch=rows, remat=remat)


def _dlrm(layers: int, rows: int, remat: bool) -> Model:
    del layers, remat  # it has none
    return dlrm(batch=rows)


def _mamba(layers: int, rows: int, remat: bool) -> Model:
    return mamba(layers, batch=rows, remat=remat)


def _dit(layers: int, rows: int, remat: bool) -> Model:
    return dit(layers, batch=rows, remat=remat)


def _lora(layers: int, rows: int, remat: bool) -> Model:
    return lora(layers, sequence=2048, batch=rows, remat=remat)


CASES: tuple[Case, ...] = (
    Case("gpt-1.3b", functools.partial(_gpt, 2048, 16), 2, 24, 4, 2048 * 50304, decoder_layouts),
    Case("gpt-6.7b", functools.partial(_gpt, 4096, 32), 2, 32, 1, 2048 * 50304, decoder_layouts),
    Case("llama-8b", _llama, 2, 32, 1, 2048 * 128256, decoder_layouts),
    Case(
        "moe-8x7b", _moe, 1, 32, 1, 2048 * 32000,
        functools.partial(decoder_layouts, experts=8), experts=True,
    ),
    Case("vit-l", _vit, 2, 24, 64, 1024, decoder_layouts),
    Case("wide-resnet", _wide_resnet, 1, 4, 16, 1024, data_layouts, tensor=False),
    Case("unet", _unet, 1, 2, 8, 0, data_layouts, tensor=False),
    Case("resnet", _resnet, 2, 4, 64, 1000, data_layouts, tensor=False),
    Case("gan", _gan, 1, 1, 16, 0, data_layouts, tensor=False),
    Case(
        "scanned-gpt-1.3b", _scanned_gpt, 2, 24, 4, 2048 * 50304, transformer_layouts, scanned=True
    ),
    Case("t5-large", _t5, 2, 24, 8, 512 * 32128, transformer_layouts, scanned=True),
    Case("two-tower", _two_tower, 4, 12, 64, 512, transformer_layouts, scanned=True),
    Case("dlrm", _dlrm, 1, 1, 8192, 1, recommender_layouts, tensor=False),
    Case("mamba-370m", _mamba, 2, 48, 4, 1024 * 50304, transformer_layouts, scanned=True),
    Case("dit-xl", _dit, 2, 28, 32, 0, transformer_layouts, scanned=True),
    Case("lora-6.7b", _lora, 2, 32, 1, 2048 * 50304, transformer_layouts, scanned=True),
)  # fmt: skip
