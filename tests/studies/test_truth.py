"""Maps are scored only where the truth is known."""

import torch

from carmil.bags.bags import Bags
from carmil.studies.located import located
from carmil.studies.tested import Subject
from carmil.studies.truth import auprc, known_instances
from carmil.truth import UNKNOWN


def test_unknown_instances_do_not_count():
    truth = torch.tensor([1, UNKNOWN, 0, 0, UNKNOWN, UNKNOWN, 1, 0])
    scores = torch.tensor([0.8, 0.9, 0.1, 0.2, 0.7, 0.3, 0.4, 0.5])
    bags = Bags(torch.zeros(8, 2), torch.tensor([0, 4, 6, 8]), instance_labels=truth)
    known, offsets = known_instances(truth, bags.offsets)
    assert known.tolist() == [True, False, True, True, False, False, True, True]
    assert offsets.starts.tolist() == [0, 3, 5]  # nothing is known of the second bag
    assert auprc(scores, bags) == 0.75  # 1 in the first bag, 1/2 in the last


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
    found = located(bags, subjects, files, {"path": "evidence_b"}, {})["path"]
    assert found["auprc_plus"]["value"] == 0.75
    assert found["auprc_plus"]["slides"] == 2
    assert found["froc"]["slides"] == 2
    assert "auprc_both_mirror" not in found  # unknown is not against
