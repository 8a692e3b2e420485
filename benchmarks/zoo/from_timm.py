"""timm: the smallest model of each family (each module of `timm.models`), on the smallest image it
takes.
"""

from functools import partial

import torch

from benchmarks.zoo.libraries import import_timm
from benchmarks.zoo.specimen import Absent, Case, Specimen

__all__ = ["SPECIMENS"]

# Name, image size, and whether the model has to be told the size when it is made.
_MODELS: tuple[tuple[str, int, bool], ...] = (
    ("beit_base_patch16_224", 64, True), ("lambda_resnet26t", 64, False), ("mobileone_s1", 64,
    False),
    ("cait_xxs24_224", 64, True), ("coat_tiny", 64, True), ("convit_tiny", 64, True),
    ("convmixer_768_32", 64, False),
    ("convnext_atto_rms", 64, False), ("cpubone_nano", 64, False), ("crossvit_tiny_240", 64, False),
    ("csatv2", 64, False), ("cs3darknet_focus_s", 64, False), ("davit_tiny", 64, False),
    ("deepseek_vit_412m", 224, False), ("deit_tiny_patch16_224", 64, True), ("densenet121", 64,
    False),
    ("dla46x_c", 64, False), ("dpn48b", 64, False), ("edgenext_xx_small", 64, False),
    ("efficientformer_l1", 224, False), ("efficientformerv2_s0", 64, True), ("mnasnet_small", 64,
    False),
    ("efficientvim_m1", 64, False), ("efficientvit_b0", 64, False), ("efficientvit_m0", 64, True),
    ("vit_tiny_patch16_dinov3_qkvb", 64, False), ("fasternet_t0", 64, False), ("fastvit_t8", 64,
    False),
    ("focalnet_tiny_srf", 64, False), ("gcvit_xxtiny", 64, True), ("gemma4_vit_167m", 64, False),
    ("ghostnet_050", 64, False), ("hardcorenas_b", 64, False), ("hgnetv2_b0", 64, False),
    ("hiera_tiny_224", 64, True),
    ("sam2_hiera_tiny", 64, False), ("hrnet_w18_small", 64, False), ("iformer_t", 64, False),
    ("inception_next_atto", 64, False), ("inception_resnet_v2", 96, False), ("inception_v3", 96,
    False),
    ("inception_v4", 96, False), ("lcnetv2_small", 64, False), ("levit_128s", 64, True),
    ("lowformer_b0", 64, False),
    ("test_mambaout", 64, False), ("maxvit_pico_rw_256", 64, True), ("poolformerv2_s12", 64, False),
    ("gmlp_ti16_224", 64, True), ("mobilenetv3_small_050", 64, False), ("mobilenetv5_base", 64,
    False),
    ("mobilevit_xxs", 64, False), ("mvitv2_tiny", 64, False), ("naflexvit_base_patch16_parfac_gap",
    64, False),
    ("nasnetalarge", 64, False), ("nest_tiny", 64, True), ("nextvit_small", 64, False),
    ("test_nfnet", 64, False),
    ("pit_ti_224", 64, True), ("pnasnet5large", 64, False), ("pvt_v2_b0", 64, False),
    ("qwen3_vit_88m", 64, False),
    ("rdnet_tiny", 64, False), ("regnetx_002", 64, False), ("repghostnet_050", 64, False),
    ("repvit_m1", 64, False),
    ("res2next50", 64, False), ("resnest14d", 64, False), ("resnet14t", 64, False), ("resnetv2_18",
    64, False),
    ("rexnet_100", 64, False), ("selecsls42", 64, False), ("legacy_seresnet18", 64, False),
    ("sequencer2d_s", 64, False), ("shvit_s1", 64, False), ("skresnet18", 64, False),
    ("starnet_s050", 64, False),
    ("swiftformer_xs", 64, False), ("swin_tiny_patch4_window7_224", 64, True),
    ("swinv2_tiny_window8_256", 64, True),
    ("swinv2_cr_tiny_224", 64, True), ("tiny_vit_5m_224", 64, False), ("tnt_s_legacy_patch16_224",
    64, True),
    ("tresnet_m", 64, False), ("twins_svt_small", 64, False), ("vgg11", 64, False),
    ("visformer_tiny", 64, True),
    ("vit_tiny_patch16_224", 64, True), ("vit_tiny_r_s16_p8_224", 64, True),
    ("vit_srelpos_small_patch16_224", 64, True), ("samvit_base_patch16_224", 64, False),
    ("vitamin_small_224", 64, True), ("volo_d1_224", 64, True), ("ese_vovnet19b_slim_dw", 64,
    False),
    ("test_byobnet", 64, False), ("test_convnext", 64, False), ("test_convnext2", 64, False),
    ("test_convnext3", 64, False), ("test_efficientnet", 64, False),
    ("test_efficientnet_evos", 64, False), ("test_efficientnet_gn", 64, False),
    ("test_efficientnet_ln", 64, False), ("test_resnet", 64, False), ("test_vit", 64, True),
    ("test_vit2", 64, True), ("test_vit3", 64, True), ("test_vit4", 64, True),
    ("test_coatnet", 64, True), ("test_maxvit", 64, True), ("test_vit_relpos", 64, True),
    ("legacy_xception", 64, False), ("xception41p", 64, False), ("xcit_nano_12_p8_224", 64, False),
)  # fmt: skip
_FEEDFORWARD = {"convnext_atto_rms", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"}


# Made smaller: the only one of its family is large.
_OPTIONS = {"deepseek_vit_412m": {"depth": 2, "embed_dim": 64}}


def _make(name: str, size: int, is_told: bool) -> Case:
    timm = import_timm()
    if not timm.is_model(name):
        raise Absent(f"timm {timm.__version__} has no {name}")
    options = {"img_size": size} if is_told else _OPTIONS.get(name, {})
    model = timm.create_model(name, **options)
    return Case(model, (torch.randn(2, 3, size, size),))


SPECIMENS = tuple(
    Specimen(
        "timm", name, partial(_make, name, size, is_told),
        is_recurrent=False if name in _FEEDFORWARD else None,
    )
    for name, size, is_told in _MODELS
)  # fmt: skip
