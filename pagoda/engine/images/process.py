"""Turn pixels into the input of a model's vision tower, as transformers' PIL processors do, to the bit.

pagoda/models/image_config.py says what the features of each family are.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.models.image_config import (
    MAX_STRETCH,
    Gemma3Images,
    Idefics3Images,
    ImageConfig,
    PixelConfig,
    PixtralImages,
    Qwen2VLImages,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST_EDGE = 4096
"""Of an image of Idefics3."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """The features of one MediaItem, its grid, and its image tokens."""

    features: np.ndarray
    grid: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """items: in the order of their tokens.   text: what the prompt has in place of the image, special tokens in it."""

    items: tuple[ImageFeatures, ...]
    text: str


def process_image(image: "Image", config: ImageConfig, where: str) -> ProcessedImage:
    """Return the features of an RGB image.   where: what errors call it.

    Raises RequestError for an image of a shape that the model cannot read.
    """
    match config:
        case Idefics3Images():
            return _process_idefics3(image, config)
        case Qwen2VLImages():
            return _process_qwen2_vl(image, config, where)
        case Gemma3Images():
            return _process_gemma3(image, config)
        case PixtralImages():
            return _process_pixtral(image, config, where)


def num_image_tokens(width: int, height: int, config: ImageConfig) -> int:
    """Return how many image tokens `process_image` makes of an image of this size, without its work."""
    match config:
        case Idefics3Images():
            edge, size = config.tile_size, _idefics3_size(width, height, config.longest_edge)
            columns, rows = (length // edge for length in _in_tiles(*size, edge))
            num_tiles = columns * rows if config.splits and max(columns, rows) > 1 else 0
            return (num_tiles + 1) * config.tokens_per_tile
        case Qwen2VLImages():
            width, height = _qwen2_vl_size(width, height, config)
            return width * height // (config.patch_size * config.merge_size) ** 2
        case Gemma3Images():
            return config.tokens_per_image
        case PixtralImages():
            columns, rows = _pixtral_size(width, height, config)
            return rows * (columns + 1)


# ---- Idefics3


def _process_idefics3(image: "Image", config: Idefics3Images) -> ProcessedImage:
    edge, resample = config.tile_size, config.pixels.resample
    image = image.resize(_idefics3_size(*image.size, config.longest_edge), resample)
    num_rows = num_columns = 0
    tiles: list[Image] = []
    if config.splits:
        image = image.resize(_in_tiles(*image.size, edge), resample)
        if max(image.size) > edge:
            num_columns, num_rows = (size // edge for size in image.size)
            tiles = [
                image.crop((column * edge, row * edge, (column + 1) * edge, (row + 1) * edge))
                for row in range(num_rows)
                for column in range(num_columns)
            ]
    tiles.append(image.resize((edge, edge), resample))
    side = edge // config.patch_size
    items = tuple(
        ImageFeatures(
            _patches(np.asarray(tile), config.pixels, config.patch_size), (side, side), config.tokens_per_tile
        )
        for tile in tiles
    )
    return ProcessedImage(items, _idefics3_text(config, num_rows, num_columns))


def _idefics3_size(width: int, height: int, longest_edge: int) -> tuple[int, int]:
    """Return width and height with the longest edge as given, the other one even."""
    ratio = width / height
    if width >= height:
        width, height = longest_edge, int(longest_edge / ratio)
        height += height % 2
    else:
        width, height = int(longest_edge * ratio), longest_edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _LARGEST_EDGE:
        width, height = _LARGEST_EDGE, int(_LARGEST_EDGE / ratio)
    elif height > width and height > _LARGEST_EDGE:
        width, height = int(_LARGEST_EDGE * ratio), _LARGEST_EDGE
    return max(width, 1), max(height, 1)


def _in_tiles(width: int, height: int, edge: int) -> tuple[int, int]:
    """Return width and height rounded up to whole tiles: first the longer one, then the other in proportion."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return width, height


def _idefics3_text(config: Idefics3Images, num_rows: int, num_columns: int) -> str:
    around, tokens = "<fake_token_around_image>", config.image_token * config.tokens_per_tile
    rows = "".join(
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(num_columns)) + "\n"
        for row in range(num_rows)
    )
    return f"{rows}\n{around}<global-img>{tokens}{around}" if num_rows else f"{around}<global-img>{tokens}{around}"


