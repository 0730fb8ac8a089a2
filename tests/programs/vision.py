"""timm and diffusers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import torchstrat as ts
from tests.programs.table import images, noised, program, train


def _freeze_batch_norm(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def _small(name: str, **options: Any) -> Any:
    import timm

    return timm.create_model(name, num_classes=5, drop_rate=0.0, **options).double()


def _classifier(model: nn.Module, optimizer: torch.optim.Optimizer, smoothing: float = 0.0) -> Any:
    def step(batch: Any) -> None:
        train(optimizer, F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing))

    return {"model": model, "optimizer": optimizer}, step


@program("timm", batches=images)
def resnet_frozen_norm() -> Any:
    model = _small("resnet10t")
    _freeze_batch_norm(model)
    return _classifier(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True), 0.1)


@program("timm", batches=images)
def resnet_converted_norm() -> Any:
    model = ts.convert_sync_batchnorm(_small("test_resnet"))
    return _classifier(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


@program("timm", batches=images)
def mobilenet_with_rmsprop() -> Any:
    model = _small("mobilenetv3_small_050")
    _freeze_batch_norm(model)
    return _classifier(model, torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1.0))


@program("timm", batches=images)
def vision_transformer_by_layers() -> Any:
    """Rates by depth, from timm's own factory of optimizers."""
    from timm.optim import create_optimizer_v2

    model = _small("test_vit", img_size=32)
    return _classifier(model, create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7))


@program("timm", batches=images)
def mixed_images_with_moving_average() -> Any:
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV3

    model = _small("test_convnext")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    average, loss_of = ModelEmaV3(model, decay=0.9), SoftTargetCrossEntropy()

    def step(batch: Any) -> None:
        labels = F.one_hot(batch[1], 5).double() * 0.8 + 0.04
        train(optimizer, loss_of(model(batch[0]), labels))
        average.update(model)

    return {"model": model, "average": average.module, "optimizer": optimizer}, step


@program("timm", batches=images)
def efficientnet_with_a_schedule() -> Any:
    from timm.scheduler import CosineLRScheduler

    model = _small("test_efficientnet")
    _freeze_batch_norm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler, done = CosineLRScheduler(optimizer, t_initial=5, warmup_t=1, warmup_lr_init=1e-3), iter(range(1, 99))
    return *_classifier(model, optimizer), lambda: scheduler.step(next(done))


@program("timm", batches=images)
def timms_lion_and_adaptive_clipping() -> Any:
    from timm.optim import create_optimizer_v2
    from timm.utils import adaptive_clip_grad

    model = _small("test_vit", img_size=32)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        adaptive_clip_grad(model.parameters(), clip_factor=0.01)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


_UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 2,
    "out_channels": 2,
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "block_out_channels": (4, 8),
}


@program("diffusers", batches=noised)
def denoising() -> Any:
    from diffusers import DDPMScheduler, UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model, noise = UNet2DModel(**_UNET, **blocks, attention_head_dim=4).double(), DDPMScheduler(100)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        clean, drawn, times = batch
        optimizer.zero_grad()
        F.mse_loss(model(noise.add_noise(clean, drawn, times), times).sample, drawn).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


@program("diffusers", batches=noised)
def denoising_by_text() -> Any:
    from diffusers import DDIMScheduler, UNet2DConditionModel

    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = UNet2DConditionModel(**_UNET, **blocks, cross_attention_dim=6, attention_head_dim=2).double()
    words, noise = nn.Embedding(100, 6).requires_grad_(False), DDIMScheduler(100)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        clean, drawn, times = batch
        text = words(times)[:, None]
        out = model(noise.add_noise(clean, drawn, times), times, encoder_hidden_states=text).sample
        train(optimizer, F.mse_loss(out, drawn))

    return {"model": model, "optimizer": optimizer}, step


@program("diffusers", batches=noised)
def denoising_with_moving_average() -> Any:
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model, noise = UNet2DModel(**_UNET, **blocks).double(), DDPMScheduler(100)
    optimizer, holder = AdamW(model.parameters(), lr=1e-3), copy.deepcopy(model)
    average = EMAModel(model.parameters(), decay=0.9)

    def step(batch: Any) -> None:
        clean, drawn, times = batch
        train(optimizer, F.mse_loss(model(noise.add_noise(clean, drawn, times), times).sample, drawn))

    def after() -> None:
        average.step(model.parameters())
        average.copy_to(holder.parameters())

    return {"model": model, "average": holder, "optimizer": optimizer}, step, after


@program("diffusers", batches=noised)
def autoencoder() -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        in_channels=2, out_channels=2, block_out_channels=(4,), latent_channels=2, norm_num_groups=2,
    ).double()  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        latent = model.encode(batch[0]).latent_dist
        out = model.decode(latent.mode()).sample
        train(optimizer, F.mse_loss(out, batch[0]) + 0.01 * latent.kl().mean())

    return {"model": model, "optimizer": optimizer}, step


@program("diffusers", batches=partial(noised, 8, 2))
def diffusion_transformer() -> Any:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=2, num_layers=1, sample_size=8,
        patch_size=2, num_embeds_ada_norm=100, norm_num_groups=2,
    ).double()  # fmt: skip
    _no_dropout(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        clean, drawn, times = batch
        train(optimizer, F.mse_loss(model(clean + drawn, times, class_labels=times).sample, drawn))

    return {"model": model, "optimizer": optimizer}, step


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):  # of labels
            module.dropout_prob = 0.0
