"""transformers: every kind of model, from tiny configurations and with random weights; nothing is
downloaded.
"""

import importlib
import inspect
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.libraries import import_transformers
from benchmarks.zoo.specimen import Absent, Case, Specimen

__all__ = ["SPECIMENS"]

# What makes a model small, under each of the names that configurations give it.
_SMALL = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32, "projection_dim": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "num_blocks": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8,
    "d_kv": 8,
    "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "n_inner": 64, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "hidden_dim": 64, "feed_forward_hidden_size": 64, "max_position_embeddings": 128,
    "n_positions": 128,
    "max_source_positions": 64, "max_target_positions": 64, "max_seq_len": 128, "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "state_size": 8, "d_state": 8,
    "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip

# Types of model that are small enough and consistent with nothing but `_SMALL`.
_PLAIN = (
    "afmoe", "aimv2", "aimv2_text_model", "aimv2_vision_model", "albert", "align_text_model",
    "altclip", "altclip_text_model", "altclip_vision_model", "apertus", "arcee", "aria",
    "aria_text", "axk1", "axk2", "aya_vision", "bart", "beam", "beit", "bert", "bert-generation",
    "big_bird", "bigbird_pegasus", "biogpt", "bit", "bitnet", "blenderbot", "blenderbot-small",
    "blip", "blip_2_vision_model", "blip_text_model", "blip_vision_model", "bloom",
    "bridgetower_text_model", "camembert", "canine", "chinese_clip", "chinese_clip_text_model",
    "chinese_clip_vision_model", "clap_text_model", "clip", "clip_text_model",
    "clip_vision_model", "clipseg", "clipseg_text_model", "clipseg_vision_model", "clvp_decoder",
    "cohere", "cohere2", "cohere2_moe", "cohere2_vision", "convbert", "cosmos3_omni", "cpmant",
    "csm_depth_decoder_model", "ctrl", "cvt", "cwm", "data2vec-audio", "data2vec-text",
    "data2vec-vision", "deberta", "deberta-v2", "deepseek_v32", "deepseek_v4", "deepseek_vl",
    "deepseek_vl_hybrid", "deit", "diffllama", "dinov2", "dinov2_with_registers",
    "dinov3_convnext", "dinov3_vit", "distilbert", "doge", "dpr", "dpt", "electra",
    "emu3_text_model", "encoder-decoder", "ernie", "ernie4_5", "ernie4_5_moe", "eurobert",
    "evolla", "exaone4", "exaone4_5", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba",
    "fastspeech2_conformer", "flaubert", "flava", "flava_image_model", "flava_text_model",
    "flex_olmo", "flint", "fnet", "focalnet", "fsmt", "funnel", "fuyu", "gemma", "gemma2",
    "gemma3", "gemma3_text", "gemma4_audio", "git", "git_vision_model", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "glmasr_encoder", "glpn", "got_ocr2", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "granite", "granite4_vision_text",
    "granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "groupvit", "groupvit_text_model", "groupvit_vision_model", "gte", "helium", "hgnet_v2",
    "hiera", "higgs_audio_v2", "hrm_text", "hubert", "hy_v3", "hy_v4", "hyperclovax",
    "hyperclovax_vision_v2", "ibert", "idefics2", "idefics3", "idefics3_vision", "ijepa",
    "imagegpt", "inkling2_text", "inkling_text", "instructblip_qformer",
    "instructblip_vision_model", "instructblipvideo_qformer", "instructblipvideo_vision_model",
    "internlm3", "internvl", "internvl_vision", "iquestcoder", "jais2", "janus_vision_model",
    "jetmoe", "jina_embeddings_v3", "kimi_k25", "kolibri1", "kosmos-2.5", "kosmos_2_5_text_model",
    "kosmos_2_text_model", "kosmos_2_vision_model", "laguna", "layoutlm", "led", "lfm2",
    "lfm2_vl", "lighton_ocr", "llama", "llama4_text", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "longformer", "longt5", "m2m_100", "mamba", "marian", "markuplm", "mbart",
    "megatron-bert", "mellum", "metaclip_2", "metaclip_2_text_model", "metaclip_2_vision_model",
    "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text",
    "ministral3", "mistral", "mistral3", "mistral4", "mistral_large4", "mistral_large4_text",
    "mixtral", "mlcd_vision_model", "mllama", "mllama_text_model", "mobilebert", "mobilenet_v1",
    "mobilenet_v2", "mobilevit", "modernbert", "modernbert-decoder", "modernvbert", "molmo2_text",
    "moonshine", "moshi", "moss_transcribe_diarize_audio", "mpnet", "mpt", "mra", "mt5",
    "muse_glimmer_text", "muse_spark_text", "mvp", "nanochat", "nemotron_h", "nllb-moe",
    "nomic_bert", "nystromformer", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt",
    "openai_privacy_filter", "opt", "ovis2", "ovis2_vision", "owlv2", "owlv2_text_model",
    "owlv2_vision_model", "owlvit", "owlvit_text_model", "owlvit_vision_model", "paligemma",
    "pegasus", "pegasus_x", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "pixio",
    "pixtral", "plbart", "pp_formulanet_text", "prophetnet", "pvt_v2", "qianfan_ocr",
    "qianfan_ocr_vision", "qwen2", "qwen2_audio_encoder", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_omni_moe_text", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text",
    "radio", "rembert", "resnet", "roberta", "roberta-prelayernorm",
    "roformer", "rwkv", "sam3_lite_text_text_model", "sam3_vision_model", "sam3_vit_model",
    "sam_hq_vision_model", "sam_vision_model", "segformer", "siglip", "swiftformer",
    "switch_transformers", "t5", "tapas", "vilt", "visual_bert", "vit", "vit_mae", "vits",
    "wav2vec2", "whisper", "xlm", "xlnet", "yoso",
)  # fmt: skip

