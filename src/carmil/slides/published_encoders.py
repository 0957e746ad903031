"""Published encoders of pathology: what each one expects to see, and how one vector per tile is made of its tokens.

A vision transformer gives one token per patch of the tile, a class token, and sometimes register tokens, which carry
nothing about the tile. Which of them make the features is decided by those who published the model, and is not written
in the model's files. Every row names the public text it was taken from; nothing here is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from carmil.slides.resnet import IMAGENET_MEAN, IMAGENET_STD

Colour = tuple[float, float, float]
Pooling = Literal["class token", "class token and mean of patch tokens", "attention pooling"]
UNVERIFIED = "not verified"
CLASS: Pooling = "class token"
CLASS_AND_MEAN: Pooling = "class token and mean of patch tokens"

_OPTIMUS = (0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)
_HIBOU = (0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816)
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_TRIDENT = "TRIDENT (github.com/mahmoodlab/TRIDENT): README, trident/patch_encoder_models/load.py"


@dataclass(frozen=True)
class PublishedEncoder:
    """One row of the table.

    name          as `--encoder` takes it; upper and lower case are the same
    library       what loads it: timm, transformers or conch; "its own code" is code of the hub, which carmil never executes
    width         features per tile
    pixels        side of what the network sees, in tile pixels
    mean, std     of red, green and blue from 0 to 1; None where no public text was found
    pooling       how one vector per tile is made; None where no public text was found
    mpps          micrometres per pixel of the tiles that it was published for; empty where no public text was found
    architecture  timm's name of the network, or transformers' class, with `options` to create it
    source        where the facts of this row are written
    note          what else a user should know
    """

    name: str
    library: Literal["timm", "transformers", "conch", "its own code"]
    width: int
    pixels: int
    pooling: Pooling | None
    mpps: tuple[float, ...]
    source: str
    mean: Colour | None = IMAGENET_MEAN
    std: Colour | None = IMAGENET_STD
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    architecture: str = ""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """What tables show: model, library, width, pixels, micrometres per pixel, pooling."""
        loaded = "not loaded" if self.library == "its own code" else self.library
        mpps = ", ".join(f"{mpp:g}" for mpp in self.mpps) or UNVERIFIED
        return (self.name, loaded, str(self.width), str(self.pixels), mpps, self.pooling or UNVERIFIED)

    @property
    def normalisation(self) -> str:
        if self.mean is None or self.std is None:
            return UNVERIFIED
        return " / ".join(", ".join(f"{value:.6g}" for value in colour) for colour in (self.mean, self.std))


_SCALED = {"init_values": 1e-5, "img_size": 224}
_GATED = {"mlp_layer": "SwiGLUPacked", "act_layer": "SiLU"}  # classes of timm and torch, by their names
_VIRCHOW = {**_SCALED, **_GATED, "mlp_ratio": 5.3375}

PUBLISHED_ENCODERS = (
    PublishedEncoder(
        name="hf-hub:MahmoodLab/UNI",
        library="timm",
        width=1024,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        architecture="vit_large_patch16_224",
        options=_SCALED,
        source=f"github.com/mahmoodlab/UNI: README; {_TRIDENT}",
    ),
    PublishedEncoder(
        name="hf-hub:MahmoodLab/UNI2-h",
        library="timm",
        width=1536,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        architecture="vit_giant_patch14_224",
        options={
            **_SCALED,
            **_GATED,
            "patch_size": 14,
            "depth": 24,
            "num_heads": 24,
            "embed_dim": 1536,
            "mlp_ratio": 2.66667 * 2,
            "no_embed_class": True,
            "reg_tokens": 8,
        },
        source=f"github.com/mahmoodlab/UNI: README; {_TRIDENT}",
    ),
    PublishedEncoder(
        name="hf-hub:paige-ai/Virchow",
        library="timm",
        width=2560,
        pixels=224,
        pooling=CLASS_AND_MEAN,
        mpps=(0.5,),
        interpolation="bicubic",
        architecture="vit_huge_patch14_224",
        options=_VIRCHOW,
        source=f"model card of paige-ai/Virchow; {_TRIDENT}",
    ),
    PublishedEncoder(
        name="hf-hub:paige-ai/Virchow2",
        library="timm",
        width=2560,
        pixels=224,
        pooling=CLASS_AND_MEAN,
        mpps=(0.25, 0.5, 1.0, 2.0),
        interpolation="bicubic",
        architecture="vit_huge_patch14_224",
        options={**_VIRCHOW, "reg_tokens": 4},
        source=f"model card of paige-ai/Virchow2; arXiv:2408.00738 (magnifications); {_TRIDENT}",
        note="the four register tokens are left out of the mean",
    ),
    PublishedEncoder(
        name="hf-hub:prov-gigapath/prov-gigapath",
        library="timm",
        width=1536,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        interpolation="bicubic",
        architecture="vit_giant_patch14_dinov2",
        options={
            "img_size": 224,
            "patch_size": 16,
            "embed_dim": 1536,
            "depth": 40,
            "num_heads": 24,
            "mlp_ratio": 5.33334,
        },
        source=f"github.com/prov-gigapath/prov-gigapath: README; {_TRIDENT}",
        note="tile encoder; its README crops the centre 224 of 256 pixels, carmil shows the whole tile",
    ),
    PublishedEncoder(
        name="hf-hub:bioptimus/H-optimus-0",
        library="timm",
        width=1536,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        mean=_OPTIMUS[0],
        std=_OPTIMUS[1],
        architecture="vit_giant_patch14_reg4_dinov2",
        options=_SCALED,
        source=f"github.com/bioptimus/releases: models/h-optimus/v0/README.md; {_TRIDENT}",
    ),
    PublishedEncoder(
        name="hf-hub:bioptimus/H-optimus-1",
        library="timm",
        width=1536,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        mean=_OPTIMUS[0],
        std=_OPTIMUS[1],
        architecture="vit_giant_patch14_reg4_dinov2",
        options=_SCALED,
        source=_TRIDENT,
    ),
    PublishedEncoder(
        name="hf-hub:owkin/phikon",
        library="transformers",
        width=768,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        architecture="ViTModel",
        options={"add_pooling_layer": False},
        source=f"github.com/owkin/HistoSSLscaling: README; {_TRIDENT}",
    ),
    PublishedEncoder(
        name="hf-hub:owkin/phikon-v2",
        library="transformers",
        width=1024,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        architecture="Dinov2Model",
        source=f"files of owkin/phikon-v2 on the hub (model type dinov2); {_TRIDENT}",
    ),
    PublishedEncoder(
        name="hf-hub:MahmoodLab/CONCH",
        library="conch",
        width=512,
        pixels=448,
        pooling="attention pooling",
        mpps=(0.5,),
        mean=_CLIP[0],
        std=_CLIP[1],
        interpolation="bicubic",
        source="github.com/mahmoodlab/CONCH: README, conch/open_clip_custom; magnification: TRIDENT's README",
        note="before the projection that is compared with text",
    ),
    PublishedEncoder(
        name="hf-hub:MahmoodLab/conchv1_5",
        library="its own code",
        width=768,
        pixels=448,
        pooling=None,
        mpps=(0.5,),
        mean=None,
        std=None,
        source=_TRIDENT,
        note="normalisation and pooling not verified",
    ),
    PublishedEncoder(
        name="hf-hub:histai/hibou-b",
        library="its own code",
        width=768,
        pixels=224,
        pooling=CLASS,
        mpps=(),
        mean=_HIBOU[0],
        std=_HIBOU[1],
        interpolation="bicubic",
        source="github.com/HistAI/hibou: README, hibou/models, example.ipynb",
        note="magnification not verified",
    ),
    PublishedEncoder(
        name="hf-hub:histai/hibou-L",
        library="its own code",
        width=1024,
        pixels=224,
        pooling=CLASS,
        mpps=(0.5,),
        mean=_HIBOU[0],
        std=_HIBOU[1],
        interpolation="bicubic",
        source=f"github.com/HistAI/hibou: README; {_TRIDENT}",
    ),
)


def published(name: str) -> PublishedEncoder | None:
    """The row of the table with this name; None if it is not in the table."""
    return next((row for row in PUBLISHED_ENCODERS if row.name.lower() == name.lower()), None)
