"""A folder with a small random Qwen2-VL, as `mlx_vlm.load` reads it, and pictures for it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from paged_kv import embedded_model
from tests.support.vision_zoo import drawn

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = f"{MARKS[0]}{MARKS[2]}{MARKS[1]}"
# As Qwen's, without roles: contents are a text, or a list of texts and images.
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    f"{IMAGE}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_model(folder: Path, *, vision_seed: int = 0) -> Path:
    """Write the model, with the tokenizer of stdlib-llama and four tokens more. Its language model
    is always the same."""
    from mlx_vlm.models.qwen2_vl import Model, ModelConfig, TextConfig, VisionConfig
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_model())
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.save_pretrained(folder)
    start, _, image, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    config = {
        "model_type": "qwen2_vl",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(tokenizer),
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "eos_token_id": [len(tokenizer) - 1],
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 7840})
    )
    whole = ModelConfig.from_dict(dict(config))
    whole.text_config = TextConfig.from_dict(whole.text_config)
    whole.vision_config = VisionConfig.from_dict(whole.vision_config)
    mx.random.seed(0)
    model: Any = Model(whole)
    model.update(tree_map(drawn, model.parameters()))
    mx.random.seed(vision_seed)
    model.vision_tower.update(tree_map(drawn, model.vision_tower.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def write_picture(path: Path, shade: int) -> Path:
    """A picture of one shade, with a corner of another."""
    from PIL import Image

    picture = Image.new("RGB", (56, 56), (shade, 255 - shade, 128))
    picture.paste((255, shade, 0), (0, 0, 20, 30))
    picture.save(path)
    return path


def write_model_and_pictures(folder: Path) -> Path:
    """A model in `model`, and beside it a red and a blue picture of one size."""
    write_model(folder / "model")
    for name, shade in (("red", 250), ("blue", 10)):
        write_picture(folder / f"{name}.png", shade)
    return folder
