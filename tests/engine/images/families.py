"""Small tokenizers, chat templates and image processors of the vision-language families, for tests."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pagoda.base.request_limits import RequestLimits
from pagoda.engine.inputs.image_prompts import ImagePrompts
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer, make_facts
from pagoda.models.config_reader import ConfigReader
from pagoda.models.image_config import ImageConfig, read_image_config

SPECIAL = {
    "idefics3": (
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
    ),
    "qwen2_vl": ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "pixtral": ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "</s>"),
}
TEMPLATES = {
    # Contents are parts, and nothing else; the role is followed by a space unless an image comes first.
    "idefics3": (
        "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "qwen2_vl": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "gemma3": (
        "{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part.text | trim }}{% endif %}{% endfor %}"
        "{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "pixtral": (
        "{% for message in messages %}{{ '[INST]' if message.role == 'user' else '' }}"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% else %}[IMG]{% endif %}{% endfor %}{% endif %}"
        "{{ '[/INST]' if message.role == 'user' else '</s>' }}{% endfor %}"
    ),
}
FAMILIES = tuple(TEMPLATES)


def backend_of(family):
    """Return a byte-level tokenizer that merges newlines, as those of the families do."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"ĊĊ": len(vocab), "he": len(vocab) + 1}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("Ċ", "Ċ"), ("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[family]])
    return backend


@functools.cache
def image_processor(family):
    if family == "idefics3":
        return Idefics3ImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    if family == "qwen2_vl":
        return Qwen2VLImageProcessorPil(min_pixels=4 * 784, max_pixels=30 * 784)
    if family == "pixtral":
        return PixtralImageProcessorPil(size={"longest_edge": 96})
    return Gemma3ImageProcessorPil(size={"height": 56, "width": 56})


CONFIGS = {
    "idefics3": ({"scale_factor": 2, "vision_config": {"image_size": 32, "patch_size": 8}}, {"image_seq_len": 4}),
    "qwen2_vl": ({}, {}),
    "gemma3": ({"mm_tokens_per_image": 4, "vision_config": {"patch_size": 14}}, {"image_seq_length": 4}),
    "pixtral": (
        {"spatial_merge_size": 2, "vision_config": {"patch_size": 8}},
        {"patch_size": 8, "spatial_merge_size": 2},
    ),
}


def image_config(family) -> ImageConfig:
    config, processor = CONFIGS[family]
    given = json.loads(image_processor(family).to_json_string())
    readers = [
        ConfigReader(values, name)
        for values, name in ((config, "config.json"), (processor, "processor"), (given, "preprocessor_config.json"))
    ]
    return read_image_config(*readers)


def inputs_of(family, limits=None, parses=False, domains=(), template=None, max_model_len=4096):
    backend = backend_of(family)
    facts = make_facts(backend, None, (), template or TEMPLATES[family], {})
    tokenizer = LibraryTokenizer(backend, facts)
    limits = limits or RequestLimits()
    images = ImagePrompts(image_config(family), tokenizer, limits, domains)
    bounds = InputLimits(facts.vocab_size, max_model_len, 8, of_request=limits)
    return InputProcessor(tokenizer, bounds, 0, parses, images=images, model_name="tiny")


def tokens_of_pixtral(height, width):
    """Return what PixtralProcessor.replace_image_token makes of an image that was resized to this size."""
    rows = [["[IMG]"] * (width // 16) + ["[IMG_BREAK]"] for _ in range(height // 16)]
    return "".join([token for row in rows for token in row][:-1]) + "[IMG_END]"


def expected_ids(family, text, images):
    """Return what transformers' processor makes of a rendered prompt and its images."""
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    extra = {"extra_special_tokens": names} if family == "gemma3" else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend_of(family), **extra)
    processor = image_processor(family)
    if family == "idefics3":
        whole = Idefics3Processor(processor, tokenizer, image_seq_len=4)
    elif family == "gemma3":
        whole = Gemma3Processor(processor, tokenizer, image_seq_length=4)
    else:  # their modules and constructors need torchvision, of which they use nothing
        found = processor(images=images, return_tensors="np")
        if family == "pixtral":
            place, written = "[IMG]", [tokens_of_pixtral(*size) for size in found["image_sizes"].tolist()]
        else:
            place = "<|image_pad|>"
            own = SimpleNamespace(image_processor=processor, image_token=place)
            written = [Qwen2_5_VLProcessor.replace_image_token(own, found, index) for index in range(len(images))]
        pieces = text.split(place)
        joined = "".join(piece + tokens for piece, tokens in zip(pieces, [*written, ""], strict=True))
        return tokenizer(joined)["input_ids"]
    return whole(text=text, images=images)["input_ids"][0]


def image_of(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_model(family):
    """Return a tiny random model of transformers for the family's tokenizer, in float32."""
    size = backend_of(family).get_vocab_size()
    special = {text: 258 + at for at, text in enumerate(SPECIAL[family])}
    text = {
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": size - 1,
        "pad_token_id": None,
    }
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(5)
    if family == "idefics3":
        config = transformers.SmolVLMConfig(
            text_config={"model_type": "llama", **text},
            vision_config={**tower, "image_size": 32, "patch_size": 8},
            scale_factor=2,
            image_token_id=special["<image>"],
            tie_word_embeddings=False,
        )
        kind = transformers.SmolVLMForConditionalGeneration
    elif family == "gemma3":
        config = transformers.Gemma3Config(
            text_config={**text, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
            vision_config={**tower, "image_size": 56, "patch_size": 14},
            mm_tokens_per_image=4,
            image_token_index=special["<image_soft_token>"],
            boi_token_index=special["<start_of_image>"],
            eoi_token_index=special["<end_of_image>"],
        )
        kind = transformers.Gemma3ForConditionalGeneration
    elif family == "pixtral":
        config = transformers.Mistral3Config(
            text_config={"model_type": "mistral", **text, "head_dim": 32},
            vision_config={"model_type": "pixtral", **tower, "image_size": 96, "patch_size": 8},
            spatial_merge_size=2,
            image_token_index=special["[IMG]"],
            tie_word_embeddings=False,
        )
        kind = transformers.Mistral3ForConditionalGeneration
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
        tower |= {"depth": 2, "num_heads": 2, "window_size": 56, "fullatt_block_indexes": [1], "out_hidden_size": 64}
        config = transformers.Qwen2_5_VLConfig(
            text_config={"model_type": "qwen2_5_vl_text", **text, "rope_parameters": rope},
            vision_config=tower,
            image_token_id=special["<|image_pad|>"],
            video_token_id=special["<|video_pad|>"],
            vision_start_token_id=special["<|vision_start|>"],
            vision_end_token_id=special["<|vision_end|>"],
            tie_word_embeddings=False,
        )
        kind = transformers.Qwen2_5_VLForConditionalGeneration
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
        if family == "gemma3":  # its embeddings are scaled up, and would repeat the last token
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def write_model(family, folder):
    """Write `make_model` to a folder, with its tokenizer, chat template and the settings of its images."""
    make_model(family).save_pretrained(folder)
    backend_of(family).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[family])
    (folder / "preprocessor_config.json").write_text(image_processor(family).to_json_string())
    (folder / "processor_config.json").write_text(json.dumps(CONFIGS[family][1]))
    return folder