# Types that need more said: further configuration, and arguments where those by name will not do.
_SWIN = {
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 2],
    "window_size": 2,
    "patch_size": 2,
    "image_size": 16,
}
_LATENT_ATTENTION = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16,
                     "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}  # fmt: skip
_SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}
_CONFIGURED: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "convnext": {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1],
    "patch_size": 4},
    "convnextv2": {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1],
    "patch_size": 4},
    "deepseek_v2": _LATENT_ATTENTION | {"num_experts_per_tok": 2},
    "deepseek_v3": _LATENT_ATTENTION,
    "donut-swin": _SWIN,
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "levit": {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4],
    "depths": [1, 1, 1],
              "key_dim": [8, 8, 8], "patch_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "maskformer-swin": _SWIN,
    "recurrent_gemma": {"num_hidden_layers": 3},  # its third block is the first with attention
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds_dim": [16, 16],
    "axial_pos_shape": [4, 4],
                 "attention_head_size": 8, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4,
                 "num_buckets": 2,
                 "hash_seed": 0},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32},
    "swin": _SWIN,
    "swin2sr": {"image_size": 16, "patch_size": 1, "embed_dim": 16, "depths": [1, 1],
    "num_heads": [2, 2],
                "window_size": 4},
    "swinv2": _SWIN,
}  # fmt: skip


def _ids(length: int = 8) -> torch.Tensor:
    return torch.randint(3, 30, (2, length))


def _pixels(size: int, *leading: int) -> torch.Tensor:
    return torch.randn(2, *leading, 3, size, size)


def _series() -> dict[str, Any]:
    past = 8 + 2
    return {
        "past_values": torch.randn(2, past).abs(), "past_time_features": torch.randn(2, past, 1),
        "past_observed_mask": torch.ones(2, past), "future_values": torch.randn(2, 4).abs(),
        "future_time_features": torch.randn(2, 4, 1),
    }  # fmt: skip


