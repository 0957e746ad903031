import pytest
import torch

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.evidence.regions import neighbouring_regions


def placed(*coordinates):
    features = [torch.zeros(len(at), 2) for at in coordinates]
    return Bags.from_list(features, coordinates=coordinates, coordinate_unit="level0_px")


def test_a_square_of_tiles_is_divided_into_squares():
    x, y = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    region = neighbouring_regions(placed(torch.stack([x, y], -1).view(-1, 2) * 512)).view(8, 8)
    assert sorted(region.unique().tolist()) == [0, 1, 2, 3]
    for i, j in ((0, 0), (0, 4), (4, 0), (4, 4)):
        assert len(region[i : i + 4, j : j + 4].unique()) == 1


@pytest.mark.parametrize("tiles", [1, 5, 16])
def test_regions_have_about_the_same_size_and_numbers_from_0_in_every_bag(tiles):
    bags = placed(torch.rand(157, 2) * 1000, torch.rand(3, 2), torch.rand(64, 2))
    for own in neighbouring_regions(bags, tiles).split(bags.sizes.tolist()):
        sizes = own.bincount()
        assert len(sizes) == -(-len(own) // tiles)
        assert sizes.max() <= tiles
        assert sizes.max() - sizes.min() <= 1


def test_bag_without_coordinates_raises_an_error_naming_it():
    with pytest.raises(CarmilError, match="1 bag of 1 without coordinates, such as '0'"):
        neighbouring_regions(Bags.from_list([torch.zeros(3, 2)]))
    nowhere = Bags.concatenate([placed(torch.rand(4, 2)), Bags.from_list([torch.zeros(3, 2)], ids=["b"])])
    with pytest.raises(CarmilError, match="1 bag of 2 without coordinates, such as 'b'"):
        neighbouring_regions(nowhere)
