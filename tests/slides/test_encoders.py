"""Encoders receive the input that they were trained on, and are named after their weights."""

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet50

from carmil.bags.geometry import TileGeometry
from carmil.errors import CarmilError
from carmil.slides import library_models, published_encoders
from carmil.slides.encoders import Encoder, load_encoder
from carmil.slides.library_models import Pooled, class_and_mean_token
from carmil.slides.published_encoders import CLASS_AND_MEAN, PUBLISHED_ENCODERS, PublishedEncoder, published

SMALL = "timm/resnet10t"


def random_resnet(scale: float) -> nn.Module:
    """Return a ResNet with normalisation as after training; `scale` multiplies the variance after the first convolution."""
    network = resnet50()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
            module.weight.data.uniform_(0.5, 1.0)
    network.bn1.running_var *= scale
    return network.eval()


def saved(network: nn.Module, path: Path) -> Path:
    state = {name: value.contiguous() for name, value in network.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.fixture
def pictures() -> torch.Tensor:
    return torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)


def to_the_third_stage(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
    return network.layer3(network.layer2(network.layer1(x))).mean((-2, -1))


def test_resnet50_features_are_the_mean_of_the_third_stage_of_torchvision(tmp_path, pictures):
    network = random_resnet(1.0)
    encoder = load_encoder("resnet50", weights=saved(network, tmp_path / "weights.pt"))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.inference_mode():
        expected = to_the_third_stage(network, ((pictures / 255 - mean) / std).permute(0, 3, 1, 2))
        torch.testing.assert_close(encoder(pictures), expected, rtol=1e-3, atol=1e-4)
    assert encoder.width == 1024 and encoder.pixels == 224


def test_caffe_resnet50_uses_bgr_input_early_strides_and_unscaled_pixels(tmp_path, pictures):
    network = random_resnet(4000.0)
    encoder = load_encoder("resnet50.caffe", weights=saved(network, tmp_path / "weights.safetensors"))
    for stage in (network.layer2, network.layer3):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    with torch.inference_mode():
        bgr = pictures.flip(3).float() - torch.tensor([103.939, 116.779, 123.68])
        expected = to_the_third_stage(network, bgr.permute(0, 3, 1, 2))
        torch.testing.assert_close(encoder(pictures), expected, rtol=1e-3, atol=1e-4)


def test_weights_of_the_other_resnet50_variant_raise_an_error(tmp_path):
    ours, caffes = (saved(random_resnet(scale), tmp_path / f"{scale}.pt") for scale in (1.0, 4000.0))
    with pytest.raises(CarmilError, match=r"Caffe's ResNet50.*use --encoder resnet50\.caffe"):
        load_encoder("resnet50", weights=caffes)
    with pytest.raises(CarmilError, match=r"torchvision's ResNet50.*use --encoder resnet50$"):
        load_encoder("resnet50.caffe", weights=ours)
    with pytest.raises(CarmilError, match="cannot be downloaded: give a file"):
        load_encoder("resnet50.caffe")


def test_encoder_name_depends_on_weights_and_not_on_the_file_format(tmp_path):
    network = timm.create_model("resnet10t", pretrained=False)
    first = load_encoder(SMALL, weights=saved(network, tmp_path / "a.pt")).name
    again = load_encoder(SMALL, weights=saved(network, tmp_path / "a.safetensors")).name
    network.conv1[0].weight.data[0, 0, 0, 0] += 1e-3
    other = load_encoder(SMALL, weights=saved(network, tmp_path / "b.pt")).name
    assert first == again != other
    assert first.startswith("timm_resnet10t-") and len(first) == len("timm_resnet10t-") + 8


def test_timm_model_receives_tiles_normalised_as_timm_specifies(tmp_path):
    network = timm.create_model("resnet10t", pretrained=False).eval()
    encoder = load_encoder(SMALL, weights=saved(network, tmp_path / "weights.safetensors"))
    config = timm.data.resolve_data_config(model=network)
    side = config["input_size"][-1]
    assert (encoder.pixels, encoder.interpolation, encoder.width) == (side, config["interpolation"], 512)
    tile = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8)
    normalised = (tile / 255 - torch.tensor(config["mean"])) / torch.tensor(config["std"])
    network.reset_classifier(0)
    with torch.inference_mode():
        torch.testing.assert_close(encoder(tile), network(normalised.permute(0, 3, 1, 2)), rtol=1e-4, atol=1e-5)


