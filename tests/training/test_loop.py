import torch

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.training import loop
from carmil.training.protocol import GridPoint, train_protocol
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION, Recipe


def test_batches_contain_only_training_bags_with_an_official_split(monkeypatch):
    """Validation and test bags of an official split are not part of any batch."""
    torch.manual_seed(0)
    bags = Bags(torch.randn(60, 4), torch.arange(31) * 2, torch.arange(30) % 2)
    roles = torch.tensor([TRAIN] * 12 + [VALIDATION] * 8 + [UNUSED] * 10)[None]
    sizes: list[int] = []
    batches = loop._batches

    def recording_sizes(*given):
        for batch in batches(*given):
            sizes.append(len(batch.labels))
            yield batch

    monkeypatch.setattr(loop, "_batches", recording_sizes)
    train_protocol(
        lambda: create_model("abmil", 4, 2, hidden=4, attention=4),
        bags,
        roles,
        recipe=Recipe(epochs=3, batch=4, shuffle=True, warmup=0),
        seeds=(0, 1),
        grid=(GridPoint(lr=1e-2),),
    )
    assert sizes == [4] * 9
