"""ImageFolder: a class per folder of images; decode_image: any image file as one kind of array."""

import errno
import io
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Both plugins by name: Pillow would register them when it meets the first such file, and a second thread that
# meets one meanwhile may fail to identify it.
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401

from aioload.datasets.base import Dataset, read_sample
from aioload.errors import AioloadError, ArgumentError, DatasetNotFoundError

Array: TypeAlias = NDArray[np.uint8]

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")
_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}

# The EXIF tag, and how to turn what is stored into what is meant (EXIF 2.3, 4.6.4 A).
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNS_BACK = {**_TURNS, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}

# What Pillow raises, besides OSError, for content that breaks a format's rules.
_BROKEN = (SyntaxError, EOFError, LookupError, TypeError, ValueError, ArithmeticError, struct.error)


class ImageError(AioloadError, OSError):
    """An image file is empty, broken or over ``max_pixels``; an ``OSError``, as what Pillow raises."""


def decode_image(
    data: bytes | bytearray | memoryview, mode: str = "RGB", *, orientation: bool = True, max_pixels: int | None = None
) -> Array:
    """Decode an image file of any kind into an array of one kind.

    The first frame counts. Colours are what Pillow's ``convert`` makes of them: CMYK is converted without a
    profile, JPEGs that store it inverted included. Transparency is dropped where ``mode`` has none, and
    leaves the colours as they are. Grey of 16 bits keeps its high byte; 32-bit integers and floats (TIFF),
    which have no agreed white, are cut off at 0 and 255. Any number of threads may call it at once.

    Args:
        data: The file's content.
        mode: ``"RGB"``, ``"RGBA"``, ``"L"`` or ``"LA"``: what the channels mean.
        orientation: Turn the image as its EXIF orientation says (in TIFF the tag of that name), so that it is
            upright; ``False`` leaves the rows as they are stored.
        max_pixels: Refuse an image whose header says that it is larger, before it is decoded. It stands in
            for Pillow's guard (a ``DecompressionBombWarning`` over ``PIL.Image.MAX_IMAGE_PIXELS``, an error
            over twice that) for JPEG, PNG and BMP. Pillow's plugins for GIF, TIFF and WebP may ask that guard
            themselves; other formats and ``None`` leave it all to Pillow.

    Returns:
        A ``uint8`` array of shape (height, width, channels), C-contiguous, writable, owned by the caller.

    Raises:
        ImageError: ``data`` is empty or broken, or the image is over ``max_pixels``.
        OSError: The file is truncated, or is no image (``PIL.UnidentifiedImageError``).
        PIL.Image.DecompressionBombError: The image is refused by Pillow's own guard.
        ArgumentError: ``mode`` or ``max_pixels`` cannot work.
    """
    _check_options(mode, max_pixels)
    if not data:
        msg = "empty file (0 bytes)"
        raise ImageError(msg)
    stream = io.BytesIO(data)
    try:
        source = _open(stream, max_pixels)
        turn = _load(source, orientation)
        image = _to_eight_bits(source)
        if turn is not None:
            image = image.transpose(turn)
        image = _convert(image, mode)
    except _BROKEN as error:
        msg = f"broken image file ({len(data)} bytes): {error}"
        raise ImageError(msg) from error
    # The fastest way to a writable array without private calls: 12, 195 and 3560 us for 32x32, 500x375 and
    # 2000x1500, where numpy.array(image) takes 15, 199 and 3570.
    flat = np.frombuffer(image.tobytes(), np.uint8)
    return np.array(flat.reshape(image.height, image.width, _CHANNELS[mode]))


class ImageFolder(Dataset[tuple[Any, int]]):
    """Images in one folder per class: ``root/cat/1.jpg``, ``root/cat/more/2.png``, ``root/dog/3.jpg``.

    Every folder directly in ``root`` is a class; its images are found at any depth, through symbolic links
    too (a link back to a folder above is skipped). Classes, folders and files are sorted by name, which gives
    the order of ``torchvision.datasets.ImageFolder``. Images are the files named jpg, jpeg, png, bmp, webp,
    gif, tif or tiff, in any case. Listing opens no file and asks for no file's status.

    It has two stages, so the loader keeps many reads waiting while few threads decode. It can be pickled
    when ``transform`` can.

    Args:
        root: The folder of class folders.
        transform: Makes the sample's first item from the decoded image, a ``uint8`` array of shape (height,
            width, channels) that it owns. It runs on several threads at once. ``None`` leaves the array.
        mode, orientation, max_pixels: See :func:`decode_image`.

    Attributes:
        classes: The names of the classes, sorted.
        class_to_idx: The index of each class in ``classes``.
        samples: Path and class index of each image.
        targets: The class index of each image.

    Raises:
        DatasetNotFoundError: ``root`` has no class folders, or a class folder has no images.
        OSError: ``root`` or a folder below cannot be listed.
        ArgumentError: ``mode`` or ``max_pixels`` cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Array], Any] | None = None,
        *,
        mode: str = "RGB",
        orientation: bool = True,
        max_pixels: int | None = None,
    ) -> None:
        _check_options(mode, max_pixels)
        self.root = os.path.dirname(os.path.join(root, ""))  # without a trailing slash
        self.transform = transform
        self.mode = mode
        self.orientation = orientation
        self.max_pixels = max_pixels
        self.classes = _find_classes(self.root)
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.samples = _find_samples(self.root, self.classes)
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Read and decode image ``index`` on the calling thread; an error carries a note with the path."""
        return read_sample(self, index)

    def location(self, index: int) -> str:
        """Return the path of image ``index``; negative indices count from the end."""
        return self.samples[index][0]

    def decode(self, data: bytes, index: int) -> tuple[Any, int]:
        """Return the image, transformed, and the index of its class."""
        image = decode_image(data, self.mode, orientation=self.orientation, max_pixels=self.max_pixels)
        return (image if self.transform is None else self.transform(image)), self.samples[index][1]


