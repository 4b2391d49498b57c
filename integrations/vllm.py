"""vLLM: keep a rollout engine at the served weights, and prove that it is.

    llm = vllm.LLM(path, dtype="bfloat16")
    sync(optimizer, llm)                            # after step(); or the URL of a server:
    sync(optimizer, "http://localhost:8000")

A server is started with what lets a trainer write to it::

    VLLM_SERVER_DEV_MODE=1 vllm serve path --dtype bfloat16 \\
        --weight-transfer-config '{"backend": "fc_optim"}'

That backend, ours, works on every device, through shared memory of one host. With vLLM's own, for
GPUs: `ServerEngine(url, transfer=...)`, or `ServedSource(optimizer)` as the source of whatever
drives vLLM's weight transfer already. Tested with vLLM 0.32 on CPUs.

The engine must compute with the bits that it is sent: dtype bfloat16, no quantisation, no tensor
or pipeline parallelism; on a CPU see `keep_plain_weights`. Make an `LLM` before the optimizer's
first step, or numba keeps vLLM from starting in the same process.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fc_optim.integrations.needs import needs
from fc_optim.integrations.vllm_layout import (
    PACKED,
    Layout,
    Ledger,
    check_shapes,
    read_checksums,
)
from fc_optim.integrations.vllm_plugin import keep_plain_weights as keep_plain_weights
from fc_optim.optimizer import FairCastOptimizer
from fc_optim.serving.stream import publish_items
from fc_optim.sync.manifests import Entry, Manifest
from fc_optim.sync.patches import Patch
from fc_optim.sync.sync import Engine, Sync

with needs("vllm", "0.32"):
    import vllm
    from vllm.distributed.weight_transfer import (
        ParamMeta,
        TrainerWeightTransferEngine,
        WeightSource,
    )

    from fc_optim.integrations import vllm_worker
    from fc_optim.integrations.vllm_transfer import FileTransfer, FileTransferInit, Routes

_PARTIAL = "partial"  # the version of an engine whose update did not come to its end
_PATCH_BYTES = 64 << 20

Weights = Iterator[tuple[str, Tensor]]


class ServedSource(WeightSource):
    """The served weights as vLLM's native weight transfer takes them.

    Every iteration is a fresh pass over `served_params()`: where parameters are sharded each rank
    iterates to the end. Call `optimizer.publish(redraw=True)` before each transfer, as `Sync` does.
    """

    def __init__(self, optimizer: FairCastOptimizer, bucket_bytes: int | None = None):
        self._optimizer, self._bucket_bytes = optimizer, bucket_bytes

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and whole shapes, in the order of iteration; gathers nothing."""
        items = publish_items(self._optimizer.weights, "served")
        return [ParamMeta(i.name, i.dtype, tuple(i.piece.shape)) for i in items]

    def __iter__(self) -> Weights:
        return self._optimizer.served_params(bucket_bytes=self._bucket_bytes)


# ---- An LLM in this process


