import gzip
import http.server
import struct
import threading

import numpy as np
import pytest

from carmil.datasets import digit_images
from carmil.datasets.digit_features import array_features, pixel_features, resnet18_features
from carmil.datasets.digit_images import DigitImages, bundled_digits, download_mnist, mnist_from_folder
from carmil.datasets.digits import TASKS, pools, sample_digits, sample_study
from carmil.errors import CarmilError


def naive_truth(task: str, digits: list[int]) -> tuple[int, list[list[int]]]:
    """Return the label and evidence of one bag, written out from the benchmark's tables."""
    if task == "four_bags":
        label = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}[8 in digits, 9 in digits]
        table = {8: [-1, 1, -1, 1], 9: [-1, -1, 1, 1]}
        return label, [table.get(digit, [0, 0, 0, 0]) for digit in digits]
    if task == "adjacent_pairs":
        partners = {0: {1}, 1: {0, 2}, 2: {1, 3}, 3: {2, 4}, 4: {3}}
        paired = [bool(partners.get(digit, set()) & set(digits)) for digit in digits]
        return int(any(paired)), [[-1, 1] if yes else [0, 0] for yes in paired]
    sign = [1 if d in (4, 6, 8) else -1 if d in (5, 7, 9) else 0 for d in digits]
    return int(sign.count(1) > sign.count(-1)), [[-s, s] for s in sign]


@pytest.mark.parametrize("task", TASKS)
def test_labels_and_evidence_equal_those_of_the_benchmark(task):
    digits = sample_digits(500, np.random.default_rng(1))
    labels, evidence = TASKS[task].label(digits), TASKS[task].evidence(digits)
    for bag, label, rows in zip(digits.tolist(), labels, evidence, strict=True):
        assert (label, rows.tolist()) == naive_truth(task, bag)


def test_sampled_digits_have_the_published_frequencies():
    digits = sample_digits(20_000, np.random.default_rng(0))
    assert digits.shape == (20_000, 30)
    four = np.bincount(TASKS["four_bags"].label(digits), minlength=4) / 20_000
    assert np.allclose(four, [0.2508, 0.2511, 0.2511, 0.2469], atol=0.012)
    pairs = np.bincount(TASKS["adjacent_pairs"].label(digits), minlength=2) / 20_000
    assert np.allclose(pairs, [0.4084, 0.5916], atol=0.014)
    distinct = (digits[..., None] == np.arange(10)).any(1).sum(1)
    assert abs(distinct.mean() - 4.98) < 0.05
    assert abs((distinct == 1).mean() - 0.0098) < 0.003


@pytest.fixture(scope="module")
def bundled() -> DigitImages:
    return bundled_digits()


def test_bundled_digits_have_500_images_per_digit(bundled):
    assert bundled.images.shape == (5000, 28, 28)
    assert bundled.images.dtype == np.uint8
    assert bundled.images.max() == 255
    assert np.bincount(bundled.labels).tolist() == [500] * 10


def test_disjoint_pools_share_no_images_and_shared_pools_share_all(bundled):
    sizes = (2000, 500, 1000)
    train, validation, test = pools(bundled.labels, sizes, "disjoint", 0)
    assert not set(train) & set(validation)
    assert not set(train) & set(test)
    assert not set(validation) & set(test)
    assert len(train) + len(validation) + len(test) == 5000
    assert all(len(part) == 5000 for part in pools(bundled.labels, sizes, "shared", 0))


def test_equal_seeds_give_equal_digit_studies(bundled):
    features = np.arange(5000, dtype=np.float32)[:, None]
    make = lambda seed: sample_study(TASKS["four_bags"], bundled.labels, features, sizes=(50, 20, 30), seed=seed)  # noqa: E731
    first, again, other = make(3), make(3), make(4)
    assert first.train.bags.features.equal(again.train.bags.features)
    assert not first.train.bags.features.equal(other.train.bags.features)
    assert [len(part.bags) for part in (first.train, first.validation, first.test)] == [50, 20, 30]
    # the features of an instance are the row of its image, and the image shows its digit
    assert first.test.bags.features[:, 0].tolist() == first.test.images.tolist()
    assert np.array_equal(bundled.labels[first.test.images], first.test.digits)
    assert not set(first.train.images) & set(first.test.images)
    assert set(first.train.bags.sizes.tolist()) == {30}


def test_principal_components_are_fitted_on_training_images_only(bundled):
    rows = np.arange(0, 5000, 2)
    features = pixel_features(bundled, rows, components=16)
    assert features.shape == (5000, 16)
    fitted = features[rows]
    assert np.allclose(fitted.mean(0), 0, atol=1e-3)
    assert np.isclose(fitted.var(), 1, atol=0.01)
    changed = DigitImages(bundled.images.copy(), bundled.labels, "changed")
    changed.images[1::2] = 0
    assert np.allclose(np.abs(pixel_features(changed, rows, components=16)[rows]), np.abs(fitted), atol=1e-3)


def test_mnist_files_are_read_in_original_order(shared_data):
    digits = mnist_from_folder(shared_data / "mnist")
    counts = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    assert np.bincount(digits.labels).tolist() == counts
    assert digits.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert digits.labels[60_000:60_005].tolist() == [7, 2, 1, 0, 4]
    features = array_features(shared_data / "mnist" / "resnet50_pca256.npy", digits)
    assert features.shape == (70_000, 256)


