"""The way to a vLLM server: its HTTP routes, and a weight transfer through shared memory.

vLLM's own backends (nccl, ipc) need CUDA. `FileTransfer` is for CPUs, and for engines on the same
host. It writes the whole update before the engine is told of it: a trainer that dies meanwhile
leaves the engine as it was.
"""

import http.client
import json
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from fc_optim.sync.patches import Patch

_FILE_BYTES = 256 << 20
_SHARED = Path("/dev/shm")


@dataclass
class FileTransferInit(TrainerInitInfo):
    """folder: where both sides can read and write; by default shared memory (/dev/shm)."""

    backend: ClassVar[str] = "fc_optim"

    folder: str | None = None


class FileTransfer(TrainerWeightTransferEngine[FileTransferInit]):
    """The trainer's end. Takes one copy of the weights in the folder while an update runs."""

    init_info_cls = FileTransferInit
    folder: str | None

    @classmethod
    def trainer_init(
        cls, init_info: FileTransferInit, *, client: Any, source: WeightSource | None = None
    ) -> "FileTransfer":
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made.folder = init_info.folder or (str(_SHARED) if _SHARED.is_dir() else None)
        if made.is_sender:
            client.init_weight_transfer_engine({})
        return made

    def send_weights(self) -> None:
        """Write all of the source, then let the engine read it. Every rank calls it."""
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        with self._written(({n: t} for n, t in self.source), {}) as paths:
            self._update(paths, patches=False)

    def send_patches(self, patches: Iterable[Patch]) -> None:
        """The same for what changed."""
        shapes: dict[str, tuple[int, ...]] = {}

        def pieces() -> Iterator[dict[str, Tensor]]:
            for p in patches:
                shapes[p.name] = p.shape
                yield {f"{p.name}:i": p.indices, f"{p.name}:v": p.values}

        with self._written(pieces(), shapes) as paths:
            self._update(paths, patches=True)

    def _update(self, paths: list[str], patches: bool) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"paths": paths, "patches": patches})
        self.client.finish_weight_update()

    @contextmanager
    def _written(
        self, pieces: Iterable[dict[str, Tensor]], shapes: dict[str, tuple[int, ...]]
    ) -> Iterator[list[str]]:
        """Files of these tensors, and of the shapes that belong to them; removed at the end."""
        folder = tempfile.mkdtemp(prefix="fc_optim-", dir=self.folder)
        paths: list[str] = []
        held: dict[str, Tensor] = {}

        def flush() -> None:
            paths.append(f"{folder}/{len(paths)}.safetensors")
            save_file(held, paths[-1], {"shapes": json.dumps(shapes)})
            held.clear()
            shapes.clear()

        try:
            for piece in pieces:
                held |= {n: t.detach().cpu().contiguous().clone() for n, t in piece.items()}
                if sum(t.nbytes for t in held.values()) >= _FILE_BYTES:
                    flush()
            if held:
                flush()
            yield paths
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Routes:
    """The server's routes for training; the client that vLLM's senders take."""

    def __init__(self, url: str, timeout_s: float):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.version: str | None = None  # what the weights are when the update is finished

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Ends an update before it that its trainer did not: it died, or was cut off."""
        try:
            self.post("start_weight_update")
        except RuntimeError as e:
            if "already active" not in str(e):
                raise
            self.post("finish_weight_update")
            self.post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("finish_weight_update", {"weight_version": weight_version or self.version})

    def get(self, route: str) -> Any:
        return self._ask(urllib.request.Request(f"{self.url}/{route}"), route)

    def post(self, route: str, body: Any = None, **query: str) -> Any:
        url = f"{self.url}/{route}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        return self._ask(urllib.request.Request(url, data, headers, method="POST"), route)

    def _ask(self, request: urllib.request.Request, route: str) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as e:
            text = e.read().decode(errors="replace")[:2000]
            if e.code == 404:
                text = "no such route: start the server with VLLM_SERVER_DEV_MODE=1, vLLM >= 0.32."
            raise RuntimeError(f"{self.url}/{route}: {e.code}: {text}") from e
        except (OSError, http.client.HTTPException) as e:
            reason = getattr(e, "reason", e)
            if isinstance(reason, TimeoutError):
                raise TimeoutError(f"{self.url}/{route}: no answer in {self.timeout_s} s") from e
            raise ConnectionError(f"{self.url}/{route}: {reason!r}") from e
        return json.loads(text) if text else {}
