"""Images become what transformers' PIL processors make of them, to the bit."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from pagoda.base.errors import RequestError
from pagoda.engine.images.process import num_image_tokens, process_image
from pagoda.models.config_reader import ConfigReader
from pagoda.models.image_config import read_image_config

SIZES = [(64, 64), (1, 1), (3, 500), (500, 3), (129, 257), (640, 480), (33, 32), (1023, 767), (65, 64)]
"""Width and height: odd, tiny, very long, exactly a tile, just more than one."""


def image_of(size, seed=0):
    width, height = size
    rng = np.random.default_rng(seed + width * 7919 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def config_of(processor, config, processor_config=None):
    """Read the processor's own settings as pagoda does."""
    given = json.loads(processor.to_json_string())
    return read_image_config(
        ConfigReader(config, "config.json"),
        ConfigReader(processor_config or {}, "processor_config.json"),
        ConfigReader(given, "preprocessor_config.json"),
    )


def patches_of(tiles, size):
    """float32 [tiles, 3, height, width] -> [tiles, patches, 3 * size * size]."""
    num, _, height, width = tiles.shape
    cut = tiles[:, :, : height // size * size, : width // size * size]
    cut = cut.reshape(num, 3, height // size, size, width // size, size).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(num, -1, 3 * size * size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Idefics3ImageProcessorPil, {}),
        (SmolVLMImageProcessorPil, {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7], "resample": 3}),
        (Idefics3ImageProcessorPil, {"do_image_splitting": False}),
    ],
)
def test_idefics3_tiles_are_those_of_transformers(kind, options, size):
    processor = kind(size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, **options)
    vision = {"vision_config": {"image_size": 64, "patch_size": 8}, "scale_factor": 2}
    config = config_of(processor, vision, {"image_seq_len": 16})
    image = image_of(size)
    expected = processor(images=image, return_row_col_info=True, return_tensors="np")
    got = process_image(image, config, "image")
    assert sum(item.length for item in got.items) == num_image_tokens(*size, config)
    assert [item.grid for item in got.items] == [(8, 8)] * len(got.items)
    features = np.stack([item.features for item in got.items])
    np.testing.assert_array_equal(features, patches_of(expected["pixel_values"][0], 8))
    assert features.dtype == np.float32
    rows, columns = np.ravel(expected["rows"])[0], np.ravel(expected["cols"])[0]
    assert got.text.count("<row_") == rows * columns == len(got.items) - 1
    assert got.text.count("<image>") == 16 * len(got.items)


def test_the_whole_image_is_within_the_largest_edge_of_idefics3():
    processor = Idefics3ImageProcessorPil(size={"longest_edge": 5000}, max_image_size={"longest_edge": 1024})
    vision = {"vision_config": {"image_size": 1024, "patch_size": 256}, "scale_factor": 2}
    config = config_of(processor, vision, {"image_seq_len": 4})
    image = image_of((90, 31))
    expected = processor(images=image, return_tensors="np")["pixel_values"][0]
    features = np.stack([item.features for item in process_image(image, config, "image").items])
    np.testing.assert_array_equal(features, patches_of(expected, 256))


@pytest.mark.parametrize("size", [*(one for one in SIZES if max(one) <= 200 * min(one)), (20, 4000), (2000, 1500)])
@pytest.mark.parametrize(
    "options", [{}, {"min_pixels": 4 * 784, "max_pixels": 60 * 784}, {"patch_size": 4, "merge_size": 3}]
)
def test_qwen2_vl_patches_are_those_of_transformers(options, size):
    processor = Qwen2VLImageProcessorPil(**options)
    config = config_of(processor, {})
    image = image_of(size)
    expected = processor(images=image, return_tensors="np")
    got = process_image(image, config, "image")
    assert sum(item.length for item in got.items) == num_image_tokens(*size, config)
    assert len(got.items) == 1
    assert got.items[0].grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_array_equal(got.items[0].features, expected["pixel_values"])
    num_tokens = int(expected["image_grid_thw"].prod()) // processor.merge_size**2
    assert got.items[0].length == got.text.count("<|image_pad|>") == num_tokens <= config.max_item_tokens


def test_an_image_that_qwen2_vl_cannot_read_is_refused():
    config = config_of(Qwen2VLImageProcessorPil(), {})
    with pytest.raises(RequestError, match="messages\\[0\\]: an image of 201 x 1 pixels is too narrow"):
        process_image(image_of((201, 1)), config, "messages[0]")


@pytest.mark.parametrize("size", SIZES)
def test_gemma3_squares_are_those_of_transformers(size):
    processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    config = config_of(processor, {"mm_tokens_per_image": 4, "vision_config": {"patch_size": 14}}, GEMMA)
    image = image_of(size)
    expected = np.stack(processor(images=image, return_tensors="np")["pixel_values"])
    (item,) = process_image(image, config, "image").items
    assert (item.grid, item.length) == ((4, 4), 4)
    np.testing.assert_array_equal(item.features, patches_of(expected, 14)[0])


GEMMA = {"image_seq_length": 4}


PIXTRAL = {"vision_config": {"patch_size": 8}, "spatial_merge_size": 2}, {"patch_size": 8, "spatial_merge_size": 2}


NORMAL_SIZES = [one for one in SIZES if max(one) < 100 * min(one)]


@pytest.mark.parametrize("size", [*NORMAL_SIZES, (16, 96), (96, 17), (96, 1), (300, 200)])
def test_pixtral_patches_are_those_of_transformers(size):
    processor = PixtralImageProcessorPil(size={"longest_edge": 96})
    config = config_of(processor, *PIXTRAL)
    image = image_of(size)
    expected = processor(images=image, return_tensors="np")
    got = process_image(image, config, "image")
    (item,) = got.items
    height, width = expected["image_sizes"][0]
    assert item.grid == (height // 8, width // 8)
    np.testing.assert_array_equal(item.features, patches_of(expected["pixel_values"], 8)[0])
    rows, columns = height // 16, width // 16
    assert item.length == num_image_tokens(*size, config) == rows * (columns + 1) <= config.max_item_tokens
    assert got.text.split("[IMG_BREAK]") == ["[IMG]" * columns] * (rows - 1) + ["[IMG]" * columns + "[IMG_END]"]


@pytest.mark.parametrize("size", [(500, 3), (3, 500)])
def test_an_image_that_pixtral_cannot_read_is_refused(size):
    config = config_of(PixtralImageProcessorPil(size={"longest_edge": 96}), *PIXTRAL)
    with pytest.raises(RequestError, match=f"messages\\[0\\]: an image of {size[0]} x {size[1]} pixels is too narrow"):
        process_image(image_of(size), config, "messages[0]")
