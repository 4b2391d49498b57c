"""OpenRLHF: train with FairCastAdamW, so that what `broadcast_to_vllm` sends is served weights.

OpenRLHF has no place for an optimizer: its strategy names AdamW in a DeepSpeed config. The change
is one line where a trainer makes its strategy (`openrlhf/cli/train_ppo_ray.py` and the others)::

    strategy = use_faircast(get_strategy(args), dither="held")

The engines' bf16 weights, which OpenRLHF broadcasts as they are, are then the served ones. Only
`DeepspeedStrategy._ds_init_train_model` and `load_ckpt` are overridden (0.11.2). While the first
runs, `deepspeed.initialize` is replaced by a function that builds the optimizer from the config:
it breaks if a later version calls something else, which raises below.
"""

from typing import Any
from unittest import mock

from fc_optim.integrations.deepspeed import attach, register
from fc_optim.integrations.needs import needs
from fc_optim.optimizer import FairCastAdamW

with needs("deepspeed", "0.19"):
    import deepspeed
with needs("openrlhf", "0.11"):
    from openrlhf.utils.deepspeed import DeepspeedStrategy


class FairCastStrategy(DeepspeedStrategy):
    """OpenRLHF's strategy; `faircast` holds the options of FairCastAdamW."""

    faircast: dict[str, Any]

    def _ds_init_train_model(self, model: Any, cfg: dict[str, Any]) -> Any:
        """As OpenRLHF's, with FairCastAdamW as DeepSpeed's client optimizer, attached."""
        if cfg["optim"] != "adam":
            raise ValueError(
                f"optim: {cfg['optim']!r} is not possible with FairCastAdamW under ZeRO; "
                "set the optimizer of this model to 'adam'."
            )
        initialize, engines = deepspeed.initialize, []

        def with_our_optimizer(*, config: dict[str, Any], **kwargs: Any) -> Any:
            options = config.pop("optimizer")["params"]
            groups = _named(kwargs.pop("model_parameters"), kwargs["model"])
            kwargs["optimizer"] = FairCastAdamW(groups, **options, **self.faircast)
            made = initialize(config=register(config), **kwargs)
            engines.append(made[0])
            return made

        with mock.patch.object(deepspeed, "initialize", with_our_optimizer):
            prepared = super()._ds_init_train_model(model, cfg)
        if len(engines) != 1:
            raise RuntimeError(
                f"openrlhf: _ds_init_train_model called deepspeed.initialize {len(engines)} times, "
                "not once: this version of OpenRLHF is not supported (0.11.2 is)."
            )
        attach(engines[0])
        return prepared

    def load_ckpt(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As OpenRLHF's; finishes the load of a universal checkpoint."""
        loaded = super().load_ckpt(model, *args, **kwargs)
        if model.optimizer is not None:
            attach(model)
        return loaded


def use_faircast(strategy: DeepspeedStrategy, **options: Any) -> FairCastStrategy:
    """The same strategy, whose trained models are stepped by FairCastAdamW.

    Args:
        strategy: as `openrlhf.utils.get_strategy(args)` makes it, before `prepare()`.
        **options: `seed`, `dither`, `backend` of FairCastAdamW; lr, betas, eps and weight decay
            are OpenRLHF's. With dither "sync", call `publish(redraw=True)` of the optimizer
            before each broadcast.

    Raises ValueError from `prepare()` for a model whose optimizer is Muon, and for what `register`
    refuses (fp16).
    """
    made = object.__new__(FairCastStrategy)
    made.__dict__.update(vars(strategy), faircast=options)
    return made


def _named(groups: list[dict[str, Any]], model: Any) -> list[dict[str, Any]]:
    """OpenRLHF's groups, with the names that key the random bits."""
    names = {p: n for n, p in model.named_parameters()}
    return [{**g, "params": [(names[p], p) for p in g["params"]]} for g in groups if g["params"]]
