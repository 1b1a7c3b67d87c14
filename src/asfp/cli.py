"""The command line: every command is a few lines that call the library."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from asfp.errors import AsfpError, Interrupted, out_of_room
from asfp.version import __version__


class Commands(TyperGroup):
    """A mistake or an interruption in any command becomes one line on stderr and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AsfpError as error:
            message, code = f"Error: {error}", 2
        except OSError as error:
            if error.errno == errno.EPIPE:  # `asfp ... | head`: not a mistake
                raise
            message, code = f"Error: {_describe(error)}", 2
        except KeyboardInterrupt as stop:
            message, code = str(stop) or "Stopped.", 130
            if isinstance(stop, Interrupted):
                message, code = "" if stop.silent else message, stop.code
        if message:
            typer.echo(message, err=True)
        raise typer.Exit(code)


def _describe(error: OSError) -> str:
    """What failed, and the fix where it is known."""
    from urllib.error import HTTPError, URLError

    if isinstance(error, URLError):
        import torch

        what = f"{error.url}: {error}" if isinstance(error, HTTPError) else str(error.reason)
        return (
            f"a download failed ({what}); check the network, or put the file into {torch.hub.get_dir()}/checkpoints "
            "by hand (pretrained weights are looked for there first) and run the same command again"
        )
    where = f"{error.filename}: " if error.filename else ""
    hint = "; free the space or choose another folder" if out_of_room(error) else ""
    return f"{where}{error.strerror or error}{hint}"


app = typer.Typer(
    cls=Commands,
    name="asfp",
    help="Asymptotic soft filter pruning: smaller convolutional networks at the same accuracy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asfp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(help="Epochs for each of the three runs.")] = 30,
    rate: Annotated[float, typer.Option(help="Share of the filters to prune, between 0 and 1.")] = 0.4,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the order of the images and the split.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the picture and the record.")] = Path("demo"),
) -> None:
    """Train a ResNet-20 on handwritten digits: dense, with SFP and with ASFP, in about two minutes on two cores."""
    if sys.stderr.isatty():
        typer.echo("Loading torch ...", err=True)
    from asfp.demo import DemoSettings, run_demo

    run_demo(DemoSettings(epochs=epochs, rate=rate, seed=seed, output=output))


