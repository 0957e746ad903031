import pytest
import torch

from carmil.bags import Bags
from carmil.errors import CarmilError


def three_bags() -> Bags:
    features = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    return Bags.from_list(
        [features[:1], features[1:4], features[4:]],
        labels=[0, 1, 1],
        ids=("a", "b", "c"),
        instance_labels=[torch.tensor([0]), torch.tensor([1, 0, 1]), torch.tensor([1, 1])],
        coordinates=[torch.zeros(1, 2), torch.ones(3, 2), torch.full((2, 2), 2.0)],
        coordinate_unit="level0_px",
    )


def test_bags_are_stored_consecutively():
    bags = three_bags()
    assert bags.offsets.tolist() == [0, 1, 4, 6]
    assert bags.sizes.tolist() == [1, 3, 2]
    assert (len(bags), bags.width, bags.classes) == (3, 2, 2)


@pytest.mark.parametrize(
    ("which", "ids", "sizes"),
    [
        (1, ("b",), [3]),
        (-1, ("c",), [2]),
        (slice(0, 2), ("a", "b"), [1, 3]),
        ([2, 0], ("c", "a"), [2, 1]),
        (torch.tensor([True, False, True]), ("a", "c"), [1, 2]),
    ],
)
def test_indexing_selects_features_labels_and_coordinates_together(which, ids, sizes):
    bags = three_bags()
    part = bags[which]
    assert part.ids == ids
    assert part.sizes.tolist() == sizes
    rows = torch.cat([torch.arange(*bags.offsets[bags.ids.index(name) :][:2].tolist()) for name in ids])
    assert part.features.equal(bags.features[rows])
    assert part.instance_labels.equal(bags.instance_labels[rows])
    assert part.coordinates.equal(bags.coordinates[rows])
    assert part.labels.tolist() == [bags.labels[bags.ids.index(name)] for name in ids]


def test_concatenating_slices_restores_the_bags():
    bags = three_bags()
    again = Bags.concatenate([bags[:1], bags[1:]])
    assert again.features.equal(bags.features)
    assert again.offsets.equal(bags.offsets)
    assert again.ids == bags.ids
    assert again.coordinate_unit == "level0_px"


def test_parts_keep_bag_order_and_respect_the_maximum_size():
    bags = three_bags()
    parts = list(bags.parts(4))
    assert [part.ids for part in parts] == [("a", "b"), ("c",)]
    assert [len(part) for part in bags.parts(1)] == [1, 1, 1]
    assert list(bags.parts(6)) == [bags]


def test_moving_bags_to_a_device_keeps_offsets_on_cpu():
    moved = three_bags().to("meta")
    assert moved.features.device.type == "meta"
    assert moved.offsets.device.type == "cpu"


def make_invalid(**changes):
    given = {"features": torch.ones(4, 2), "offsets": torch.tensor([0, 1, 4]), **changes}
    return lambda: Bags(**given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_invalid(offsets=torch.tensor([0, 1, 3])), "do not span the 4 instances"),
        (make_invalid(offsets=torch.tensor([0, 4, 4])), "bag '1' has 0 instances"),
        (make_invalid(labels=torch.tensor([0])), "labels have shape (1,) for 2 bags"),
        (make_invalid(labels=torch.tensor([0, -1])), "class numbers"),
        (make_invalid(ids=("one",)), "1 id for 2 bags"),
        (make_invalid(instance_labels=torch.ones(3)), "3 instance labels for 4 instances"),
        (make_invalid(coordinates=torch.ones(3, 2), coordinate_unit="um"), "expected (4, 2)"),
        (make_invalid(coordinates=torch.ones(4, 2)), "coordinates without a unit"),
        (make_invalid(features=torch.ones(4, 2, dtype=torch.long)), "floating-point"),
        (
            make_invalid(features=torch.tensor([[1.0], [1.0], [float("nan")], [1.0]])),
            "bag '1' has NaN or infinite features (instance 1 of 3",
        ),
        (make_invalid(features=torch.tensor([[float("inf")], [1.0], [1.0], [1.0]])), "bag '0' has NaN or infinite"),
        (
            lambda: Bags.from_list([torch.ones(2, 3), torch.ones(2, 4)], ids=("x", "y")),
            "bag 'y' has 4 features per instance, the first bag 3",
        ),
        (lambda: Bags.from_list([torch.ones(2, 3), torch.ones(2)]), "bag '1' has shape (2,)"),
        (lambda: Bags.from_list([]), "no bags given"),
        (lambda: Bags.concatenate([three_bags(), make_invalid()()]), "only one of them has labels"),
        (
            lambda: Bags.concatenate([make_invalid()(), make_invalid(features=torch.ones(4, 3))()]),
            "part 1 has 3 features per instance",
        ),
        (lambda: three_bags()[[]], "none of the 3 bags was selected"),
        (lambda: three_bags()[torch.tensor([True])], "the mask has 1 entries: expected 3"),
    ],
)
def test_inconsistent_bags_raise_an_error_naming_the_mismatch(make, words):
    with pytest.raises(CarmilError) as raised:
        make()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.finding(n=6)
def test_each_bag_may_have_its_own_coordinate_unit_or_none():
    places = [torch.zeros(1, 2), torch.ones(3, 2), torch.full((2, 2), torch.nan)]
    bags = Bags.from_list(
        [torch.ones(1, 2), torch.ones(3, 2), torch.ones(2, 2)],
        coordinates=places,
        coordinate_unit=("um", "level0_px", None),
    )
    assert [bags[i].coordinate_unit for i in range(3)] == ["um", "level0_px", None]
    assert bags[2].coordinates is None
    assert bags[:2].coordinate_unit == ("um", "level0_px")
    again = Bags.concatenate([bags[i] for i in range(3)])
    assert again.units == ("um", "level0_px", None)
    assert again.coordinates[:4].equal(bags.coordinates[:4])
    assert again.coordinates[4:].isnan().all()
    with pytest.raises(CarmilError, match="2 units of coordinates for 3 bags"):
        Bags.from_list(
            [torch.ones(1, 2), torch.ones(3, 2), torch.ones(2, 2)], coordinates=places, coordinate_unit=("um", "um")
        )