_FED: dict[str, tuple[dict[str, Any], Any]] = {
    "audio-spectrogram-transformer": ({"max_length": 32}, lambda: {"input_values": torch.randn(2,
    32, 16)}),
    "decision_transformer": (
        {"state_dim": 5, "act_dim": 3},
        lambda: {
            "states": torch.randn(2, 4, 5), "actions": torch.randn(2, 4, 3),
            "rewards": torch.randn(2, 4, 1),
            "returns_to_go": torch.randn(2, 4, 1), "timesteps": torch.arange(4).repeat(2, 1),
            "attention_mask": torch.ones(2, 4),
        },
    ),
    "encodec": (
        {"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16, "hidden_size": 16},
        lambda: {"input_values": torch.randn(2, 1, 200)},
    ),
    "informer": (_SERIES, _series),
    "lxmert": (
        {"num_hidden_layers": 2, "l_layers": 1, "x_layers": 1, "r_layers": 1,
        "visual_feat_dim": 12},
        lambda: {"input_ids": _ids(), "visual_feats": torch.randn(2, 3, 12),
        "visual_pos": torch.rand(2, 3, 4)},
    ),
    "patchtst": (
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4},
        lambda: {"past_values": torch.randn(2, 16, 2)},
    ),
    "patchtsmixer": (
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4},
        lambda: {"past_values": torch.randn(2, 16, 2)},
    ),
    "perceiver": (
        {"d_latents": 16, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2,
         "num_cross_attention_heads": 2, "qk_channels": 16, "v_channels": 16},
        lambda: {"inputs": torch.randn(2, 10, 32)},
    ),
    "time_series_transformer": (_SERIES, _series),
    "timesformer": ({"num_frames": 4}, lambda: {"pixel_values": _pixels(32, 4)}),
    "videomae": ({"num_frames": 4}, lambda: {"pixel_values": _pixels(32, 4)}),
    "vivit": ({"num_frames": 4, "tubelet_size": [2, 8, 8]}, lambda: {"pixel_values": _pixels(32,
    4)}),
    "vjepa2": ({"crop_size": 32, "frames_per_clip": 4}, lambda: {"pixel_values_videos": _pixels(32,
    4)}),
}  # fmt: skip
# Models with the head of a task, by the name of the automatic class: `AutoModelForCausalLM`.
_WITH_HEAD = {
    "AudioClassification": (
        "audio-spectrogram-transformer data2vec-audio hubert wav2vec2 whisper "
    ),
    "CTC": (
        "data2vec-audio hubert wav2vec2 "
    ),
    "CausalLM": (
        "afmoe apertus arcee aria_text bart beam bert bert-generation big_bird "
        "bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert "
        "codegen cohere cohere2 cohere2_moe cpmant ctrl cwm data2vec-text deepseek_v2 "
        "deepseek_v3 deepseek_v4 diffllama doge electra ernie ernie4_5 ernie4_5_moe "
        "exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 "
        "gemma3_text git glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss "
        "gptj granite granitemoe llama mamba mamba2 marian mistral mixtral nemotron_h "
        "olmoe opt phi3 qwen2_moe roberta roformer rwkv whisper xlm xlnet "
    ),
    "DepthEstimation": (
        "glpn "
    ),
    "ImageClassification": (
        "beit bit clip convnext convnextv2 cvt data2vec-vision dinov2 "
        "dinov2_with_registers donut-swin focalnet hgnet_v2 imagegpt mobilenet_v1 "
        "mobilevit resnet segformer siglip swiftformer swin swinv2 vit "
    ),
    "MaskedImageModeling": (
        "deit focalnet swin swinv2 vit "
    ),
    "MaskedLM": (
        "albert bart bert big_bird camembert convbert data2vec-text deberta deberta-v2 "
        "distilbert electra ernie esm eurobert flaubert fnet ibert longformer "
        "modernbert mpnet mra nystromformer reformer roberta roformer tapas yoso "
    ),
    "PreTraining": (
        "lxmert visual_bert vit_mae "
    ),
    "QuestionAnswering": (
        "canine led lxmert t5 "
    ),
    "SemanticSegmentation": (
        "mobilevit segformer "
    ),
    "Seq2SeqLM": (
        "bigbird_pegasus blenderbot blenderbot-small fsmt led marian "
        "switch_transformers t5 "
    ),
    "SequenceClassification": (
        "albert arcee biogpt bloom canine convbert ctrl deberta deberta-v2 deepseek_v2 "
        "deepseek_v3 diffllama distilbert doge esm eurobert exaone4 falcon flaubert "
        "fnet gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox "
        "gpt_oss gptj ibert llama longformer mistral mixtral modernbert mpnet mra "
        "nystromformer opt phi3 qwen2_moe reformer tapas xlnet yoso "
    ),
    "SpeechSeq2Seq": (
        "moonshine speech_to_text "
    ),
    "TokenClassification": (
        "apertus "
    ),
    "VideoClassification": (
        "timesformer videomae vivit vjepa2 "
    ),
}  # fmt: skip
_FEEDFORWARD = {"bert", "gpt2", "llama", "roberta", "swin", "t5", "vit"}
_RECURRENT = {"albert"}  # one block used twice


# -- making one
# --------------------------------------------------------------------------------------------------


def _tiny_config(cls: Any, extra: dict[str, Any]) -> Any:
    """A configuration of class `cls` with every size it has a name for set small, those of its
    parts too.
    """
    defaults = cls()
    if hasattr(defaults, "kv_lora_rank"):
        extra = _LATENT_ATTENTION | extra
    fields = set(inspect.signature(cls.__init__).parameters).union(
        *(vars(base).get("__annotations__", {}) for base in cls.__mro__)
    )
    aliases = getattr(cls, "attribute_map", {})
    values: dict[str, Any] = {}
    for name, value in _SMALL.items():
        default = getattr(defaults, name, None)
        is_number = isinstance(default, int) and not isinstance(default, bool)
        if name in fields and name not in aliases and (is_number or name.endswith("_token_id")):
            values[name] = value
    for name, part in getattr(cls, "sub_configs", {}).items():
        default = getattr(defaults, name, None)
        kind = type(default) if part.__name__ == "AutoConfig" else part
        if kind is not type(None):
            values[name] = _tiny_config(kind, {}).to_dict()
    return cls(**values | extra)


