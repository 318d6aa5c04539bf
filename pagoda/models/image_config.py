"""How images become the input of a model's vision tower: one class per family, read from a checkpoint's settings.

Each class says what its MediaItems are. `features` is float32 [num_patches, values of a patch], the pixels after
rescaling and normalising, equal to those of transformers' PIL processors; the values of a patch are in the order of a
convolution's weights, so that the patch embedding is a Linear with weight.reshape(hidden, -1). `grid` is how many
patches there are in each direction; `length` is the number of the prompt's image tokens that the item stands for.
"""

import math
from dataclasses import dataclass

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.models.config_reader import ConfigReader

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BILINEAR, _LANCZOS, _BICUBIC = 2, 1, 3
_NUM_FILTERS = 6
_LARGEST_EDGE = 16_384

MAX_STRETCH = 200
"""Longer edge to shorter edge, of an image of Qwen2-VL."""


@dataclass(frozen=True, slots=True)
class PixelConfig:
    """From pixels of 0 to 255 to a tower's input: (pixel * scale - mean) / std, per channel.

    resample: Pillow's number of the filter that resizes.
    """

    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Idefics3Images:
    """Idefics3 and SmolVLM: an image is cut into square tiles, with the whole image as the last one.

    A MediaItem is one tile: features float32 [rows * columns, 3 * patch_size ** 2], patches row by row, a patch in the
    order (channel, y, x); grid = (rows, columns), both tile_size // patch_size; length = tokens_per_tile.

    longest_edge: of the image before it is cut.   splits: False: the only tile is the whole image.
    tile_size: edge of a tile in pixels.   scale_factor: patches per image token, in each direction.
    """

    pixels: PixelConfig
    longest_edge: int
    splits: bool
    tile_size: int
    patch_size: int
    scale_factor: int

    placeholder = image_token = "<image>"
    tokens = (image_token,)

    @property
    def tokens_per_tile(self) -> int:
        return (self.tile_size // self.patch_size // self.scale_factor) ** 2

    @property
    def max_item_tokens(self) -> int:
        return self.tokens_per_tile


@dataclass(frozen=True, slots=True)
class Qwen2VLImages:
    """Qwen2-VL and Qwen2.5-VL: an image is resized to a multiple of the patches that are merged, its size kept.

    A MediaItem is one image: features float32 [rows * columns, 3 * temporal_patch_size * patch_size ** 2], a patch in
    the order (channel, time, y, x), where all times are the same; grid = (1, rows, columns), in patches;
    length = rows * columns / merge_size ** 2. The merge_size ** 2 patches of an image token are next to each other,
    row by row, and so are these groups: [rows / merge, columns / merge, merge, merge].

    min_pixels, max_pixels: of the resized image.
    """

    pixels: PixelConfig
    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    placeholder = image_token = "<|image_pad|>"
    tokens = (image_token,)

    @property
    def max_item_tokens(self) -> int:
        """The longest item: of an image of max_pixels, a narrow one, or one that is enlarged to min_pixels."""
        factor = self.patch_size * self.merge_size
        longer = math.sqrt(MAX_STRETCH * self.min_pixels) / factor
        enlarged = self.min_pixels / factor**2 + longer * (1 + 1 / MAX_STRETCH) + 1
        return math.ceil(max(self.max_pixels / factor**2, math.sqrt(MAX_STRETCH * self.max_pixels) / factor, enlarged))


@dataclass(frozen=True, slots=True)
class Gemma3Images:
    """Gemma 3: an image is resized to a square, whatever its shape.

    A MediaItem is one image: features float32 [rows * columns, 3 * patch_size ** 2], patches row by row, a patch in the
    order (channel, y, x); grid = (rows, columns); length = tokens_per_image. All of them attend to each other.

    height, width: of the resized image.
    """

    pixels: PixelConfig
    height: int
    width: int
    patch_size: int
    tokens_per_image: int

    placeholder = "<start_of_image>"
    image_token = "<image_soft_token>"
    tokens = (image_token,)

    @property
    def max_item_tokens(self) -> int:
        return self.tokens_per_image


@dataclass(frozen=True, slots=True)
class PixtralImages:
    """Pixtral, of Mistral 3: an image is resized to whole tokens, shrunk if an edge is longer than `longest_edge`.

    A MediaItem is one image: features float32 [rows * columns, 3 * patch_size ** 2], patches row by row, a patch in the
    order (channel, y, x); grid = (rows, columns), in patches; length = rows / merge_size * (columns / merge_size + 1):
    each row of tokens ends with one that has its own embedding.
    """

    pixels: PixelConfig
    longest_edge: int
    patch_size: int
    merge_size: int

    placeholder = image_token = "[IMG]"
    row_end, image_end = "[IMG_BREAK]", "[IMG_END]"
    tokens = (image_token, row_end, image_end)

    @property
    def max_item_tokens(self) -> int:
        side = math.ceil(self.longest_edge / (self.patch_size * self.merge_size))
        return side * (side + 1)


ImageConfig = Idefics3Images | Qwen2VLImages | Gemma3Images | PixtralImages
"""placeholder: what a chat template writes for an image.   image_token: what stands for each row of the tower's output.
tokens: those of a MediaItem.   max_item_tokens: the longest MediaItem."""


def read_image_config(config: ConfigReader, processor: ConfigReader, preprocessor: ConfigReader) -> ImageConfig:
    """Read a checkpoint's processing of images.

    config: config.json.   processor: processor_config.json.   preprocessor: preprocessor_config.json, or the section
    image_processor of the former; settings that are absent have transformers' defaults.
    Raises ConfigError for a processor, or a step of it, that is not supported, and names it.
    """
    kind = preprocessor.text("image_processor_type", preprocessor.text("feature_extractor_type", ""))
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if preprocessor.has(name) and not preprocessor.flag(name):
            raise ConfigError(f"{preprocessor.origin}: {name} = false is not supported")
    for name in ("do_center_crop", "do_pan_and_scan"):
        preprocessor.refuse(name)
    match kind.removesuffix("Fast").removesuffix("Pil"):
        case "Idefics3ImageProcessor" | "SmolVLMImageProcessor":
            return _read_idefics3(config, processor, preprocessor)
        case "Qwen2VLImageProcessor" | "Qwen2_5_VLImageProcessor":
            return _read_qwen2_vl(preprocessor)
        case "Gemma3ImageProcessor":
            return _read_gemma3(config, processor, preprocessor)
        case "PixtralImageProcessor":
            return _read_pixtral(config, processor, preprocessor)
        case _:
            raise ConfigError(
                f"{preprocessor.origin}: image_processor_type {abbreviate(kind)} is not supported; supported: "
                "Idefics3ImageProcessor, SmolVLMImageProcessor, Qwen2VLImageProcessor, Gemma3ImageProcessor, "
                "PixtralImageProcessor"
            )


def _read_idefics3(config: ConfigReader, processor: ConfigReader, preprocessor: ConfigReader) -> Idefics3Images:
    vision = _vision(config)
    read = Idefics3Images(
        _read_pixels(preprocessor, _LANCZOS, _HALF, _HALF),
        longest_edge=_edge(preprocessor, "size", 4 * 364),
        splits=preprocessor.flag("do_image_splitting", True),
        tile_size=_edge(preprocessor, "max_image_size", 364),
        patch_size=vision.integer("patch_size", 32),
        scale_factor=config.integer("scale_factor", 2),
    )
    image_size = vision.integer("image_size", 224)
    if read.tile_size != image_size:
        raise ConfigError(
            f"{preprocessor.origin}: max_image_size has the longest_edge {read.tile_size}, but {vision.origin} has "
            f"image_size = {image_size}; they must be equal"
        )
    stated = processor.integer("image_seq_len", 169)
    if read.tokens_per_tile != stated:
        raise ConfigError(
            f"{processor.origin}: image_seq_len = {stated}, but {vision.origin} makes {read.tokens_per_tile} tokens of "
            "a tile"
        )
    return read


def _read_qwen2_vl(preprocessor: ConfigReader) -> Qwen2VLImages:
    size = preprocessor.section("size") or ConfigReader({}, preprocessor.origin)
    read = Qwen2VLImages(
        _read_pixels(preprocessor, _BICUBIC, _CLIP_MEAN, _CLIP_STD),
        min_pixels=preprocessor.integer("min_pixels", size.integer("shortest_edge", 56 * 56)),
        max_pixels=preprocessor.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280)),
        patch_size=preprocessor.integer("patch_size", 14, most=_LARGEST_EDGE),
        temporal_patch_size=preprocessor.integer("temporal_patch_size", 2, most=16),
        merge_size=preprocessor.integer("merge_size", 2, most=16),
    )
    if read.min_pixels > read.max_pixels:
        raise ConfigError(
            f"{preprocessor.origin}: min_pixels = {read.min_pixels} is more than max_pixels = {read.max_pixels}"
        )
    return read


