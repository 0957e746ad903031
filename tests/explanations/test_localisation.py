"""The localisation of written maps is measured only where the truth is known."""

import torch

from carmil.bags.bags import Bags
from carmil.explanations.localisation import localisation_figures
from carmil.studies.subjects import Subject
from carmil.truth import UNKNOWN


def test_localisation_excludes_slides_and_tiles_without_truth(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    truth = torch.tensor([1, UNKNOWN, 0, 0, UNKNOWN, UNKNOWN, 1, 0])
    scores = torch.tensor([0.8, 0.9, 0.1, 0.2, 0.7, 0.3, 0.4, 0.5])
    bags = Bags(torch.zeros(8, 2), torch.tensor([0, 4, 6, 8]), instance_labels=truth)
    files = [tmp_path / f"{i}.parquet" for i in range(3)]
    for path, part in zip(files, scores.split([4, 2, 2]), strict=True):
        pq.write_table(pa.table({"evidence_b": part.numpy()}), path)
    subjects = [Subject(str(i), i, (0,)) for i in range(3)]
    result = localisation_figures(bags, subjects, files, {"path": "evidence_b"}, {})["path"]
    assert result["auprc_plus"].value == 0.75
    assert result["auprc_plus"].slides == 2
    assert result["froc"].slides == 2
    assert "auprc_both_mirror" not in result  # unknown truth is not negative truth
