"""Muon beside its two kernels: which parameters it takes, Newton-Schulz, the adjusted rate.

Source: Jordan et al., "Muon", and `torch.optim.Muon`, whose arithmetic this follows.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fc_optim.params.modules import named_modules, named_parameters
from fc_optim.params.sources import source_of

# torch.optim.Muon's own defaults: nesterov, ns_steps, adjust_lr_fn and so on.
DEFAULTS = {
    name: p.default
    for name, p in inspect.signature(torch.optim.Muon).parameters.items()
    if name != "params"
}


def orthogonalise(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The zeroth power of a matrix, roughly: Newton-Schulz's quintic iteration in bf16.

    Args:
        update: bf16 `[rows, columns]`, contiguous, owned by the caller. Not written.
        group: `ns_coefficients`, `ns_steps` and `eps` as in `torch.optim.Muon`.

    Returns a new contiguous bf16 matrix. Zero gives zero, not NaN.
    """
    a, b, c = group["ns_coefficients"]
    tall = update.size(0) > update.size(1)
    x = update.mT if tall else update
    x = x / x.norm().clamp(min=group["eps"])  # a spectral norm of at most 1
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def lr_ratio(adjust_lr_fn: str | None, shape: torch.Size) -> float:
    """What `adjust_lr_fn` of `torch.optim.Muon` multiplies the rate of a matrix with."""
    rows, columns = shape
    if adjust_lr_fn in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise ValueError(
        f"adjust_lr_fn: {adjust_lr_fn!r} is neither 'original' (or None) nor 'match_rms_adamw'."
    )


def muon_param_groups(
    model: nn.Module,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Named parameter groups for one optimizer: hidden matrices to Muon, the rest to AdamW.

    To AdamW go embeddings (and heads tied to them), output heads (what transformers calls the
    output embeddings, and modules named `lm_head`, `head`, `score`, `classifier`, ...), norms,
    biases and whatever is not 2-D. Frozen parameters are left out.

    Args:
        model: the model, wrapped or not, on the meta device or under DeepSpeed's `zero.Init` too.
        muon, adamw: keys for the two groups, such as `lr`; Muon's others are
            `torch.optim.Muon`'s defaults.

    Raises TypeError for parameters that FullyShardedDataParallel has flattened.

    Use as `FairCastAdamW(muon_param_groups(model, muon={"lr": 2e-3}), lr=1e-4)`.
    """
    not_hidden = _embeddings_and_heads(model)
    named = [(n, p) for n, p in named_parameters(model) if p.requires_grad]
    shapes = _shapes(named)
    hidden = [(n, p) for n, p in named if len(shapes[p]) == 2 and p not in not_hidden]
    held = {p for _, p in hidden}
    rest = [(n, p) for n, p in named if p not in held]
    defaults = {k: v for k, v in DEFAULTS.items() if k != "lr"}
    groups = [
        {"params": hidden, "algorithm": "muon", **defaults, **(muon or {})},
        {"params": rest, "algorithm": "adamw", **(adamw or {})},
    ]
    return [g for g in groups if g["params"]]


def _shapes(named: list[tuple[str, Tensor]]) -> dict[Tensor, torch.Size]:
    shapes, flat = {}, []
    for name, p in named:
        try:
            shapes[p] = source_of(p).shape(p, name)
        except TypeError:
            flat.append(name)
    if flat:
        raise TypeError(
            f"model: {', '.join(flat[:8])} are flattened by FullyShardedDataParallel, so nobody "
            "can see which are matrices, and Muon needs whole ones. Shard with fully_shard "
            "(FSDP2), or use AdamW alone."
        )
    return shapes


_HEADS = ("lm_head", "head", "score", "classifier", "embed_out", "output", "output_layer")


def _embeddings_and_heads(model: nn.Module) -> set[Tensor]:
    found: set[Tensor] = set()
    for name, module in named_modules(model):
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) or leaf in _HEADS:
            found.update(module.parameters(recurse=False))
    if hasattr(model, "get_output_embeddings"):  # transformers
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
        found.update(head.parameters() if head is not None else ())
    return found
