"""Encoders see what they were trained to see, and are known by their weights."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet50

from carmil.errors import CarmilError
from carmil.slides import timm_models
from carmil.slides.encoders import load_encoder
from carmil.slides.timm_models import Published

SMALL = "timm/resnet10t"


def random_resnet(scale: float) -> nn.Module:
    """Normalisations as after a training; `scale` is that of the variance behind the first convolution."""
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


def test_resnet50_is_the_mean_of_torchvisions_third_stage(tmp_path, pictures):
    network = random_resnet(1.0)
    encoder = load_encoder("resnet50", weights=saved(network, tmp_path / "weights.pt"))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.inference_mode():
        expected = to_the_third_stage(network, ((pictures / 255 - mean) / std).permute(0, 3, 1, 2))
        torch.testing.assert_close(encoder(pictures), expected, rtol=1e-3, atol=1e-4)
    assert encoder.width == 1024 and encoder.pixels == 224


def test_caffes_resnet_sees_blue_first_strides_early_and_wants_large_numbers(tmp_path, pictures):
    network = random_resnet(4000.0)
    encoder = load_encoder("resnet50.caffe", weights=saved(network, tmp_path / "weights.safetensors"))
    for stage in (network.layer2, network.layer3):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    with torch.inference_mode():
        bgr = pictures.flip(3).float() - torch.tensor([103.939, 116.779, 123.68])
        expected = to_the_third_stage(network, bgr.permute(0, 3, 1, 2))
        torch.testing.assert_close(encoder(pictures), expected, rtol=1e-3, atol=1e-4)


def test_weights_of_the_other_kind_of_resnet50_are_refused_by_their_scale(tmp_path):
    ours, caffes = (saved(random_resnet(scale), tmp_path / f"{scale}.pt") for scale in (1.0, 4000.0))
    with pytest.raises(CarmilError, match=r"Caffe's ResNet50.*use --encoder resnet50\.caffe"):
        load_encoder("resnet50", weights=caffes)
    with pytest.raises(CarmilError, match=r"torchvision's ResNet50.*use --encoder resnet50$"):
        load_encoder("resnet50.caffe", weights=ours)
    with pytest.raises(CarmilError, match="cannot be downloaded: give a file"):
        load_encoder("resnet50.caffe")


def test_an_encoder_is_named_after_its_weights_whatever_file_they_are_in(tmp_path):
    network = timm.create_model("resnet10t", pretrained=False)
    first = load_encoder(SMALL, weights=saved(network, tmp_path / "a.pt")).name
    again = load_encoder(SMALL, weights=saved(network, tmp_path / "a.safetensors")).name
    network.conv1[0].weight.data[0, 0, 0, 0] += 1e-3
    other = load_encoder(SMALL, weights=saved(network, tmp_path / "b.pt")).name
    assert first == again != other
    assert first.startswith("timm_resnet10t-") and len(first) == len("timm_resnet10t-") + 8


def test_a_model_of_timm_sees_tiles_as_timm_says(tmp_path):
    network = timm.create_model("resnet10t", pretrained=False).eval()
    encoder = load_encoder(SMALL, weights=saved(network, tmp_path / "weights.safetensors"))
    config = timm.data.resolve_data_config(model=network)
    side = config["input_size"][-1]
    assert (encoder.pixels, encoder.interpolation, encoder.width) == (side, config["interpolation"], 512)
    tile = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8)
    seen = (tile / 255 - torch.tensor(config["mean"])) / torch.tensor(config["std"])
    network.reset_classifier(0)
    with torch.inference_mode():
        torch.testing.assert_close(encoder(tile), network(seen.permute(0, 3, 1, 2)), rtol=1e-4, atol=1e-5)


def test_a_larger_tile_is_seen_whole_and_smaller(tmp_path):
    network = timm.create_model("resnet10t", pretrained=False).eval()
    encoder = load_encoder(SMALL, weights=saved(network, tmp_path / "weights.pt"))
    large = np.random.default_rng(0).integers(0, 256, (6, 6, 3)).astype(np.uint8)
    large = np.asarray(Image.fromarray(large).resize((256, 256), Image.Resampling.BICUBIC))
    small = np.asarray(Image.fromarray(large).resize((encoder.pixels,) * 2, Image.Resampling.BICUBIC))
    with torch.inference_mode():
        seen, expected = (encoder(torch.from_numpy(picture.copy())[None]) for picture in (large, small))
    assert torch.cosine_similarity(seen, expected).item() > 0.9999
    assert (seen - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_model_of_the_hub_needs_no_network_when_its_weights_are_in_a_file(tmp_path, monkeypatch):
    published = Published("vit_tiny_patch16_224", {"init_values": 1e-5}, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    monkeypatch.setitem(timm_models._PUBLISHED, "hf-hub:mahmoodlab/uni", published)
    network = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0, init_values=1e-5)
    weights = saved(network, tmp_path / "pytorch_model.bin")
    encoder = load_encoder("hf-hub:MahmoodLab/UNI", weights=weights)
    assert (encoder.width, encoder.pixels, encoder.mean, encoder.std) == (192, 224, published.mean, published.std)
    assert encoder.name.startswith("hf-hub_MahmoodLab_UNI-")


def test_a_gated_model_says_how_to_get_it(monkeypatch):
    from huggingface_hub.errors import GatedRepoError

    class RefusedError(GatedRepoError):
        def __init__(self):  # the real one wants the answer of a server
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
def test_an_unknown_encoder_is_one_line(name, says):
    with pytest.raises(CarmilError, match=says):
        load_encoder(name)


def test_weights_that_do_not_fit_are_one_line(tmp_path):
    weights = saved(timm.create_model("resnet18", pretrained=False), tmp_path / "resnet18.pt")
    for name in (SMALL, "resnet50"):
        with pytest.raises(CarmilError, match=r"resnet18\.pt does not hold") as refused:
            load_encoder(name, weights=weights)
        assert "\n" not in str(refused.value)
    with pytest.raises(CarmilError, match="is not a file"):
        load_encoder(SMALL, weights=tmp_path / "none.pt")


def test_weights_are_never_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "weights.pt").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CarmilError, match="cannot be read as weights"):
        load_encoder(SMALL, weights=tmp_path / "weights.pt")
    assert not (tmp_path / "exploded").exists()


def test_the_real_weights_give_the_features_of_nuclei_that_came_with_them(shared_data):
    encoder = load_encoder("resnet50.caffe", weights=shared_data / "weights" / "resnet50_caffe_layer3.safetensors")
    with np.load(shared_data / "crc" / "patches.npz") as file:
        patches = file["im"]
    chosen = np.random.default_rng(0).choice(len(patches), 12, replace=False)
    nuclei = [Image.fromarray(patches[i]).resize((224, 224), Image.Resampling.BICUBIC) for i in chosen]
    expected = torch.from_numpy(np.load(shared_data / "crc" / "features.npy", mmap_mode="r")[chosen]).float()
    tiles = torch.from_numpy(np.stack([np.asarray(nucleus) for nucleus in nuclei]))
    with torch.inference_mode():
        assert torch.cosine_similarity(encoder(tiles), expected).min() > 0.99
        assert torch.cosine_similarity(encoder(tiles.flip(3)), expected).min() < 0.97  # red taken for blue