def small_mnist(folder):
    """Write four idx files with ten images each, compressed like the files of MNIST."""
    for name in digit_images.IDX_FILES:
        axes = (10, 28, 28) if "images" in name else (10,)
        data = np.arange(np.prod(axes)).astype(np.uint8) if "images" in name else np.arange(10, dtype=np.uint8)
        header = bytes([0, 0, 8, len(axes)]) + b"".join(n.to_bytes(4, "big") for n in axes)
        (folder / f"{name}.gz").write_bytes(gzip.compress(header + data.tobytes(), mtime=0))


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("shape", [(), (10, 1), (3,)])
def test_mnist_labels_of_the_wrong_shape_raise_an_error(tmp_path, shape):
    small_mnist(tmp_path)
    labels = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(int(np.prod(shape)))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with pytest.raises(CarmilError, match="do not match MNIST"):
        mnist_from_folder(tmp_path)


@pytest.mark.finding(n=14)
def test_idx_file_that_decompresses_beyond_the_limit_raises_an_error(tmp_path, monkeypatch):
    small_mnist(tmp_path)
    monkeypatch.setattr("carmil.datasets.digit_images.LARGEST_IDX", 5000)
    with pytest.raises(CarmilError, match=r"not a complete idx file .larger than 5,000 bytes"):
        mnist_from_folder(tmp_path)


def test_folder_without_complete_idx_files_raises_an_error(tmp_path):
    with pytest.raises(CarmilError, match="has no train-images-idx3-ubyte"):
        mnist_from_folder(tmp_path)
    with pytest.raises(CarmilError, match="is not a folder"):
        mnist_from_folder(tmp_path / "nowhere")
    small_mnist(tmp_path)
    assert mnist_from_folder(tmp_path).labels.tolist() == [*range(10), *range(10)]
    broken = tmp_path / "train-images-idx3-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(CarmilError, match="not a complete idx file"):
        mnist_from_folder(tmp_path)


def test_mnist_download_is_verified_and_cached(tmp_path, monkeypatch):
    import hashlib

    served, kept = tmp_path / "served", tmp_path / "kept"
    served.mkdir()
    small_mnist(served)
    sums = {name: hashlib.md5((served / f"{name}.gz").read_bytes()).hexdigest() for name in digit_images.IDX_FILES}
    handler = lambda *args: http.server.SimpleHTTPRequestHandler(*args, directory=served)  # noqa: E731
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    mirror = f"http://127.0.0.1:{server.server_port}/"
    try:
        with pytest.raises(CarmilError, match="by its md5"):
            download_mnist(kept, mirror=mirror)
        assert not kept.exists() or not list(kept.iterdir())
        monkeypatch.setattr(digit_images, "IDX_FILES", sums)
        assert len(download_mnist(kept, mirror=mirror).images) == 20
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(download_mnist(kept, mirror=mirror).images) == 20  # read from the folder
    with pytest.raises(CarmilError, match="could not download"):
        download_mnist(tmp_path / "other", mirror=mirror)


def test_invalid_feature_arrays_raise_an_error(tmp_path, bundled):
    path = tmp_path / "features.npy"
    np.save(path, np.zeros((7, 3), dtype=np.float32))
    with pytest.raises(CarmilError, match="7 rows for 5,000 images"):
        array_features(path, bundled)
    np.save(path, np.zeros((5000, 3), dtype=int))
    with pytest.raises(CarmilError, match="floating-point"):
        array_features(path, bundled)
    np.savez(tmp_path / "several.npz", a=np.zeros(3))
    with pytest.raises(CarmilError, match="holds several arrays"):
        array_features(tmp_path / "several.npz", bundled)
    path.write_bytes(b"")
    with pytest.raises(CarmilError, match="cannot be read"):
        array_features(path, bundled)
    path.write_text("no array")
    with pytest.raises(CarmilError, match="cannot be read"):
        array_features(path, bundled)


def test_array_that_needs_pickle_raises_an_error(tmp_path, bundled):
    path = tmp_path / "features.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(CarmilError, match="cannot be read"):
        array_features(path, bundled)


def test_resnet18_features_use_the_weights_file_and_are_cached(tmp_path, monkeypatch, bundled):
    import torch
    import torchvision

    monkeypatch.setenv("CARMIL_CACHE", str(tmp_path / "cache"))
    few = DigitImages(bundled.images[::1000], bundled.labels[::1000], "few")
    network = torchvision.models.resnet18()
    weights = tmp_path / "resnet18.pth"
    torch.save(network.state_dict(), weights)
    features = resnet18_features(few, weights=weights)
    network.fc = torch.nn.Identity()
    network.eval()
    image = torch.from_numpy(few.images[:1]).float().expand(3, -1, -1) / 255
    transform = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    with torch.inference_mode():
        expected = network(transform(image).unsqueeze(0))[0].numpy()
    assert features.shape == (5, 512)
    assert np.allclose(features[0], expected, atol=1e-4)
    monkeypatch.setattr(torchvision.models, "resnet18", None)  # features are read from the cache, not computed again
    with pytest.raises(TypeError):
        torchvision.models.resnet18()
    assert np.array_equal(resnet18_features(few, weights=weights), features)
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    monkeypatch.undo()
    with pytest.raises(CarmilError, match="does not contain torchvision's ResNet18"):
        resnet18_features(few, weights=tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(CarmilError, match="cannot be read as weights"):
        resnet18_features(few, weights=tmp_path / "text.pth")
