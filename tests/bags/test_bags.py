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


def test_bags_lie_end_to_end():
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
def test_indexing_takes_everything_that_belongs_to_a_bag(which, ids, sizes):
    bags = three_bags()
    part = bags[which]
    assert part.ids == ids
    assert part.sizes.tolist() == sizes
    rows = torch.cat([torch.arange(*bags.offsets[bags.ids.index(name) :][:2].tolist()) for name in ids])
    assert part.features.equal(bags.features[rows])
    assert part.instance_labels.equal(bags.instance_labels[rows])
    assert part.coordinates.equal(bags.coordinates[rows])
    assert part.labels.tolist() == [bags.labels[bags.ids.index(name)] for name in ids]


def test_what_is_taken_apart_and_concatenated_is_the_same():
    bags = three_bags()
    again = Bags.concatenate([bags[:1], bags[1:]])
    assert again.features.equal(bags.features)
    assert again.offsets.equal(bags.offsets)
    assert again.ids == bags.ids
    assert again.coordinate_unit == "level0_px"


def test_parts_hold_all_bags_in_order_and_no_more_than_asked():
    bags = three_bags()
    parts = list(bags.parts(4))
    assert [part.ids for part in parts] == [("a", "b"), ("c",)]
    assert [len(part) for part in bags.parts(1)] == [1, 1, 1]
    assert list(bags.parts(6)) == [bags]


def test_moving_keeps_offsets_where_they_can_be_read():
    moved = three_bags().to("meta")
    assert moved.features.device.type == "meta"
    assert moved.offsets.device.type == "cpu"


def bad(**changes):
    given = {"features": torch.ones(4, 2), "offsets": torch.tensor([0, 1, 4]), **changes}
    return lambda: Bags(**given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (bad(offsets=torch.tensor([0, 1, 3])), "do not span the 4 instances"),
        (bad(offsets=torch.tensor([0, 4, 4])), "bag '1' has 0 instances"),
        (bad(labels=torch.tensor([0])), "labels have shape (1,) for 2 bags"),
        (bad(labels=torch.tensor([0, -1])), "class numbers"),
        (bad(ids=("one",)), "1 id for 2 bags"),
        (bad(instance_labels=torch.ones(3)), "3 instance labels for 4 instances"),
        (bad(coordinates=torch.ones(3, 2), coordinate_unit="um"), "expected (4, 2)"),
        (bad(coordinates=torch.ones(4, 2)), "coordinates without a unit"),
        (bad(features=torch.ones(4, 2, dtype=torch.long)), "floating-point"),
        (
            bad(features=torch.tensor([[1.0], [1.0], [float("nan")], [1.0]])),
            "bag '1' has NaN or infinite features (instance 1 of 3",
        ),
        (bad(features=torch.tensor([[float("inf")], [1.0], [1.0], [1.0]])), "bag '0' has NaN or infinite"),
        (
            lambda: Bags.from_list([torch.ones(2, 3), torch.ones(2, 4)], ids=("x", "y")),
            "bag 'y' is 4 features wide, the first bag 3",
        ),
        (lambda: Bags.from_list([torch.ones(2, 3), torch.ones(2)]), "bag '1' has shape (2,)"),
        (lambda: Bags.from_list([]), "no bags given"),
        (lambda: Bags.concatenate([three_bags(), bad()()]), "only one of them has labels"),
        (lambda: Bags.concatenate([bad()(), bad(features=torch.ones(4, 3))()]), "part 1 is 3 features wide"),
        (lambda: three_bags()[[]], "no bag of 3 was chosen"),
        (lambda: three_bags()[torch.tensor([True])], "a mask of 1 entries for 3 bags"),
    ],
)
def test_what_does_not_fit_is_named(make, words):
    with pytest.raises(CarmilError) as raised:
        make()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.finding(n=6)
def test_every_bag_may_have_coordinates_in_a_unit_of_its_own_or_none():
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
