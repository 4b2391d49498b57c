"""The command `fc-audit`: what an export discards, read off the files of any training run."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as RichTable

from fc_optim.audit import findings
from fc_optim.audit.compare import compare as compare_checkpoints
from fc_optim.audit.compare import open_masters
from fc_optim.audit.html import page
from fc_optim.audit.layers import kind_of
from fc_optim.audit.predict import FORMATS, Row, lag_stride, predict
from fc_optim.audit.readers import open_checkpoint
from fc_optim.audit.report import Report
from fc_optim.audit.states import open_state
from fc_optim.audit.stored import BadCheckpoint, explain_memory
from fc_optim.audit.updates import first_adamw_step, first_muon_step, next_step

app = typer.Typer(
    help="What a served copy of the weights keeps of an optimizer's steps, and what it drops. "
    "Reads checkpoints and training states; needs no training and no GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

T = TypeVar("T")
_Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON, nothing else.")]
_Html = Annotated[
    Path | None, typer.Option("--html", help="Write a page with pictures that opens offline.")
]
_Trust = Annotated[
    bool,
    typer.Option("--trust-pickle", help="Unpickle arbitrary objects. Runs code of the file."),
]
_Only = Annotated[
    list[str] | None,
    typer.Option("--format", help=f"One of {', '.join(FORMATS)}; may be repeated."),
]


class Optimizer(str, Enum):
    adamw = "adamw"
    muon = "muon"


@app.command()
def checkpoints(
    first: Annotated[Path, typer.Argument(help="The earlier served checkpoint.")],
    second: Annotated[Path, typer.Argument(help="The one served after it.")],
    master: Annotated[
        Path | None,
        typer.Option(help="fp32 masters of the second: weights, or a training state."),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate, for the dead zone.")] = 1e-6,
    common: Annotated[bool, typer.Option("--common", help="Ignore tensors in one only.")] = False,
    as_json: _Json = False,
    html: _Html = None,
    trust_pickle: _Trust = False,
) -> None:
    """Compare two consecutive served checkpoints; with the masters, name the rounding.

    Safetensors, .bin and .pt files, Hugging Face folders (sharded or not) and folders of
    torch.distributed.checkpoint. Memory stays bounded, whatever their size.

    Example: fc-audit checkpoints step_100/ step_101/ --master step_101/optimizer.pt --lr 1e-6
    """
    with _explained():
        _positive(lr)
        a = open_checkpoint(first, trust_pickle=trust_pickle)
        b = open_checkpoint(second, trust_pickle=trust_pickle)
        masters = open_masters(master, b, trust_pickle=trust_pickle) if master else None
        steps = compare_checkpoints(a, b, masters, lr, common=common)
        *_, result = _progress(steps, len(a), as_json)
        subject = f"{first} and {second}" + (f", masters {master}" if master else "")
        _emit(findings.compared(subject, result, lr, master is not None), as_json, html)


@app.command()
def model(
    path: Annotated[Path, typer.Argument(help="Weights that training will start from.")],
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-6,
    optimizer: Annotated[Optimizer, typer.Option(help="Which first step.")] = Optimizer.adamw,
    weight_decay: Annotated[float, typer.Option(help="Decoupled; torch's is 0.01.")] = 0.01,
    adamw_lr: Annotated[
        float | None, typer.Option(help="With muon: of what AdamW trains. Default: lr.")
    ] = None,
    adjust_lr_fn: Annotated[
        str, typer.Option(help="Of torch.optim.Muon: original or match_rms_adamw.")
    ] = "original",
    only: _Only = None,
    as_json: _Json = False,
    html: _Html = None,
    trust_pickle: _Trust = False,
) -> None:
    """Before any training: what share of one step's updates round-to-nearest would discard.

    For bf16, fp16 and FP8 e4m3 (a scale per tensor or per 128 x 128 block), and the median number
    of equal steps until a copy changes.

    Example: fc-audit model path/to/model --lr 1e-6 --optimizer adamw --html report.html
    """
    with _explained():
        _positive(lr if adamw_lr is None else min(lr, adamw_lr))
        formats = _formats(only or list(FORMATS))
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise BadCheckpoint(f"--adjust-lr-fn: {adjust_lr_fn!r} is not known.")
        tensors = _once(open_checkpoint(path, trust_pickle=trust_pickle))
        floats = {n: t for n, t in tensors.items() if t.dtype.is_floating_point and t.numel}
        if not floats:
            kinds = sorted({str(t.dtype) for t in tensors.values()})
            raise BadCheckpoint(f"{path}: only {', '.join(kinds)}: quantized weights have no ulp.")
        stride = lag_stride(sum(t.numel for t in floats.values()))

        def rows() -> Iterator[Row]:
            for name, t in floats.items():
                dims = len(t.shape)
                by_muon = dims == 2 and kind_of(name, dims) not in ("embedding", "head", "norm")
                if optimizer is Optimizer.muon and by_muon:
                    step = first_muon_step(name, t.shape, lr, weight_decay, adjust_lr_fn)
                else:
                    step = first_adamw_step(name, adamw_lr or lr, weight_decay)
                yield predict(name, t, step, formats, stride)

        done = list(_progress(rows(), len(floats), as_json))
        data = {"command": "model", "lr": lr, "optimizer": optimizer.value,
                "weight_decay": weight_decay}  # fmt: skip
        report = findings.predicted(
            "What a served copy would drop of the first step",
            f"{path}, {optimizer.value}, lr {lr:g}", done,
            _model_of_update(optimizer, adjust_lr_fn), data,
        )  # fmt: skip
        left = [n for n in tensors if n not in floats]
        if left:
            report.notes.append(f"Not floating point, left out: {', '.join(left[:12])}.")
        _emit(report, as_json, html)


def _model_of_update(optimizer: Optimizer, adjust_lr_fn: str) -> str:
    adam = (
        "Adam's first step moves every element by lr, up or down, and adds the decay. Later steps "
        "are mostly smaller, so this is the least that is discarded."
    )
    if optimizer is Optimizer.adamw:
        return adam
    return (
        "Muon's matrices: normal elements of rms 0.9 / sqrt(max(rows, columns)), times the rate of "
        f"torch.optim.Muon (adjust_lr_fn {adjust_lr_fn}). Embeddings, heads, norms, biases: {adam}"
    )


@app.command()
def optimizer(
    state: Annotated[Path, typer.Argument(help="A saved training state: a file or a folder.")],
    weights: Annotated[
        Path | None, typer.Option(help="The weights, for states without masters.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="In place of the state's own.")] = None,
    only: _Only = None,
    as_json: _Json = False,
    html: _Html = None,
    trust_pickle: _Trust = False,
) -> None:
    """From a training state: which updates of the next step survive, with its real moments.

    torch.optim and fc_optim states, folders of accelerate and transformers' Trainer,
    torch.distributed.checkpoint (FSDP), DeepSpeed ZeRO 1, 2 and 3. Masters are taken from the
    state where it has them.

    Example: fc-audit optimizer checkpoint-500/ --html report.html
    """
    with _explained():
        formats = _formats(only or ["bf16"])
        slots = open_state(state, weights, trust_pickle=trust_pickle)
        stride = lag_stride(sum(s.masters.numel for s in slots))
        rows = (predict(s.name, s.masters, next_step(s, lr), formats, stride) for s in slots)
        done = list(_progress(rows, len(slots), as_json))
        steps = sorted({s.step for s in slots})
        rates = sorted({float(s.group["lr"]) if lr is None else lr for s in slots})
        data = {"command": "optimizer", "lr": rates, "step": [steps[0], steps[-1]]}
        text = ", ".join(f"{r:g}" for r in rates[:4])
        _emit(
            findings.predicted(
                "What a served copy would drop of the next step",
                f"{state}, step {steps[-1]:g}, lr {text}", done,
                "the last step's update once more, from the state's moments: lr m_hat / "
                "(sqrt(v_hat) + eps) and decoupled decay for Adam and AdamW, the orthogonalised "
                "momentum for Muon, the momentum for SGD. The next gradient is not known.", data,
            ),
            as_json, html,
        )  # fmt: skip


@app.command()
def probe(
    model: Annotated[str, typer.Argument(help="Folder or name of a causal language model.")],
    text: Annotated[Path | None, typer.Option(help="A text file. Default: a built-in one.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of the steps.")] = 1e-6,
    steps: Annotated[list[int] | None, typer.Option(help="Distances; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Of the stochastic copies.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model is evaluated.")] = "cpu",
    plot: Annotated[Path | None, typer.Option(help="A PNG to write (needs matplotlib).")] = None,
    as_json: _Json = False,
    html: _Html = None,
) -> None:
    """Take one real gradient, move masters along it, and measure the hidden log-ratio of copies.

    Needs transformers. Two minutes for 135 M parameters on a CPU.

    Example: fc-audit probe path/to/model --lr 1e-6 --steps 10 --steps 50 --html report.html
    """
    from fc_optim.audit.probe import plot_probe
    from fc_optim.audit.probe import probe as run

    with _explained():
        try:
            words = text.read_text() if text else None
            result = run(model, text=words, lr=lr, steps=steps or (10, 50, 150), seed=seed,
                         device=device)  # fmt: skip
            if plot is not None:
                plot_probe(result, plot)
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise BadCheckpoint(str(error)) from None
        _emit(findings.probed(result), as_json, html)


@contextmanager
def _explained() -> Iterator[None]:
    """Messages in place of tracebacks for everything that a file can be wrong in."""
    try:
        with explain_memory():
            yield
    except (BadCheckpoint, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from None


def _positive(lr: float) -> None:
    if not 0 < lr < float("inf"):
        raise BadCheckpoint(f"--lr: {lr} must be above 0.")


def _formats(asked: list[str]) -> list[str]:
    for f in asked:
        if f not in FORMATS:
            raise BadCheckpoint(f"--format: {f!r} is none of {', '.join(FORMATS)}.")
    return asked


def _once(tensors: dict) -> dict:  # type: ignore[type-arg]
    """Without the second name of a tied tensor."""
    seen: set[tuple[str, int]] = set()
    kept = {}
    for name, t in tensors.items():
        if t.place is None or not t.numel or t.place not in seen:
            kept[name] = t
            if t.place is not None:
                seen.add(t.place)
    return kept


def _progress(items: Iterable[T], total: int, quiet: bool) -> Iterator[T]:
    if quiet or not sys.stderr.isatty():
        yield from items
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total, description="reading tensors")


def _emit(report: Report, as_json: bool, html: Path | None) -> None:
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
    if as_json:
        print(json.dumps(report.data, allow_nan=False, indent=1))
        return
    console = Console()
    if not console.is_terminal:  # a pipe or a file folds nothing
        console.width = 160
    console.print(f"[bold]{escape(report.title)}[/]\n{escape(report.subject)}\n", soft_wrap=True)
    width = max((len(v) for _, v in report.figures), default=0)
    for label, value in report.figures:
        console.print(f"  [bold]{escape(value):>{width}}[/]  {escape(label)}", soft_wrap=True)
    for table in report.tables:
        if table.long:
            continue
        shown = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
        for i, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for row in table.rows:
            shown.add_row(*(escape(cell) for cell in row))
        console.print("\n", shown, sep="")
    for note in report.notes:
        console.print(f"\n{escape(note)}", soft_wrap=True)
    if html is not None:
        console.print(f"\nPage: {escape(str(html))}", soft_wrap=True)