@app.command()
def compact(
    checkpoint: Annotated[Path, typer.Argument(help="Weights of a pruned model: a .pt, .pth or .safetensors file.")],
    model: Annotated[str, typer.Option(help="What it is: resnet56, vgg16, torchvision:NAME or timm:NAME.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The compact model, a .safetensors file.")],
    num_classes: Annotated[int | None, typer.Option(help="Classes, where they are not the model's default.")] = None,
    size: Annotated[str | None, typer.Option(help="Height and width of the input: 224 or 224x160.")] = None,
    layout: Annotated[str, typer.Option(help="Of residual additions: least (MACs), auto, zeros.")] = "least",
    tune: Annotated[str | None, typer.Option(help="Time layouts on this engine, e.g. openvino; take the best.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Show every layer.")] = False,
) -> None:
    """Cut the zero filters out of a trained model: smaller, exactly the same function, checked."""
    from asfp.compaction.command import compact_checkpoint

    options = {} if num_classes is None else {"num_classes": num_classes}
    typer.echo(
        compact_checkpoint(checkpoint, output, model, size=size, layout=layout, tune=tune, table=table, **options)
    )


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help="resnet56, vgg16, torchvision:NAME, timm:NAME, or a .safetensors file.")],
    rate: Annotated[float | None, typer.Option(help="Share of the filters to prune, between 0 and 1.")] = None,
    selection: Annotated[str | None, typer.Option(help="independent (the default), nested or coupled.")] = None,
    streams: Annotated[
        float | None, typer.Option(help="Another rate for layers that write a residual stream, 0 to leave them.")
    ] = None,
    align: Annotated[int | None, typer.Option(help="Keep multiples of so many filters. [default: 1]")] = None,
    target_macs: Annotated[float | None, typer.Option(help="Find the rate that leaves this share of the MACs.")] = None,
    target_latency: Annotated[
        float | None, typer.Option(help="Find the rate that leaves this share of the time.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="For --target-latency: torch, onnxruntime or openvino.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="With a target: time selections and alignments, the best first.")
    ] = False,
    preset: Annotated[str | None, typer.Option(help="Layers of a published model: pfec, for vgg16.")] = None,
    size: Annotated[str | None, typer.Option(help="Height and width of the input: 224 or 224x160.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show each layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Multiply-adds and parameters: dense, pruned by the paper's count, and of the real compact model."""
    from asfp.measurement.command import find_target, measure_source

    if target_macs is not None or target_latency is not None or engine is not None or search:
        if rate is not None or preset is not None or layers:
            raise AsfpError("a target stands in the place of --rate, --preset and --layers: leave them out")
        typer.echo(
            find_target(
                model,
                macs=target_macs,
                latency=target_latency,
                engine=engine,
                search=search,
                selection=selection,
                streams=streams,
                align=align,
                size=size,
                as_json=as_json,
            )
        )
        return
    typer.echo(
        measure_source(
            model,
            rate=rate,
            selection=selection,
            streams=streams,
            align=align,
            preset=preset,
            size=size,
            layers=layers,
            as_json=as_json,
        )
    )


@app.command()
def bench(
    models: Annotated[list[str], typer.Argument(help="Names, NAME@RATE for a pruned one, .safetensors, .onnx, .xml.")],
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="torch, compile, onnxruntime, openvino, fused (GPU) or all; may be repeated. [default: torch]"
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; may be repeated. [default: 1]")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16; tf32 on a GPU.")] = "fp32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="NHWC memory; not for onnxruntime, openvino.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads. [default: the engine's choice]")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each model.")] = 30,
    warmup: Annotated[int, typer.Option(help="Runs before that are not counted.")] = 5,
    size: Annotated[str | None, typer.Option(help="Height and width of the input: 224 or 224x160.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time models side by side, A B A B ...: latency, throughput, memory, time saved beside MACs saved."""
    from asfp.bench.command import bench_sources

    typer.echo(
        bench_sources(
            models,
            engine or ["torch"],
            batch or [1],
            device=device,
            precision=precision,
            channels_last=channels_last,
            threads=threads,
            repeats=repeats,
            warmup=warmup,
            size=size,
            as_json=as_json,
        )
    )


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(help="A .safetensors file, resnet56, torchvision:NAME, or NAME@RATE, pruned.")
    ],
    to: Annotated[
        list[str] | None, typer.Option(help="onnx, openvino or pt2; may be repeated. [default: onnx]")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the files.")] = Path(),
    size: Annotated[str | None, typer.Option(help="Height and width of the input: 224 or 224x160.")] = None,
    fixed: Annotated[bool, typer.Option("--fixed", help="For that size alone: faster on OpenVINO.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Write a model for ONNX Runtime, OpenVINO or torch.export, and check it against torch."""
    from asfp.export import export_source

    written = export_source(model, to or ["onnx"], output, size, fixed)
    typer.echo(json.dumps([x.to_dict() for x in written]) if as_json else "\n".join(map(str, written)))


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, e.g. recipes/cifar10/resnet56-asfp.toml.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, e.g. pruning.rate=0.3 seed=1.")
    ] = None,
) -> None:
    """Train, prune and compact a model as a recipe says; a run that was cut off goes on when called again."""
    from asfp.train import load_config
    from asfp.train.show import run

    run(load_config(recipe, settings or ()))


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="The data set: cifar10.")],
    root: Annotated[Path, typer.Option(help="The folder that holds it.")] = Path("data"),
    download: Annotated[bool, typer.Option("--download", help="Fetch what is missing.")] = False,
) -> None:
    """Check that a data set is there and whole."""
    from asfp.data import describe

    typer.echo(describe(name, root, download))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, their record.json files, or folders of such.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page. [default: report.html]")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print headline and tables instead.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Folder for PNG and SVG files of every figure.")] = None,
    bench: Annotated[bool, typer.Option("--bench", help="First time dense and compact on the engines here.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Serve the page on this machine and keep it current.")] = False,
    host: Annotated[str, typer.Option(help="With --live: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --live: the port, 0 for any free one.")] = 6007,
) -> None:
    """Show what pruning did: one HTML page that works offline, pictures, or tables in the terminal."""
    from asfp.report import command

    if live:
        command.live(runs, host, port)
    else:
        command.report(runs, output, text=text, figures=figures, bench=bench)


@app.command()
def schedule(
    goal: Annotated[float, typer.Option(help="Share of the filters to prune in the end, between 0 and 1.")] = 0.4,
    epochs: Annotated[int, typer.Option(help="Epochs of the training.")] = 200,
    start: Annotated[float, typer.Option(help="Rate before training; equal to the goal it is SFP.")] = 0.0,
    d: Annotated[float, typer.Option(help="Share of the epochs after which 3/4 of the goal is reached.")] = 0.125,
) -> None:
    """Draw the pruning rate over the epochs."""
    from asfp.report.text import schedule_text

    typer.echo(schedule_text(goal, epochs, start, d))


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            help="table1 ... table5, fig-rate, -flops, -gap, -interval, -d, -selection, layers, options, summary, all."
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Rows with this in their text; =NAME for one run; a,b for both.")] = "",
    seeds: Annotated[int | None, typer.Option(help="Runs of each row. [default: 3 or 1, as the row says]")] = None,
    budget: Annotated[str, typer.Option(help="Stop after this time, e.g. 25m; the next call goes on.")] = "",
    plan: Annotated[bool, typer.Option("--plan", help="Run nothing: show what is there and what is missing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of CIFAR-10. [default: data]")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once on the GPU (best with CUDA MPS).")] = 1,
    device: Annotated[str, typer.Option(help="auto: a GPU; cpu: there, however long it takes.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Folder for the picture of a figure, PNG and SVG.")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Make the tables of README and docs from the records.")
    ] = False,
) -> None:
    """The paper's tables and figures: run what is missing, and print ours beside the paper's."""
    from asfp.reproduce import command

    request = command.Request(
        name or "", only, seeds, budget, plan, as_json, markdown, results, runs, data, jobs, device, output
    )
    typer.echo(command.write(request) if write else command.reproduce(request, command.stderr))


def main() -> None:
    """The `asfp` command.

    >>> import sys
    >>> sys.argv = ["asfp", "--version"]
    >>> try:
    ...     main()
    ... except SystemExit as end:
    ...     print(end.code)
    asfp 0.1.0
    0
    """
    app(prog_name="asfp")
