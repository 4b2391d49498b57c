"""Every narrowing of a model's parameters in a piece of code, with file, line and the bits lost."""

import linecache
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fc_optim.audit.lineage import Lineage, plain_tensors
from fc_optim.audit.loss import Loss, measure
from fc_optim.params.modules import named_parameters


@dataclass(frozen=True)
class Place:
    """A line of code outside torch and the standard library."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Cast:
    """One operation that wrote parameter values into a format that cannot hold all of them.

    names: the parameters in it, cleaned; several when a bucket was cast. stack: where, innermost
    first. loss is None where the operation also computed or rearranged, so that nothing tells
    which value each result was rounded from.
    """

    names: tuple[str, ...]
    op: str
    source: torch.dtype
    target: torch.dtype
    elements: int
    loss: Loss | None
    stack: tuple[Place, ...]

    @property
    def place(self) -> Place:
        return self.stack[0]

    @property
    def rounding(self) -> str:
        return self.loss.rounding if self.loss else "not measured"


@dataclass
class CastReport:
    """What `watch_casts` saw, in order. It fills while the context is open."""

    casts: list[Cast] = field(default_factory=list)

    @property
    def lossy(self) -> list[Cast]:
        """The casts that changed a value, or that could not be measured."""
        return [c for c in self.casts if c.rounding != "exact"]

    def by_place(self) -> list[list[Cast]]:
        """Casts of the same line and dtypes together, in order of first appearance."""
        places: dict[Any, list[Cast]] = {}
        for c in self.casts:
            places.setdefault((c.place, c.source, c.target), []).append(c)
        return list(places.values())

    def summary(self) -> list[dict[str, Any]]:
        """One row per place: file, line, function, code, op, dtypes, parameters and elements,
        changed, mean_ulp, max_ulp, overflowed, rounding. For JSON."""
        return [_row(casts) for casts in self.by_place()]

    def __str__(self) -> str:
        rows = self.summary()
        lossy = [r for r in rows if r["rounding"] != "exact"]
        exact = [r for r in rows if r["rounding"] == "exact"]
        if not rows:
            return "No parameter was narrowed."
        lines = [f"{len(rows)} places narrow parameters, {len(lossy)} of them lose bits."]
        for r in [*lossy, *exact]:
            lines += ["", f"{r['file']}:{r['line']} in {r['function']}", f"    {r['code']}"]
            lines += [
                f"    {r['op']}: {r['source']} -> {r['target']}, {r['parameters']} parameters "
                f"({', '.join(r['names'][:3])}{', ...' if r['parameters'] > 3 else ''}), "
                f"{r['elements']:,} elements",
                f"    {_verdict(r)}",
            ]
        return "\n".join(lines)


@contextmanager
def watch_casts(
    model: nn.Module, masters: Mapping[str, Tensor] | None = None
) -> Iterator[CastReport]:
    """Report where code narrows the model's parameters.

    ```
    with watch_casts(model) as report:
        trainer.sync_weights()
    print(report)
    ```

    Seen are all operations of torch in this thread, whoever wrote the code: `.to`, `type_as`,
    `copy_` into a narrower tensor, `torch._foreach_copy_`, `out=`, `model.bfloat16()`, on
    parameters, their `.data`, views, state-dict values, DTensors and what `full_tensor()` gathers,
    and on copies, buckets, merged or scaled weights made from them inside the context. A parameter
    counts as narrowed if the new floating-point format cannot hold all values of the old one. A
    cast that changed no value, because they were on the narrow grid already, is in `report.casts`
    with rounding "exact" and not in `report.lossy`: that is what code shows which serves a
    Fair Cast model.

    Under FSDP1, whose ranks hold parts of one flat parameter, names are those of this rank's part.

    Not seen: other threads, processes and integer quantization; kernels that write through raw
    pointers (Triton, ctypes, numba, `Tensor.numpy()`). Code under `torch.compile` runs eagerly.
    Inside, a cast that loses bits costs a comparison in float64 (about 75 ns per element on a CPU
    core, 2 ns if exact) and a read from the device; outside, nothing is installed.

    Args:
        model: its parameters are watched, under their cleaned names. Not written.
        masters: more tensors to watch, by name, e.g. an optimizer's fp32 masters.
    """
    named = list(named_parameters(model))
    report = CastReport()
    with _Watch(Lineage([*named, *(masters or {}).items()]), report):
        yield report


# Operations that move values without changing them, by name; "same" keep their order too.
_SAME = {
    "_foreach_copy_", "_pin_memory", "_to_copy", "broadcast", "clone", "copy", "copy_", "detach",
    "lift_fresh", "lift_fresh_copy", "wait_tensor",
}  # fmt: skip
_MOVES = _SAME | {
    "_allgather_base_", "all_gather_copy_in", "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out", "all_to_all_single",
    "allgather_", "allgather_into_tensor_coalesced_", "as_strided_scatter", "cat", "chunk_cat",
    "constant_pad_nd", "flip", "gather", "index", "index_copy", "index_copy_", "index_put",
    "index_put_", "index_select", "masked_select", "repeat", "roll", "scatter_", "select_scatter",
    "slice_scatter", "split_with_sizes_copy", "stack", "take", "where",
}  # fmt: skip
# Elementwise: on floats they merge or scale weights, on integers they work on the weights' bits.
_ELEMENTWISE = {
    "__and__", "__lshift__", "__or__", "__rshift__", "__xor__", "add", "addcmul", "addmm",
    "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "clamp", "div", "lerp", "mul", "sub",
}  # fmt: skip
# Operations that write an argument without saying so in their schema: its position.
_WRITES = {
    "c10d::_allgather_base_": 0, "c10d::allgather_": 0, "c10d::scatter_": 0,
    "c10d::allgather_into_tensor_coalesced_": 0, "fsdp::all_gather_copy_in": 1,
}  # fmt: skip


class _Watch(TorchDispatchMode):
    def __init__(self, lineage: Lineage, report: CastReport):
        super().__init__()
        self.lineage = lineage
        self.report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = plain_tensors((args, kwargs))
        if not isinstance(func, torch._ops.OpOverload) or not any(map(self._tracked, inputs)):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # there composite operations arrive whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        written = _written(func, args, kwargs)
        ids = {id(t) for t in written}
        sources = [t for t in inputs if id(t) not in ids]
        before = {id(t): self._bits_before(func, t) for t in written}
        result = func(*args, **kwargs)
        with torch.no_grad():
            self._follow(func, args, written, sources, before, plain_tensors(result))
        return result

    def _tracked(self, t: Tensor) -> bool:
        return bool(self.lineage.origins(t))

    def _bits_before(self, func: Any, t: Tensor) -> Tensor | None:
        """The values of a tensor whose bits are about to be changed in place."""
        if t.is_floating_point() or _kind(func) not in _ELEMENTWISE or not self._tracked(t):
            return None
        values = self.lineage.values(t)
        own = values is not None and (values.untyped_storage()._cdata == t.untyped_storage()._cdata)
        return values.clone() if own and values is not None else values

    def _follow(
        self, func: Any, args: Any, written: list[Tensor], sources: list[Tensor],
        before: dict[int, Tensor | None], outputs: list[Tensor],
    ) -> None:  # fmt: skip
        kind = _kind(func)
        if kind == "view" and func._overloadname == "dtype" and outputs:
            return self._reinterpreted(func, sources[0], outputs[0])
        known = {t.untyped_storage()._cdata for t in (*written, *sources)}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in known]
        from_params = [t for t in sources if self._tracked(t)]
        for dest, feeds in _pairs(kind, args, [*written, *fresh], from_params):
            if kind in _MOVES and feeds:
                self._moved(func, kind, dest, feeds)
            elif kind in _MOVES:
                self.lineage.forget(dest)
            elif before.get(id(dest)) is not None:
                self.lineage.moved(dest, [dest], before[id(dest)])
            elif kind in _ELEMENTWISE and any(f.shape == dest.shape for f in feeds):
                self._computed(func, dest, [f for f in feeds if f.shape == dest.shape])

    def _moved(self, func: Any, kind: str, dest: Tensor, feeds: list[Tensor]) -> None:
        source = feeds[0]
        if source.is_floating_point() != dest.is_floating_point():  # numbers, not bits
            return self.lineage.forget(dest)
        values = self.lineage.values(source) if len(feeds) == 1 and kind in _SAME else None
        if values is not None and values.shape != dest.shape:
            values = _expanded(values, dest.shape)
        wide = source.dtype if values is None else values.dtype
        narrows = _narrows(wide, dest.dtype)
        if narrows:
            if kind == "cat" and dest.dim() == 1:  # with out=
                values = torch.cat([f.reshape(-1) for f in feeds])
            self._record(func, feeds, values, dest)
        keep = kind in _SAME and (not dest.is_floating_point() or self._alive(values))
        self.lineage.moved(dest, feeds, values if keep and not narrows else None)

    def _alive(self, values: Tensor | None) -> bool:
        """Whether `values` are a parameter's own memory, which costs nothing to hold on to."""
        return values is not None and any(o.fixed for o in self.lineage.origins(values))

    def _computed(self, func: Any, dest: Tensor, feeds: list[Tensor]) -> None:
        if not dest.is_floating_point():
            return self.lineage.moved(dest, feeds[:1], self.lineage.values(feeds[0]))
        if _narrows(feeds[0].dtype, dest.dtype):
            self._record(func, feeds, None, dest)
        self.lineage.moved(dest, feeds)

    def _reinterpreted(self, func: Any, source: Tensor, result: Tensor) -> None:
        """The bits of integers are read as a narrow float: a cast done by hand ends here."""
        values = None if source.is_floating_point() else self.lineage.values(source)
        if values is None or not result.is_floating_point() or values.shape != result.shape:
            return
        if _narrows(values.dtype, result.dtype):
            self._record(func, [source], values, result)
            self.lineage.moved(result, [source])

    def _record(self, func: Any, feeds: list[Tensor], values: Tensor | None, dest: Tensor) -> None:
        source = feeds[0].dtype if values is None else values.dtype
        names = dict.fromkeys(name for f in feeds for name in self.lineage.names(f))
        if dest.numel():
            loss = None if values is None else measure(values, dest)
            cast = Cast(tuple(names), str(func), source, dest.dtype, dest.numel(), loss, _stack())
            self.report.casts.append(cast)