class OfflineEngine:
    """A `vllm.LLM` as a `fc_optim.sync.Engine` and `SparseEngine`.

    Writes in place, one whole fused parameter after another, and reads back the memory that the
    model computes with. Between two calls of `generate()` only.

    Args:
        llm: runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), or takes functions from it
            (VLLM_ALLOW_INSECURE_SERIALIZATION=1), for which weights are pickled.

    Raises NotImplementedError for an engine that is split, quantised or repacked its weights.
    """

    def __init__(self, llm: "vllm.LLM"):
        self.llm = llm
        self._rows: dict[str, int] = {}
        packed, self._shapes = self._call(vllm_worker.describe)
        self._layout = Layout(frozenset(self._shapes), packed)

    def watch(self, weights: Weights, sent: Manifest) -> Weights:
        """Refuse, before anything is written, what does not make up the engine's parameters."""
        shapes = {name: e.shape for name, e in sent.parameters.items()}
        self._layout.check_whole(shapes)
        self._layout.check_covered(shapes)
        check_shapes(self._layout, shapes, self._shapes)
        self._rows = {name: shape[0] for name, shape in shapes.items()}
        return weights

    def load(self, weights: Weights, version: int) -> None:
        """See `fc_optim.sync.Engine`. Raises ValueError for a fused parameter without all of its
        parts, of which nothing is written."""
        rows: dict[str, int] = {}
        for group in self._layout.whole_groups(weights, lambda t: t.detach().clone()):
            self.llm.update_weight_version(_PARTIAL)
            rows |= {name: tensor.shape[0] for name, tensor in group}
            self._rows |= rows
            self._call(vllm_worker.load_group, group=group)
        self._rows = rows
        self._finish(version)

    def load_patches(self, patches: Iterator[Patch], version: int) -> None:
        """See `fc_optim.sync.SparseEngine`. Raises ValueError for new values that are NaN."""
        for batch in _batches(patches):
            self.llm.update_weight_version(_PARTIAL)
            self._call(vllm_worker.load_patches, patches=batch)
        self._finish(version)

    def held(self) -> Manifest:
        """What the model computes with, under the names that were loaded."""
        answer = self._call(vllm_worker.entries, rows=self._rows)
        parameters = {name: Entry(d, tuple(s), x) for name, (d, s, x) in answer.items()}
        return Manifest(_number(self.llm.get_weight_version()), parameters)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The weights themselves, under the names that were loaded: views of the engine's memory.

        Raises RuntimeError if that is another process's.
        """
        named: list[tuple[str, Tensor]] = self._call(vllm_worker.read, rows=self._rows)
        if not all(isinstance(t, Tensor) for _, t in named):
            raise RuntimeError("llm: its weights are in another process; held() tells their bits.")
        return named

    def _finish(self, version: int) -> None:
        self._call(vllm_worker.finish)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "llm: its prefix cache, which older weights filled, cannot be dropped while "
                "requests run. Sync between two calls of generate()."
            )
        self.llm.update_weight_version(str(version))

    def _call(self, function: Callable[..., Any], **kwargs: Any) -> Any:
        try:  # bound, they are pickled; as arguments of the call tensors would arrive as lists
            (answer,) = self.llm.collective_rpc(functools.partial(function, **kwargs))
        except TypeError as e:
            if "VLLM_ALLOW_INSECURE_SERIALIZATION" not in str(e):
                raise
            raise RuntimeError(
                "llm: it runs in another process and takes no functions. Set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 (to run it in this one) or "
                "VLLM_ALLOW_INSECURE_SERIALIZATION=1 before it is made."
            ) from e
        return answer


# ---- A server

Transfer = Callable[[Routes, WeightSource], TrainerWeightTransferEngine]


class ServerEngine:
    """A vLLM server as a `fc_optim.sync.Engine`, and a `SparseEngine` with our backend.

    An update pauses it, writes, drops the prefix cache, resumes. After a failure it resumes only
    if all its weights are of one version; else it stays paused, and the error says so. What it
    holds is read from its `weight_checker`: each sync hashes all weights once on both sides.

    Args:
        url: of the server, started as the module's docstring says.
        transfer: how weights travel, by default our backend. Called once with the client and the
            source that vLLM's `trainer_init` takes, for example ``lambda client, source:
            WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)``.
        in_flight: what the pause does with running requests: "wait" for them, or "abort" them.
            (vLLM's "keep" would finish them on a cache of older weights.)
        folder: where our backend puts weights on their way; by default shared memory.
        packed: fused module -> its parts, if the model fuses others than qkv_proj, gate_up_proj.
        timeout_s: for each answer of the server.

    Use it through `Sync`, which tells it beforehand what will come.
    """

    def __init__(
        self,
        url: str,
        *,
        transfer: Transfer | None = None,
        in_flight: str = "wait",
        folder: str | None = None,
        packed: Mapping[str, Sequence[str]] = PACKED,
        timeout_s: float = 600.0,
    ):
        if in_flight not in ("wait", "abort"):
            raise ValueError(f"in_flight: {in_flight!r} is neither 'wait' nor 'abort'.")
        self.routes = Routes(url, timeout_s)
        self._in_flight, self._packed = in_flight, packed
        self._transfer = transfer or (
            lambda client, source: FileTransfer.trainer_init(
                FileTransferInit(rank=0, folder=folder), client=client, source=source
            )
        )
        self._source = _Once()
        self._sender: TrainerWeightTransferEngine | None = None
        self._layout: Layout | None = None
        self._ledger = Ledger()

    def watch(self, weights: Weights, sent: Manifest) -> Weights:
        """Refuse, before the engine is told anything, what does not make up its parameters; keep
        checksums of the rest. Fused parameters come together."""
        if self._layout is None:
            self._layout = Layout(frozenset(self._checksums()), self._packed)
        if self._sender is None:
            self._sender = self._transfer(self.routes, self._source)
        self._layout.check_whole(sent.parameters)
        self._layout.check_covered(sent.parameters)
        named = [(n, (n, e)) for n, e in sent.parameters.items()]
        ordered = [x for group in self._layout.whole_groups(named, lambda e: e) for x in group]
        self._source.expected = [
            ParamMeta(n, getattr(torch, e.dtype), e.shape) for n, (_, e) in ordered
        ]
        return self._ledger.record(self._layout, weights, sent)

    def load(self, weights: Weights, version: int) -> None:
        """See `fc_optim.sync.Engine`."""
        sender = self._sender_of()
        self._source.weights = weights
        self._update(sender.send_weights, version)

    def load_patches(self, patches: Iterator[Patch], version: int) -> None:
        """See `fc_optim.sync.SparseEngine`. Raises ValueError for new values that are NaN, and
        TypeError if the transfer takes no patches."""
        sender = self._sender_of()
        if not isinstance(sender, FileTransfer):
            raise TypeError(f"sparse: {type(sender).__name__} sends no patches; use sparse=False.")
        self._update(lambda: sender.send_patches(_checked(patches)), version)

    def held(self) -> Manifest:
        """What the server's checksums say, under the names that were loaded."""
        version = _number(self.routes.get("weight_info")["weight_version"])
        return Manifest(version, self._ledger.translate(self._checksums()))

    def _sender_of(self) -> TrainerWeightTransferEngine:
        if self._sender is None:
            raise RuntimeError("ServerEngine: call watch() before a load, or use it through Sync.")
        return self._sender

    def _update(self, send: Callable[[], None], version: int) -> None:
        before = self.routes.get("weight_info")["weight_version"]
        try:
            self.routes.post("pause", mode=self._in_flight)
            self.routes.post("update_weight_version", {"new_version": _PARTIAL})
            self.routes.version = str(version)
            send()
            self._ledger.loaded()
            self._resume()
        except Exception as e:
            self._recover(e, before, version)
            raise

    def _resume(self) -> None:
        if not self.routes.post("reset_prefix_cache").get("success", True):
            raise RuntimeError(
                "the server could not drop its prefix cache, which older weights filled, because "
                "requests hold parts of it."
            )
        self.routes.post("resume")

    def _recover(self, error: Exception, before: str, version: int) -> None:
        """Resume if all weights are of one version; else raise and leave the server paused."""
        why = f"{str(error).removesuffix('.')}. The server is left paused"
        kind = TimeoutError if isinstance(error, TimeoutError) else RuntimeError
        try:
            which = self._ledger.holds(self._checksums())
            if which is not None:
                held = str(version) if which == "new" else before
                self.routes.post("update_weight_version", {"new_version": held})
                self._resume()
                return
        except Exception as second:
            raise kind(f"{why}, if it still runs: {second}") from error
        raise kind(
            f"{why}: its weights are neither all old nor all new. The next sync that succeeds "
            "resumes it."
        ) from error

    def _checksums(self) -> dict[str, set[str]]:
        answer = self.routes.post("weight_checker", {"action": "checksum"})
        return read_checksums(answer["checksums"])


class _Once(WeightSource):
    """The weights of one sync, whose metadata `watch` knows."""

    expected: list[ParamMeta]
    weights: Weights

    def metadata(self) -> list[ParamMeta]:
        return self.expected

    def __iter__(self) -> Weights:
        return self.weights


# ---- In one call

_KEPT: dict[str | None, tuple[FairCastOptimizer, dict[str, Any], Sync]] = {}  # by URL


def sync(
    optimizer: FairCastOptimizer, engine: "vllm.LLM | str | Engine | None", **options: Any
) -> Manifest:
    """Publish, send, and prove that the engine holds the served weights; returns what it holds.

    Keeps one `fc_optim.Sync` for each engine, so that the next call knows what this one proved.

    Args:
        optimizer: bound to the model that is served.
        engine: an `LLM`, a server's URL, or an engine of this module with other options. None on
            ranks that only help to gather.
        **options: of `fc_optim.Sync`: sparse, recheck, bucket_bytes, wait_s.

    Raises SyncError if the engine holds anything else.
    """
    here = engine is None or isinstance(engine, str)
    kept: dict[Any, Any] = _KEPT if here else vars(engine)  # with the engine, it goes
    key = engine if here else "_fc_optim_sync"
    last = kept.get(key)
    if last is None or last[0] is not optimizer or last[1] != options:
        if isinstance(engine, str):
            made: Engine | None = ServerEngine(engine)
        elif engine is None or isinstance(engine, Engine):
            made = engine
        else:
            made = OfflineEngine(engine)
        last = kept[key] = optimizer, options, Sync(optimizer, made, **options)
    return last[2]()


# ---- What both share


def _number(version: str) -> int | None:
    """The version that a load has set, None for one that somebody else has."""
    return int(version) if version.isdecimal() else None


def _checked(patches: Iterable[Patch]) -> Iterator[Patch]:
    for patch in patches:
        if patch.values.isnan().any():
            raise ValueError(
                f"patches: new values of {patch.name!r} are NaN, which means 'unchanged' in vLLM's "
                "format. Find the step that made them; to send them nonetheless use sparse=False."
            )
        yield patch


def _batches(patches: Iterable[Patch]) -> Iterator[list[Patch]]:
    batch: list[Patch] = []
    for patch in _checked(patches):
        batch.append(patch)
        if sum(p.values.nbytes + p.indices.nbytes for p in batch) >= _PATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch
