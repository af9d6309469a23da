"""Five typed slots in a row: batch, layer, stage, shard, lower; and their text form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

from autopar.errors import InputError
from autopar.ir.batching import BatchGraphs, Batching
from autopar.ir.graph import Graph
from autopar.ir.sharding_plan import ShardingPlan
from autopar.ir.stages import LayerSequence, StagePlan
from autopar.passes.base import (
    AbstractBatching,
    AbstractLayering,
    AbstractSharding,
    One,
    Setting,
    Single,
    Whole,
)
from autopar.passes.batch.exact import Exact
from autopar.passes.layer.fixed import Fixed
from autopar.passes.layer.min_cut import MinCut
from autopar.passes.lower.lowering import AbstractLowering, Faster, Mpmd, Spmd
from autopar.passes.shard.optimal import Optimal
from autopar.passes.shard.recipes import AbstractRecipe, recipe_named
from autopar.passes.stage.prices import StageTable
from autopar.passes.stage.search import Ranked, Search
from autopar.schedule.table import SCHEDULES


@dataclass(frozen=True)
class PassPipeline:
    """Five typed slots in a row; a variant of a pass is another final class in its slot.

        graph ─batch─▶ Batching ─layer─▶ LayerSequence ─stage─▶ StagePlan
                                  ─shard─▶ ShardingPlan ─lower─▶ Program

    Every slot but the last has a method that runs its pass, checks what it made and tells the
    watchers; `lower_stages` of `autopar.planner` is the last. The planner calls them in this order
    for one stage as for many: batch and layer for every number of microbatches, the stage slot
    once layers have a price, and shard for every submesh. The text form has the slots that are not
    at their defaults, with the options that are not; `read_passes` reads it back:

        batch=exact,layer=min-cut{layers=8},stage=search{stages=2},shard{recipe=fsdp},lower

    Of stages `lower` makes programs of their own (mpmd), one program (spmd), or the faster (auto).
    """

    batch: AbstractBatching = field(default_factory=Whole)
    layer: AbstractLayering = field(default_factory=Single)
    stage: One | Search = field(default_factory=One)
    shard: AbstractSharding = field(default_factory=Optimal)
    lower: AbstractLowering = field(default_factory=Mpmd)

    @classmethod
    def of_options(
        cls, method: str = "auto", stages: int | None = 1, microbatches: int | None = 1,
        schedule: str | None = None,
    ) -> PassPipeline:  # fmt: skip
        """The pipeline of a method and numbers; None leaves a number to the search."""
        shard = Optimal(recipe=recipe_named(method))
        if stages == 1 and microbatches == 1:
            return cls(shard=shard)
        asked = SCHEDULES.get(schedule or "")  # a name that is unknown is refused elsewhere
        batch = Exact(barrier=asked is None or asked.allows_barrier)
        return cls(batch, MinCut(), Search(stages, microbatches, schedule), shard)

    def cut_batch(self, graphs: BatchGraphs, setting: Setting) -> Batching:
        """The batch slot."""
        batching = setting.watched("batch", graphs, lambda: self.batch.run(graphs, setting))
        batching.verify()
        return batching

    def cut_layers(self, batching: Batching, setting: Setting) -> LayerSequence:
        """The layer slot."""
        layers = setting.watched("layer", batching, lambda: self.layer.run(batching, setting))
        layers.verify()
        return layers

    def one_stage(self, layers: LayerSequence, setting: Setting) -> StagePlan:
        """The stage slot where there is one stage, whatever layers take."""
        one = self.stage
        assert isinstance(one, One)
        stages = setting.watched("stage", layers, lambda: one.run(layers, setting))
        stages.verify()
        return stages

    def search(self, table: StageTable, setting: Setting) -> Ranked:
        """The stage slot where stages are searched, by what layers take."""
        search = self.stage
        assert isinstance(search, Search)
        return setting.watched("stage", table, lambda: search.run(table, setting))

    def shard_graph(self, graph: Graph, setting: Setting) -> ShardingPlan:
        """The shard slot, for the step or for what a submesh runs."""
        sharding = setting.watched("shard", graph, lambda: self.shard.run(graph, setting))
        sharding.verify(graph)
        return sharding

    def check(self) -> None:
        """Raise InputError where stages are searched of a step left whole, or the reverse."""
        whole = (isinstance(self.batch, Whole), isinstance(self.layer, Single))
        if isinstance(self.stage, One) and not all(whole):
            raise InputError(
                f"passes {self}: stage=one is for batch=whole and layer=single; add "
                "stage=search to plan stages or microbatches"
            )
        if isinstance(self.stage, Search) and any(whole):
            raise InputError(
                f"passes {self}: stage=search needs batch=exact, and layer=min-cut or layer=fixed"
            )

    def __str__(self) -> str:
        texts: list[str] = []
        for slot, kinds in PASSES.items():
            chosen: object = getattr(self, slot)
            name = slot if type(chosen) is kinds[0] else f"{slot}={_name(type(chosen))}"
            text = name + _options_text(chosen)
            if text != slot or slot in ("shard", "lower"):
                texts.append(text)
        return ",".join(texts)


# -- the text form -------------------------------------------------------------------------------

# The passes of each slot that a user may choose; the first is the default.
PASSES: Mapping[str, tuple[type, ...]] = {
    "batch": (Whole, Exact),
    "layer": (Single, MinCut, Fixed),
    "stage": (One, Search),
    "shard": (Optimal,),
    "lower": (Mpmd, Spmd, Faster),
}
_STEP = re.compile(r"(?P<slot>[\w-]+)(=(?P<name>[\w-]+))?(\{(?P<options>[^{}]*)\})?")


def read_passes(text: str) -> PassPipeline:
    """The pipeline of a text form; raises InputError that names the slot, pass or option."""
    # Any: each slot's own type, as PASSES has them.
    found: dict[str, Any] = {}
    for step in re.split(r",(?![^{]*\})", text.replace(" ", "")):
        match = _STEP.fullmatch(step)
        if match is None:
            raise InputError(
                f"passes: {step!r} is no pass; write slot, slot=pass or slot{{option=value}}"
            )
        slot = match["slot"]
        if slot in found:
            raise InputError(f"passes: slot {slot!r} is there twice")
        if slot not in PASSES:
            raise InputError(f"passes: there is no slot {slot!r}; there are: {', '.join(PASSES)}")
        kinds = {_name(kind): kind for kind in PASSES[slot]}
        name = match["name"] or next(iter(kinds))
        if name not in kinds:
            raise InputError(
                f"passes: slot {slot} has no pass {name!r}; there are: {', '.join(kinds)}"
            )
        found[slot] = kinds[name](**_read_options(kinds[name], match["options"] or ""))
    return PassPipeline(**found)


def _name(kind: type) -> str:
    return str(vars(kind)["name"])


def _options_of(kind: type) -> dict[str, object]:
    """The hints of the fields that a user may set, by name."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.metadata.get("option", True)}


