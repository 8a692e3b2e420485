"""torchvision: classification, segmentation, video and optical flow."""

from functools import partial

import torch

from benchmarks.zoo.libraries import import_torchvision
from benchmarks.zoo.specimen import Case, Specimen

__all__ = ["SPECIMENS"]

_CLASSIFICATION = {
    "alexnet": 64, "convnext_tiny": 64, "densenet121": 64, "densenet169": 64, "efficientnet_b0": 64,
    "efficientnet_b1": 64,
    "efficientnet_v2_s": 64, "googlenet": 64, "inception_v3": 96, "maxvit_t": 224, "mnasnet0_5": 64,
    "mnasnet1_0": 64,
    "mobilenet_v2": 64, "mobilenet_v3_large": 64, "mobilenet_v3_small": 64, "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "resnet18": 64, "resnet34": 64, "resnet50": 64, "resnet101": 64, "resnext50_32x4d": 64,
    "shufflenet_v2_x0_5": 64,
    "shufflenet_v2_x1_0": 64, "squeezenet1_0": 64, "squeezenet1_1": 64, "swin_t": 64,
    "swin_v2_t": 64, "vgg11": 32,
    "vgg11_bn": 32, "vgg16": 32, "vit_b_16": 64, "vit_b_32": 64, "wide_resnet50_2": 64,
}  # fmt: skip
# Models whose image size is part of the architecture.
_SIZED = {"vit_b_16": "image_size", "vit_b_32": "image_size"}
_SEGMENTATION = (
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50",
    "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
)
_VIDEO = {
    "mc3_18": (8, 32), "r2plus1d_18": (8, 32), "r3d_18": (8, 32), "swin3d_t": (4, 64),
}  # fmt: skip
_FLOW = ("raft_large", "raft_small")


def _classifier(name: str, size: int) -> Case:
    models = import_torchvision().models
    options = {_SIZED[name]: size} if name in _SIZED else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    model = models.get_model(name, weights=None, num_classes=10, **options)
    return Case(model, (torch.randn(2, 3, size, size),))


def _segmenter(name: str) -> Case:
    segmentation = import_torchvision().models.segmentation
    model = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=5)
    return Case(model, (torch.randn(2, 3, 64, 64),))


def _video(name: str, frames: int, size: int) -> Case:
    model = import_torchvision().models.get_model(name, weights=None, num_classes=10)
    return Case(model, (torch.randn(1, 3, frames, size, size),))


def _multiscale() -> Case:
    """MViT with four blocks: the ready ones take 224 × 224 pixels and nothing less."""
    mvit = import_torchvision().models.video.mvit
    pooled = ([3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2])
    plain = ([3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2])
    blocks = [
        mvit.MSBlockConfig(1, 16, 16, *plain),
        mvit.MSBlockConfig(2, 16, 32, *pooled),
        mvit.MSBlockConfig(2, 32, 32, *plain),
        mvit.MSBlockConfig(4, 32, 64, *pooled),
    ]
    model = mvit.MViT(
        spatial_size=(32, 32), temporal_size=4, block_setting=blocks, residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True, proj_after_attn=True, num_classes=10,
    )  # fmt: skip
    return Case(model, (torch.randn(2, 3, 4, 32, 32),))


def _flow(name: str) -> Case:
    model = import_torchvision().models.get_model(name, weights=None)
    return Case(
        model, (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {"num_flow_updates": 3}
    )


SPECIMENS = (
    *(
        Specimen(
            "torchvision", name, partial(_classifier, name, size),
            is_recurrent=False,
        )
        for name, size in _CLASSIFICATION.items()
    ),
    *(Specimen("torchvision", name, partial(_segmenter, name)) for name in _SEGMENTATION),
    *(
        Specimen("torchvision", name, partial(_video, name, frames, size))
        for name, (frames, size) in _VIDEO.items()
    ),
    Specimen("torchvision", "mvit", _multiscale),
    *(Specimen("torchvision", name, partial(_flow, name), is_recurrent=True) for name in _FLOW),
)  # fmt: skip