def test_larger_tile_is_resized_to_the_encoder_input(tmp_path):
    network = timm.create_model("resnet10t", pretrained=False).eval()
    encoder = load_encoder(SMALL, weights=saved(network, tmp_path / "weights.pt"))
    large = np.random.default_rng(0).integers(0, 256, (6, 6, 3)).astype(np.uint8)
    large = np.asarray(Image.fromarray(large).resize((256, 256), Image.Resampling.BICUBIC))
    small = np.asarray(Image.fromarray(large).resize((encoder.pixels,) * 2, Image.Resampling.BICUBIC))
    with torch.inference_mode():
        normalised, expected = (encoder(torch.from_numpy(picture.copy())[None]) for picture in (large, small))
    assert torch.cosine_similarity(normalised, expected).item() > 0.9999
    assert (normalised - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.fixture
def replace_row(monkeypatch):
    """Return a function that replaces a published encoder by a smaller network."""

    def put(known: str, /, **changes) -> PublishedEncoder:
        row = replace(published(known), **changes)
        rows = tuple(row if one.name == known else one for one in published_encoders.PUBLISHED_ENCODERS)
        monkeypatch.setattr(published_encoders, "PUBLISHED_ENCODERS", rows)
        return row

    return put


def test_hub_model_with_a_weights_file_needs_no_download(tmp_path, replace_row):
    small = {"architecture": "vit_tiny_patch16_224", "width": 192, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    row = replace_row("hf-hub:MahmoodLab/UNI", **small)
    network = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0, init_values=1e-5)
    weights = saved(network, tmp_path / "pytorch_model.bin")
    encoder = load_encoder("hf-hub:MahmoodLab/UNI", weights=weights)
    assert (encoder.width, encoder.pixels, encoder.mean, encoder.std) == (192, 224, row.mean, row.std)
    assert encoder.name.startswith("hf-hub_MahmoodLab_UNI-") and encoder.pooling == "class token"


SMALL_VIT = {"img_size": 28, "patch_size": 14, "embed_dim": 32, "depth": 2, "num_heads": 2, "init_values": 1e-5}


@pytest.mark.finding(n=7)
@pytest.mark.parametrize(("name", "registers"), [("hf-hub:paige-ai/Virchow", 0), ("hf-hub:paige-ai/Virchow2", 4)])
def test_virchow_features_join_class_token_and_mean_patch_token(tmp_path, replace_row, name, registers):
    options = dict(published(name).options)
    assert options.get("reg_tokens", 0) == registers
    replace_row(name, width=64, pixels=28, options=options | SMALL_VIT)
    layers = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 5.3375}
    network = timm.create_model(
        "vit_huge_patch14_224", num_classes=0, global_pool="", reg_tokens=registers, **layers, **SMALL_VIT
    ).eval()
    encoder = load_encoder(name, weights=saved(network, tmp_path / "weights.safetensors"))
    tile = torch.randint(0, 256, (2, 28, 28, 3), dtype=torch.uint8)
    normalised = (tile / 255 - torch.tensor(encoder.mean)) / torch.tensor(encoder.std)
    with torch.inference_mode():
        tokens = network(normalised.permute(0, 3, 1, 2))
        assert tokens.shape == (2, 1 + registers + 4, 32)
        expected = torch.cat([tokens[:, 0], tokens[:, 1 + registers :].mean(1)], dim=1)
        torch.testing.assert_close(encoder(tile), expected, rtol=1e-4, atol=1e-5)
    assert encoder.width == 64 and encoder.pooling == "class token and mean of patch tokens"
    assert encoder.name.startswith(name.replace(":", "_").replace("/", "_"))


@pytest.mark.finding(n=7)
@pytest.mark.parametrize(
    "row", [row for row in PUBLISHED_ENCODERS if row.library == "timm"], ids=lambda row: row.name.rsplit("/")[-1]
)
def test_every_published_timm_encoder_has_its_documented_width(row):
    """Build the network without weights and check only shapes, pooled as in `load_encoder`."""
    with torch.device("meta"):
        network = timm.create_model(row.architecture, num_classes=0, **library_models.timm_options(row)).eval()
        pooled = Pooled(network, class_and_mean_token) if row.pooling == CLASS_AND_MEAN else network
        shape = pooled(torch.zeros(1, 3, row.pixels, row.pixels)).shape
    assert shape == (1, row.width)
    assert sum(value.numel() for value in network.parameters()) == pytest.approx(PARAMETERS[row.name], rel=0.01)