def _check_options(mode: str, max_pixels: int | None) -> None:
    if mode not in _CHANNELS:
        msg = f"mode must be one of {', '.join(map(repr, _CHANNELS))}, got {mode!r}"
        raise ArgumentError(msg)
    if max_pixels is not None and max_pixels < 1:
        msg = f"max_pixels must be at least 1, or None for Pillow's own limit, got {max_pixels!r}"
        raise ArgumentError(msg)


def _open(stream: io.BytesIO, max_pixels: int | None) -> ImageFile.ImageFile:
    """Read the header, and refuse what is over ``max_pixels``."""
    if max_pixels is None:
        return Image.open(stream)
    image = _open_unguarded(stream)
    pixels = image.width * image.height
    if pixels > max_pixels:
        msg = f"image of {image.width}x{image.height} = {pixels} pixels is over max_pixels={max_pixels}"
        raise ImageError(msg)
    return image


def _open_unguarded(stream: io.BytesIO) -> ImageFile.ImageFile:
    """Do as ``Image.open`` without its check, which only a global could turn off, for other threads too."""
    Image.preinit()
    prefix = stream.read(16)
    for name in _FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is None or accept(prefix) is True:
            stream.seek(0)
            try:
                return factory(stream, "")
            except _BROKEN as error:
                msg = f"cannot identify image file that begins like {name}: {error}"
                raise UnidentifiedImageError(msg) from error
    return Image.open(stream)


def _load(image: ImageFile.ImageFile, orientation: bool) -> Image.Transpose | None:
    """Load the pixels; return how they have yet to be turned, to be upright or as stored."""
    if image.format == "TIFF":  # Pillow's plugin turns the image, and drops the tag, while it loads
        turn = None if orientation else _TURNS_BACK.get(image.getexif().get(_ORIENTATION, 1))
        image.load()
        return turn
    image.load()
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1)) if orientation else None
    except _BROKEN:  # a broken EXIF block does not make a broken image
        return None


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Return grey of 16 bits by its high byte, as Pillow does for colour; ``convert`` would clip it."""
    wide = image.mode == "I" and image.format == "PPM"  # Pillow holds these 16 bits in 32
    if not (wide or image.mode.startswith("I;16")):
        return image
    grey = np.asarray(image)
    high = (grey >> 8).astype(np.uint8)
    if "transparency" not in image.info:
        return Image.fromarray(high)
    opaque = grey != image.info["transparency"]
    return Image.fromarray(np.dstack([high, opaque * np.uint8(255)]))


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if mode in ("L", "RGB"):
        image.info.pop("transparency", None)  # convert() would warn, or look for a colour to stand for it
    if image.mode == "LAB":  # Pillow converts it to RGB alone
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _find_classes(root: str) -> list[str]:
    with os.scandir(root) as entries:
        found = list(entries)
    classes = sorted(entry.name for entry in found if _is_folder(entry, root))
    if not classes:
        msg = (
            f"ImageFolder needs a folder per class in {root!r}, found {len(found)} files and no folder; move "
            "the images to folders named after their classes, or use FileDataset for images without classes"
        )
        raise DatasetNotFoundError(msg)
    return classes


def _find_samples(root: str, classes: list[str]) -> list[tuple[str, int]]:
    samples: list[tuple[str, int]] = []
    empty = []
    for target, name in enumerate(classes):
        listed = sorted(_walk(os.path.join(root, name)))
        paths = [os.path.join(folder, file) for folder, files in listed for file in sorted(files)]
        samples += [(path, target) for path in paths]
        if not paths:
            empty.append(name)
    if empty:
        msg = (
            f"ImageFolder needs images ({' '.join(_SUFFIXES)}) in each class folder of {root!r}, found none "
            f"in {', '.join(map(repr, empty))}; add images, or move these folders out of the root"
        )
        raise DatasetNotFoundError(msg)
    return samples


def _walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Give each folder from ``top`` down with the names of its images, in no order."""
    root = os.path.dirname(top)
    pending = [top]
    while pending:
        folder = pending.pop()
        images = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_folder(entry, root):
                    pending.append(entry.path)
                elif entry.name.lower().endswith(_SUFFIXES):
                    images.append(entry.name)
        yield folder, images


def _is_folder(entry: os.DirEntry[str], root: str) -> bool:
    """Tell folders from files by the type that the listing gave; only a symbolic link is followed to see."""
    try:
        return entry.is_dir() and not (entry.is_symlink() and _is_loop(entry, root))
    except OSError as error:
        if error.errno == errno.ELOOP:  # links that lead to each other only
            return False
        raise


def _is_loop(link: os.DirEntry[str], root: str) -> bool:
    """Tell whether a link leads to a folder that it lies in, from ``root`` down."""
    target = link.stat()
    folder = os.path.dirname(link.path)
    while not os.path.samestat(os.stat(folder), target):
        if folder == root:
            return False
        folder = os.path.dirname(folder)
    return True
