"""Lightning: Fabric and Trainer, every precision, resumed bit for bit.

Both wrap the optimizer in a class that imitates it and looks its attributes up. Reading through the
wrapper works; the optimizer itself is `wrapper.optimizer`, or `trainer.optimizers[0]`.
"""

from typing import Any

import pytest
import torch
from models import assert_equal_states, assert_same, assert_served, tiny

from fc_optim import FairCastAdamW

pytestmark = [
    pytest.mark.integration,
    # Lightning's own imports and advice.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
]

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def batch(i: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(i))


def assert_served_in(precision: str, opt: Any) -> None:
    assert_served(opt)
    container = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {e.param.dtype for e in opt.managed()} == {container}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fabric(precision, tmp_path):
    from lightning.fabric import Fabric

    def setup() -> tuple[Any, Any, Any]:
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        model = tiny()
        model, wrapped = fabric.setup(model, FairCastAdamW(model.named_parameters(), lr=1e-2))
        return fabric, model, wrapped

    def train(fabric, model, wrapped, steps) -> None:
        for i in steps:
            for half in range(2):
                fabric.backward(model(batch(2 * i + half)).float().square().mean() / 2)
            fabric.clip_gradients(model, wrapped, max_norm=0.5)
            wrapped.step()
            wrapped.zero_grad()

    fabric, model, wrapped = setup()
    train(fabric, model, wrapped, range(3))
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": wrapped})
    train(fabric, model, wrapped, range(3, 6))
    opt = wrapped.optimizer.bind(model.module)
    assert_served_in(precision, opt)
    assert [n for n, _ in opt.served_params()] == [n for n, _ in tiny().named_parameters()]
    through = dict(wrapped.served_params())
    assert all(torch.equal(p, through[n]) for n, p in opt.served_params())
    assert wrapped.served_version == opt.served_version == 6

    fabric, again, other = setup()
    fabric.load(tmp_path / "saved", {"model": again, "optimizer": other})
    train(fabric, again, other, range(3, 6))
    assert_same(model.module, again.module)
    assert_equal_states(opt.state_dict(), other.optimizer.state_dict())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trainer(precision, tmp_path):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny()

        def training_step(self, step_batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.net(step_batch[0]).float().square().mean()

        def configure_optimizers(self) -> Any:
            opt = FairCastAdamW(self.named_parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def fit(folder: str, **kwargs: Any) -> tuple[Any, Any]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            precision=precision,
            max_steps=6,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            callbacks=[ModelCheckpoint(tmp_path / folder, every_n_train_steps=3, save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Module()
        data = TensorDataset(torch.cat([batch(i) for i in range(6)]))  # three steps an epoch
        trainer.fit(model, DataLoader(data, batch_size=5), **kwargs)
        return model, trainer.optimizers[0]

    model, opt = fit("first")
    assert type(opt) is FairCastAdamW and opt.served_version == 6
    assert_served_in(precision, opt.bind(model))
    (saved,) = (tmp_path / "first").glob("*step=3.ckpt")
    again, other = fit("second", ckpt_path=str(saved), weights_only=False)
    assert_same(model, again)
    assert_equal_states(opt.state_dict(), other.state_dict())