PARAMETERS = {  # as published
    "hf-hub:MahmoodLab/UNI": 303e6,
    "hf-hub:MahmoodLab/UNI2-h": 681e6,
    "hf-hub:paige-ai/Virchow": 632e6,
    "hf-hub:paige-ai/Virchow2": 632e6,
    "hf-hub:prov-gigapath/prov-gigapath": 1.135e9,
    "hf-hub:bioptimus/H-optimus-0": 1.135e9,
    "hf-hub:bioptimus/H-optimus-1": 1.135e9,
}


@pytest.mark.finding(n=7)
def test_every_published_encoder_names_its_source_and_is_documented(run_cli):
    page = (Path(__file__).parents[2] / "docs" / "slides.md").read_text(encoding="utf-8")
    _, out, _ = run_cli("slides", "encoders")
    for row in PUBLISHED_ENCODERS:
        name, *cells = row.cells()
        assert row.source and f"{row.name}: " in out and row.source in out
        assert f"| `{name}` | {' | '.join(cells)} | {row.normalisation} |" in page, row.name
        assert "not verified" not in (row.pooling, row.normalisation) or row.library == "its own code"


@pytest.mark.finding(n=7)
@pytest.mark.parametrize(
    ("name", "words"),
    [(SMALL, "pooled by timm's default, mean"), ("timm/test_vit", "pooled by timm's default, class token")],
)
def test_unlisted_model_logs_its_pooling_as_unverified(tmp_path, name, words):
    lines: list[str] = []
    network = timm.create_model(name.removeprefix("timm/"), pretrained=False)
    encoder = load_encoder(name, weights=saved(network, tmp_path / "weights.pt"), log=lines.append)
    assert len(lines) == 1 and words in lines[0] and "has not been verified" in lines[0]
    assert f"pooled by {encoder.pooling}" in lines[0]


@pytest.mark.finding(n=7)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf-hub:histai/hibou-L", "comes with its own code, which carmil does not execute"),
        ("hf-hub:MahmoodLab/conchv1_5", "comes with its own code, which carmil does not execute"),
        ("hf-hub:owkin/phikon", "is loaded by transformers, which is not installed: pip install transformers"),
        ("hf-hub:MahmoodLab/CONCH", "is loaded by conch, which is not installed: pip install"),
    ],
)
def test_published_encoder_that_cannot_be_loaded_raises_an_error_naming_the_package(monkeypatch, name, says):
    monkeypatch.setattr(library_models, "find_spec", lambda library: None)
    with pytest.raises(CarmilError, match=says) as refused:
        load_encoder(name)
    assert "\n" not in str(refused.value)