def _arguments(model: torch.nn.Module, config: Any) -> dict[str, Any]:
    """Random arguments for those that the model's `forward` names."""
    names = inspect.signature(model.forward).parameters.keys()
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 32
    size = size if isinstance(size, int) else size[0]
    channels = getattr(config, "num_channels", 3)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
    features: tuple[Any, ...] = (
        (2, 128, mels) if config.model_type == "speech_to_text" else (2, mels, 128)
    )
    known = {
        "input_ids": lambda: _ids(16 if config.model_type == "reformer" else 8),
        "decoder_input_ids": lambda: _ids(6),
        "pixel_values": lambda: torch.randn(
            2, channels if isinstance(channels, int) else 3, size, size
        ),
        "input_values": lambda: torch.randn(2, 4000),
        "input_features": lambda: torch.randn(features),
        "bbox": lambda: torch.zeros(2, 8, 4, dtype=torch.long),
        "query_embeds": lambda: torch.randn(2, 8, config.hidden_size),
        "inputs_embeds": lambda: torch.randn(2, 8, config.hidden_size),
    }
    # An image goes with as many marks in the text, which each processor makes in its own way.
    without = {name for name in known if name.endswith("_embeds") and "input_ids" in names}
    if any(hasattr(config, name) for name in ("image_token_id", "image_token_index")):
        without.add("pixel_values")
    if len(names & known.keys()) > 1:
        without.add("inputs_embeds")
    return {name: make() for name, make in known.items() if name in names and name not in without}


def _class_of(config: Any) -> Any:
    """The model of a configuration; of a part of a larger model too, which has no automatic one."""
    mapping = import_transformers().MODEL_MAPPING
    if type(config) in mapping:
        known = mapping[type(config)]
        return known[0] if isinstance(known, tuple) else known
    module = importlib.import_module(
        type(config).__module__.replace(".configuration_", ".modeling_")
    )
    for name, kind in vars(module).items():
        is_model = name.endswith("Model") and not name.endswith("PreTrainedModel")
        if is_model and getattr(kind, "config_class", None) is type(config):
            return kind
    raise Absent(f"no model of a {type(config).__name__} alone")


def _make(kind: str, head: str = "") -> Case:
    transformers = import_transformers()
    if kind not in transformers.CONFIG_MAPPING:
        raise Absent(f"transformers {transformers.__version__} has no {kind}")
    extra, feed = _FED.get(kind, (_CONFIGURED.get(kind, {}), None))
    config = _tiny_config(transformers.CONFIG_MAPPING[kind], extra)
    if head:
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    else:
        model = _class_of(config)._from_config(config)
    return Case(model, (), _arguments(model, config) if feed is None else feed())


# -- more than one call of a model
# -------------------------------------------------------------------------------------


class _Generation(torch.nn.Module):
    """Text generation, one token after the other, with the keys and values of earlier tokens
    kept.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)


def _generation(kind: str, auto_class: str) -> Case:
    transformers = import_transformers()
    config = _tiny_config(transformers.CONFIG_MAPPING[kind], {})
    return Case(_Generation(getattr(transformers, auto_class).from_config(config)), (_ids(),))


def _with_head(kind: str, auto_class: str, kwargs: Any) -> Case:
    transformers = import_transformers()
    config = _tiny_config(transformers.CONFIG_MAPPING[kind], {})
    return Case(getattr(transformers, auto_class).from_config(config), (), kwargs())


def _language_modelling() -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def _classification() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": torch.tensor([0, 1])}


def _specimen(kind: str) -> Specimen:
    is_recurrent = False if kind in _FEEDFORWARD else True if kind in _RECURRENT else None
    return Specimen("transformers", kind, partial(_make, kind), is_recurrent=is_recurrent)


SPECIMENS = (
    *map(_specimen, sorted({*_PLAIN, *_CONFIGURED, *_FED})),
    *(
        Specimen("transformers", f"{kind}-{head}", partial(_make, kind, head))
        for head, kinds in _WITH_HEAD.items()
        for kind in kinds.split()
    ),
    Specimen(
        "transformers",
        "gpt2-generate",
        partial(_generation, "gpt2", "AutoModelForCausalLM"),
        is_recurrent=True,
    ),
    *(
        Specimen(
            "transformers",
            name,
            partial(_with_head, kind, f"AutoModelFor{head}", arguments),
        )
        for name, kind, head, arguments in (
            ("gpt2-with_loss", "gpt2", "CausalLM", _language_modelling),
            ("bert-with_loss", "bert", "MaskedLM", _language_modelling),
            ("roberta-classifier", "roberta", "SequenceClassification", _classification),
        )
    ),
)
