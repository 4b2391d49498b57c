"""What vLLM calls in each of its processes when it starts: an entry point, `vllm.general_plugins`.

It makes the weight transfer backend "fc_optim" known there.
"""

import os
from typing import Any

from torch import nn

_BACKEND = "fc_optim"


def register() -> None:
    """Register the backend; may be called again. See `keep_plain_weights` for FC_OPTIM_VLLM_PLAIN.

    Does nothing in a vLLM that has no weight transfer.
    """
    try:
        from vllm.distributed.weight_transfer import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError:
        return
    here = "fc_optim.integrations.vllm"
    try:
        WeightTransferEngineFactory.register_engine(_BACKEND, f"{here}_worker", "WeightReceiver")
        WeightTransferTrainerFactory.register_engine(_BACKEND, f"{here}_transfer", "FileTransfer")
    except ValueError:  # already registered in this process
        pass
    if os.environ.get("FC_OPTIM_VLLM_PLAIN") == "1":
        keep_plain_weights()


def keep_plain_weights() -> None:
    """On a CPU, let linear layers compute with torch and keep their weights as they were loaded.

    Without, vLLM repacks them into oneDNN's or AMX's layout where the CPU has AVX-512, and keeps no
    plain copy that could be updated in place or read. Call it in the engine's process before the
    engine is made, or set FC_OPTIM_VLLM_PLAIN=1 there. Changes nothing on a GPU.
    """
    from vllm.model_executor.layers import utils

    repack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:
            repack(layer, remove_weight)

    if repack.__name__ != dispatch.__name__:
        utils.dispatch_cpu_unquantized_gemm = dispatch
