"""`asfp measure`: from what the user wrote to a table or a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from asfp.checks import SELECTIONS, check_align, check_selection, check_streams
from asfp.compaction import CompactModule
from asfp.errors import AsfpError
from asfp.measurement import Measurement, measure
from asfp.measurement.paper import PRESETS
from asfp.measurement.table import as_table, ways_table
from asfp.models import create_model
from asfp.schedule import check_rate
from asfp.sources import Source, build, parse_source

ENGINE = "onnxruntime"
ALIGNS = (1, 16, 32)
"""What a search tries."""


def measure_source(
    text: str,
    *,
    rate: float | None = None,
    selection: str | None = None,
    streams: float | None = None,
    align: int | None = None,
    preset: str | None = None,
    size: str | None = None,
    layers: bool = False,
    as_json: bool = False,
) -> str:
    """What `asfp measure` prints.

    >>> json.loads(measure_source("vgg16", preset="pfec", as_json=True))["macs_paper"]
    206143488
    """
    source = parse_source(text)
    if source.is_graph_file:
        raise AsfpError(f"{text} can be run, but not counted: measure the model or the .safetensors file it came from")
    rates = _preset(source, preset, rate)
    rate = _rate(source, rate, as_given=preset is None)
    selection = _once(source, "selection", source.selection, selection) or "independent"
    streams = _once(source, "streams", source.streams, streams)
    align = _once(source, "align", source.align, align) or 1
    if rate is None and rates is None and (selection, streams, align) != ("independent", None, 1):
        raise AsfpError(
            f"--selection, --streams and --align say how {text} is pruned: give --rate too, e.g. --rate 0.4"
        )
    if source.layout is not None:
        raise AsfpError(f"{text}: MACs are counted for the layout with the fewest; leave out :{source.layout}")
    model, example = build(replace(source, rate=None), size)
    found = measure(model, example, rate=rate, layers=rates, selection=selection, streams=streams, align=align)
    found = replace(found, model=text.partition("@")[0])
    origin = _origin(model, found, example) if isinstance(model, CompactModule) else {}
    if as_json:
        extra = {"preset": preset} if preset else {}
        return json.dumps({"rate": None, **found.to_dict(layers=layers), **extra, **origin})
    dense = f"\n  cut from {origin['macs_dense']:,} MACs of {origin['architecture']}" if origin else ""
    return as_table(found, layers=layers) + dense


def find_target(
    text: str,
    *,
    macs: float | None = None,
    latency: float | None = None,
    engine: str | None = None,
    search: bool = False,
    selection: str | None = None,
    streams: float | None = None,
    align: int | None = None,
    size: str | None = None,
    as_json: bool = False,
) -> str:
    """What `asfp measure` prints for --target-macs and --target-latency: the rate that meets it.

    With `search`, selections and alignments are compared, those that were not given.

    >>> print(find_target("resnet8", macs=0.5))
    resnet8: rate ..., independent, layout least: ... % of the MACs (asked 50 %)
    """
    from asfp.targets import Way, rate_for_latency, rate_for_macs, ways_to_latency, ways_to_macs

    source = parse_source(text)
    if source.path is not None or source.rate is not None:
        raise AsfpError(f"{text} has a rate already: give the name of a dense model, e.g. {source.name or 'resnet56'}")
    if macs is None and latency is None:
        raise AsfpError("these options go with a target: give --target-macs or --target-latency as well, e.g. 0.5")
    if macs is not None and latency is not None:
        raise AsfpError("give --target-macs or --target-latency, not both")
    if macs is not None and engine is not None and not search:
        raise AsfpError(f"--engine {engine} is where time is measured: it goes with --target-latency or --search")
    model, example = build(source, size)
    target = macs if macs is not None else latency
    assert target is not None
    if search:
        selections = SELECTIONS if selection is None else (check_selection(selection),)
        aligns = ALIGNS if align is None else (check_align(align),)
        ways = [Way(chosen, n) for chosen in selections for n in aligns]
        compare = ways_to_latency if macs is None else ways_to_macs
        with _progress() as progress:
            targets = compare(
                model, example, target, engine=engine or ENGINE, ways=ways, streams=streams, progress=progress
            )
        return (
            json.dumps({"model": text, "found": [t.to_dict() for t in targets]})
            if as_json
            else ways_table(text, targets)
        )
    options: dict[str, Any] = {"selection": selection or "independent", "streams": streams}
    options["align"] = 1 if align is None else align
    if macs is not None:
        found = rate_for_macs(model, example, macs, **options)
    else:
        found = rate_for_latency(model, example, target, engine=engine or ENGINE, **options)
    return json.dumps({"model": text, **found.to_dict()}) if as_json else f"{text}: {found}"


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A line on the error stream that says what is being done, where that is a terminal."""
    console = Console(file=sys.stderr)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda message, share: bar.update(task, description=message, completed=share)


def _rate(source: Source, rate: float | None, as_given: bool) -> float | None:
    if rate is not None:
        check_rate("rate", rate)
        if source.path is not None:
            raise AsfpError(f"{source.text} is compact already: leave out --rate")
        if source.rate is not None and source.rate != rate:
            raise AsfpError(f"{source.text} and --rate {rate} differ: give the rate once")
    return rate if rate is not None or not as_given else source.rate


def _once(source: Source, name: str, own: Any, given: Any) -> Any:
    if given is not None:
        CHECKS[name](given)
        if own is not None and own != given:
            raise AsfpError(f"{source.text} and --{name} {given} differ: give the {name} once")
    return own if given is None else given


CHECKS: dict[str, Callable[[Any], object]] = {
    "selection": check_selection,
    "streams": partial(check_streams, mapped=False),
    "align": check_align,
}


def _preset(source: Source, preset: str | None, rate: float | None) -> dict[str, float] | None:
    if preset is None:
        return None
    if preset not in PRESETS:
        raise AsfpError(f"preset={preset!r} is unknown: use {' or '.join(PRESETS)}")
    model, rates = PRESETS[preset]
    if source.text != model:
        raise AsfpError(f"--preset {preset} names layers of {model}: asfp measure {model} --preset {preset}")
    if rate is not None:
        raise AsfpError(f"--preset {preset} has rates of its own: leave out --rate")
    return dict(rates)


def _origin(model: CompactModule, found: Measurement, example: Tensor) -> dict[str, Any]:
    """A file's own numbers: the model is the compact one, and beside it stands what it was cut from."""
    name, options = model.meta["created_as"]
    dense = measure(create_model(name, **options), example.float())
    return {
        "architecture": model.plan.model,
        "macs_dense": dense.macs_conv,
        "macs_dense_linear": dense.macs_linear,
        "params_dense": dense.params,
        "macs_compact": found.macs_conv,
        "macs_compact_linear": found.macs_linear,
        "cut_compact_percent": round(dense.cut_percent(found.macs_conv), 4),
        "params_compact": found.params,
    }