# ---- Qwen2-VL


def _process_qwen2_vl(image: "Image", config: Qwen2VLImages, where: str) -> ProcessedImage:
    width, height = image.size
    if max(width, height) > MAX_STRETCH * min(width, height):
        raise RequestError(
            f"{where}: an image of {width} x {height} pixels is too narrow for this model: its longer edge may be at "
            f"most {MAX_STRETCH} times the shorter one",
            where,
        )
    size, merge = config.patch_size, config.merge_size
    image = image.resize(_qwen2_vl_size(width, height, config), config.pixels.resample)
    num_columns, num_rows = (edge // size for edge in image.size)
    patches = np.asarray(image).reshape(num_rows // merge, merge, size, num_columns // merge, merge, size, 3)
    patches = patches.transpose(0, 3, 1, 4, 6, 2, 5).reshape(num_rows * num_columns, 3, 1, size * size)
    times = config.temporal_patch_size
    features = np.empty((num_rows * num_columns, 3, times, size * size), np.float32)
    for channel, values in enumerate(_tower_values(config.pixels)):
        features[:, channel] = values[patches[:, channel]]
    num_tokens = num_rows * num_columns // merge**2
    item = ImageFeatures(features.reshape(num_rows * num_columns, -1), (1, num_rows, num_columns), num_tokens)
    return ProcessedImage((item,), config.image_token * num_tokens)


def _qwen2_vl_size(width: int, height: int, config: Qwen2VLImages) -> tuple[int, int]:
    """Return width and height as multiples of merged patches, their product within the bounds."""
    factor = config.patch_size * config.merge_size
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > config.max_pixels:
        shrink = math.sqrt((height * width) / config.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_width, new_height


# ---- Gemma 3


def _process_gemma3(image: "Image", config: Gemma3Images) -> ProcessedImage:
    image = image.resize((config.width, config.height), config.pixels.resample)
    features = _patches(np.asarray(image), config.pixels, config.patch_size)
    grid = (config.height // config.patch_size, config.width // config.patch_size)
    item = ImageFeatures(features, grid, config.tokens_per_image)
    tokens = config.image_token * config.tokens_per_image
    return ProcessedImage((item,), f"\n\n{config.placeholder}{tokens}<end_of_image>\n\n")


# ---- Pixtral


def _process_pixtral(image: "Image", config: PixtralImages, where: str) -> ProcessedImage:
    columns, rows = _pixtral_size(*image.size, config)
    if not columns or not rows:
        raise RequestError(
            f"{where}: an image of {image.width} x {image.height} pixels is too narrow for this model: its longer edge "
            f"becomes {config.longest_edge} pixels, and the shorter one none",
            where,
        )
    factor = config.patch_size * config.merge_size
    image = image.resize((columns * factor, rows * factor), config.pixels.resample)
    features = _patches(np.asarray(image), config.pixels, config.patch_size)
    item = ImageFeatures(features, (rows * config.merge_size, columns * config.merge_size), rows * (columns + 1))
    row = config.image_token * columns
    return ProcessedImage((item,), (row + config.row_end) * (rows - 1) + row + config.image_end)


def _pixtral_size(width: int, height: int, config: PixtralImages) -> tuple[int, int]:
    """Return how many tokens an image has along its width and its height; 0 for an edge that would be no pixel."""
    ratio = max(height / config.longest_edge, width / config.longest_edge)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    factor = config.patch_size * config.merge_size
    return math.ceil(width / factor), math.ceil(height / factor)


# ---- what they share


def _patches(pixels: np.ndarray, config: PixelConfig, size: int) -> np.ndarray:
    """uint8 [height, width, 3] -> float32 [patches, 3 * size * size], row by row; what is over at the ends is cut."""
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    patches = pixels[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
    patches = patches.transpose(0, 2, 4, 1, 3).reshape(rows * columns, 3, size * size)
    features = np.empty(patches.shape, np.float32)
    for channel, values in enumerate(_tower_values(config)):
        features[:, channel] = values[patches[:, channel]]
    return features.reshape(rows * columns, -1)


def _tower_values(config: PixelConfig) -> np.ndarray:
    """Return what each value of a pixel becomes: float32 [3, 256]. Rounded where transformers rounds."""
    scaled = (np.arange(256, dtype=np.float64) * config.scale).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None] for each in (config.mean, config.std))
    return (scaled - mean) / std