def _options_text(chosen: object) -> str:
    default = type(chosen)()
    given = {
        name: value
        for name in _options_of(type(chosen))
        if (value := getattr(chosen, name)) != getattr(default, name)
    }
    text = ",".join(f"{name}={_value_text(value)}" for name, value in given.items())
    return f"{{{text}}}" if text else ""


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, cast("tuple[object, ...]", value)))
    return value.name if isinstance(value, AbstractRecipe) else str(value)


def _read_options(kind: type, text: str) -> dict[str, object]:
    hints, found = _options_of(kind), dict[str, object]()
    for entry in filter(None, text.split(",")):
        option, _, value = entry.partition("=")
        if option not in hints:
            known = f"it has {', '.join(hints)}" if hints else "it has none"
            raise InputError(f"passes: pass {_name(kind)} has no option {option!r}; {known}")
        try:
            found[option] = _read_value(hints[option], value)
        except (ValueError, InputError) as error:
            raise InputError(f"passes: option {option} of pass {_name(kind)}: {error}") from None
    return found


def _read_value(hint: object, text: str) -> object:
    """A value by its field's type; raises ValueError or InputError where the text is none."""
    inside = [h for h in get_args(hint) if h not in (NoneType, Ellipsis)]
    if get_origin(hint) is tuple:
        return tuple(_read_value(inside[0], part) for part in text.split("+"))
    if inside:
        return _read_value(inside[0], text)
    if hint is AbstractRecipe:
        return recipe_named(text)
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false")
        return text == "true"
    return cast("type", hint)(text)