def _read_gemma3(config: ConfigReader, processor: ConfigReader, preprocessor: ConfigReader) -> Gemma3Images:
    size = preprocessor.section("size") or ConfigReader({}, preprocessor.origin)
    read = Gemma3Images(
        _read_pixels(preprocessor, _BILINEAR, _HALF, _HALF),
        height=size.integer("height", 224, most=_LARGEST_EDGE),
        width=size.integer("width", 224, most=_LARGEST_EDGE),
        patch_size=_vision(config).integer("patch_size", 16),
        tokens_per_image=processor.integer("image_seq_length", preprocessor.integer("image_seq_length", 256)),
    )
    stated = config.integer("mm_tokens_per_image", 256)
    if stated != read.tokens_per_image:
        raise ConfigError(
            f"{config.origin}: mm_tokens_per_image = {stated}, but {processor.origin} has image_seq_length = "
            f"{read.tokens_per_image}"
        )
    return read


def _read_pixtral(config: ConfigReader, processor: ConfigReader, preprocessor: ConfigReader) -> PixtralImages:
    read = PixtralImages(
        _read_pixels(preprocessor, _BICUBIC, _CLIP_MEAN, _CLIP_STD),
        longest_edge=_edge(preprocessor, "size", 1024),
        patch_size=_vision(config).integer("patch_size", 16, most=_LARGEST_EDGE),
        merge_size=config.integer("spatial_merge_size", 2, most=16),
    )
    stated = processor.integer("patch_size", 16) * processor.integer("spatial_merge_size", 1)
    if stated != read.patch_size * read.merge_size:
        raise ConfigError(
            f"{processor.origin}: patch_size times spatial_merge_size is {stated}, but in {config.origin} it is "
            f"{read.patch_size * read.merge_size}"
        )
    for name, token in zip(("image_token", "image_break_token", "image_end_token"), read.tokens, strict=True):
        processor.expect(name, token)
    return read


def _read_pixels(
    preprocessor: ConfigReader, resample: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> PixelConfig:
    chosen = preprocessor.values.get("resample")
    if chosen is not None and (not isinstance(chosen, int) or not 0 <= chosen < _NUM_FILTERS):
        raise preprocessor.wrong("resample", "the number of one of Pillow's filters")
    return PixelConfig(
        resample if chosen is None else chosen,
        preprocessor.positive("rescale_factor", 1 / 255),
        _channels(preprocessor, "image_mean", mean),
        _channels(preprocessor, "image_std", std),
    )


def _channels(preprocessor: ConfigReader, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = preprocessor.values.get(key)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != 3:
        raise preprocessor.wrong(key, "three numbers")
    entries = ConfigReader({str(index): one for index, one in enumerate(value)}, f"{preprocessor.origin}: {key}")
    return tuple(entries.number(str(index)) for index in range(3))


def _edge(preprocessor: ConfigReader, key: str, default: int) -> int:
    size = preprocessor.section(key)
    return default if size is None else size.integer("longest_edge", most=_LARGEST_EDGE)


def _vision(config: ConfigReader) -> ConfigReader:
    return config.section("vision_config") or ConfigReader({}, f"{config.origin}: vision_config")
