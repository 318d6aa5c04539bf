"""How a checkpoint's settings say that its images are processed."""

import pytest

from pagoda.base.errors import ConfigError
from pagoda.models.config_reader import ConfigReader
from pagoda.models.image_config import (
    Gemma3Images,
    Idefics3Images,
    PixelConfig,
    PixtralImages,
    Qwen2VLImages,
    read_image_config,
)

SMOLVLM = {"image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"longest_edge": 512}}
SMOLVLM_CONFIG = {"scale_factor": 4, "vision_config": {"image_size": 512, "patch_size": 16}}


def read(preprocessor, config=None, processor=None):
    return read_image_config(
        ConfigReader(config or {}, "config.json"),
        ConfigReader(processor or {}, "processor_config.json"),
        ConfigReader(preprocessor, "preprocessor_config.json"),
    )


def test_smolvlm_has_square_tiles_of_64_tokens():
    given = {**SMOLVLM, "size": {"longest_edge": 2048}, "image_std": [0.5, 0.25, 0.5]}
    images = read(given, SMOLVLM_CONFIG, {"image_seq_len": 64})
    assert images == Idefics3Images(PixelConfig(1, 1 / 255, (0.5,) * 3, (0.5, 0.25, 0.5)), 2048, True, 512, 16, 4)
    assert images.max_item_tokens == 64
    assert images.image_token == images.placeholder == "<image>"


def test_qwen2_vl_reads_the_older_names_of_its_bounds_first():
    images = read(
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "min_pixels": 3136,
            "max_pixels": 401_408,
            "size": {"longest_edge": 7},
        }
    )
    assert isinstance(images, Qwen2VLImages)
    assert (images.min_pixels, images.max_pixels, images.max_item_tokens) == (3136, 401_408, 512)


def test_gemma3_has_one_square_of_256_tokens():
    config = {"mm_tokens_per_image": 256, "vision_config": {"patch_size": 14}}
    images = read({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}, config)
    assert isinstance(images, Gemma3Images)
    assert (images.height, images.patch_size, images.max_item_tokens) == (896, 14, 256)


PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}}
PIXTRAL_CONFIG = {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2}


def test_pixtral_has_a_token_more_for_each_row():
    images = read(PIXTRAL, PIXTRAL_CONFIG, {"patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]"})
    assert isinstance(images, PixtralImages)
    assert (images.longest_edge, images.max_item_tokens) == (1540, 55 * 56)


@pytest.mark.parametrize(
    ("preprocessor", "config", "processor", "error"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, {}, {}, "image_processor_type 'CLIPImageProcessor' is not"),
        ({**SMOLVLM, "do_resize": False}, SMOLVLM_CONFIG, {}, "do_resize = false is not supported"),
        ({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}, {}, {}, "do_pan_and_scan = True"),
        (SMOLVLM, {**SMOLVLM_CONFIG, "vision_config": {"image_size": 384}}, {}, "must be equal"),
        (SMOLVLM, SMOLVLM_CONFIG, {"image_seq_len": 169}, "image_seq_len = 169, but config.json: vision_config makes"),
        (PIXTRAL, PIXTRAL_CONFIG, {"patch_size": 14}, "spatial_merge_size is 14, but in config.json it is 28"),
        (
            PIXTRAL,
            PIXTRAL_CONFIG,
            {"patch_size": 28, "image_end_token": "[E]"},
            r"image_end_token = '\[E\]', expected \[IMG_END\]",
        ),
        ({**SMOLVLM, "resample": "best"}, SMOLVLM_CONFIG, {}, "resample = 'best', expected the number of one"),
        ({**SMOLVLM, "image_mean": [0.5]}, SMOLVLM_CONFIG, {}, "image_mean = .*, expected three numbers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(preprocessor, config, processor, error):
    with pytest.raises(ConfigError, match=error):
        read(preprocessor, config, processor)