@pytest.mark.finding(n=7)
def test_phikon_features_are_the_class_token_of_the_last_layer(tmp_path, replace_row):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    for name, kind, options in (
        ("hf-hub:owkin/phikon", transformers.ViTModel, {"add_pooling_layer": False}),
        ("hf-hub:owkin/phikon-v2", transformers.Dinov2Model, {}),
    ):
        network = kind(kind.config_class(image_size=28, patch_size=14, **config), **options).eval()
        network.save_pretrained(tmp_path / kind.__name__)
        replace_row(name, name=f"hf-hub:{tmp_path / kind.__name__}", width=16, pixels=28)
        encoder = load_encoder(f"hf-hub:{tmp_path / kind.__name__}")
        tile = torch.randint(0, 256, (2, 28, 28, 3), dtype=torch.uint8)
        normalised = (tile / 255 - torch.tensor(encoder.mean)) / torch.tensor(encoder.std)
        with torch.inference_mode():
            expected = network(pixel_values=normalised.permute(0, 3, 1, 2)).last_hidden_state[:, 0]
            torch.testing.assert_close(encoder(tile), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.finding(n=7)
def test_conch_features_are_taken_before_the_projection(monkeypatch, replace_row):
    """The package is not installed; a stand-in checks how it is called."""

    class Conch(nn.Linear):
        def encode_image(self, pictures, *, proj_contrast, normalize):
            assert not proj_contrast and not normalize
            return self(pictures.mean((2, 3)))

    arguments = {}

    def create(architecture, **words):
        arguments.update(words, architecture=architecture)
        return Conch(3, 512)

    package = SimpleNamespace(create_model_from_pretrained=create)
    monkeypatch.setattr(library_models, "find_spec", lambda library: library)
    monkeypatch.setitem(sys.modules, "conch.open_clip_custom", package)
    encoder = load_encoder("hf-hub:MahmoodLab/CONCH")
    assert (encoder.width, encoder.pixels) == (512, 448) and encoder.mean[0] == pytest.approx(0.48145466)
    assert arguments["architecture"] == "conch_ViT-B-16" and arguments["checkpoint_path"] == "hf_hub:MahmoodLab/conch"


@pytest.mark.finding(n=7)
@pytest.mark.parametrize(
    ("tiles", "remark"),
    [
        (TileGeometry(256, 0.5), None),  # resized to 0.57 um/px, as is common practice
        (TileGeometry(512, 0.25), None),
        (TileGeometry(256, 1.0), "was published for 0.5 um/px and sees 1.14 um/px here"),
        (TileGeometry(512, 0.5), "was published for 0.5 um/px and sees 1.14 um/px here"),
        (TileGeometry(256, None), None),
    ],
)
def test_tiles_of_an_unpublished_magnification_give_a_remark(tiles, remark):
    encoder = Encoder("uni-1", nn.Identity(), 1, 224, (0.0,) * 3, (1.0,) * 3, mpps=(0.5,))
    result = encoder.magnification_remark(tiles)
    assert result is None if remark is None else remark in result
    assert replace(encoder, mpps=(0.25, 0.5, 1.0, 2.0)).magnification_remark(tiles) is None
    assert replace(encoder, mpps=()).magnification_remark(tiles) is None


def test_gated_model_raises_an_error_explaining_how_to_get_access(monkeypatch):
    from huggingface_hub.errors import GatedRepoError

    class RefusedError(GatedRepoError):
        def __init__(self):  # the real constructor needs a server response
            Exception.__init__(self, "401")

    def refused(*_, **__):
        raise RefusedError

    monkeypatch.setattr(timm, "create_model", refused)
    with pytest.raises(
        CarmilError, match=r"accept its terms at https://huggingface\.co/MahmoodLab/UNI, then set HF_TOKEN"
    ):
        load_encoder("hf-hub:MahmoodLab/UNI")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet5", "unknown encoder 'resnet5': expected resnet50, resnet50.caffe, timm/NAME"),
        ("timm/", "unknown encoder 'timm/'"),
        ("timm/resnet10", "timm has no model 'resnet10': did you mean timm/resnet10t"),
    ],
)
def test_unknown_encoder_raises_an_error(name, says):
    with pytest.raises(CarmilError, match=says):
        load_encoder(name)


def test_weights_of_another_architecture_raise_an_error_of_one_line(tmp_path):
    weights = saved(timm.create_model("resnet18", pretrained=False), tmp_path / "resnet18.pt")
    for name in (SMALL, "resnet50"):
        with pytest.raises(CarmilError, match=r"resnet18\.pt does not contain") as refused:
            load_encoder(name, weights=weights)
        assert "\n" not in str(refused.value)
    with pytest.raises(CarmilError, match="is not a file"):
        load_encoder(SMALL, weights=tmp_path / "none.pt")


def test_loading_weights_never_executes_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "weights.pt").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CarmilError, match="cannot be read as weights"):
        load_encoder(SMALL, weights=tmp_path / "weights.pt")
    assert not (tmp_path / "exploded").exists()


def test_published_caffe_weights_reproduce_the_published_nuclei_features(shared_data):
    encoder = load_encoder("resnet50.caffe", weights=shared_data / "weights" / "resnet50_caffe_layer3.safetensors")
    with np.load(shared_data / "crc" / "patches.npz") as file:
        patches = file["im"]
    chosen = np.random.default_rng(0).choice(len(patches), 12, replace=False)
    nuclei = [Image.fromarray(patches[i]).resize((224, 224), Image.Resampling.BICUBIC) for i in chosen]
    expected = torch.from_numpy(np.load(shared_data / "crc" / "features.npy", mmap_mode="r")[chosen]).float()
    tiles = torch.from_numpy(np.stack([np.asarray(nucleus) for nucleus in nuclei]))
    with torch.inference_mode():
        assert torch.cosine_similarity(encoder(tiles), expected).min() > 0.99
        assert torch.cosine_similarity(encoder(tiles.flip(3)), expected).min() < 0.97  # red and blue swapped