def _kind(func: Any) -> str:
    """ "add" for aten::add_.Tensor; names that end in "_" are kept where only they are listed."""
    name = func._schema.name.split("::")[1].removesuffix("_copy") or "copy"
    full: str = func._schema.name.split("::")[1]
    if full in _MOVES or full in _ELEMENTWISE:
        return full
    return name if name in _MOVES else full.removesuffix("_")


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    schema = func._schema
    if schema.name in _WRITES:
        return plain_tensors(args[_WRITES[schema.name]])
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return [
        t
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
        for t in plain_tensors(given.get(a.name))
    ]


def _pairs(
    kind: str, args: Any, dests: list[Tensor], sources: list[Tensor]
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Which sources, of those that come from parameters, fed which destination."""
    if kind == "_foreach_copy_":
        ids = {id(t) for t in sources}
        for dest, source in zip(dests, plain_tensors(args[1]), strict=True):
            yield dest, [source] if id(source) in ids else []
    elif len(dests) == len(sources) > 1:
        yield from ((d, [s]) for d, s in zip(dests, sources, strict=True))
    else:
        yield from ((d, sources) for d in dests)


def _expanded(values: Tensor, shape: torch.Size) -> Tensor | None:
    """As `copy_` broadcasts; None where a DTensor's local parts do not correspond."""
    try:
        return values.expand(shape)
    except RuntimeError:
        return None


def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether some values of the floating-point format `source` are not in `target`."""
    if source == target or not source.is_floating_point or not target.is_floating_point:
        return False
    try:
        a, b = torch.finfo(source), torch.finfo(target)
    except TypeError:  # packed formats, such as two fp4 in a byte
        return target.itemsize < source.itemsize
    return b.eps > a.eps or b.max < a.max or b.tiny * b.eps > a.tiny * a.eps


_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGES = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}


def _stack(depth: int = 4) -> tuple[Place, ...]:
    """The innermost frames of the code that is being watched."""
    places: list[Place] = []
    frame = sys._getframe(1)
    while frame is not None and len(places) < depth:
        code = frame.f_code
        if _is_user_code(code.co_filename):
            places.append(Place(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(places) or (Place("<unknown>", 0, "<unknown>"),)


def _is_user_code(file: str) -> bool:
    if file == __file__ or file.startswith((_TORCH, "<frozen")):
        return False
    in_packages = "site-packages" in file or any(file.startswith(p) for p in _PACKAGES)
    return in_packages or not file.startswith(_STDLIB)


def _row(casts: list[Cast]) -> dict[str, Any]:
    first = casts[0]
    names = list(dict.fromkeys(name for c in casts for name in c.names))
    losses = [c.loss for c in casts if c.loss]
    total = sum(losses, Loss())
    measured = len(losses) == len(casts)
    return {
        "file": first.place.file,
        "line": first.place.line,
        "function": first.place.function,
        "code": first.place.code,
        "op": first.op,
        "source": str(first.source).removeprefix("torch."),
        "target": str(first.target).removeprefix("torch."),
        "names": names,
        "parameters": len(names),
        "elements": sum(c.elements for c in casts),
        "rounding": total.rounding if measured else "not measured",
        "mean_ulp": total.mean_ulp,
        **{f.name: getattr(total, f.name) for f in fields(Loss) if f.name not in _INNER},
    }


_INNER = ("elements", "sum_ulp", "drift", "variance", "log10_stochastic")


def _verdict(row: dict[str, Any]) -> str:
    if row["rounding"] == "exact":
        return "exact: all values were on the narrow grid already"
    if row["rounding"] == "not measured":
        return "not measured: the operation computes or rearranges, and narrows, at once"
    overflow = f", {row['overflowed']:,} overflowed" if row["overflowed"] else ""
    return (
        f"{row['changed'] / row['elements']:.1%} changed value (mean {row['mean_ulp']:.3f}, max "
        f"{row['max_ulp']:.3f} ulp){overflow}; rounding: {row['rounding']}"
    )
