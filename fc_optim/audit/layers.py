"""Where a parameter sits in a model, read off its name: its layer and its kind."""

import re

KINDS = ("norm", "bias", "embedding", "attention", "mlp", "head", "other")  # norms first

_PATTERNS = (
    ("norm", r"norm|(^|[._])ln(_|\d|\.|$)|layernorm"),
    ("bias", r"(^|\.)bias$|_bias$"),
    ("embedding", r"embed|(^|\.)(wte|wpe)\."),
    ("head", r"(^|\.)(lm_head|head|score|classifier|output_layer|embed_out)\."),
    ("attention", r"attn|attention|(^|\.)[qkvo]_proj\.|qkv"),
    ("mlp", r"mlp|ffn|feed_forward|expert|(gate|up|down)_proj|(^|\.)(fc|w)\d\.|router"),
)


def kind_of(name: str, dims: int) -> str:
    """One of `KINDS`. A vector that nothing else claims counts as a norm's gain."""
    for kind, pattern in _PATTERNS:
        if re.search(pattern, name):
            return kind
    return "norm" if dims == 1 and name.endswith("weight") else "other"


def layer_of(name: str) -> int | None:
    """The first number among the parts of the name, or None outside the stack of layers."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)
