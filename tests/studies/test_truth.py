"""Maps are scored only where the truth is known."""

import torch

from carmil import Member, Population, create_model
from carmil.bags.bags import Bags
from carmil.evidence import explain
from carmil.studies import truth as truths
from carmil.studies.localisation import localisation_figures
from carmil.studies.subjects import Subject
from carmil.studies.truth import agreement, auprc, auprc_by_bag, known_instances
from carmil.truth import UNKNOWN


def test_unknown_instances_do_not_count():
    truth = torch.tensor([1, UNKNOWN, 0, 0, UNKNOWN, UNKNOWN, 1, 0])
    scores = torch.tensor([0.8, 0.9, 0.1, 0.2, 0.7, 0.3, 0.4, 0.5])
    bags = Bags(torch.zeros(8, 2), torch.tensor([0, 4, 6, 8]), instance_labels=truth)
    known, offsets = known_instances(truth, bags.offsets)
    assert known.tolist() == [True, False, True, True, False, False, True, True]
    assert offsets.starts.tolist() == [0, 3, 5]  # nothing is known of the second bag
    assert auprc(scores, bags) == 0.75  # 1 in the first bag, 1/2 in the last


def test_agreement_is_the_mean_over_the_models_in_the_order_asked_for_however_bags_are_parted(monkeypatch):
    truth = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0])
    bags = Bags(torch.randn(12, 4), torch.tensor([0, 3, 5, 7, 10, 12]), instance_labels=truth)
    population = Population(
        lambda: create_model("abmil", 4, 2, hidden=6, attention=3), [Member(seed=i) for i in range(3)]
    )
    chosen = torch.tensor([4, 0, 3, 1])
    by_hand = torch.stack([auprc_by_bag(explain(population.member(i), bags, "path")[:, 1], bags) for i in (0, 2)])
    for at_once in (1, 5, 100):
        monkeypatch.setattr(truths, "AT_ONCE", at_once)
        found = agreement(population, [0, 2], bags, chosen)
        assert list(found) == ["auprc_attention", "auprc_path"]
        torch.testing.assert_close(torch.from_numpy(found["auprc_path"]), by_hand.mean(0)[chosen], equal_nan=True)


def test_located_leaves_out_slides_and_tiles_that_nobody_knows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    truth = torch.tensor([1, UNKNOWN, 0, 0, UNKNOWN, UNKNOWN, 1, 0])
    scores = torch.tensor([0.8, 0.9, 0.1, 0.2, 0.7, 0.3, 0.4, 0.5])
    bags = Bags(torch.zeros(8, 2), torch.tensor([0, 4, 6, 8]), instance_labels=truth)
    files = [tmp_path / f"{i}.parquet" for i in range(3)]
    for path, part in zip(files, scores.split([4, 2, 2]), strict=True):
        pq.write_table(pa.table({"evidence_b": part.numpy()}), path)
    subjects = [Subject(str(i), i, (0,)) for i in range(3)]
    found = localisation_figures(bags, subjects, files, {"path": "evidence_b"}, {})["path"]
    assert found["auprc_plus"]["value"] == 0.75
    assert found["auprc_plus"]["slides"] == 2
    assert found["froc"]["slides"] == 2
    assert "auprc_both_mirror" not in found  # unknown is not against
