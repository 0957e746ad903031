"""Pictures of instances (digits, nuclei, tiles), stored with the features of cohorts that have no slide files.

m images, n instances of all bags together.
"""

from dataclasses import dataclass

import numpy as np

from carmil.errors import CarmilError


@dataclass(frozen=True, eq=False)
class Pictures:
    """images (m, height, width, channels) uint8, grey or RGB; index (n): the image of each instance.

    Similar images are adjacent, so that instances sorted by `index` are easy to compare.
    """

    images: np.ndarray
    index: np.ndarray

    def __post_init__(self) -> None:
        shape = self.images.shape
        if self.images.dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or not all(shape):
            raise CarmilError(
                f"pictures are {self.images.dtype} of shape {shape}: expected uint8 (images, height, width, 1 or 3)"
            )
        if len(self.index) and not 0 <= self.index.min() <= self.index.max() < len(self.images):
            raise CarmilError(
                f"instances refer to pictures {self.index.min()} to {self.index.max()}: expected 0 to "
                f"{len(self.images) - 1}"
            )

    def rows(self, first: int, last: int) -> "Pictures":
        """Return the pictures of the instances of one bag."""
        return Pictures(self.images, self.index[first:last])

    def rgb(self, row: int) -> np.ndarray:
        """Return the picture of one instance as RGB (height, width, 3)."""
        image = self.images[self.index[row]]
        return np.broadcast_to(image, (*image.shape[:2], 3))
