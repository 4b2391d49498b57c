"""Imported before everything else: an older torch lacks what the rest imports."""

import re

import torch

MINIMUM = (2, 11)

_numbers = tuple(map(int, re.findall(r"\d+", str(torch.__version__))[:2]))  # of nightlies too
if _numbers < MINIMUM:
    _wanted = ".".join(map(str, MINIMUM))
    raise ImportError(
        f"fc_optim needs torch >= {_wanted}; pip install 'torch>={_wanted}' "
        f"({torch.__version__} is installed).",
        name="torch",
    )
