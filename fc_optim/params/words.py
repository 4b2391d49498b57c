"""The bits of tensors as integers: what digests, checksums and comparisons are made of."""

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finalizer (Steele et al. 2014) in wrapping int64 arithmetic."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)


def differing_words(a: Tensor, b: Tensor) -> Tensor:
    """How many elements of two containers differ in their bits: 0-d int64 on the device of `b`."""
    as_int = WORDS[b.element_size()]
    a = a.detach().to(b.device)
    return (a.contiguous().view(as_int) != b.detach().contiguous().view(as_int)).sum()
